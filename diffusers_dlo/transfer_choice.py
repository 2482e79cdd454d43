# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which transfer an enabling with `transfer="auto"` takes: one real block is timed both ways, and all ranks take
what is faster. Must not time anything once hooks are on, nor leave a trace in the slots it borrows.

[Note: Transfer choice]
    The largest block that would be gathered is brought into a slot both ways: in shards with a gather, and whole over
    each rank's own link, all ranks at the same time. Before each repetition the ranks agree, so they start together,
    and hear of one that failed. The figure of each rank is its best of three after a warm-up; that of the group is
    its slowest rank's, since the others would wait for it. All ranks compare the same two numbers, so all decide
    alike. Ranks agree outside of the transfers and not inside ([Note: Lone gather]).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diffusers.utils import logging

from .byte_size import format_bytes
from .config import DistributedLayerwiseOffloadConfig
from .distributed.group import OffloadGroup
from .engine import Engine
from .gather_lane import GatherLane
from .host.store import Extent
from .lone_gather import LoneGather
from .offload_plan import OffloadPlan
from .units import Component, Unit


logger = logging.get_logger(__name__)

_REPETITIONS = 3


@dataclass(frozen=True)
class TransferTiming:
    r"""
    How long the largest block took to reach the device ([Note: Transfer choice]).

    Attributes:
        all_gather_ms (`float`): milliseconds in shards, with the gather.
        local_ms (`float`): milliseconds whole, over each rank's own link.
    """

    all_gather_ms: float
    local_ms: float

    @property
    def faster(self) -> str:
        """`"local"` if that took less time, else `"all_gather"`."""
        return "local" if self.local_ms < self.all_gather_ms else "all_gather"


def choose_transfer(
    plan: OffloadPlan,
    components: Sequence[Component],
    engine: Engine,
    config: DistributedLayerwiseOffloadConfig,
) -> tuple[OffloadPlan, TransferTiming | None]:
    """
    Decides what `transfer="auto"` is for components that are attached to the engine, their stores filled and no hooks
    on them yet, and makes them local if that is faster. Collective, while no pass can begin.

    Args:
        plan (`OffloadPlan`): with `"auto"` decided by the number of ranks alone.
        components (`Sequence[Component]`): its components.
        engine (`Engine`): what streams them.
        config (`DistributedLayerwiseOffloadConfig`): the options.

    Returns:
        The plan that is in force, and the figures; None for them where nothing was timed.

    Raises:
        `RuntimeError`: a transfer failed, on this rank or on another.
    """
    gathered = [block for c in components if c.plan.transfer == "all_gather" for block in c.blocks]
    if config.transfer != "auto" or not gathered or not engine.platform.has_host_link:
        return plan, None
    largest = max(gathered, key=lambda block: block.layout.nbytes)
    if not largest.store.is_whole(largest.key):
        logger.info(
            f"all_gather is taken without timing: the host store is '{largest.store.kind}', with a shard of each "
            "block on each rank, so no rank can copy a whole one."
        )
        return plan, None
    refusal = _lock_whole([largest], engine.group)
    if refusal is not None:
        logger.info(f"all_gather is taken without timing: whole blocks cannot be page-locked ({refusal})")
        return plan, None
    timing = _time_both(largest, engine, config.timeout)
    chosen, why = timing.faster, ""
    if chosen == "local":
        refusal = _lock_whole(gathered, engine.group)
        if refusal is not None:
            chosen, why = "all_gather", f", because not all blocks can be page-locked whole ({refusal})"
    logger.info(
        f"Transfer of a block of {format_bytes(largest.layout.nbytes)}: {timing.all_gather_ms:.1f} ms by all_gather, "
        f"{timing.local_ms:.1f} ms by local; {chosen} is taken{why}."
    )
    if chosen == "all_gather":
        return plan, timing
    with engine.group.agreement("enable: local transfer"):
        engine.lanes.go_local(components, config)
    return plan.as_local(), timing


def _lock_whole(blocks: Sequence[Unit], group: OffloadGroup) -> str | None:
    """
    Page-locks the whole of blocks on all ranks. Why one of them could not, or None. What was locked stays so until the
    store is closed: other ranks have locked the same memory for their shards, and a shard's extents stay as they are.
    """
    said: dict[str, Any] = {"refused": None}
    with group.agreement("enable: page-lock whole blocks", said) as replies:
        try:
            for block in blocks:
                block.store.whole_extents(block.key)
        except RuntimeError as error:
            said["refused"] = str(error)
    return next((f"rank {rank}: {r['refused']}" for rank, r in enumerate(replies) if r["refused"] is not None), None)


def _time_both(block: Unit, engine: Engine, timeout: float) -> TransferTiming:
    group = engine.group
    trial = _Trial(block, engine, timeout)
    mine = [_best_ms(trial.gather, group), _best_ms(trial.copy_whole, group)]
    with group.agreement("enable: compare transfers", {"ms": mine}) as replies:
        pass
    return TransferTiming(*(max(reply["ms"][way] for reply in replies) for way in range(2)))


def _best_ms(transfer: Callable[[], None], group: OffloadGroup) -> float:
    """
    The shortest of several repetitions on this rank, in milliseconds; the first, which warms up, does not count.
    Interrupts come in the agreements only ([Note: Transfer choice]), since enabling defers them.
    """
    best = float("inf")
    for repetition in range(1 + _REPETITIONS):
        failure: Exception | None = None
        start = time.perf_counter()
        try:
            transfer()
        except Exception as error:
            failure = error
        elapsed = time.perf_counter() - start
        if repetition > 0:
            best = min(best, elapsed)
        with group.agreement("enable: time transfers"):
            if failure is not None:
                raise failure
    return 1000 * best


class _Trial:
    """One block and a slot, and the two ways from the one to the other. Each returns when the block has arrived."""

    def __init__(self, block: Unit, engine: Engine, timeout: float) -> None:
        lane = engine.lanes.find("all_gather")
        assert isinstance(lane, GatherLane)
        self._block, self._platform, group = block, engine.platform, engine.group
        self._transfers = lane.transfers
        self._lone = LoneGather(self._platform, group, timeout, engine.lanes.end_passes)
        ring = lane.lend_ring()
        index = ring.next_slot.index

        def views(extents: Sequence[Extent], shards: int, rank: int) -> Any:
            return ring.views(block.layout, extents, shards, rank)[index]

        self._in_shards = views(block.extents, group.size, group.rank)
        self._whole = views(block.store.whole_extents(block.key), 1, 0)
        self._copies = self._platform.new_stream()
        self._gathers = self._platform.new_stream(high_priority=True)
        self._arrived, self._ready = self._platform.new_event(), self._platform.new_event()

    def copy_whole(self) -> None:
        """As the local lane does it."""
        whole = self._whole
        self._transfers.copy(self._block, self._copies, whole.copies, (), self._ready, whole.realigned)
        self._platform.synchronize()

    def gather(self) -> None:
        """
        As the gathered lane does it.

        Raises:
            `RankLost`: the gather failed; the group is over. Other errors: the copy failed, and the gather did not.
        """
        failure: Exception | None = None
        try:
            self._transfers.copy(self._block, self._copies, self._in_shards.copies, (), self._arrived)
        except Exception as error:
            failure = error
        what = str(self._block)
        self._lone.queue(self._gathers, self._in_shards, (self._arrived,), self._ready, what)
        self._lone.wait(self._ready, what)
        if failure is not None:
            raise failure
