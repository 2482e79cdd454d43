# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what runs in a worker process: it joins torch.distributed, builds the object whose methods are called, and answers
one request after the other. Must not outlive the process that started it, and must not know of waves: it echoes the
`wave_id` of a request.

[Note: messages] A message is one dictionary, made by `messages.encode`; nothing that arrives is executed.

- A request has `kind` ("start" or "call"), `wave_id`, `method`, `payload` and `notes`. The first is "start", whose
  payload says what to build. Two others have no reply: "stop" is the last and has nothing else, and "cancel" says
  with a `wave_id` that nobody waits for the reply to it any more.
- A reply has `wave_id`, `ok`, and either `value`, or `type`, `message` and `traceback`, all text. There is one for
  each request, and one of wave 0 unasked: it says that the worker is there.
- A note has `wave_id` and `note`. It comes before the reply to a request that asks for `notes`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import zmq

from ..device.onload import resolve_device
from ..device.platform import get_platform
from ..distributed.group import stay_on_host
from .conversation import Line, talking
from .messages import encode


MAX_MESSAGE = 1 << 32
"""Bytes of the largest message, 4 GiB. A video of 1920 x 1080, 240 frames, has 1.4 GiB in uint8."""
_WATCH_SECONDS = 0.5
"""How often a worker looks whether its parent is still there."""
_GRACE_SECONDS = 3.0
"""What a worker that is busy when its parent dies has left to end by itself."""
_LINGER_SECONDS = 1.0
"""How long a worker that ends tries to deliver its last reply."""


def endpoint(folder: str) -> str:
    """Where the executor listens: a Unix-domain socket in its private directory."""
    return f"ipc://{folder}/socket"


def identity(rank: int) -> bytes:
    """The name under which a rank's socket is known to the executor's."""
    return f"rank-{rank}".encode()


def import_target(name: str) -> Any:
    """
    The attribute that "package.module:attribute" names.

    Raises:
        `ImportError`: there is no such module.
        `AttributeError`: there is no such attribute.
    """
    module, _, attribute = name.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


class Worker:
    """
    One rank and the object it serves.

    Args:
        folder (`str`): the executor's private directory.
        rank (`int`): this worker's index.
        size (`int`): the number of workers.
    """

    def __init__(self, folder: str, rank: int, size: int) -> None:
        self.folder = folder
        self.rank = rank
        self.size = size
        self._served: Any = None

    def answer(self, request: Mapping[str, Any]) -> bytes:
        """Does what `request` asks for and returns the encoded reply; an exception is a reply too."""
        if request["kind"] == "start":
            return _reply(request["wave_id"], lambda: self._start(**request["payload"]))
        return _reply(request["wave_id"], lambda: self._call(request["method"], request["payload"]))

    def _start(self, target: str, args: Mapping[str, Any], path: Sequence[str], device: str | None) -> None:
        # What the executor's process can import, its workers can.
        sys.path += [entry for entry in path if entry not in sys.path]
        platform = get_platform(resolve_device(None if device is None else torch.device(device), self.rank))
        if self.size > 1:
            # A store in a file opens no port.
            store = dist.FileStore(os.path.join(self.folder, "store"), self.size)
            dist.init_process_group(platform.backend, store=store, rank=self.rank, world_size=self.size)
            # Registered first, so run last: what `target` leaves to its exit may need the other ranks.
            atexit.register(_leave_world)
        self._served = import_target(target)(**args)

    def _call(self, name: str, payload: Any) -> Any:
        method = None if name.startswith("_") else getattr(self._served, name, None)
        if not callable(method):
            raise AttributeError(f"'{type(self._served).__name__}' has no public method '{name}'")
        return method(payload)


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _reply(wave_id: int, work: Callable[[], Any]) -> bytes:
    try:
        data = encode({"wave_id": wave_id, "ok": True, "value": work()})
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a result of {len(data)} bytes exceeds the {MAX_MESSAGE} of a message; return less")
        return data
    except Exception as error:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        told = {"type": name, "message": str(error), "traceback": traceback.format_exc()}
        return encode({"wave_id": wave_id, "ok": False, **told})


def _end_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent(parent: int, folder: str) -> None:
    """For a worker that is busy when its parent dies; an idle one sees it in its own loop."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, rank: int, size: int, parent: int) -> None:
    """Serves the executor of process `parent` until it says stop or is gone."""
    # Ctrl-C is for the parent, which decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopped = threading.Event()
    # Registered first, so run last. Taking apart all that was imported lasts for seconds, and is of no use to anybody.
    atexit.register(lambda: _end_now() if stopped.is_set() else None)
    threading.Thread(target=_end_with_parent, args=(parent, folder), daemon=True).start()
    stay_on_host()
    worker = Worker(folder, rank, size)
    context = zmq.Context()
    try:
        channel = context.socket(zmq.DEALER)
        channel.setsockopt(zmq.IDENTITY, identity(rank))
        channel.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        channel.connect(endpoint(folder))
        line = Line(channel)
        line.send(_reply(0, lambda: None))
        while os.getppid() == parent:
            if (request := line.take(_WATCH_SECONDS)) is not None:
                if request["kind"] == "stop":
                    stopped.set()
                    break
                with talking(line, request["wave_id"], request["notes"]):
                    answer = worker.answer(request)
                line.send(answer)
                del request, answer  # they may be large, and the next request may be long in coming
    finally:
        context.destroy(linger=int(_LINGER_SECONDS * 1000))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
