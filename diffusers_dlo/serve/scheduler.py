# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns who is served next: a bounded queue in order of arrival, of which each free rank takes the first, or, with waves,
all free ranks take equal ones together; deadlines and cancellation. Must not know of HTTP, or how ranks are reached.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .arguments import Request
from .fleet import Fleet, RankGoneError, RankLostError
from .jobs import Failure, Job, Pulse, Status
from .options import Limits, ServeOptions
from .waves import differences


WAVE_SECONDS = 0.5
"""For so long at most the first request of a wave waits for others."""
_FIRST_GUESS = 5.0
"""Seconds that a job is taken to last before any has been done, for Retry-After."""
_SHUTTING_DOWN = Failure(503, "shutting_down", "The server is shutting down.")


class RefusedError(RuntimeError):
    """A request is not admitted; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Scheduler:
    r"""
    The queue and the ranks.

    Args:
        options (`ServeOptions`): limits, and whether there are waves.
        on_end (`Callable[[Job], None]`): told of each job that has become final.
    """

    def __init__(self, options: ServeOptions, on_end: Callable[[Job], None] = lambda job: None) -> None:
        self.pulse = Pulse()
        self.fleet = Fleet(options, self._woken)
        self._limits: Limits = options.limits
        self._wave = options.wave
        self._on_end = on_end
        self._queue: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._wave_due: asyncio.TimerHandle | None = None
        self._wave_ready = False
        self._mean_seconds = _FIRST_GUESS
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing is served any more."""
        return self._closed

    @property
    def running(self) -> int:
        """The jobs that ranks compute."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The jobs that no rank has taken yet."""
        return len(self._queue)

    def admit(self, requests: Sequence[Request], seconds: float | None = None) -> list[Job]:
        """
        Queues all of `requests`, or none of them. They have `seconds` until they fail; the server's own limit at most.

        Raises:
            `RefusedError`: the queue is full, or nothing is served any more.
        """
        if self._closed or self.fleet.state in ("failed", "closed"):
            raise RefusedError(_SHUTTING_DOWN)
        if len(self._queue) + len(requests) > self._limits.queue:
            after = max(1, math.ceil(self._mean_seconds * len(self._queue) / self.fleet.size))
            raise RefusedError(
                Failure(
                    503,
                    "queue_full",
                    f"{len(self._queue)} requests wait already, and --max-queue is {self._limits.queue}; try again in "
                    f"about {after} s.",
                    after,
                )
            )
        limit = min(seconds or self._limits.seconds, self._limits.seconds)
        loop = asyncio.get_running_loop()
        jobs = [Job(request, self._changed) for request in requests]
        for job in jobs:
            self._timers[job.id] = loop.call_later(limit, self._expire, job, limit)
        self._queue.extend(jobs)
        self._woken()
        return jobs

    def cancel(self, job: Job) -> bool:
        """Ends a job that nobody wants any more; False if it was final already. Its rank is free after its step."""
        ended = job.cancel()
        if ended:
            self._leave(job)
        return ended

    async def run(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Hands out jobs until it is cancelled. `on_failure` is told if the ranks cannot be started at all."""
        ranks = asyncio.create_task(self.fleet.run())
        ranks.add_done_callback(lambda _: on_failure() if self.fleet.error is not None else None)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self.hand_out()
        finally:
            self.close()
            self.fleet.stop()
            await asyncio.gather(ranks, return_exceptions=True)
            await self.fleet.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Fails everything, and admits nothing more."""
        self._closed = True
        for job in [*self._queue, *self._running.values()]:
            if job.fail(_SHUTTING_DOWN):
                self._leave(job)
        self.pulse.beat()

    def position(self, job: Job) -> int | None:
        """The place in the queue, from 1; None if it does not wait."""
        return self._queue.index(job) + 1 if job in self._queue else None

    def hand_out(self) -> None:
        """Gives jobs to the ranks that have none. `run` does so whenever something has changed."""
        if self._wave and not self._take_wave():
            return
        for rank in self._idle:
            if not self._queue:
                return
            job = self._queue.popleft()
            job.start(rank)
            self._running[rank] = job
            task = asyncio.create_task(self._serve(rank, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def snapshot(self) -> dict[str, Any]:
        """What the page shows: the state, the queue, and what each rank does and uses."""
        return {
            "state": self.fleet.state,
            "reason": self.fleet.reason,
            "ready": self.fleet.ready,
            "restarts": self.fleet.restarts,
            "queue": [_describe(job) for job in self._queue],
            "ranks": [
                {
                    "rank": rank,
                    "job": _describe(self._running[rank]) if rank in self._running else None,
                    "figures": self.fleet.figures.get(rank),
                }
                for rank in range(self.fleet.size)
            ],
        }

    @property
    def _idle(self) -> list[int]:
        """The ranks that have no job: one that was given a job is called a moment later only."""
        return [rank for rank in self.fleet.idle if rank not in self._running]

    def _take_wave(self) -> bool:
        """
        Whether a wave begins: all ranks are free, and there is work for each, or the first has waited long enough.
        Those that are not equal to the first are refused, so that they do not take the wave from others.
        """
        if not self._queue:
            self._stop_gathering()
        if len(self._idle) < self.fleet.size or not self._queue:
            return False
        if len(self._queue) < self.fleet.size and not self._wave_ready:
            if self._wave_due is None:
                self._wave_due = asyncio.get_running_loop().call_later(WAVE_SECONDS, self._end_gathering)
            return False
        self._stop_gathering()
        while gathered := list(self._queue)[: self.fleet.size]:
            refused = differences([job.request for job in gathered])
            for index, reason in refused.items():
                if gathered[index].fail(Failure(400, "unequal_wave", reason)):
                    self._leave(gathered[index])
            if not refused:
                return True
        return False

    def _stop_gathering(self) -> None:
        if self._wave_due is not None:
            self._wave_due.cancel()
        self._wave_due, self._wave_ready = None, False

    def _end_gathering(self) -> None:
        self._wave_due, self._wave_ready = None, True
        self._woken()

    async def _serve(self, rank: int, job: Job) -> None:
        try:
            if job.status.final:  # it ended before its rank was called, which so could not be told
                return
            result = await self.fleet.generate(rank, job.request, job.advance)
        except RankGoneError:
            if job.put_back():
                self._queue.appendleft(job)
        except RankLostError as error:
            job.fail(Failure(503, "rank_lost", f"{error} It was not tried again; send it again if you like.", 5))
        except ValueError as error:  # a request that cannot be sent to a rank
            job.fail(Failure(400, "invalid_value", str(error)))
        else:
            if result["outcome"] == "done":
                self._mean_seconds += 0.2 * (result["seconds"] - self._mean_seconds)
                job.complete(result["content"], result["seconds"])
            elif result["outcome"] == "refused":
                job.fail(Failure(400, "refused_by_model", result["message"]))
            else:
                job.fail(_SHUTTING_DOWN)  # nobody cancelled it but the end of its rank
        finally:
            self._running.pop(rank, None)
            self._woken()

    def _expire(self, job: Job, seconds: float) -> None:
        state = "was waiting for a rank" if job.status is Status.QUEUED else f"had done {job.step} steps"
        failure = Failure(504, "deadline_exceeded", f"The deadline of {seconds:g} s has passed; the request {state}.")
        if job.fail(failure):
            self._leave(job)

    def _leave(self, job: Job) -> None:
        """Takes a job that is final out of the queue, or off its rank."""
        if job in self._queue:
            self._queue.remove(job)
        for rank, running in self._running.items():
            if running is job:
                self.fleet.cancel(rank)
        self._woken()

    def _changed(self, job: Job) -> None:
        if job.status.final:
            timer = self._timers.pop(job.id, None)
            if timer is not None:
                timer.cancel()
            self._on_end(job)
        self.pulse.beat()

    def _woken(self) -> None:
        self._wake.set()
        self.pulse.beat()


def _describe(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "kind": job.request.kind,
        "prompt": job.request.prompt[:200],
        "status": job.status.value,
        "progress": job.progress,
        "step": job.step,
        "steps": job.steps,
        "created_at": int(job.created),
    }
