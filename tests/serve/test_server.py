# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
A server as users start it, with two ranks that share the demo's weights: its answers are those of the pipeline called
directly, and nobody's request harms another's.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import hypothesis
import imageio
import imageio_ffmpeg
import openai
import pytest
import schemathesis
import torch
from diffusers import Cosmos3OmniPipeline
from PIL import Image

from diffusers_dlo.serve.demo import build_tiny_cosmos3
from diffusers_dlo.serve.media import mp4, png
from diffusers_dlo.serve.options import add_arguments, read_options
from tests.code_blocks import blocks_of, commands, program_of

from .process import ROOT, ServerProcess


pytestmark = pytest.mark.timeout(200)

IMAGES = "/v1/images/generations"
SMALL = {"prompt": "a red fox", "size": "64x64", "num_inference_steps": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    limits = ("--max-size", "128", "--max-frames", "17", "--max-n", "2")
    with ServerProcess(tmp_path_factory.mktemp("server") / "log", "--data-parallel-size", "2", *limits) as server:
        yield server


Solo = Callable[..., bytes]


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Solo:
    """The bytes that the pipeline makes when it is called directly, without offload."""
    path = build_tiny_cosmos3(tmp_path_factory.mktemp("solo") / "cosmos3")
    pipe = Cosmos3OmniPipeline.from_pretrained(path, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    done: dict[Any, bytes] = {}

    def make(seed: int, fps: int | None = None, prompt: str = "a red fox", **call: Any) -> bytes:
        key = (seed, fps, prompt, *sorted(call.items()))
        if key not in done:
            call = {"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 2, **call}
            if fps is not None:
                call["fps"] = fps
            video = pipe(prompt=prompt, generator=torch.Generator("cpu").manual_seed(seed), **call).video
            done[key] = png(video[0]) if fps is None else mp4(video, fps)
        return done[key]

    return make


def test_the_openai_client_makes_pictures(server: ServerProcess, solo: Solo) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = client.images.generate(
        prompt="a red fox", n=2, size="64x64", extra_body={"num_inference_steps": 2, "seed": 5}
    )
    assert [base64.b64decode(one.b64_json or "") for one in answer.data or []] == [solo(5), solo(6)]
    with pytest.raises(openai.BadRequestError, match="multiples of 16"):
        client.images.generate(prompt="a red fox", size="72x64")
    with pytest.raises(openai.NotFoundError, match="'dall-e-3' is not served here"):
        client.images.generate(prompt="a red fox", model="dall-e-3")


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_lines_of_the_readme_give_a_picture_and_a_video(server: ServerProcess, tmp_path: pathlib.Path) -> None:
    assert len(commands("README.md", "curl")) == 2
    run_block("README.md", "curl", server, tmp_path)
    with Image.open(tmp_path / "fox.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (128, 128))
    check_video(tmp_path / "boat.mp4", 17, (128, 128))


def run_block(page: str, words: str, server: ServerProcess, folder: pathlib.Path) -> None:
    """Runs the bash blocks of a page that have these words in them, with the address of `server`."""
    blocks = [block.text for block in blocks_of(page) if block.language == "bash" and words in block.text]
    lines = "\n".join(blocks).replace("127.0.0.1:8000", server.address.removeprefix("http://"))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", lines], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_blocks_of_the_page_run(server: ServerProcess, tmp_path: pathlib.Path) -> None:
    run_block("docs/serve.md", "curl", server, tmp_path)
    with Image.open(tmp_path / "fox.png") as picture:
        assert picture.format == "PNG"
    check_video(tmp_path / "boat.mp4", 17, (128, 128))
    names: dict[str, Any] = {}
    (python,) = [block.text for block in blocks_of("docs/serve.md") if block.language == "python"]
    exec(python.replace("http://127.0.0.1:8000", server.address), names)
    assert len(names["answer"].data) == 1


@pytest.mark.parametrize("page", ("README.md", "docs/serve.md"))
def test_the_commands_of_the_pages_are_understood(page: str) -> None:
    started = commands(page, "diffusers-dlo serve")
    assert started
    for words in started:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        read_options(parser.parse_args(program_of(words)[2:]))


def check_video(path: pathlib.Path, frames: int, size: tuple[int, int]) -> None:
    """An mp4 that ffmpeg decodes without a word, and ffprobe accepts where it is installed."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "null", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with imageio.get_reader(path) as reader:
        assert reader.count_frames() == frames and reader.get_meta_data()["size"] == size
        assert reader.get_meta_data()["codec"] == "h264"
    if shutil.which("ffprobe"):
        assert subprocess.run(["ffprobe", "-v", "error", str(path)]).returncode == 0


def test_a_job_tells_each_step_and_ends_with_the_video_of_the_pipeline(
    server: ServerProcess, solo: Solo, tmp_path: pathlib.Path
) -> None:
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
    job = client.videos.create(
        prompt="a red fox",
        size="64x96",  # type: ignore[arg-type]  # OpenAI's own models know four sizes
        seconds="1",  # type: ignore[arg-type]
        extra_body={"fps": 4, "num_inference_steps": 24, "seed": 7, "flow_shift": 5.0, "extra_params": "{}"},
    )
    assert job.status in ("queued", "in_progress") and job.object == "video"
    steps, events = [], []
    with httpx.stream("GET", f"{server.address}/v1/videos/{job.id}/events", timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
            elif found := re.search(r'"progress":\s*(\d+).*"step":\s*(\d+),\s*"steps":\s*(\w+)', line):
                steps.append((found[1], found[2], found[3]))
    assert events[-1] == "completed" and "in_progress" in events and steps[-1] == ("100", "24", "24")
    assert [int(step) for _, step, _ in steps] == sorted(int(step) for _, step, _ in steps)
    # Not each step is told where the machine is busy, but some are, each with its share.
    before_the_last = {(str(100 * step // 24), str(step), "24") for step in range(1, 24)}
    told = {one for one in steps if one[1] != "0"}
    assert told & before_the_last and told <= before_the_last | {("99", "24", "24"), ("100", "24", "24")}, steps
    assert client.videos.retrieve(job.id).status == "completed"
    content = client.videos.download_content(job.id).read()
    assert content == solo(7, fps=4, width=64, height=96, num_frames=5, num_inference_steps=24)
    (tmp_path / "video.mp4").write_bytes(content)
    check_video(tmp_path / "video.mp4", 5, (64, 96))
    assert client.videos.delete(job.id).deleted


def test_what_nobody_waits_for_ends_between_two_steps(server: ServerProcess, solo: Solo) -> None:
    endless = {**SMALL, "num_inference_steps": 100}
    jobs = [server.post("/v1/videos", files={k: (None, str(v)) for k, v in endless.items()}).json() for _ in range(3)]
    server.wait_for(lambda state: all(rank["job"] for rank in state["ranks"]) and len(state["queue"]) == 1)
    # A picture that waits behind them, with its own deadline; then one whose client goes away.
    late = server.post(IMAGES, json={**SMALL, "timeout": 0.3})
    assert late.status_code == 504 and "was waiting for a rank" in late.json()["error"]["message"]
    for job in jobs:
        assert server.delete(f"/v1/videos/{job['id']}").json()["status"] == "cancelled"
    server.wait_for(lambda state: not any(rank["job"] for rank in state["ranks"]) and not state["queue"])
    late = server.post(IMAGES, json={**endless, "timeout": 1.0})
    assert late.status_code == 504 and re.search(r"had done \d+ steps", late.json()["error"]["message"])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.address + IMAGES, json=endless, timeout=0.7)
    server.wait_for(lambda state: not any(rank["job"] for rank in state["ranks"]))
    assert 'jobs_total{code="",kind="image",status="cancelled"} 1.0' in server.get("/metrics").text
    # Both ranks compute as before.
    answer = server.post(IMAGES, json={**SMALL, "n": 2, "seed": 5}).json()
    assert [base64.b64decode(one["b64_json"]) for one in answer["data"]] == [solo(5), solo(6)]


def test_errors_of_the_model_are_told_and_harm_nobody(server: ServerProcess, solo: Solo) -> None:
    for fields, said in (
        ({"size": "64x72"}, "multiples of 16"),
        ({"max_sequence_length": 7}, "'Cosmos3OmniPipeline' does not take 'max_sequence_length'"),
        ({"extra_params": {"image": "/etc/passwd"}}, "not a scalar"),
        ({"extra_params": {"mixed_precision_format": "none of these"}}, "mixed_precision_format"),
    ):
        with ThreadPoolExecutor() as pool:
            beside = pool.submit(server.post, IMAGES, json={**SMALL, "seed": 5})
            refused = server.post(IMAGES, json={**SMALL, **fields})
        assert refused.status_code == 400 and said in refused.json()["error"]["message"], refused.text
        assert base64.b64decode(beside.result().json()["data"][0]["b64_json"]) == solo(5)


@pytest.mark.parametrize(
    "requests, clients, kill",
    ((10, 4, False), pytest.param(64, 8, True, marks=pytest.mark.slow)),
    ids=("few", "many-with-a-death"),
)
def test_each_request_is_answered_once_and_as_if_it_were_alone(
    requests: int, clients: int, kill: bool, server: ServerProcess, solo: Solo
) -> None:
    """Mixed sizes and steps from several clients, every tenth cancelled by its client, and a worker killed."""
    todo, lock = list(range(requests)), threading.Lock()
    answers: dict[int, list[httpx.Response | None]] = {number: [] for number in todo}
    before = server.memory()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop(0)
                if kill and number == requests // 2:
                    server.kill_a_worker()
            side, steps = (64, 96)[number % 2], 1 + number % 3
            asked = {**SMALL, "size": f"{side}x64", "num_inference_steps": steps, "seed": number % 8}
            if number % 10 == 9:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(server.address + IMAGES, json={**asked, "num_inference_steps": 100}, timeout=0.5)
                answers[number].append(None)
            else:
                answers[number].append(server.post(IMAGES, json=asked))

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = 0
    for number, got in answers.items():
        assert len(got) == 1
        if got[0] is None:
            continue
        if kill and got[0].status_code == 503:
            lost += got[0].json()["error"]["code"] == "rank_lost"
            continue
        assert got[0].status_code == 200, got[0].text
        picture = base64.b64decode(got[0].json()["data"][0]["b64_json"])
        side, steps = (64, 96)[number % 2], 1 + number % 3
        assert picture == solo(number % 8, width=side, num_inference_steps=steps), f"request {number}"
    assert lost <= 1, "one worker was lost, and more than its own request failed"
    server.wait_for(lambda state: state["ready"] and not any(rank["job"] for rank in state["ranks"]))
    counted = re.findall(r'jobs_total\{code="\w*",kind="image",status="(\w+)"\} (\d+)', server.get("/metrics").text)
    assert sum(int(count) for status, count in counted if status == "cancelled") >= requests // 10
    assert server.memory() < before + 200 * 2**20


def test_a_lost_rank_fails_its_own_request_and_all_are_started_anew(server: ServerProcess, solo: Solo) -> None:
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, steps: int) -> threading.Thread:
        asked = {**SMALL, "num_inference_steps": steps, "seed": 5}
        thread = threading.Thread(target=lambda: answers.update({name: server.post(IMAGES, json=asked)}))
        thread.start()
        return thread

    threads = [ask("first", 30), ask("second", 30)]
    server.wait_for(lambda state: all(rank["job"] and rank["job"]["step"] > 1 for rank in state["ranks"]))
    server.kill_a_worker()
    threads.append(ask("waits", 2))
    server.wait_for(lambda state: not state["ready"])
    ready, health = server.get("/ready"), server.get("/health")
    assert (ready.status_code, ready.json()["status"], health.status_code) == (503, "recovering", 200)
    for thread in threads:
        thread.join()
    failed, survived = sorted((answers["first"], answers["second"]), key=lambda answer: -answer.status_code)
    assert (
        failed.status_code == 503 and failed.json()["error"]["code"] == "rank_lost" and "retry-after" in failed.headers
    )
    assert "was killed by SIGKILL while it computed this" in failed.json()["error"]["message"]
    for answer, steps in ((survived, 30), (answers["waits"], 2)):
        assert answer.status_code == 200, answer.text
        assert base64.b64decode(answer.json()["data"][0]["b64_json"]) == solo(5, num_inference_steps=steps)
    assert server.get("/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path", (IMAGES, "/v1/videos/sync"), ids=("picture", "video"))
def test_no_request_is_an_error_of_the_server_or_costs_it_a_rank(path: str, server: ServerProcess) -> None:
    pids = server.worker_pids()
    schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    answers: Counter[int] = Counter()

    @hypothesis.settings(
        max_examples=60, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(0)
    @hypothesis.given(case=schema[path]["POST"].as_strategy())
    def fuzz(case: Any) -> None:
        if isinstance(case.body, dict):
            # What the limits would refuse is the other test's: these are to reach the model.
            case.body = {**case.body, "num_inference_steps": 1, "timeout": 20}
            for name in ("model", "extra_params", "seconds"):
                case.body.pop(name, None)
        response = case.call()
        assert response.status_code in (200, 400, 404, 504), response.text
        answers[response.status_code] += 1

    fuzz()
    assert answers[200] and answers[400], answers
    server.wait_for(lambda state: state["ready"])
    assert server.worker_pids() == pids


@pytest.mark.slow
def test_a_wave_is_of_equal_requests_and_begins_together(tmp_path: pathlib.Path, solo: Solo) -> None:
    with ServerProcess(tmp_path / "log", "--data-parallel-size", "2", "--wave", "--api-key", "secret") as waves:
        assert waves.get("/v1/models").status_code == 401
        waves.headers["Authorization"] = "Bearer secret"

        with ThreadPoolExecutor() as pool:

            def ask(waiting: int, **fields: int) -> Future[httpx.Response]:
                """Returns once so many wait."""
                sent = pool.submit(waves.post, IMAGES, json={**SMALL, **fields})
                waves.wait_for(lambda state: len(state["queue"]) == waiting)
                return sent

            # While both ranks compute what was asked for at once, the others come in their order, however slowly.
            busy = pool.submit(
                waves.post, IMAGES, json={**SMALL, "n": 2, "size": "128x128", "num_inference_steps": 100}
            )
            waves.wait_for(lambda state: all(rank["job"] for rank in state["ranks"]))
            first, second = (ask(i + 1, num_inference_steps=30, seed=5 + i) for i in range(2))
            other, unequal = (ask(i + 3, num_inference_steps=2 + i, seed=7 + i) for i in range(2))
            # The third and the fourth wait until both ranks are free, and the third then half a second for others.
            waves.wait_for(lambda state: all(rank["job"] for rank in state["ranks"]) and len(state["queue"]) == 2)
            assert busy.result().status_code == 200
            refused = unequal.result()
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "unequal_wave"
            assert "'num_inference_steps' must be the same in every request" in refused.json()["error"]["message"]
            for answer, seed, steps in ((first, 5, 30), (second, 6, 30), (other, 7, 2)):
                picture = base64.b64decode(answer.result().json()["data"][0]["b64_json"])
                assert picture == solo(seed, num_inference_steps=steps)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_command_with_its_reason(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "diffusers_dlo.cli", "serve", str(tmp_path / "nothing"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 1
    error = done.stderr.split("diffusers-dlo: error: ")[1]
    assert error.startswith("The ranks could not start, so nothing was served.") and str(tmp_path / "nothing") in error


@pytest.mark.slow
@pytest.mark.parametrize("is_listening", (True, False), ids=("hung-up", "port-in-use"))
def test_nothing_is_left_of_a_server_that_ends_while_its_ranks_start(
    is_listening: bool, tmp_path: pathlib.Path
) -> None:
    with contextlib.ExitStack() as stack:
        starting = ServerProcess(tmp_path / "log")
        stack.callback(starting.__exit__)
        if not is_listening:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", int(starting.address.rpartition(":")[2])))
            taken.listen()
        else:
            while "Uvicorn running" not in starting.log.read_text():
                time.sleep(0.05)
            while not list(starting.folder.glob("diffusers_dlo-demo-*")):
                time.sleep(0.05)
            starting.process.send_signal(signal.SIGHUP)
        code = starting.process.wait(60 if is_listening else 150)  # the start of the command is not over in the latter
    log = starting.log.read_text()
    assert not starting.left_behind() and "Traceback" not in log and not starting.worker_pids()
    if is_listening:
        assert code in (0, -signal.SIGHUP), log
    else:
        assert code == 1 and "cannot be listened at" in log and "--port" in log.split("diffusers-dlo: error: ")[1]


def test_a_signal_ends_everything_soon(server: ServerProcess) -> None:
    """The last test of the file: it ends the server that the others share."""
    answers: list[httpx.Response] = []
    endless = {**SMALL, "num_inference_steps": 100}
    threads = [
        threading.Thread(target=lambda: answers.append(server.post(IMAGES, json=endless))),
        threading.Thread(target=lambda: answers.append(server.get("/v1/events"))),
    ]
    for thread in threads:
        thread.start()
    server.wait_for(lambda state: any(rank["job"] for rank in state["ranks"]))
    pids, begun = server.worker_pids(), time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10) in (0, -signal.SIGTERM)
    assert time.monotonic() - begun < 10
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    assert len(pids) == 2 and not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in server.log.read_text() and not server.left_behind()
