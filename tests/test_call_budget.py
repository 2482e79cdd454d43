# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What the engine asks of a device for each block, counted. On some devices one wait too many costs more than a gather
does, and Python between kernels is what a short block has no time for. `BUDGETS` is the one place where it is written
down; the table in `docs/how_it_works.md` shows it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from diffusers_dlo import api, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.host.pinned import PinnedStore
from tests import toys
from tests.doubles import DelayedPlatform
from tests.ranks import run_ranks
from tests.scenarios import Kind, Scenario
from tests.schedules import ScheduledPlatform
from tests.test_stream_order import LateBlock, LateStack
from tests.toys import feed, toy


CPU = torch.device("cpu")
WIDTHS = (24, 40, 8, 24, 16)
COLUMNS = (
    "switch to a stream",
    "wait on a stream",
    "record on a stream",
    "wait in computing",
    "record in computing",
    "allocation",
)
BUDGETS = {
    # A block is copied (behind its slot), waited for before it computes, and its slot given back.
    "`local`": (1, 1, 1, 1, 1, 0),
    # And gathered, behind its own copy.
    "`all_gather`": (2, 2, 2, 1, 1, 0),
    # A coded shard is copied, behind what was decoded from its buffer, and decoded, behind that copy and the slot. The
    # event of the fetch follows by itself, as the buffer has one of its own.
    "`local`, one coded shard": (3, 3, 3, 1, 1, 0),
    "`all_gather`, coded": (4, 4, 4, 1, 1, 0),
    # Its gather waits for the slot, and the copy before it for what was gathered from its staging buffer.
    "`all_gather`, staged": (2, 3, 2, 1, 1, 0),
    "`all_gather`, its shard stays": (1, 1, 1, 1, 1, 0),
    "pulled": (1, 1, 1, 1, 1, 0),
    "it stays whole": (0, 0, 0, 0, 1, 0),
    # What nothing computes with is overwritten behind its own gather.
    "a pass for others": (2, 2, 2, 0, 0, 0),
    "a pass for others, coded": (4, 4, 4, 0, 0, 0),
    "a pass for others, staged": (2, 2, 2, 0, 0, 0),
    "a pass for others, its shard stays": (1, 0, 1, 0, 0, 0),
    "a leaf": (0, 0, 0, 0, 1, 1),
    "a leaf that stays": (0, 0, 0, 0, 0, 0),
}
"""What one block, or one call of a leaf, asks for in the steady state, by column. Nothing else is asked for: no event
or stream is made, and the host waits for nothing."""


class Counting(Platform):
    """Counts what is asked of a platform, and by which threads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.submitting: set[int] = set()
        self.using: set[int] = set()
        super().__init__(*args, **options)

    def new_stream(self, high_priority: bool = False) -> Any:
        self.calls["new stream"] += 1
        return super().new_stream(high_priority)

    def new_event(self) -> Any:
        self.calls["new event"] += 1
        return super().new_event()

    def empty(self, nbytes: int) -> torch.Tensor:
        self.calls["allocation"] += 1
        return super().empty(nbytes)

    def submit(
        self,
        stream: Any,
        work: Callable[[], None],
        after: Sequence[Any] = (),
        record: Any = None,
        timed: Any = None,
    ) -> None:
        self.submitting.add(threading.get_ident())
        self.calls["switch to a stream"] += 1
        self.calls["wait on a stream"] += len(after)
        self.calls["record on a stream"] += 1
        super().submit(stream, work, after, record, timed)

    def is_done(self, event: Any) -> bool:
        self.calls["look at an event"] += 1
        return super().is_done(event)

    def compute_wait(self, event: Any) -> None:
        self.calls["wait in computing"] += 1
        super().compute_wait(event)

    def compute_record(self, event: Any) -> None:
        self.calls["record in computing"] += 1
        super().compute_record(event)

    def synchronize(self) -> None:
        self.calls["wait on the host"] += 1
        super().synchronize()

    def use_in_this_thread(self) -> None:
        self.using.add(threading.get_ident())


class CountingPlatform(Counting, DelayedPlatform):
    """On streams that lag, and with what of it is still to be done."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.pending: list[threading.Event] = []

    @property
    def is_busy(self) -> bool:
        return not all(event.is_set() for event in self.pending)

    def submit(self, stream: Any, work: Callable[[], None], *args: Any, **options: Any) -> None:
        end = threading.Event()
        self.pending = [event for event in self.pending if not event.is_set()] + [end]

        def tracked() -> None:
            work()
            end.set()

        super().submit(stream, tracked, *args, **options)


