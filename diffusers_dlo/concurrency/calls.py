# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns calls to single workers, of which each is answered by itself: the thread that drives the socket while any is open,
what a busy worker says, and what it is told. Must not start or end workers.

[Note: one thread for the socket] A socket is for one thread at a time. Who drives it holds `driving`: a wave for as
long as it runs, and otherwise the thread of this file, which lives from the first open call to the end of the last.
Other threads only queue what is to be sent, and wake it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .envelope import read_note, read_reply
from .messages import encode
from .processes import WorkerProcesses
from .wave import WaveError, WorkerError, describe_wave


_POLL_SECONDS = 0.05
"""No wait is longer without looking whether the workers still run."""
_STOP_SECONDS = 1.0
"""How long `stop` waits for the thread, which looks at the flag at every poll."""


@dataclass(frozen=True)
class Call:
    """
    A call to one worker.

    Args:
        rank (`int`): the worker.
        future (`Future`): what the method returns there; a `WaveError` if it raised, or if the worker has ended.
        cancel (`Callable[[], None]`): tells the worker that nobody wants the result any more. The method learns of it
            when it asks (`conversation.cancelled`), and the future ends as the method does.
    """

    rank: int
    future: Future[Any]
    cancel: Callable[[], None]


@dataclass(frozen=True)
class _Open:
    rank: int
    what: str
    wave_id: int
    future: Future[Any]
    on_note: Callable[[Any], None] | None


class Calls:
    """
    The open calls, one for each rank at most.

    Args:
        workers (`WorkerProcesses`): the processes and the socket.
        driving (`threading.Lock`): held by whoever drives the socket.
    """

    def __init__(self, workers: WorkerProcesses, driving: threading.Lock) -> None:
        self._workers = workers
        self._driving = driving
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._stopped = False
        self._ended: list[tuple[_Open, WorkerError | None, Any]] = []  # of the thread

    def begin(self, rank: int, wave_id: int, what: str, request: bytes, on_note: Callable[[Any], None] | None) -> Call:
        """
        Queues `request` for `rank`. `on_note` is called in the thread of the socket, and must neither raise nor wait.

        Raises:
            `RuntimeError`: the rank has an open call, or a wave is running.
        """
        call = _Open(rank, what, wave_id, Future(), on_note)
        call.future.set_running_or_notify_cancel()  # a call that is on its way is not cancelled through its future
        with self._lock:
            if rank in self._open:
                raise RuntimeError(f"Rank {rank} has not answered its last call yet, and takes one at a time.")
            if self._thread is None:
                if not self._driving.acquire(blocking=False):
                    raise RuntimeError("A wave is running in this WaveExecutor; calls have to wait for its end.")
                try:
                    self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                    self._thread = threading.Thread(target=self._drive, name="calls to workers", daemon=True)
                    self._thread.start()
                except BaseException:
                    self._end_thread()
                    raise
            self._open[rank] = call
            self._send(rank, request)
        return Call(rank, call.future, lambda: self._cancel(rank, call))

    def stop(self) -> None:
        """Gives all open calls up, and returns when the thread has left the socket. Idempotent."""
        with self._lock:
            self._stopped = True
            thread = self._thread
            if thread is not None:
                os.eventfd_write(self._wake, 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def _cancel(self, rank: int, call: _Open) -> None:
        with self._lock:
            if self._open.get(rank) is call:
                self._send(rank, encode({"kind": "cancel", "wave_id": call.wave_id}))

    def _send(self, rank: int, data: bytes) -> None:
        """With the lock held."""
        self._outgoing.append((rank, data))
        os.eventfd_write(self._wake, 1)

    def _end_thread(self) -> None:
        """With the lock held: the socket is free for a wave."""
        if self._wake >= 0:
            os.close(self._wake)
        self._wake, self._thread = -1, None
        self._driving.release()

    def _drive(self) -> None:
        """The thread: sends, receives, and looks for workers that have ended, while a call is open."""
        looked = time.monotonic()
        while True:
            with self._lock:
                if self._stopped:
                    for call in self._open.values():
                        reason = "the WaveExecutor was shut down while its reply was waited for"
                        call.future.set_exception(RuntimeError(f"{call.what}: {reason}."))
                    self._open.clear()
                    self._end_thread()
                    return
                outgoing, self._outgoing = self._outgoing, deque()
                waited_for = dict(self._open)
            for rank, data in outgoing:
                self._workers.send(rank, data)
            received = self._workers.receive(_POLL_SECONDS, self._wake)
            if received is not None:
                self._hear(*received)
            if time.monotonic() - looked > _POLL_SECONDS:
                looked = time.monotonic()
                self._look_for_deaths(waited_for)
            # Whoever waits for a future may call the rank again, or begin a wave, as soon as it has ended.
            with self._lock:
                if is_last := not self._open:
                    self._end_thread()
                ended, self._ended = self._ended, []
            for call, error, reply in ended:
                if error is None:
                    call.future.set_result(reply["value"])
                else:
                    ranks = {call.rank: error}
                    call.future.set_exception(WaveError(describe_wave(call.what, ranks, 1), ranks, {}))
            if is_last:
                return

    def _look_for_deaths(self, waited_for: Mapping[int, _Open]) -> None:
        # The deaths first: what a dead worker had sent before is heard before its call fails.
        deaths = {rank: self._workers.death(rank) for rank in waited_for}
        if any(deaths.values()):
            while (received := self._workers.receive(0)) is not None:
                self._hear(*received)
        for rank, death in deaths.items():
            if death:
                self._end(waited_for[rank], WorkerError("WorkerDied", death))

    def _hear(self, rank: int | None, data: memoryview | None) -> None:
        """What is no answer to an open call is a stranger's or stale, and ignored: there is no end to wait for."""
        with self._lock:
            call = None if rank is None else self._open.get(rank)
        if call is None:
            return
        if (note := read_note(data, call.wave_id)) is not None:
            if call.on_note is not None:
                call.on_note(note["note"])
            return
        outcome = read_reply(data, call.wave_id)
        if outcome is not None:
            self._end(call, outcome if isinstance(outcome, WorkerError) else None, outcome)

    def _end(self, call: _Open, error: WorkerError | None, reply: Any = None) -> None:
        with self._lock:
            if self._open.get(call.rank) is call:
                del self._open[call.rank]
                self._ended.append((call, error, reply))
