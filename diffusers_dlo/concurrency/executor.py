# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns waves: calls to worker processes that are made together, whose replies are all drained before any error is raised,
so that no rank is left alone in a collective. Must not know what the workers compute, and listens on no network.

[Note: stale replies] A wave that ended early (a deadline, an interrupt) leaves replies behind. Each carries the
`wave_id` of its call, so the next wave tells them from its own and discards them; a worker queues what it is sent,
so the next wave need not wait for them first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from .calls import Call, Calls
from .envelope import make_request, read_reply
from .processes import WorkerProcesses, target_name
from .wave import WaveError, WaveTimeoutError, WorkerError, describe_wave


_POLL_SECONDS = 0.05
"""No wait is longer without looking at the clock and at the workers."""
_MAX_STALE = 16
"""So many replies that nobody waits for are discarded in one wave; more mean that ranks are out of step."""
_SETTLE_SECONDS = 5.0
"""When a rank cannot start, the others have this long to say whether they can."""
_SHUTDOWN_SECONDS = 10.0


class WaveExecutor:
    """
    Worker processes ("ranks") that are called together, wave by wave, for a server that renders on ranks whose models
    share weights. Workers are processes of this host that run the same Python, joined in one torch.distributed world,
    each with an accelerator where there is one. They end with this process.

    One wave runs at a time: a second thread is refused, and so is a forked child. Ranks that do not need each other
    are called by `submit`, each for itself.

    Args:
        target (`str` or `Callable`): "package.module:attribute", or a function or class that can be imported under its
            name. Every worker calls it with `args` once it has joined the others; the public methods of what it
            returns can be called.
        num_workers (`int`): the number of workers.
        args (`Mapping[str, Any]`, *optional*): keyword arguments for `target`, of types that can be sent (see
            `messages.encode`).
        timeout (`float`, *optional*, defaults to 600.0): seconds a wave may last, unless it says otherwise.
        start_timeout (`float`, *optional*, defaults to 600.0): seconds until every worker has built its object.
        env (`Mapping[str, str]`, *optional*): environment variables for the workers, besides this process's.
        give_up (`Callable[[], bool]`, *optional*): looked at while the workers start; once it is True, they are taken
            down with a `RuntimeError`.
        device (`str`, *optional*): the device that workers are joined for, where it is not an accelerator for each;
            `"cpu"` on a machine that has some.

    Raises:
        `ValueError`: an argument is of no use; nothing has been started.
        `WaveError`: a worker could not start. All have been taken down.
    """

    def __init__(
        self,
        target: str | Callable[..., Any],
        num_workers: int,
        args: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
        start_timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
        give_up: Callable[[], bool] = lambda: False,
        device: str | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"'num_workers' is {num_workers}; at least one worker is needed.")
        self.num_workers = num_workers
        self.timeout = timeout
        self._owner = os.getpid()
        self._wave_id = 1
        self._wave = threading.Lock()
        self._counting = threading.Lock()
        self._closing = False
        self._give_up: Callable[[], bool] = give_up
        path = [os.path.abspath(entry) for entry in sys.path]
        built = {"target": target_name(target), "args": dict(args or {}), "path": path, "device": device}
        start = make_request("start", 1, "", built, "'args'")
        self._workers = WorkerProcesses(num_workers, env or {})
        self._calls = Calls(self._workers, self._wave)
        self._finalizer = weakref.finalize(self, _take_down, self._calls, self._workers, _SHUTDOWN_SECONDS)
        try:
            deadline = time.monotonic() + start_timeout
            self._collect("The workers could not start", range(num_workers), 0, deadline, _SETTLE_SECONDS)
            for rank in range(num_workers):
                self._workers.send(rank, start)
            self._collect("The workers could not start", range(num_workers), 1, deadline, _SETTLE_SECONDS)
        except BaseException:
            self._workers.close(0.5 * _SHUTDOWN_SECONDS)
            raise

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return self._workers.pids

    @property
    def alive(self) -> list[int]:
        """The ranks whose processes run."""
        self._check_owner()
        return [rank for rank in range(self.num_workers) if self._workers.death(rank) is None]

    @property
    def closed(self) -> bool:
        """Whether no further wave is possible: after `shutdown`, or once a worker has ended."""
        return self._closing or self._workers.closed or len(self.alive) < self.num_workers

    def wave(self, method: str, payloads: Sequence[Any], deadline: float | None = None) -> list[Any]:
        """
        Calls `method(payloads[rank])` on each rank that has a payload and returns what they returned, in order; the
        other ranks idle. Every reply is waited for, also when a rank has failed.

        An interrupt (Ctrl-C) ends the wait, not the work: the next wave queues behind what the workers still do. See
        [Note: stale replies].

        Args:
            method (`str`): a public method of what `target` built.
            payloads (`Sequence[Any]`): one for each rank from 0 on; of types that can be sent.
            deadline (`float`, *optional*, defaults to `timeout`): seconds until all must have answered.

        Raises:
            `ValueError`: no payload, more payloads than workers, or one that cannot be sent; nothing has been sent.
            `WaveError`: ranks failed; it has the results of the others. A `WaveTimeoutError` if they are only late.
            `TimeoutError`: more than 16 replies that nobody waits for arrived; the message names who sent them.
            `RuntimeError`: the executor is closed, a worker has ended, or another wave is running.
        """
        if not 0 < len(payloads) <= self.num_workers:
            raise ValueError(
                f"A wave takes one payload for each of up to {self.num_workers} workers; it got {len(payloads)}."
            )
        results = self._run(method, dict(enumerate(payloads)), deadline)
        return [results[rank] for rank in range(len(payloads))]

    def call(self, rank: int, method: str, payload: Any, deadline: float | None = None) -> Any:
        """A wave of `rank` alone, as `wave`: what `method(payload)` returned there."""
        self._check_rank(rank)
        return self._run(method, {rank: payload}, deadline)[rank]

    def submit(self, rank: int, method: str, payload: Any, on_note: Callable[[Any], None] | None = None) -> Call:
        r"""
        Calls `method(payload)` on `rank` alone and returns at once. Other ranks can be called meanwhile, from any
        thread, and each answers by itself; waves have to wait for the end of all such calls. A worker that dies fails
        its own call and no other.

        Args:
            rank (`int`): which worker.
            method (`str`): a public method of what `target` built.
            payload (`Any`): its argument, of types that can be sent.
            on_note (`Callable[[Any], None]`, *optional*): gets what the method says by `conversation.tell` before it
                returns, in another thread; must neither raise nor wait.

        Returns:
            `Call`: with the future of the result, and `cancel()`. There is no deadline: who has waited long enough
            cancels.

        Raises:
            `ValueError`: there is no such rank, or the payload cannot be sent.
            `RuntimeError`: the executor is closed, a worker has ended, a wave is running, or the rank is busy.
        """
        self._check_owner()
        self._check_rank(rank)
        self._check_usable()
        with self._counting:
            wave_id = self._wave_id = self._wave_id + 1
        request = make_request("call", wave_id, method, payload, f"the payload of rank {rank}", on_note is not None)
        return self._calls.begin(rank, wave_id, f"call {wave_id} ('{method}')", request, on_note)

    def shutdown(self, timeout: float = _SHUTDOWN_SECONDS) -> None:
        """
        Ends all workers, in about `timeout` seconds also when some are stuck, and removes what they shared. A wave
        that another thread waits for is given up. Idempotent; done by itself when the executor is forgotten, and at
        exit.
        """
        self._check_owner()
        self._closing = True
        self._calls.stop()
        # See [Note: one thread for the socket]. A wave looks at `_closing` at every poll.
        acquired = self._wave.acquire(timeout=20 * _POLL_SECONDS)
        try:
            self._workers.close(timeout)
            self._finalizer.detach()
        finally:
            if acquired:
                self._wave.release()

    def __enter__(self) -> WaveExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"This WaveExecutor belongs to process {self._owner} and cannot be used in its forked child "
                f"{os.getpid()}; make one there."
            )

    def _check_rank(self, rank: int) -> None:
        if rank not in range(self.num_workers):
            raise ValueError(f"There is no rank {rank}: the workers are ranks 0 to {self.num_workers - 1}.")

    def _check_usable(self) -> None:
        if self._closing or self._workers.closed:
            raise RuntimeError("This WaveExecutor has been shut down; make a new one.")
        deaths = {rank: self._workers.death(rank) for rank in range(self.num_workers)}
        ended = ", ".join(f"rank {rank} {death}" for rank, death in deaths.items() if death)
        if ended:
            raise RuntimeError(
                f"{ended}, so no further wave is possible. Shut this WaveExecutor down and make a new one."
            )

    def _run(self, method: str, payloads: Mapping[int, Any], deadline: float | None) -> dict[int, Any]:
        self._check_owner()
        seconds = self.timeout if deadline is None else deadline
        if not seconds > 0:
            raise ValueError(f"'deadline' is {seconds}; it has to be more than 0 seconds.")
        if not self._wave.acquire(blocking=False):
            raise RuntimeError(
                "Another wave is running in this WaveExecutor, or calls of single ranks are; it runs one at a time."
            )
        try:
            self._check_usable()
            with self._counting:
                wave_id = self._wave_id + 1
                requests = {
                    rank: make_request("call", wave_id, method, payload, f"the payload of rank {rank}")
                    for rank, payload in payloads.items()
                }
                self._wave_id = wave_id
            for rank, data in requests.items():
                self._workers.send(rank, data)
            return self._collect(f"wave {wave_id} ('{method}')", requests, wave_id, time.monotonic() + seconds)
        finally:
            self._wave.release()

    def _collect(
        self, what: str, ranks: Iterable[int], wave_id: int, deadline: float, settle: float | None = None
    ) -> dict[int, Any]:
        """
        Drains the replies of `ranks` to `wave_id` and returns their values, or raises all that went wrong as one. With
        `settle`, ranks that are late when another has failed are waited for so many seconds at most, and not blamed.
        """
        seconds = deadline - time.monotonic()
        blame_late = True
        waiting = set(ranks)
        asked = len(waiting)
        results: dict[int, Any] = {}
        errors: dict[int, WorkerError] = {}
        stale: Counter[str] = Counter()
        while waiting and (left := deadline - time.monotonic()) > 0:
            if self._closing or self._give_up():
                raise RuntimeError(f"{what}: the WaveExecutor was shut down while replies were waited for.")
            received = self._workers.receive(min(left, _POLL_SECONDS))
            deaths = {rank: self._workers.death(rank) for rank in waiting} if received is None else {}
            if any(deaths.values()):
                received = self._workers.receive(0)  # the last of what a dead worker had sent
            if received is None:
                errors |= {rank: WorkerError("WorkerDied", death) for rank, death in deaths.items() if death}
            else:
                rank, data = received
                outcome = read_reply(data, wave_id)
                if rank is None or rank not in waiting or outcome is None:
                    stale["a stranger" if rank is None else f"rank {rank}"] += 1
                    if sum(stale.values()) > _MAX_STALE:
                        senders = ", ".join(f"{count} from {sender}" for sender, count in sorted(stale.items()))
                        raise TimeoutError(f"{what}: more than {_MAX_STALE} replies nobody waits for: {senders}.")
                elif isinstance(outcome, WorkerError):
                    errors[rank] = outcome
                else:
                    results[rank] = outcome["value"]
            waiting -= results.keys() | errors.keys()
            if errors and settle is not None:
                deadline, settle, blame_late = min(deadline, time.monotonic() + settle), None, False
        if waiting and blame_late:
            errors |= {rank: WorkerError("NoReply", f"did not answer within {seconds:.3g} s") for rank in waiting}
        if errors:
            kind = WaveTimeoutError if all(error.type == "NoReply" for error in errors.values()) else WaveError
            raise kind(describe_wave(what, errors, asked), errors, results)
        return results


def _take_down(calls: Calls, workers: WorkerProcesses, timeout: float) -> None:
    calls.stop()
    workers.close(timeout)