class CountingSchedule(Counting, ScheduledPlatform):
    """On streams of which a seed decides what runs when."""


def expected(blocks: dict[str, int]) -> dict[str, int]:
    """What so many blocks of each kind ask for together."""
    total = {
        column: sum(count * BUDGETS[kind][i] for kind, count in blocks.items()) for i, column in enumerate(COLUMNS)
    }
    return {column: count for column, count in total.items() if count}


SIZES = [(100, 7), (180,), (40, 60, 3), (100,), (9,), (150, 20), (64,)]
IN_PLACE, STAGED, STAYS = "`all_gather`", "`all_gather`, staged", "`all_gather`, its shard stays"
FOR_OTHERS = "a pass for others"
SCENARIOS = {
    "local": (Kind("local", 1, (0,), 2), {"`local`": 7}, {}),
    "local, three slots": (Kind("local", 1, (0,), 3), {"`local`": 7}, {}),
    "local, some stay": (Kind("local", 1, (0.5,), 2), {"`local`": 3, "it stays whole": 4}, {}),
    "all_gather": (Kind("all_gather", 2, (0,), 2), {IN_PLACE: 7}, {FOR_OTHERS: 7}),
    "all_gather, three slots": (Kind("all_gather", 3, (0,), 3), {IN_PLACE: 7}, {FOR_OTHERS: 7}),
    "local, coded": (Kind("local", 1, (0,), 2, coded="all"), {"`local`, one coded shard": 7}, {}),
    "all_gather, coded": (
        Kind("all_gather", 2, (0,), 2, in_place=True, coded="all"),
        {"`all_gather`, coded": 7},
        {f"{FOR_OTHERS}, coded": 7},
    ),
    "all_gather, half stays": (
        Kind("all_gather", 2, (0.5,), 3),
        {IN_PLACE: 4, STAYS: 3},
        {FOR_OTHERS: 4, f"{FOR_OTHERS}, its shard stays": 3},
    ),
    "all_gather, staged": (
        Kind("all_gather", 2, (0.95,), 2),
        {STAGED: 3, STAYS: 4},
        {f"{FOR_OTHERS}, staged": 3, f"{FOR_OTHERS}, its shard stays": 4},
    ),
    "all_gather, some stay whole": (
        Kind("all_gather", 2, (1.4,), 2),
        {STAYS: 5, "it stays whole": 2},
        {f"{FOR_OTHERS}, its shard stays": 5},
    ),
}


@pytest.mark.parametrize("kind, blocks, served", SCENARIOS.values(), ids=SCENARIOS)
def test_what_a_block_asks_of_the_device(kind: Kind, blocks: dict[str, int], served: dict[str, int]) -> None:
    """
    No more than is written above, with what is copied ahead when a forward ends: it is the next one's first copy.
    """
    scenario = Scenario(0, kind, platform=CountingSchedule)
    scenario.enable(SIZES)
    counts = []
    try:
        scenario.steady(3)
        for serves in (False, True, True) if served else (False,):
            before = Counter(scenario.platform.calls)
            scenario.steady(1, serves)
            counted = scenario.platform.calls - before
            counts.append({name: count for name, count in counted.items() if count})
    finally:
        assert not scenario.run(0)
    assert counts[0] == expected(blocks)
    if served:  # the pass before it has copied ahead for the first of these
        assert counts[2] == expected(served)


