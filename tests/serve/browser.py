# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""For the tests of the page: a server in this process that can go and come back, and a browser that looks at it."""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from diffusers_dlo.serve.app import make_app
from diffusers_dlo.serve.options import ServeOptions


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--lang=en-US"),
)
_SECONDS = 90.0

_CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (color) => color.slice(0, 3).map((part) => part / 255)
  .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
const ground = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const color = rgb(getComputedStyle(one).backgroundColor);
    if ((color[3] ?? 1) >= 0.8) return color;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!element.checkVisibility() || element.closest(".unseen, .skip") || !(own || element.placeholder)) continue;
  const style = getComputedStyle(element, element.placeholder ? "::placeholder" : null);
  const [low, high] = [light(rgb(style.color)), light(ground(element))].sort((one, other) => one - other);
  found.push([element.id || element.className || element.tagName, (high + 0.05) / (low + 0.05)]);
}
return found;
"""


class PageServer:
    """
    The application behind a port that can be closed and opened again, as if the server went away.

    Args:
        options (`ServeOptions`): of the server.
        ranks (`bool`): whether its ranks are started; without, requests wait for ever.
    """

    def __init__(self, options: ServeOptions, ranks: bool) -> None:
        self.app = make_app(options)
        self.service = self.app.state.service
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._life = self.app.router.lifespan_context(self.app) if ranks else None

    def __enter__(self) -> PageServer:
        self._thread.start()
        if self._life is not None:
            self._run(self._life.__aenter__())
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._life is not None:
            self._run(self._life.__aexit__(None, None, None))
        else:
            self._run(self.service.scheduler.fleet.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def open(self) -> None:
        config = uvicorn.Config(
            self.app, port=self.port, lifespan="off", timeout_graceful_shutdown=0, log_level="critical"
        )
        self._door = uvicorn.Server(config)
        self._serving = asyncio.run_coroutine_threadsafe(self._door.serve(), self._loop)
        wait_until(lambda: self._door.started, "the port is open")

    def close(self) -> None:
        self._door.should_exit = True
        self._serving.result(15)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


class Browser(webdriver.Chrome):
    """
    Chromium without a window, with a profile of its own.

    Args:
        profile (`Path`): the folder of the profile.
    """

    def __init__(self, profile: pathlib.Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        super().__init__(options, Service(str(CHROMEDRIVER)))

    def viewport(self, width: int, height: int, mobile: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def by_id(self, name: str) -> WebElement:
        return self.find_element(By.ID, name)

    def texts(self, selector: str) -> list[str]:
        """The texts of what is there, hidden or not, at one moment; spaces are ordinary ones."""
        found: list[str] = self.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
        )
        return [text.replace("\N{NO-BREAK SPACE}", " ") for text in found]

    def see(self, selector: str, text: str, seconds: float = _SECONDS) -> None:
        """Until an element's text has `text` in it."""
        wait_until(
            lambda: any(text in one for one in self.texts(selector)),
            f"'{text}' in {selector}",
            seconds,
            lambda: f"{self.texts(selector)}, {self.texts('.error, #server, #news')}",
        )

    def ask(self, kind: str = "image", **fields: str) -> None:
        """Fills the form, as a user does, and submits it."""
        self.execute_script("document.getElementById('form').reset()")
        self.find_element(By.CSS_SELECTOR, f"[name=kind][value={kind}]").click()
        for name, value in fields.items():
            self.by_id(name).send_keys(value)
        self.find_element(By.CSS_SELECTOR, "[type=submit]").click()

    def names(self) -> list[tuple[str, str]]:
        """Role and name of all that can be operated, as a screen reader gets them."""
        roles = {"button", "textbox", "spinbutton", "combobox", "radio", "link", "progressbar", "progress"}
        nodes = self.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]

    def contrasts(self) -> list[tuple[str, float]]:
        """The contrast of each text that is visible, by WCAG 2's formula."""
        found: list[tuple[str, float]] = self.execute_script(_CONTRAST)
        return found

    def violations(self) -> list[str]:
        """What the page's own policy has stopped, and errors of its script."""
        messages = [entry["message"] for entry in self.get_log("browser")]
        return [one for one in messages if "Failed to load resource" not in one]


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = _SECONDS, seen: Callable[[], str] = lambda: ""
) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}. {seen()}"
        time.sleep(0.05)
