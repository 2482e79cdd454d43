# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns worker processes: how they are started, spoken to and ended. Must leave nothing behind: no process, socket or
directory.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

from .messages import encode
from .worker import MAX_MESSAGE, endpoint, identity, import_target


_LONGEST_PARENT = 76
"""Bytes of the path of a directory in which a socket's own still has fewer than the system's 108."""
_RANKS, _SIZES = ("RANK", "LOCAL_RANK"), ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


def target_name(target: str | Callable[..., Any]) -> str:
    """
    The "module:attribute" of a target, under which `import_target` will find it in a worker.

    Raises:
        `ValueError`: it would not.
    """
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
            raise ValueError(f"'target' is '{target}'; it has to be of the form 'package.module:attribute'.")
        return target
    module, attribute = (str(getattr(target, key, "")) for key in ("__module__", "__qualname__"))
    name = f"{module}:{attribute}"
    remedy = "Pass a function or class of a module, or its name as 'package.module:attribute'."
    if module == "__main__":
        raise ValueError(f"'{attribute}' is part of the script that runs, which the workers cannot import. {remedy}")
    try:
        found = import_target(name)
    except (AttributeError, ImportError, ValueError):
        found = None
    if found is not target:
        raise ValueError(f"'{target!r}' cannot be imported by the workers under its name, '{name}'. {remedy}")
    return name


def socket_folder() -> str:
    """A new directory that is this user's alone, and whose path is short enough for that of a socket in it."""
    is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_PARENT
    return tempfile.mkdtemp(prefix="diffusers_dlo-", dir="/tmp" if is_long else None)


class WorkerProcesses:
    """
    The processes, the socket to them and its directory: all that has to be taken down.

    Args:
        size (`int`): the number of workers.
        env (`Mapping[str, str]`): their environment variables, besides this process's.
    """

    def __init__(self, size: int, env: Mapping[str, str]) -> None:
        self.closed = False
        self._owner = os.getpid()
        self._launched: SubprocessContext | None = None
        self._ranks = {identity(rank): rank for rank in range(size)}
        self._context = zmq.Context()
        self._folder = socket_folder()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            self._socket.bind(endpoint(self._folder))
            self._launched = _launch(self._folder, size, env)
        except BaseException:
            self.close(0.0)
            raise

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        assert self._launched is not None
        return [pid for _, pid in sorted(self._launched.pids().items())]

    def send(self, rank: int, data: bytes) -> None:
        """Queues a message. One to a worker that is gone is lost; who waits for its reply notices."""
        self._socket.send_multipart([identity(rank), data])

    def receive(self, seconds: float, wake: int = -1) -> tuple[int | None, memoryview | None] | None:
        """
        The next message: its rank, None for a stranger, and its bytes, None if it is not one frame. None if none came;
        sooner if another thread writes to the eventfd `wake`.
        """
        if wake < 0:
            came = self._socket.poll(math.ceil(seconds * 1000)) != 0
        else:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            ready = dict(poller.poll(math.ceil(seconds * 1000)))
            if wake in ready:
                os.eventfd_read(wake)
            came = self._socket in ready
        if not came:
            return None
        sender, *frames = self._socket.recv_multipart(copy=False)
        return self._ranks.get(sender.bytes), frames[0].buffer if len(frames) == 1 else None

    def death(self, rank: int) -> str | None:
        """How the worker ended, None if it runs."""
        assert self._launched is not None
        code = self._launched.subprocess_handlers[rank].proc.poll()
        if code is None:
            return None
        if code >= 0:
            return f"ended with exit code {code}"
        names = {int(number): number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"

    def close(self, timeout: float) -> None:
        """
        Asks all workers to stop, waits, then ends them by SIGTERM and SIGKILL, in about `timeout` seconds altogether.
        Idempotent, and without effect in a forked child.
        """
        if self.closed or os.getpid() != self._owner:
            return
        if self._launched is not None:
            # All are asked before any is waited for: what a rank does at its exit may need the others.
            for rank in self._ranks.values():
                self.send(rank, encode({"kind": "stop"}))
            deadline = time.monotonic() + 0.5 * timeout
            while time.monotonic() < deadline and not all(self.death(rank) for rank in self._ranks.values()):
                time.sleep(0.01)
            self._launched.close(signal.SIGTERM, timeout=max(1, round(0.2 * timeout)))
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.closed = True


def _is_about_no_signal(record: logging.LogRecord) -> bool:
    return "signal handlers" not in record.getMessage()


def _launch(folder: str, size: int, env: Mapping[str, str]) -> SubprocessContext:
    """
    Starts the workers through torch elastic's library. Not through its agent (`torchrun`), which ends all survivors
    when one rank dies.
    """
    handlers = {}
    library = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    if threading.current_thread() is threading.main_thread():
        # The library takes over signals that belong to the application.
        taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        handlers = {number: signal.getsignal(number) for number in taken}
    else:
        library.addFilter(_is_about_no_signal)  # it cannot take them over here, and warns of that
    try:
        launched = start_processes(
            name="worker",
            entrypoint=sys.executable,
            args={r: ("-m", f"{__package__}.worker", folder, r, size, os.getpid()) for r in range(size)},
            envs={
                r: {**env, **dict.fromkeys(_RANKS, str(r)), **dict.fromkeys(_SIZES, str(size))} for r in range(size)
            },
            logs_specs=DefaultLogsSpecs(log_dir=os.path.join(folder, "logs")),
        )
    finally:
        library.removeFilter(_is_about_no_signal)
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
    assert isinstance(launched, SubprocessContext)
    return launched
