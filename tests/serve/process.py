# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""For the tests of the server: a server in a process of its own, and what is seen of it from outside."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Any

import httpx


ROOT = pathlib.Path(__file__).parents[2]
_START_SECONDS = 150.0


class ServerProcess:
    """
    `diffusers-dlo serve` at a free port of this machine.

    Args:
        log (`Path`): the file of what it prints.
        arguments (`str`): more of the command line.
        model (`str`): what it serves.
    """

    def __init__(self, log: pathlib.Path, *arguments: str, model: str = "--demo") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = log
        self.headers: dict[str, str] = {}
        self.address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "diffusers_dlo.cli", "serve", model, "--port", str(port), *arguments]
        # Where it may write. Paths of sockets are limited, and pytest's own folders too long for them on some workers.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="served-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        names = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        environment = {**os.environ, **names}
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def __enter__(self) -> ServerProcess:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not self._is_ready():
                assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, headers=self.headers, timeout=120)

    def post(self, path: str, **content: Any) -> httpx.Response:
        return httpx.post(self.address + path, headers=self.headers, timeout=120, **content)

    def delete(self, path: str) -> httpx.Response:
        return httpx.delete(self.address + path, headers=self.headers, timeout=120)

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 60.0) -> None:
        """Until the state that /v1/events tells is as wanted."""
        deadline = time.monotonic() + seconds
        with httpx.stream("GET", f"{self.address}/v1/events", headers=self.headers, timeout=seconds) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    state = json.loads(line.removeprefix("data: "))
                    if condition(state):
                        return
                    assert time.monotonic() < deadline, state
        raise AssertionError("the events have ended")

    def worker_pids(self) -> list[int]:
        """The processes of the ranks, by rank."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"diffusers_dlo.concurrency.worker" in command and command[-2] == str(self.process.pid).encode():
                found.append((int(command[-4]), int(folder.name)))
        return [pid for _, pid in sorted(found)]

    def left_behind(self) -> list[str]:
        """What is left of the files that it wrote for itself and its ranks."""
        return [path.name for path in self.folder.glob("diffusers_dlo*")]

    def kill_a_worker(self) -> None:
        os.kill(self.worker_pids()[1], signal.SIGKILL)

    def memory(self) -> int:
        """Bytes of private memory of the server's own process."""
        text = pathlib.Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        rows = {row.split(":")[0]: row.split()[1] for row in text.splitlines()[1:]}
        return 1024 * (int(rows["Private_Dirty"]) + int(rows["Private_Clean"]))

    def _is_ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False
