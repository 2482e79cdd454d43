# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the simulation of one forward: when each copy, gather and block would begin and end, by the rules of the engine.
Pure and deterministic: arithmetic on sizes and rates. Must not know of models, devices or ranks that exist.

[Note: Simulation]
    Three streams work in order: copies from the host, gathers, computing. The host runs ahead of them and takes no
    time. Fetches go to slots by running number, so a fetch waits for the end of the block that was fetched `num_slots`
    fetches before it ([Note: Slot reuse]); computing waits for its block's fetch. Laps follow each other without a
    gap, as the first blocks of the next lap are fetched at the end of this one. A shard that stays needs no copy, a
    block that stays whole needs nothing and no slot; with staging, copies wait for staging buffers and not for slots
    ([Note: Staging]).

    All of this only ever waits for what came earlier, so going through the blocks in order gives every time exactly.
    Before a block is computed, the fetches are known that may run meanwhile: all those whose slot an earlier block has
    left. Others begin after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


_MAX_LAPS = 64
_SAME = 1e-9


@dataclass(frozen=True)
class Links:
    """
    Rates of a machine, of each rank while all ranks are at work.

    Attributes:
        h2d (`float`, defaults to 55e9): bytes per second from the host to the device.
        gather (`float`, defaults to 270e9): bytes per second that a rank receives from other ranks.
        gather_latency (`float`, defaults to 20e-6): seconds of a gather beside its bytes.
        gather_slowdown (`float`, defaults to 0): by how much computing is slower while a collective gather runs; 1
            means that it takes twice the time meanwhile. Pulls take no part of the compute units.
    """

    h2d: float = 55e9
    gather: float = 270e9
    gather_latency: float = 20e-6
    gather_slowdown: float = 0.0

    def __post_init__(self) -> None:
        for name in ("h2d", "gather"):
            if not getattr(self, name) > 0:
                raise ValueError(f"'{name}' must be a rate in bytes per second, above 0; got {getattr(self, name)!r}.")
        for name in ("gather_latency", "gather_slowdown"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"'{name}' must not be negative, got {getattr(self, name)!r}.")


class SimulatedBlock(NamedTuple):
    """A block: bytes of its image, seconds that it computes, and what of it stays: nothing, a `shard`, or `whole`."""

    nbytes: int
    seconds: float
    stays: str = ""


@dataclass(frozen=True)
class Streaming:
    """How blocks come to the device: the options of an offload that matter here, and its staging buffers."""

    transfer: str = "all_gather"
    ranks: int = 1
    num_slots: int = 2
    staging_buffers: int = 0
    gather: str = "collective"
    "How shards that stay are gathered, `collective` or `pull`; what the host sends is always gathered collectively."

    def __post_init__(self) -> None:
        if self.transfer not in ("all_gather", "local") or self.gather not in ("collective", "pull"):
            raise ValueError(f"No such way to transfer: {self.transfer!r} with gather={self.gather!r}.")
        if self.ranks < 1 or self.num_slots < 2:
            raise ValueError(f"'ranks' must be 1 or more and 'num_slots' 2 or more: {self.ranks}, {self.num_slots}.")


class Span(NamedTuple):
    """What a stream (`copy`, `gather` or `compute`) does for a block, in seconds since the lap began."""

    stream: str
    block: int
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """
    One forward among many.

    Attributes:
        seconds (`float`): from the end of one forward to the end of the next.
        first_seconds (`float`): of the first forward, which finds the slots empty.
        compute_seconds (`float`), copy_seconds (`float`), gather_seconds (`float`): what each stream has to do alone.
        exposed_seconds (`float`): how long computing waits for blocks.
        link_idle (`float`): share of the time in which nothing is copied from the host.
        h2d_nbytes (`int`), gather_nbytes (`int`): what one rank copies and receives.
        spans (`tuple[Span, ...]`): the lap's timeline; a copy may begin before the lap, below 0.
    """

    seconds: float
    first_seconds: float
    compute_seconds: float
    copy_seconds: float
    gather_seconds: float
    exposed_seconds: float
    link_idle: float
    h2d_nbytes: int
    gather_nbytes: int
    spans: tuple[Span, ...]

    @property
    def limit_seconds(self) -> float:
        """What no schedule can beat: the larger of computing and copying, each alone."""
        return max(self.compute_seconds, self.copy_seconds)


def simulate_forward(blocks: Sequence[SimulatedBlock], streaming: Streaming, links: Links) -> Simulation:
    r"""
    Simulates forwards that follow each other until their time does not change any more ([Note: Simulation]).

    Args:
        blocks (`Sequence[SimulatedBlock]`): in streaming order.
        streaming (`Streaming`), links (`Links`): the engine and the machine.

    Raises:
        `ValueError`: no blocks.
    """
    if not blocks:
        raise ValueError("There are no blocks to simulate.")
    lanes = _Lanes(blocks, streaming, links)
    ends = [0.0]
    settled = 4 * (streaming.num_slots + streaming.staging_buffers)
    for lap in range(1, _MAX_LAPS + 1):
        lanes.run_lap()
        ends.append(lanes.compute_end)
        if lap * len(blocks) > settled and lap >= 3:
            last, before = ends[-1] - ends[-2], ends[-2] - ends[-3]
            if abs(last - before) <= _SAME * last:
                break
    return lanes.summarize(ends)


