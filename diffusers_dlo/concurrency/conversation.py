# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns a worker's end of the line: the requests that come, and what a method says and hears while it still runs. Must not
know what methods do. Everything here is for the thread that serves requests: a socket is for one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import zmq

from .messages import decode, encode


class Line:
    """
    The socket of a worker, and requests that have come and not been taken.

    Args:
        channel (`zmq.Socket`): the socket.
    """

    def __init__(self, channel: zmq.Socket[bytes]) -> None:
        self._channel = channel
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._cancelled: set[int] = set()

    def send(self, data: bytes) -> None:
        """Sends a reply or a note."""
        self._channel.send(data)

    def take(self, seconds: float) -> Mapping[str, Any] | None:
        """The next request, None if none came in time."""
        if not self._waiting:
            self._receive(seconds)
        return self._waiting.popleft() if self._waiting else None

    def is_cancelled(self, wave_id: int) -> bool:
        """Whether the caller of `wave_id` has gone, or wants this worker to stop."""
        while self._receive(0.0):
            pass
        return wave_id in self._cancelled or any(request["kind"] == "stop" for request in self._waiting)

    def forget(self, wave_id: int) -> None:
        """For a call that has been answered; a cancellation of it may still come, and means nothing."""
        self._cancelled = {number for number in self._cancelled if number > wave_id}

    def _receive(self, seconds: float) -> bool:
        if not self._channel.poll(int(seconds * 1000)):
            return False
        request = decode(self._channel.recv(copy=False).buffer)
        if request["kind"] == "cancel":
            self._cancelled.add(request["wave_id"])
        else:
            self._waiting.append(request)
        return True


class _Conversation:
    """A call, and whether its caller listens to it."""

    def __init__(self, line: Line, wave_id: int, notes: bool) -> None:
        self.line = line
        self.wave_id = wave_id
        self.notes = notes

    def __enter__(self) -> None:
        global _current
        _current = self

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None
        self.line.forget(self.wave_id)


_current: _Conversation | None = None


def talking(line: Line, wave_id: int, notes: bool) -> _Conversation:
    """The context in which a request is answered."""
    return _Conversation(line, wave_id, notes)


def tell(value: Any) -> None:
    r"""
    Sends a note to the caller of the method that runs in this worker, before the method returns. Nobody hears it where
    the method was called in a wave, or not through an executor.

    Args:
        value (`Any`): of types that can be sent.

    Raises:
        `ValueError`: it cannot be sent.
    """
    if _current is not None and _current.notes:
        _current.line.send(encode({"wave_id": _current.wave_id, "note": value}))


def cancelled() -> bool:
    """
    Whether the caller of the method that runs in this worker wants its result no more, or the executor is being shut
    down. It costs a look at the socket. A method that finds it True does best to raise.
    """
    return _current is not None and _current.line.is_cancelled(_current.wave_id)
