# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The page in a real browser, as a user sees it: with one rank that computes, and with none, where requests wait."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import httpx
import pytest
from PIL import Image


pytest.importorskip("selenium", reason="needs selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from diffusers_dlo.serve.options import Limits, ServeOptions

from .browser import CHROMEDRIVER, CHROMIUM, Browser, PageServer, wait_until


pytestmark = pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver")

HTML = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"
STEP = re.compile(r"step (\d+) of 40$")
WATCH = """
window.seen = [];
new MutationObserver(() => {
  const text = document.querySelector('#ranks [data-part="state"]').textContent;
  if (text !== window.seen.at(-1)) window.seen.push(text);
}).observe(document.getElementById("ranks"), { subtree: true, childList: true, characterData: true });
"""
PIXELS = """
const picture = document.querySelector("#gallery .open img");
const canvas = document.createElement("canvas");
[canvas.width, canvas.height] = [picture.naturalWidth, picture.naturalHeight];
const context = canvas.getContext("2d");
context.drawImage(picture, 0, 0);
return [canvas.width, canvas.height, [...context.getImageData(0, 0, canvas.width, canvas.height).data]];
"""
SMALL = """
return [...document.querySelectorAll("button, a.button, input, textarea, summary, .kinds label")]
  .filter((one) => one.checkVisibility())
  .map((one) => [one.id || one.textContent, one.getBoundingClientRect()])
  .filter(([, box]) => box.width < 44 || box.height < 44).map(([name]) => name);
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.viewport(1280, 900)
    chromium.colours("light")
    yield chromium
    assert chromium.violations() == []
    chromium.get("about:blank")


@pytest.fixture
def waiting() -> Iterator[PageServer]:
    """A server whose ranks never come."""
    with PageServer(ServeOptions(limits=Limits(size=512, steps=50, n=4)), ranks=False) as server:
        yield server


def test_from_the_prompt_to_the_gallery(browser: Browser) -> None:
    with PageServer(ServeOptions(ranks=1), ranks=True) as server:
        browser.get(server.address)
        browser.see("#server", "starting: the ranks load the model", 5)
        browser.execute_script(WATCH)
        # What is asked for before there are ranks waits for them.
        browser.ask(prompt="a red fox", negative_prompt="snow", size="128x128", num_inference_steps="40", seed="7")
        browser.see("#queue", "waits, number 1", 10)
        browser.see("#gallery .state", "seed 7")
        browser.see("#news", "Picture “a red fox” is completed.", 5)
        assert browser.by_id("server").text == "Ready" and browser.by_id("model").text == "demo"

        # Progress came step by step, and in order; figures came with the picture, and are those of the server.
        steps = [int(found[1]) for text in browser.execute_script("return window.seen") if (found := STEP.match(text))]
        assert len(steps) >= 3 and steps == sorted(steps) and steps[-1] <= 40
        figures = server.service.scheduler.fleet.figures[0]
        placed = figures["device_slot_bytes"] + figures["resident_bytes"] + figures["device_placed_bytes"]
        shown = browser.texts("#ranks .main dd")
        assert shown[0] == f"{placed / 2**20:.2f} MiB"
        assert shown[2] in ("not timed", f"{round(100 * (figures['overlap'] or 0))} %")

        # The picture is, pixel for pixel, the one that the same settings give elsewhere.
        wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, "#gallery .open img"), "the picture")
        wait_until(lambda: browser.execute_script(PIXELS)[0], "the picture's pixels")
        settings = {"prompt": "a red fox", "negative_prompt": "snow", "size": "128x128", "num_inference_steps": 40}
        png = httpx.post(
            f"{server.address}/v1/images/generations",
            json={**settings, "seed": 7, "response_format": "png"},
            timeout=60,
        ).content
        with Image.open(io.BytesIO(png)) as picture:
            assert browser.execute_script(PIXELS) == [*picture.size, list(picture.convert("RGBA").tobytes())]
        download = browser.find_element(By.CSS_SELECTOR, "#gallery a.button")
        assert download.get_attribute("download") == "image-7.png"
        assert str(download.get_attribute("href")).startswith("blob:")

        # Another is cancelled while it is computed, and the rank is free for the next.
        browser.ask(prompt="an endless one", size="512x512", num_inference_steps="100")
        browser.see("#queue .state", "rank 0, step")
        browser.find_element(By.CSS_SELECTOR, "#queue button").click()
        browser.see("#ended", "Picture · cancelled", 10)
        last = str(2**63 - 1)  # which JavaScript's numbers cannot tell from others
        browser.ask("video", prompt="a paper boat", num_frames="5", num_inference_steps="2", seed=last)
        browser.see("#gallery .state", f"seed {last} · 2 steps · 5 frames")

        # Loading the page again loses nothing; a video is shown at its full size with its settings.
        browser.refresh()
        browser.see("#gallery-count", "2", 10)
        browser.see("#ended", "an endless one", 10)
        wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, "#gallery .open video"), "the video")
        browser.find_element(By.CSS_SELECTOR, "#gallery .open").click()
        video = browser.find_element(By.CSS_SELECTOR, "#viewer-media video")
        wait_until(lambda: browser.execute_script("return arguments[0].videoWidth", video) == 128, "the video plays")
        rows = dict(zip(browser.texts("#viewer-settings dt"), browser.texts("#viewer-settings dd")))
        assert (rows["Frames"], rows["Steps"], rows["Seed"]) == ("5", "2", last)
        browser.by_id("viewer-again").click()
        fields = {name: browser.by_id(name).get_attribute("value") for name in ("prompt", "num_frames", "seed")}
        assert fields == {"prompt": "a paper boat", "num_frames": "5", "seed": last}
        assert browser.by_id("num_frames").is_displayed() and not browser.by_id("viewer").is_displayed()

        # The server goes, which is said, and what was there stays; it comes back, which the page notices by itself.
        server.close()
        browser.see("#away", "The server is away", 10)
        assert browser.by_id("away").is_displayed() and browser.texts("#gallery-count") == ["2"]
        browser.find_element(By.CSS_SELECTOR, "[type=submit]").click()
        browser.see("#form-error", "cannot be reached", 10)
        server.open()
        wait_until(lambda: not browser.by_id("away").is_displayed(), "the page is connected again", 20)
        browser.see("#server", "Ready", 5)
        browser.find_elements(By.CSS_SELECTOR, "#gallery .open")[1].click()
        browser.by_id("viewer-remove").click()
        browser.see("#gallery-count", "1", 10)
        left = httpx.get(f"{server.address}/v1/jobs").json()["data"]
        assert [job["settings"]["prompt"] for job in left] == ["a paper boat", "an endless one"]


def test_a_queue_of_text(browser: Browser, waiting: PageServer) -> None:
    browser.get(waiting.address)
    browser.ask(prompt=HTML, n="2", seed="1")
    browser.see("#queue .state", "waits, number 2", 10)
    assert browser.texts("#queue .prompt") == [HTML, HTML]
    assert browser.find_elements(By.CSS_SELECTOR, "#queue img, #queue b") == [] and browser.title == "diffusers-dlo"
    # By the keyboard: the first is cancelled, the second moves up, and the focus is not lost.
    browser.find_element(By.CSS_SELECTOR, "#queue button").send_keys(Keys.ENTER)
    browser.see("#ended .state", "cancelled", 10)
    wait_until(lambda: browser.texts("#queue .state") == ["Picture · waits, number 1"], "one is left", 10)
    assert browser.switch_to.active_element.get_attribute("id") == "queue-title"
    assert browser.texts("#ended .prompt") == [HTML] and browser.find_elements(By.CSS_SELECTOR, "#ended b") == []
    # Others may have jobs in the queue that only they may cancel, and a reload shows both.
    asked = {"prompt": HTML, "num_inference_steps": 3}
    with httpx.Client(base_url=waiting.address) as other:
        with pytest.raises(httpx.ReadTimeout):
            other.post("/v1/images/generations", json=asked, timeout=1.5)
    browser.refresh()
    browser.see("#ended .prompt", HTML, 10)
    browser.see("#queue .state", "waits, number 1", 10)
    statuses = [job["status"] for job in httpx.get(f"{waiting.address}/v1/jobs").json()["data"]]
    assert statuses == ["queued", "cancelled"]


def test_errors_are_beside_their_fields(browser: Browser, waiting: PageServer) -> None:
    browser.get(waiting.address)
    browser.see("#server", "starting", 10)
    cases = (
        ("prompt", {}, "Say what to make."),
        ("size", {"size": "1024x64"}, "asks for 1024; this server allows 512 (--max-size)"),
        ("size", {"size": "large"}, "Write it as 1024x576"),
        ("num_inference_steps", {"num_inference_steps": "51"}, "allows 50 (--max-steps)"),
        ("n", {"n": "5"}, "allows 4 (--max-n)"),
        ("seed", {"seed": "-1"}, "A seed is a whole number"),
        ("guidance_scale", {"guidance_scale": "5000"}, "less than or equal to 1000"),
    )
    for field, values, said in cases:
        browser.ask(**{"prompt": "" if field == "prompt" else "a red fox", **values})
        browser.see(f"#{field}-error", said, 10)
        assert [text for text in browser.texts(".error") if text] == browser.texts(f"#{field}-error"), field
        active = browser.switch_to.active_element
        assert (active.get_attribute("id"), active.get_attribute("aria-invalid")) == (field, "true")
        assert browser.by_id(str(active.get_attribute("aria-describedby"))).is_displayed()
    browser.ask(prompt="a red fox")
    browser.see("#queue", "a red fox", 10)
    assert not any(browser.texts(".error")), "an error outlives what it was about"


def test_on_a_phone_in_the_dark_and_by_keyboard(browser: Browser, waiting: PageServer) -> None:
    browser.viewport(390, 844, mobile=True)
    browser.get(waiting.address)
    browser.ask("video", prompt="a" * 300, n="2", num_frames="9", fps="8")
    browser.see("#queue .state", "Video · waits, number 2", 10)
    browser.find_element(By.CSS_SELECTOR, "#queue button").click()
    browser.see("#ended .state", "cancelled", 10)
    browser.find_element(By.CSS_SELECTOR, "summary").click()
    browser.ask(prompt="a red fox", size="large")
    browser.see("#size-error", "Write it", 10)
    width = "return document.documentElement.scrollWidth"
    assert browser.execute_script(width) == 390 and browser.execute_script(SMALL) == []
    for scheme in ("light", "dark"):
        browser.colours(scheme)
        contrasts = browser.contrasts()
        assert len(contrasts) > 25 and [one for one in contrasts if one[1] < 4.5] == [], scheme
    browser.viewport(320, 640, mobile=True)
    assert browser.execute_script(width) == 320

    names = browser.names()
    assert all(name for _, name in names), names
    assert ("textbox", "Prompt") in names and ("spinbutton", "Steps") in names and ("radio", "Video") in names
    assert ("button", f"Cancel: {'a' * 60}…") in names

    # The order of the keyboard is that of the eye.
    browser.execute_script("document.activeElement.blur(); document.getElementById('more').open = false")
    browser.get(waiting.address)
    order = []
    for _ in range(10):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        active = browser.switch_to.active_element
        order.append(active.get_attribute("id") or active.get_attribute("name") or active.text)
    fields = ["prompt", "negative_prompt", "size", "num_inference_steps", "guidance_scale", "seed", "n"]
    assert order == ["Skip to the prompt", "kind", *fields, "More settings"], order


def test_the_key_is_asked_for_once(browser: Browser) -> None:
    with PageServer(ServeOptions(api_key="right"), ranks=False) as server:
        browser.get(server.address)
        wait_until(lambda: browser.by_id("key-dialog").is_displayed(), "the key is asked for", 10)
        assert browser.by_id("server").text == "Needs the API key"
        browser.by_id("key").send_keys("wrong", Keys.ENTER)
        browser.see("#key-error", "This is not the server's key.", 10)
        browser.by_id("key").send_keys("right", Keys.ENTER)
        browser.see("#server", "starting", 10)
        assert not browser.by_id("key-dialog").is_displayed()
        browser.ask(prompt="a red fox")
        browser.see("#queue", "a red fox", 10)
        browser.refresh()
        browser.see("#queue", "a red fox", 10)
        assert not browser.by_id("key-dialog").is_displayed()
        assert "right" not in browser.page_source and browser.execute_script("return localStorage.length") == 0


def test_what_the_page_may_do(browser: Browser, waiting: PageServer) -> None:
    page = httpx.get(waiting.address)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy) and policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert re.findall(r"<script(?![^>]* src=\"page.js\")|<style| style=| on[a-z]+=|https?://", page.text) == []
    # The policy holds in the browser: HTML from a string is stopped, and so is what it would bring.
    browser.get(waiting.address)
    stopped = browser.execute_script(
        "try { document.getElementById('news').innerHTML = '<b>x</b>' } catch (error) { return error.name }"
    )
    assert stopped == "TypeError" and browser.find_elements(By.CSS_SELECTOR, "#news b") == []
    assert any("TrustedHTML" in one for one in browser.violations())
