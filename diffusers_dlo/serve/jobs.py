# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns a job: one picture or video, its states, and who is told of its changes. Must not know of ranks' processes or
HTTP.

[Note: job states] queued -> in_progress -> completed, failed or cancelled; a job that was handed out and not begun
goes back to queued. The last three are final: whoever ends a job first decides, and what comes later (a result after
the deadline, a second failure) changes nothing. So each job is answered once. All happens in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .arguments import Request


class Status(str, Enum):
    """The states of a job; the words are OpenAI's, but for the last."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing changes any more."""
        return self in (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True)
class Failure:
    r"""
    Why there is no result.

    Args:
        status (`int`): of HTTP.
        code (`str`): for programs.
        message (`str`): for people.
        retry_after (`int`, *optional*): seconds after which trying again makes sense.
    """

    status: int
    code: str
    message: str
    retry_after: int | None = None


class Pulse:
    """
    Wakes all that wait for a change. Who is slow misses changes in between, but never the last one, and nothing piles
    up: a listener looks at `beats`, then at the state, and then waits for more beats than it has seen.
    """

    def __init__(self) -> None:
        self.beats = 0
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Something has changed."""
        self.beats += 1
        self._event.set()
        self._event = asyncio.Event()

    async def after(self, beats: int) -> None:
        """Until there have been more than `beats` changes."""
        while self.beats <= beats:
            await self._event.wait()


class Job:
    """
    One call of the pipeline. See [Note: job states].

    Args:
        request (`Request`): what to make.
        on_change (`Callable[[Job], None]`): told of each change.
    """

    def __init__(self, request: Request, on_change: Callable[[Job], None]) -> None:
        self.id = f"{request.kind}_{secrets.token_hex(12)}"
        self.request = request
        self.status = Status.QUEUED
        self.created = time.time()
        self.ended: float | None = None
        self.rank: int | None = None
        self.step = 0
        self.steps: int | None = None
        self.content: bytes | None = None
        self.seconds: float | None = None
        self.failure: Failure | None = None
        self._on_change = on_change
        self._pulse = Pulse()

    @property
    def progress(self) -> int:
        """Per cent of the steps; 100 is a job that is complete."""
        if self.status is Status.COMPLETED:
            return 100
        return min(99, 100 * self.step // self.steps) if self.steps else 0

    def start(self, rank: int) -> bool:
        """A rank has been given it."""
        return self._become(Status.IN_PROGRESS, rank=rank)

    def put_back(self) -> bool:
        """The rank was gone before it was given it."""
        return self._become(Status.QUEUED, rank=None)

    def advance(self, step: int, steps: int) -> None:
        """A step is done."""
        if self.status is Status.IN_PROGRESS:
            self.step, self.steps = step, steps
            self._changed()

    def complete(self, content: bytes, seconds: float) -> bool:
        """The result is there."""
        return self._become(Status.COMPLETED, content=content, seconds=seconds)

    def fail(self, failure: Failure) -> bool:
        """There will be no result."""
        return self._become(Status.FAILED, failure=failure)

    def cancel(self) -> bool:
        """Nobody wants the result any more."""
        return self._become(Status.CANCELLED)

    async def changes(self) -> AsyncIterator[None]:
        """Yields now and after each change, the last time when the job is final."""
        while True:
            seen, final = self._pulse.beats, self.status.final
            yield
            if final:
                return
            await self._pulse.after(seen)

    async def finished(self) -> None:
        """Until the job is final."""
        async for _ in self.changes():
            pass

    def _become(self, status: Status, **values: Any) -> bool:
        if self.status.final:
            return False
        self.status = status
        for name, value in values.items():
            setattr(self, name, value)
        if status.final:
            self.ended = time.time()
        self._changed()
        return True

    def _changed(self) -> None:
        self._on_change(self)
        self._pulse.beat()


class JobBook:
    """
    The jobs that can be asked for by their ids: all that are not final, and the last of the others. Those that have
    failed or were cancelled take no place from those with a result that may still be fetched.

    Args:
        keep (`int`): how many final ones are kept, of those with a result and of those without.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def __iter__(self) -> Any:
        return iter(list(self._jobs.values()))

    def add(self, job: Job) -> None:
        """A new one; the oldest final ones may go for it."""
        self._jobs[job.id] = job
        final = [one for one in self._jobs.values() if one.status.final]
        for has_result in (True, False):
            alike = [one.id for one in final if (one.content is not None) is has_result]
            for name in alike[: max(0, len(alike) - self._keep)]:
                del self._jobs[name]

    def get(self, name: str) -> Job | None:
        """The job of an id."""
        return self._jobs.get(name)

    def remove(self, name: str) -> None:
        """Forgets a job and its content."""
        self._jobs.pop(name, None)
