# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The server on several hosts: two replicas on a Ray of this machine, as users start them, and what stands between Ray
and the application.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from diffusers import Cosmos3OmniPipeline
from fastapi import FastAPI

from diffusers_dlo.serve.app import make_app
from diffusers_dlo.serve.demo import build_tiny_cosmos3
from diffusers_dlo.serve.media import mp4, png
from diffusers_dlo.serve.options import ServeOptions, read_options
from tests.code_blocks import ROOT


sys.path.insert(0, str(ROOT / "examples"))
import ray_serve


SCRIPT = ROOT / "examples" / "ray_serve.py"
IMAGES = "/v1/images/generations"
SMALL = {"prompt": "a red fox", "size": "64x64", "num_inference_steps": 2}
LONG = {"prompt": "a red fox", "size": "128x128", "num_frames": "17", "num_inference_steps": "100", "fps": "24"}
NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray Serve: pip install -e '.[ray]'"
)


def processes(folder: str) -> dict[int, str]:
    """The processes that were started with this folder for Ray, by number, and their command lines."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"RAY_TMPDIR={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def ranks(folder: str) -> list[int]:
    return sorted(pid for pid, command in processes(folder).items() if "concurrency.worker" in command)


@contextlib.contextmanager
def replicas(log: pathlib.Path, *arguments: str) -> Iterator[tuple[httpx.Client, str]]:
    """Two replicas of the demo, each with one rank; the folder of their Ray. Looks that nothing is left."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are limited
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), "--demo", "--replicas", "2", "--port", str(port), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder}
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 240
        while "replicas serve 'demo'" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client, folder
        process.terminate()
        assert process.wait(60) == 0, log.read_text()
        deadline = time.monotonic() + 10
        while left := processes(folder):
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.2)
    finally:
        for pid in processes(folder):  # only where the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def solo(folder: pathlib.Path, seed: int, size: int, frames: int, steps: int) -> Any:
    """What the pipeline makes when it is called directly, without offload."""
    pipe = Cosmos3OmniPipeline.from_pretrained(build_tiny_cosmos3(folder / "cosmos3"), dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    call = {"width": size, "height": size, "num_frames": frames, "num_inference_steps": steps}
    if frames > 1:
        call["fps"] = 24
    return pipe(prompt="a red fox", generator=torch.Generator("cpu").manual_seed(seed), **call).video


def state(client: httpx.Client, session: str) -> dict[str, Any]:
    """What the replica of a session tells about itself."""
    with client.stream("GET", "/v1/events", headers={"X-Session-Id": session}) as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
        return httpx.Response(200, content=line.removeprefix("data: ")).json()


@NEEDS_RAY
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_replicas_answer_and_one_that_loses_a_rank_comes_back(tmp_path: pathlib.Path) -> None:
    with replicas(tmp_path / "log", "--sticky") as (client, folder), ThreadPoolExecutor(4) as threads:
        assert len(ranks(folder)) == 2

        # Both answer, with the bytes of the pipeline called directly.
        picture = png(solo(tmp_path, 5, 64, 1, 2)[0])
        answered, sessions = set(), {}
        for number in range(40):
            session = {"X-Session-Id": f"session {number}"} if number % 2 else {}
            body = {**SMALL, "seed": 5}
            answer = client.post(IMAGES, json=body, headers={"Accept": "image/png", **session})
            assert answer.status_code == 200 and answer.content == picture, answer.text
            answered.add(answer.headers["x-replica"])
            for name in session.values():
                sessions.setdefault(answer.headers["x-replica"], name)
            if len(sessions) == 2:
                break
        assert len(answered) == 2 and len(sessions) == 2

        # A job is found by its session, and refused without one.
        form = {"prompt": (None, "a red fox"), "num_inference_steps": (None, "1"), "num_frames": (None, "5")}
        refused = client.post("/v1/videos", files=form)
        assert refused.status_code == 400 and "'X-Session-Id'" in refused.json()["error"]["message"]
        for replica, session in sessions.items():
            header = {"X-Session-Id": session}
            job = client.post("/v1/videos", files=form, headers=header).json()
            told = client.get(f"/v1/videos/{job['id']}/events", headers=header)  # until it has ended
            assert "event: completed" in told.text
            for _ in range(4):
                found = client.get(f"/v1/videos/{job['id']}", headers=header)
                assert (found.headers["x-replica"], found.json()["status"]) == (replica, "completed")

        # Both compute when a rank of one is killed: one request fails, once, and the other does not notice.
        lost: list[tuple[str, httpx.Response]] = []
        whole: list[httpx.Response] = []
        waiting: dict[str, Future[httpx.Response]] = {
            session: threads.submit(
                client.post,
                "/v1/videos/sync",
                files={name: (None, value) for name, value in {**LONG, "seed": "7"}.items()},
                headers={"X-Session-Id": session},
            )
            for session in sessions.values()
        }
        deadline = time.monotonic() + 60
        while not all(state(client, session)["ranks"][0]["job"] for session in waiting):
            assert time.monotonic() < deadline and not any(one.done() for one in waiting.values())
        os.kill(ranks(folder)[0], signal.SIGKILL)
        for session, one in waiting.items():
            answer = one.result(180)
            if answer.status_code == 200:
                whole.append(answer)
            else:
                lost.append((session, answer))
        assert len(lost) == len(whole) == 1, [one.text for _, one in lost]
        assert (lost[0][1].status_code, lost[0][1].json()["error"]["code"]) == (503, "rank_lost")
        assert whole[0].content == mp4(solo(tmp_path, 7, 128, 17, 100), 24)

        # What comes to the replica meanwhile waits for its new ranks, and the replica is the same one.
        session = lost[0][0]
        body = {**SMALL, "seed": 5}
        headers = {"Accept": "image/png", "X-Session-Id": session}
        answer = client.post(IMAGES, json=body, headers=headers)
        assert answer.content == picture and sessions[answer.headers["x-replica"]] == session
        assert (state(client, session)["restarts"], state(client, session)["state"]) == (1, "ready")
        (other,) = set(sessions.values()) - {session}
        assert state(client, other)["restarts"] == 0
        assert len(ranks(folder)) == 2


@pytest.mark.parametrize("jobs", ("all", "session", "none"))
def test_a_job_that_could_not_be_found_again_is_refused(jobs: str) -> None:
    app = FastAPI()

    @app.post("/v1/jobs")
    @app.post("/v1/videos")
    @app.post("/v1/videos/sync")
    async def made() -> dict[str, bool]:
        return {"made": True}

    async def work() -> None:
        transport = httpx.ASGITransport(app=ray_serve.ReplicaName(app, "seven", jobs))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            plain = await client.post("/v1/videos")
            session = await client.post("/v1/videos", headers={"X-Session-Id": "mine"})
            other = await client.post("/v1/jobs")
            sync = await client.post("/v1/videos/sync")
            assert [one.headers["x-replica"] for one in (plain, session, other, sync)] == ["seven"] * 4
            assert sync.json() == {"made": True} and other.status_code == plain.status_code
            assert plain.status_code == (200 if jobs == "all" else 400)
            assert session.status_code == (400 if jobs == "none" else 200)
            if jobs != "all":
                error = plain.json()["error"]
                assert (
                    error["code"] == "no_session"
                    and error["message"].startswith("'/v1/videos' ")
                    and "'/v1/videos/sync'" in error["message"]
                )
                assert ("--sticky" if jobs == "none" else "'X-Session-Id'") in error["message"]

    asyncio.run(work())


def test_all_paths_that_queue_jobs_are_known() -> None:
    paths = make_app(ServeOptions()).openapi()["paths"]
    queues = {
        path for path, methods in paths.items() if "post" in methods and any(f"{path}/{{" in one for one in paths)
    }
    assert queues == set(ray_serve.JOBS)


def test_a_replica_has_started_once_its_ranks_are_ready() -> None:
    async def work() -> None:
        app = ray_serve.make_replica_app(ray_serve.parse(["nowhere/no-such-model", "--replicas", "2"]), "seven")
        service = app.state.service
        # Ranks take long to start; what they would tell is set here.
        waiting = asyncio.create_task(ray_serve._until_ready(app))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        service.scheduler.fleet.state = "ready"
        service.scheduler.pulse.beat()
        await asyncio.wait_for(waiting, 5)

        service.scheduler.fleet.state = "failed"
        service.scheduler.fleet.error = ValueError("no such model")
        with pytest.raises(RuntimeError, match="The ranks could not start: no such model"):
            await asyncio.wait_for(ray_serve._until_ready(app), 5)

    asyncio.run(work())


def test_each_host_gets_one_replica_with_all_its_devices() -> None:
    def placed(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments = ray_serve.parse([*words])
        found = ray_serve.placement(arguments, read_options(arguments))
        return found, found["ray_actor_options"]

    eight, resources = placed("some/model", "--replicas", "3", "--data-parallel-size", "8", "--max-queue", "10")
    assert (eight["num_replicas"], eight["max_replicas_per_node"]) == (3, 1)
    assert resources == {"num_gpus": 8, "num_cpus": 8}
    assert eight["max_ongoing_requests"] > 10 + 8, "Ray would hold back what the replica's own queue refuses"
    assert "request_router_config" not in eight
    _, resources = placed("some/model", "--data-parallel-size", "8", "--accelerator", "NPU", "--cpus", "4")
    assert resources == {"resources": {"NPU": 8}, "num_cpus": 4}
    demo, resources = placed("--replicas", "2", "--sticky")  # without a model
    assert (demo["num_replicas"], resources) == (2, {"num_cpus": 0}) and "max_replicas_per_node" not in demo
    assert "ConsistentHash" in demo["request_router_config"]["request_router_class"]


def test_a_ray_of_this_machine_alone_is_told_so_before_it_is_imported() -> None:
    assert ray_serve.LOCAL["RAY_USAGE_STATS_ENABLED"] == ray_serve.LOCAL["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert len(ray_serve.LOCAL["RAY_AUTH_TOKEN"]) == 64
    top = [node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in top}
    assert "fastapi" in names and not any(name.split(".")[0] == "ray" for name in names)


@NEEDS_RAY
def test_a_key_from_a_file_is_not_stored_in_the_cluster(tmp_path: pathlib.Path) -> None:
    from ray import cloudpickle

    key = tmp_path / "key"
    key.write_text("much-too-secret")
    arguments = ray_serve.parse(["some/model", "--api-key-file", str(key)])
    options = read_options(arguments)
    assert options.api_key == "much-too-secret"
    cloudpickle.register_pickle_by_value(ray_serve)  # as what a script defines
    try:
        stored = cloudpickle.dumps(ray_serve.make_deployment(arguments, options))
    finally:
        cloudpickle.unregister_pickle_by_value(ray_serve)
    assert str(key).encode() in stored and b"much-too-secret" not in stored
    assert ray_serve.LOCAL["RAY_AUTH_TOKEN"].encode() not in stored