class _Lanes:
    """The three streams, block by block."""

    def __init__(self, blocks: Sequence[SimulatedBlock], streaming: Streaming, links: Links) -> None:
        self.blocks = blocks
        self.streaming = streaming
        self.links = links
        self.gathers = streaming.transfer == "all_gather" and streaming.ranks > 1
        self.compute_end = 0.0
        self._copy_end = self._gather_end = 0.0
        self._laps = 0
        self._spans: list[list[Span]] = []
        staying = ("whole",) if self.gathers else ("whole", "shard")
        self._fetched = [i for i, block in enumerate(blocks) if block.stays not in staying]
        self._users: list[int] = []
        "Of each fetch so far, by running number: which block in the whole row of laps it was for."
        self._ready: dict[int, float] = {}
        self._released: dict[int, float] = {}
        self._staged: list[float] = []
        "Ends of the gathers that read staging buffers."
        self._collectives: list[tuple[float, float]] = []
        self._passed = 0
        "How many of them are over for good."

    def run_lap(self) -> None:
        """Computes all blocks once."""
        self._spans.append([])
        for index, block in enumerate(self.blocks):
            number = self._laps * len(self.blocks) + index
            self._fetch_before(number)
            start = max(self.compute_end, self._ready.get(number, 0.0))
            self.compute_end = self._end_of(start, block.seconds)
            self._released[number] = self.compute_end
            self._spans[-1].append(Span("compute", index, start, self.compute_end))
        self._laps += 1

    def _fetch_before(self, number: int) -> None:
        """All fetches whose slot has been left by a block before this one."""
        while self._fetched:
            lap, place = divmod(len(self._users), len(self._fetched))
            freeing = len(self._users) - self.streaming.num_slots
            if freeing >= 0 and self._users[freeing] >= number:
                return
            slot_free = self._released[self._users[freeing]] if freeing >= 0 else 0.0
            index = self._fetched[place]
            self._users.append(lap * len(self.blocks) + index)
            self._ready[self._users[-1]] = self._fetch(index, slot_free)

    def _fetch(self, index: int, slot_free: float) -> float:
        """Copies and gathers a block; when it is ready."""
        block, shares = self.blocks[index], self.streaming.ranks if self.gathers else 1
        staged = self.gathers and self.streaming.staging_buffers > 0 and not block.stays
        arrived = 0.0
        if not block.stays:
            free = slot_free
            if staged:
                before = len(self._staged) - self.streaming.staging_buffers
                free = self._staged[before] if before >= 0 else 0.0
            start = max(self._copy_end, free)
            arrived = self._copy_end = start + block.nbytes / shares / self.links.h2d
            self._spans[-1].append(Span("copy", index, start, arrived))
        if not self.gathers:
            return arrived
        start = max(self._gather_end, arrived, slot_free)
        self._gather_end = start + self._gather_seconds(block)
        self._spans[-1].append(Span("gather", index, start, self._gather_end))
        if staged:
            self._staged.append(self._gather_end)
        if not (block.stays and self.streaming.gather == "pull"):
            self._collectives.append((start, self._gather_end))
        return self._gather_end

    def _gather_seconds(self, block: SimulatedBlock) -> float:
        others = block.nbytes * (self.streaming.ranks - 1) / self.streaming.ranks
        return others / self.links.gather + self.links.gather_latency

    def _end_of(self, start: float, seconds: float) -> float:
        """When a block that begins at `start` ends, slowed down by the gathers that run meanwhile."""
        factor = 1 + self.links.gather_slowdown
        while self._passed < len(self._collectives) and self._collectives[self._passed][1] <= start:
            self._passed += 1
        now = start
        for begin, end in itertools.islice(self._collectives, self._passed, None):
            if begin >= now + seconds:
                break
            seconds -= max(begin - now, 0.0)
            now = max(begin, now)
            if seconds * factor <= end - now:
                return now + seconds * factor
            seconds -= (end - now) / factor
            now = end
        return now + seconds

    def summarize(self, ends: Sequence[float]) -> Simulation:
        """The last lap; if laps of several lengths take turns, their mean."""
        first, begin, end = ends[1], ends[-2], ends[-1]
        seconds = end - begin
        if len(ends) > _MAX_LAPS:
            seconds = (ends[-1] - ends[len(ends) // 2]) / (len(ends) - 1 - len(ends) // 2)
        spans = [span for lap in self._spans[-3:] for span in lap if span.stop > begin and span.start < end]
        compute = sum(block.seconds for block in self.blocks)
        computing = sum(span.stop - span.start for span in self._spans[-1] if span.stream == "compute")
        shares = self.streaming.ranks if self.gathers else 1
        copied = sum(block.nbytes for block in self.blocks if not block.stays) / shares
        gathered = [self.blocks[i] for i in self._fetched] if self.gathers else []
        return Simulation(
            seconds=seconds,
            first_seconds=first,
            compute_seconds=compute,
            copy_seconds=copied / self.links.h2d,
            gather_seconds=sum(map(self._gather_seconds, gathered)),
            exposed_seconds=max(0.0, end - begin - computing),
            link_idle=max(0.0, 1 - copied / self.links.h2d / seconds) if seconds else 0.0,
            h2d_nbytes=int(copied),
            gather_nbytes=int(sum(block.nbytes for block in gathered) * (shares - 1) / shares),
            spans=tuple(
                Span(span.stream, span.block, span.start - begin, span.stop - begin)
                for span in sorted(spans, key=lambda span: (span.start, span.stream))
            ),
        )
