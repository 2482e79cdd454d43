# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what endpoints have in common: the parts of a server, and waiting for jobs as long as their client does. Must not
know what an answer looks like.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import Request

from .checks import BadRequestError
from .jobs import Failure, Job, JobBook
from .metrics import Metrics
from .options import ServeOptions
from .scheduler import RefusedError, Scheduler


class ClientGoneError(RuntimeError):
    """Nobody is there any more to be answered."""


class Service:
    """
    One server: its options, its queue and ranks, the jobs that can be asked for, and its figures.

    Args:
        options (`ServeOptions`): all of the command line.
    """

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.created = int(time.time())
        self.metrics = Metrics()
        self.scheduler = Scheduler(options, self.metrics.count)
        self.book = JobBook(options.keep)

    async def finish(self, request: Request, jobs: Sequence[Job]) -> None:
        """
        Waits until all jobs are complete. Where one is not, or the client goes, the others are cancelled.

        Raises:
            `RefusedError`: a job has failed or was cancelled. `ClientGoneError`: the client has gone.
        """
        waits = {asyncio.create_task(job.finished()) for job in jobs}
        gone = asyncio.create_task(_disconnected(request))
        try:
            pending = set(waits)
            while pending:
                done, _ = await asyncio.wait({*pending, gone}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                for job in jobs:
                    if job.failure is not None:
                        raise RefusedError(job.failure)
                    if job.status.final and job.content is None:
                        raise RefusedError(Failure(409, "cancelled", f"The job '{job.id}' was cancelled."))
                if gone in done:
                    raise ClientGoneError
        finally:
            for task in (gone, *waits):
                task.cancel()
            for job in jobs:
                self.scheduler.cancel(job)

    def find(self, name: str) -> Job:
        """
        The video of an id.

        Raises:
            `BadRequestError`: there is none.
        """
        job = self.book.get(name)
        if job is None or job.request.kind != "video":
            raise BadRequestError(
                "video_id", f"There is no video '{name:.100}'; it may have been deleted.", "not_found", 404
            )
        return job


def get_service(request: Request) -> Service:
    """The server that a request has come to."""
    service: Service = request.app.state.service
    return service


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
