# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Calls to single workers, each answered by itself: what they say meanwhile, cancelling them, deaths, and waves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diffusers_dlo.concurrency.executor import WaveError, WaveExecutor

from .workers import Service, runs, wait_for


pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def executor() -> Iterator[WaveExecutor]:
    with WaveExecutor(Service, 2, {"greeting": "hello"}, timeout=20.0, env={"OMP_NUM_THREADS": "1"}) as executor:
        yield executor


def test_ranks_answer_each_for_itself(executor: WaveExecutor) -> None:
    slow = executor.submit(0, "sleep", 1.0)
    for name in ("Ada", "Bob"):
        assert executor.submit(1, "greet", name).future.result(10) == f"hello {name}, from 1 of 2"
    with pytest.raises(
        WaveError, match=r"call \d+ \('fail'\): 1 of 1 ranks failed.\n  rank 1: ValueError: bad"
    ) as raised:
        executor.submit(1, "fail", "bad").future.result(10)
    assert raised.value.errors[1].type == "ValueError" and "in fail" in raised.value.errors[1].traceback
    assert not slow.future.done(), "the fast rank waited for the slow one"
    assert slow.future.result(10) == 1.0 and slow.rank == 0
    # The socket is free for waves again.
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_a_rank_takes_one_call_and_a_wave_waits_for_all(executor: WaveExecutor) -> None:
    call = executor.submit(0, "sleep", 0.5)
    with pytest.raises(RuntimeError, match="Rank 0 has not answered its last call"):
        executor.submit(0, "echo", 1)
    with pytest.raises(RuntimeError, match="calls of single ranks are"):
        executor.wave("echo", [1, 2])
    with pytest.raises(ValueError, match="no rank 2"):
        executor.submit(2, "echo", 1)
    with pytest.raises(ValueError, match="the payload of rank 1 cannot be sent"):
        executor.submit(1, "echo", object())
    assert call.future.result(10) == 0.5
    thread = threading.Thread(target=executor.wave, args=("sleep", [0.6]))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="A wave is running"):
        executor.submit(1, "echo", 1)
    thread.join()
    assert executor.submit(1, "echo", 1).future.result(10) == 1


def test_a_busy_worker_is_heard_and_can_be_cancelled(executor: WaveExecutor) -> None:
    heard: list[Any] = []
    done = executor.submit(0, "talk", (3, 0.0), heard.append)
    assert done.future.result(10) == {"stopped": None}
    assert heard == [{"number": 0}, {"number": 1}, {"number": 2}]

    heard.clear()
    endless = executor.submit(0, "talk", (10_000, 0.02), heard.append)
    other = executor.submit(1, "talk", (40, 0.02), lambda note: None)
    assert wait_for(lambda: len(heard) > 2, 10)
    endless.cancel()
    stopped = endless.future.result(10)["stopped"]
    assert 2 <= stopped < 500 and heard[-1] == {"number": stopped}
    assert other.future.result(10) == {"stopped": None}, "the cancellation reached the other rank"
    # A cancellation that comes late means nothing, neither to the call nor to the next one.
    done.cancel()
    endless.cancel()
    assert executor.submit(0, "talk", (2, 0.05), heard.append).future.result(10) == {"stopped": None}
    # Nobody listens in a wave.
    assert executor.wave("talk", [(2, 0.0), (2, 0.0)]) == [{"stopped": None}] * 2


def test_calls_from_many_threads_are_each_answered_once(executor: WaveExecutor) -> None:
    answers: dict[int, list[int]] = {0: [], 1: []}

    def work(rank: int) -> None:
        for number in range(200):
            answers[rank].append(executor.submit(rank, "echo", number).future.result(10))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: list(range(200)), 1: list(range(200))}


def test_a_death_fails_its_own_call_and_shutdown_gives_the_others_up(executor: WaveExecutor) -> None:
    """The last test of the file: it ends the executor that the others share."""
    heard: list[Any] = []
    survivor = executor.submit(0, "talk", (10_000, 0.02), heard.append)
    with pytest.raises(WaveError, match="rank 1 was killed by SIGKILL") as raised:
        executor.submit(1, "kill", "SIGKILL").future.result(10)
    assert raised.value.errors[1].type == "WorkerDied"
    count = len(heard)
    assert wait_for(lambda: len(heard) > count + 5, 10) and not survivor.future.done()
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL, so no further wave"):
        executor.submit(0, "echo", 1)
    pids, begun = executor.pids, time.monotonic()
    executor.shutdown()
    # The worker was asked to stop while it was busy, and did.
    assert time.monotonic() - begun < 4
    with pytest.raises(RuntimeError, match="was shut down while its reply was waited for"):
        survivor.future.result(10)
    assert not any(map(runs, pids))
    assert not [thread.name for thread in threading.enumerate() if thread.name == "calls to workers"]