def run(model: LateStack, platform: CountingPlatform, step: int) -> torch.Tensor:
    LateBlock.stream = platform.compute
    try:
        with torch.no_grad():
            return model(feed(step))
    finally:
        LateBlock.stream = None


def _count(rank: int, size: int, kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What one forward in the steady state asks for, in all, by kind."""
    return {name: _count_one(options) for name, options in kinds.items()}


def _count_one(options: dict[str, Any]) -> dict[str, int]:
    model, reference = toy(LateStack, WIDTHS), toy(LateStack, WIDTHS)
    platform = CountingPlatform(CPU)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for step in range(3):
            run(model, platform, step)
        before = Counter(platform.calls)
        output = run(model, platform, 3)
        counted = {name: count - before[name] for name, count in platform.calls.items()}
        with torch.no_grad():
            assert torch.equal(output, reference(feed(3)))
    finally:
        handle.remove()
    return {name: count for name, count in counted.items() if count}


def test_what_a_block_asks_of_the_device_on_ranks() -> None:
    shards = sum(b.shard_nbytes(2) for b in plan_distributed_layerwise_offload(toy(LateStack, WIDTHS)).blocks)
    kinds = {
        "`local`": {"transfer": "local"},
        "`all_gather`": {"transfer": "all_gather"},
        "pulled": {"device_budget": shards, "gather": "pull"},
    }
    for counted in run_ranks(2, _count, kinds):
        assert counted == {kind: expected({kind: len(WIDTHS)}) for kind in kinds}


class CountingHost(Counting):
    """Without streams, and with events as on a device: there is one once it is made."""

    def new_event(self) -> Any:
        super().new_event()
        return self.new_timing_event()


@pytest.mark.parametrize("stays", (False, True), ids=("fetched", "stays"))
def test_what_a_leaf_asks_of_the_device(stays: bool) -> None:
    model, platform = toy(toys.Leafy), CountingHost(CPU)
    budget = 400 * 16 * 4 + 256 if stays else None
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, device_budget=budget, num_slots=2)
    try:
        with torch.no_grad():
            model(feed(0))
            model(feed(1))
            before = Counter(platform.calls)
            model.embed(torch.tensor([3]))
            alone = platform.calls - before
    finally:
        handle.remove()
    assert dict(alone) == expected({"a leaf that stays" if stays else "a leaf": 1})


def test_the_page_shows_the_budget() -> None:
    page = (Path(__file__).parents[1] / "docs" / "how_it_works.md").read_text()
    section = page.split("\n## What a block asks of the device\n")[1].split("\n## ")[0]
    heading, _, *rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in heading[1:]] == list(COLUMNS)
    shown = {kind.strip(): tuple(int(cell) for cell in cells) for kind, *cells in rows}
    assert shown == BUDGETS


def _serve(rank: int, size: int) -> tuple[int, int, bool]:
    """One rank computes more than the other, whose service thread takes part in the rest."""
    model = toy(LateStack, WIDTHS)
    platform = CountingPlatform(CPU)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, grace=0.05)
    here = threading.get_ident()
    for step in range(2 + 3 * rank):
        run(model, platform, step)
    handle.join()
    others = platform.submitting - {here}
    passes = handle.report().passes
    handle.remove()
    return len(others), passes, others <= platform.using


def test_every_thread_that_submits_work_has_made_the_device_its_own() -> None:
    (served, _, right), (_, passes, also_right) = run_ranks(2, _serve)
    assert passes == 5 and served == 1
    assert right and also_right


def test_pinned_memory_stays_until_what_copies_from_it_has_ended() -> None:
    """Disabled right after a forward, when the next one's first copies are under way."""
    platform = CountingPlatform(CPU, copy_seconds=0.05)
    model = toy(LateStack, WIDTHS)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, transfer="local", host="pinned")
    run(model, platform, 0)
    busy: list[bool] = []
    close = PinnedStore.close

    def watched(store: PinnedStore) -> None:
        busy.append(platform.is_busy)
        close(store)

    assert platform.is_busy
    with patch.object(PinnedStore, "close", watched):
        handle.remove()
    assert busy == [False]
