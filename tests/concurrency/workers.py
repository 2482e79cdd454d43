# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""For the tests of `WaveExecutor`: the targets of its worker processes, and what is seen of these from outside."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zmq

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.concurrency import conversation
from diffusers_dlo.concurrency.executor import WaveExecutor
from diffusers_dlo.concurrency.messages import encode
from tests import toys


class Service:
    """Does what a payload says."""

    text = "no method"

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting
        self._model: torch.nn.Module | None = None

    def echo(self, payload: Any) -> Any:
        return payload

    def greet(self, name: str) -> str:
        return f"{self._greeting} {name}, from {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def fail(self, text: str | None) -> str:
        if text is not None:
            raise ValueError(text)
        return "well"

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def kill(self, signal_name: str | None) -> str:
        if signal_name is not None:
            os.kill(os.getpid(), getattr(signal, signal_name))
        time.sleep(0.3)
        return "alive"

    def talk(self, payload: tuple[int, float]) -> dict[str, Any]:
        """Says `count` numbers, one each `seconds`, and stops where nobody wants to hear more."""
        count, seconds = payload
        for number in range(count):
            conversation.tell({"number": number})
            time.sleep(seconds)
            if conversation.cancelled():
                return {"stopped": number}
        return {"stopped": None}

    def unencodable(self, payload: Any) -> Any:
        return {"here": object()}

    def stream(self, seeds: list[int]) -> list[torch.Tensor]:
        """One forward for each seed, of a model whose weights the ranks share; enabled in the first wave."""
        if self._model is None:
            self._model = toys.toy(toys.Stack, 5)
            apply_distributed_layerwise_offload(self._model, grace=0.2)
        with torch.no_grad():
            return [self._model(toys.feed(seed)) for seed in seeds]

    def gather(self, value: float) -> list[float]:
        gathered = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.tensor([value]))
        return [float(one) for one in gathered]

    def inject(self, payload: tuple[list[bytes], float]) -> str:
        """Sends raw messages through the worker's own socket, the only one in its process, then sleeps and answers."""
        messages, seconds = payload
        (channel,) = [one for one in gc.get_objects() if isinstance(one, zmq.Socket)]
        for message in messages:
            channel.send(message)
        time.sleep(seconds)
        return "injected"


def reply(wave_id: Any, value: Any) -> bytes:
    """A well-formed reply to `wave_id`."""
    return encode({"wave_id": wave_id, "ok": True, "value": value})


def fail_to_start() -> None:
    """Dies on rank 0 and, once it is dead, raises on rank 1: after an error no rank is waited for for long."""
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, src=0)
    if dist.get_rank() == 0:
        sys.exit(3)
    wait_for(lambda: not runs(int(pid)), 30)
    raise OSError("no such checkpoint")


def held() -> tuple[int, int]:
    """The files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def folder_of(executor: WaveExecutor) -> pathlib.Path:
    """The private directory, from the command line of a worker."""
    command = pathlib.Path(f"/proc/{executor.pids[0]}/cmdline").read_bytes().split(b"\0")
    return pathlib.Path(command[3].decode())


def runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def listening_addresses(pid: int) -> list[str]:
    """The TCP addresses at which a process listens."""
    inodes = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
