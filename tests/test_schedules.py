# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The engine in thousands of seeded schedules, with poison wherever memory may be overwritten: right with all its waits,
and noticed as soon as one kind of them is left out.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from diffusers_dlo import api, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from diffusers_dlo.distributed.group import OffloadGroup, open_gather
from tests.other_ranks import PresentRanks
from tests.queues import MODES
from tests.ranks import run_ranks
from tests.scenarios import Kind, Readers, Scenario, repeat
from tests.schedules import ScheduledPlatform


EACH = 8
"""Schedules of a scenario."""
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part}")
def test_right_whatever_runs_when(part: int, request: pytest.FixtureRequest) -> None:
    for seed in range(part, request.config.getoption("schedules") // EACH, PARTS):
        repeat(seed)


@pytest.mark.parametrize("kind", (Kind(coded="all"), Kind("local", coded="some")), ids=("all", "some"))
def test_right_with_coded_blocks(kind: Kind) -> None:
    for seed in range(24):
        scenario = Scenario(seed, kind)
        faults = scenario.run(EACH)
        assert not faults, (seed, faults[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part}")
def test_right_whatever_runs_when_ten_times(part: int, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("schedules") // EACH
    for seed in range(count + part, 11 * count, PARTS):
        repeat(seed)


def test_a_seed_is_one_schedule() -> None:
    first, again, other = (Scenario(seed) for seed in (5, 5, 6))
    assert not any(scenario.run() for scenario in (first, again, other))
    assert first.platform.trace == again.platform.trace != other.platform.trace


LOCAL = Kind("local")
ALONE = Kind("all_gather", 1, (0,))
IN_PLACE = Kind("all_gather", 2, (0,), in_place=True)
BESIDE = Kind("all_gather", 2, (0,), in_place=False)
STAGED = Kind("all_gather", 3, (0.9,), num_slots=2, slots_only=False)
ALL_STAY = Kind("all_gather", 2, (1.0,), slots_only=False)
FROM_SLOTS = Kind("all_gather", 2, (1.0,), slots_only=True)
ONE_STAYS = Kind("all_gather", 2, (1.0, 0), num_slots=2, models=2, slots_only=False)

CODED = Kind("local", 1, (0,), coded="all")
CODED_SHARDS = Kind("all_gather", 2, (0,), in_place=True, coded="all")
PARTLY_CODED = Kind("local", 1, (0,), coded="some")


def leave_out(stream: str, before: str, awaited: str) -> Callable[[str, str, str], bool]:
    return lambda *wait: wait == (stream, before, awaited)


# Each rule of [Note: Slot reuse], and of memory that comes and goes: what is left out, and where.
RULES = {
    "copy behind the last use of its slot": (LOCAL, leave_out("copy", "copy", "compute")),
    "copy behind the last use of its slot, alone": (ALONE, leave_out("copy", "copy", "compute")),
    "copy behind the last use of its slot, gathered": (IN_PLACE, leave_out("copy", "copy", "compute")),
    "copy behind the gather that nobody used": (IN_PLACE, leave_out("copy", "copy", "gather")),
    "copy to staging behind the gather from it": (STAGED, leave_out("copy", "copy", "gather")),
    "gather behind the last use of its slot": (STAGED, leave_out("comm", "gather", "compute")),
    "copy beside a slot behind the gather from there": (BESIDE, leave_out("copy", "copy", "gather")),
    "gather behind its copy beside the slot": (BESIDE, leave_out("comm", "gather", "copy")),
    "copy from where a shard stays behind its arrival": (FROM_SLOTS, leave_out("comm", "gather", "copy")),
    "copy from where a shard stays behind the use of its slot": (FROM_SLOTS, leave_out("comm", "gather", "compute")),
    "gather behind its copy": (IN_PLACE, leave_out("comm", "gather", "copy")),
    "gather behind the copy to staging": (STAGED, leave_out("comm", "gather", "copy")),
    "gather behind the arrival of a shard that stays": (ALL_STAY, leave_out("comm", "gather", "copy")),
    "gather behind what was copied ahead": (ONE_STAYS, leave_out("comm", "gather", "copy ahead")),
    "computing behind its copy": (LOCAL, leave_out("compute", "compute", "copy")),
    "computing behind its gather": (IN_PLACE, leave_out("compute", "compute", "gather")),
    "computing behind another stream's": (LOCAL, leave_out("compute", "compute", "compute")),
    "release behind the last use": (LOCAL, leave_out("compute", "record", "compute")),
    "release behind the last use, gathered": (IN_PLACE, leave_out("compute", "record", "compute")),
    "decoding behind the copy of its shard": (CODED, leave_out("decode", "decode", "copy")),
    "decoding behind the last use of its slot": (CODED, leave_out("decode", "decode", "compute")),
    "decoding behind the gather that nobody used": (CODED_SHARDS, leave_out("decode", "decode", "gather")),
    "copy behind the decoding from its buffer": (CODED, leave_out("copy", "copy", "decode")),
    "copy behind the decoding to its slot": (PARTLY_CODED, leave_out("copy", "copy", "decode")),
    "gather behind its decoding": (CODED_SHARDS, leave_out("comm", "gather", "decode")),
    "computing behind its decoding": (CODED, leave_out("compute", "compute", "decode")),
    "copy behind what used new memory": (Kind(), leave_out("copy", "copy", "new memory")),
}


@pytest.mark.parametrize("kind, drops", RULES.values(), ids=RULES)
def test_a_missing_wait_shows(kind: Kind, drops: Callable[[str, str, str], bool]) -> None:
    assert _is_noticed(kind, drops, ""), "nothing notices that this is not waited for"


# The waits of the host: the function that waits, by name.
HOST_WAITS = {
    "slots are given back": (IN_PLACE, "close"),
    "a store is closed whose model was dropped": (LOCAL, "_close_store"),
    "what stays is given back": (Kind("all_gather", 2, (0.9,)), "give_back"),
}


@pytest.mark.parametrize("kind, function", HOST_WAITS.values(), ids=HOST_WAITS)
def test_a_missing_wait_of_the_host_shows(kind: Kind, function: str) -> None:
    assert _is_noticed(kind, None, function), f"nothing notices that '{function}' does not wait"


def _is_noticed(kind: Kind, drops: Callable[[str, str, str], bool] | None, function: str) -> bool:
    """Whether one of a few hundred schedules shows what is left out."""
    for seed in range(40):
        scenario = Scenario(seed, kind, drops, function)
        if scenario.run(EACH):
            assert scenario.platform.dropped
            return True
    return False


SIZES = ((100, 7), (180,), (40, 60, 3), (100,), (9,), (150, 20), (64,))
STEADY = {
    "local": (Kind("local", 1, (0,)), 2),
    "alone": (Kind("all_gather", 1, (0,)), 2),
    "gathered": (Kind("all_gather", 2, (0,), in_place=True), 2),
    "gathered from beside": (Kind("all_gather", 2, (0,), in_place=False), 2),
    "gathered, three slots": (Kind("all_gather", 3, (0,), in_place=True), 3),
    "staged": (Kind("all_gather", 2, (0.9,), slots_only=False), 2),
    "half stays": (Kind("all_gather", 2, (0.5,), slots_only=False), 3),
    "half stays, gathered from slots": (Kind("all_gather", 2, (0.5,), in_place=True, slots_only=True), 3),
    "all shards stay": (Kind("all_gather", 2, (1.0,), slots_only=False), 3),
    "all shards stay, gathered from slots": (Kind("all_gather", 2, (1.0,), in_place=True, slots_only=True), 3),
    "some stay whole": (Kind("all_gather", 2, (1.4,), slots_only=False), 3),
    "some stay whole, local": (Kind("local", 1, (0.5,)), 2),
    "coded": (CODED, 2),
    "coded, gathered": (CODED_SHARDS, 2),
    "coded, staged": (Kind("all_gather", 2, (0.9,), slots_only=False, coded="all"), 2),
}


@pytest.mark.parametrize("serves", (False, True), ids=("computing", "serving"))
@pytest.mark.parametrize("kind, num_slots", STEADY.values(), ids=STEADY)
def test_no_wait_is_one_too_many(kind: Kind, num_slots: int, serves: bool) -> None:
    """In the steady state nothing waits for what the order of its stream, and earlier waits, ensure already."""
    scenario = Scenario(3, kind)
    scenario.options["num_slots"] = num_slots
    platform = scenario.platform
    scenario.enable(SIZES)
    try:
        scenario.steady(3)
        platform.redundant, platform.waits = [], 0
        scenario.steady(3, serves)
        found, waits = list(platform.redundant), platform.waits
    finally:
        assert not scenario.run(0)
    assert not found
    assert waits > 0 or serves


# Ranks that are all there: gathers take part in the schedules of several processes.

ORDERS = ((0, 1, 2, 3, 4, 5, 6), (0, 3, 6), (5, 6), (6, 5, 4, 3, 2, 1, 0), (1, 1, 2, 2), ())


def _on_ranks(rank: int, size: int, fraction: float, gather: str, count: int) -> list[str]:
    """Each rank calls other blocks, and not as often; what one does not compute it transfers for the others."""
    rng = random.Random(f"{rank} {size} {fraction} {gather}")
    platform = ScheduledPlatform()
    torch.manual_seed(0)
    model = Readers("", SIZES)
    plan = plan_distributed_layerwise_offload(model, group_size=size)
    budget = int(fraction * sum(block.shard_nbytes(size) for block in plan.blocks)) or None

    def open_scheduled(group: OffloadGroup, platform: ScheduledPlatform, *options: Any) -> None:
        group.gather = None
        open_gather(group, platform, *options)
        assert group.gather is not None
        group.gather = PresentRanks(platform, group.gather)

    with (
        platform.going_on(),
        patch.object(api, "get_platform", lambda device: platform),
        patch.object(api, "open_gather", open_scheduled),
    ):
        slots = 2 + int(fraction == 0.5)
        options = {"device_budget": budget, "gather": gather, "num_slots": slots, "grace": 0.01}
        handle = apply_distributed_layerwise_offload(model, **options)
        for schedule in range(count):
            platform.reseed(rng.randrange(1 << 30), MODES[schedule % len(MODES)])
            for _ in range(1 + (rank + schedule) % 2):
                model.calls = [(index, platform.compute) for index in rng.choice(ORDERS)]
                with torch.no_grad():
                    model(platform)
            if rng.random() < 0.3:
                platform.drain(platform.compute)
        platform.synchronize()
        handle.join()
        handle.remove()
    return [f"rank {rank}: {fault}" for fault in platform.faults]


PRESENT = {
    "in place": (0, "collective"),
    "staged": (0.9, "collective"),
    "half": (0.5, "collective"),
    "pulled": (1.4, "pull"),
}


def _every_kind(rank: int, size: int, count: int) -> list[str]:
    return [fault for kind in PRESENT.values() for fault in _on_ranks(rank, size, *kind, count)]


@pytest.mark.parametrize("size", (2, 3))
def test_right_on_ranks(size: int) -> None:
    assert run_ranks(size, _every_kind, 8) == [[]] * size


def test_after_an_interrupt_another_stream_waits_for_the_slots() -> None:
    """Whoever lets go of what an interrupted forward held has not waited for it: on its stream or on another one."""
    for seed in range(40):
        scenario = Scenario(seed, Kind("local", num_slots=2))
        scenario.enable([(50,), (60,), (70,)])
        model, _ = scenario.models[0]
        model.calls, model.blocks[0].is_interrupted = [(0, scenario.side)], True
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(scenario.platform)
        model.blocks[0].is_interrupted = False
        scenario.steady(2)
        assert not scenario.run(schedules=0), seed


class Refusing(ScheduledPlatform):
    """The driver may refuse whatever is queued."""

    refuses = False

    def submit(self, *args: Any, **options: Any) -> None:
        if self.refuses:
            raise RuntimeError("the driver refused")
        super().submit(*args, **options)


def _refuse(platform: Refusing, *_: Any) -> None:
    platform.refuses = True


def test_a_copy_ahead_that_fails_is_not_taken_for_the_block() -> None:
    scenario = Scenario(
        1, Kind("all_gather", 2, (0,), num_slots=2, in_place=True, slots_only=False), platform=Refusing
    )
    scenario.enable([(50,), (60,), (70,), (80,), (90,)])
    platform, (model, _) = scenario.platform, scenario.models[0]
    scenario.steady(2)
    hook = model.blocks[-1].register_forward_hook(partial(_refuse, platform))
    with pytest.raises(RuntimeError, match="the driver refused"):
        scenario.steady(1)
    hook.remove()
    platform.refuses = False
    scenario.steady(2)
    assert not scenario.run(schedules=0)


@pytest.mark.parametrize(
    "kind", (Kind("local", num_slots=2), Kind("all_gather", 1, (0,), num_slots=2)), ids=("local", "alone")
)
def test_a_fetch_that_fails_is_not_taken_for_the_block(kind: Kind) -> None:
    for index in range(3):
        scenario = Scenario(index, kind, platform=Refusing)
        scenario.enable([(50,), (60,), (70,), (80,), (90,)])
        platform, (model, _) = scenario.platform, scenario.models[0]
        scenario.steady(2)
        hook = model.blocks[index].register_forward_hook(partial(_refuse, platform))
        with pytest.raises(RuntimeError, match="the driver refused"):
            scenario.steady(1)
        hook.remove()
        platform.refuses = False
        model.calls = [(index + 2, platform.compute)]  # it may come first
        with torch.no_grad():
            model(platform)
        scenario.steady(2)
        assert not scenario.run(schedules=0), index
