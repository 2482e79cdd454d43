# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Who is served next, and what becomes of the ranks, in moments that no client can choose."""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
from collections.abc import Awaitable, Callable

import pytest

from diffusers_dlo.serve import fleet
from diffusers_dlo.serve.arguments import Request
from diffusers_dlo.serve.jobs import Job, JobBook, Status
from diffusers_dlo.serve.options import ServeOptions
from diffusers_dlo.serve.scheduler import WAVE_SECONDS, Scheduler


def asked(steps: int) -> Request:
    return Request("image", "a fox", 1, num_inference_steps=steps)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("wave", (False, True), ids=("single", "wave"))
def test_a_rank_that_was_given_a_job_is_given_no_other(wave: bool) -> None:
    async def work() -> None:
        scheduler = Scheduler(ServeOptions(ranks=2, wave=wave))
        jobs = scheduler.admit([asked(steps) for steps in (2, 2, 2, 2)])
        scheduler.fleet.state = "ready"
        # Twice before any rank was called: refusing an unequal request wakes the scheduler while it hands out.
        scheduler.hand_out()
        scheduler.hand_out()
        assert (scheduler.running, scheduler.waiting) == (2, 2)
        assert [job.rank for job in jobs] == [0, 1, None, None]
        for job in jobs:
            scheduler.cancel(job)

    run(work)


def test_a_job_that_ends_before_its_rank_is_called_costs_the_rank_nothing() -> None:
    async def work() -> None:
        scheduler = Scheduler(ServeOptions())
        (job,) = scheduler.admit([asked(2)])
        scheduler.fleet.state = "ready"
        scheduler.hand_out()
        assert job.status is Status.IN_PROGRESS
        scheduler.cancel(job)
        told: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        await asyncio.sleep(0.05)
        assert (scheduler.running, scheduler.fleet.ready, told) == (0, True, [])

    run(work)


def test_a_wave_gathers_anew_when_what_it_waited_with_has_gone() -> None:
    async def work() -> None:
        scheduler = Scheduler(ServeOptions(ranks=2, wave=True))
        scheduler.fleet.state = "ready"
        (first,) = scheduler.admit([asked(2)])
        scheduler.hand_out()
        scheduler.cancel(first)
        scheduler.hand_out()
        await asyncio.sleep(WAVE_SECONDS + 0.1)
        (second,) = scheduler.admit([asked(2)])
        scheduler.hand_out()
        assert (scheduler.running, scheduler.waiting) == (0, 1), "it begins without waiting for an equal one"
        scheduler.cancel(second)

    run(work)


def test_jobs_without_a_result_take_no_place_from_those_with_one() -> None:
    async def work() -> None:
        book = JobBook(2)
        jobs = [Job(asked(2), lambda job: None) for _ in range(9)]
        for index, job in enumerate(jobs):
            book.add(job)
            if index in (0, 2, 3):
                job.complete(b"video", 1.0)
            elif index < 8:
                job.cancel()
        assert [jobs.index(job) for job in book] == [2, 3, 6, 7, 8]

    run(work)


def test_closing_does_not_wait_for_the_next_attempt_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_RETRY_SECONDS", (3600.0,))

    async def work() -> None:
        ranks = fleet.Fleet(ServeOptions(model="nothing", start_timeout=0.001), lambda: None)
        ranks.restarts = 1
        running = asyncio.create_task(ranks.run())
        while "will be in 3600 s" not in ranks.reason:
            await asyncio.sleep(0.05)
        await ranks.close()
        await asyncio.wait_for(running, 5)

    run(work)


def test_whatever_keeps_the_ranks_from_starting_is_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / (120 * "a")  # too long a name for a socket in it
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def work() -> None:
        ranks = fleet.Fleet(ServeOptions(model="nothing"), lambda: None)
        await ranks.run()
        assert ranks.state == "failed" and ranks.error is not None and not list(folder.iterdir())

    run(work)
