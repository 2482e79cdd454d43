# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the simulation of one forward: when each copy, gather and block would begin and end, by the rules of the engine.
Pure and deterministic: arithmetic on sizes and rates. Must not know of models, devices or ranks that exist.

[Note: Simulation]
    Streams work in order: copies from the host, decoding, gathers, computing. The host runs ahead of them and takes no
    time. Fetches go to slots by running number, so a fetch waits for the end of the block that was fetched `num_slots`
    fetches before it ([Note: Slot reuse]); computing waits for its block's fetch. Laps follow each other without a
    gap, as the first blocks of the next lap are fetched at the end of this one. A shard that stays needs no copy, a
    block that stays whole needs nothing and no slot; with staging, copies wait for staging buffers and not for slots
    ([Note: Staging]). A coded shard is copied to one of `CODED_BUFFERS` buffers, once the shard before the last one
    has been decoded from there, and decoded to its place, once that is free; what is not coded is copied once all
    before it is decoded. While a device decodes, computing stands still: there is one device for both.

    All of this only ever waits for what came earlier, so going through the blocks in order gives every time exactly.
    Before a block is computed, the fetches are known that may run meanwhile: all those whose slot an earlier block has
    left, and of staged shards those whose staging buffer has been read. Others begin after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .coding.coded_block import CODED_BUFFERS


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
        decode (`float`, defaults to 940e9): bytes of weights per second that a device decodes. Of two ways that were
            measured on an idle H200 (405 MB in 0.25 and in 0.43 ms), the default is the slower.
    """

    h2d: float = 55e9
    gather: float = 270e9
    gather_latency: float = 20e-6
    gather_slowdown: float = 0.0
    decode: float = 940e9

    def __post_init__(self) -> None:
        for name in ("h2d", "gather", "decode"):
            if not getattr(self, name) > 0:
                raise ValueError(f"'{name}' must be a rate in bytes per second, above 0; got {getattr(self, name)!r}.")
        for name in ("gather_latency", "gather_slowdown"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"'{name}' must not be negative, got {getattr(self, name)!r}.")


class SimulatedBlock(NamedTuple):
    """
    A block: bytes of its image, seconds that it computes, what of it stays (nothing, a `shard`, or `whole`), and the
    bytes of each coded shard that a rank copies of it, none if it is not coded.
    """

    nbytes: int
    seconds: float
    stays: str = ""
    coded: tuple[int, ...] = ()


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
    """What a stream (`copy`, `decode`, `gather` or `compute`) does for a block, in seconds since the lap began."""

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
        decode_seconds (`float`): what decoding has to do alone.
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
    decode_seconds: float = 0.0

    @property
    def limit_seconds(self) -> float:
        """What no schedule can beat: the larger of computing, with decoding, and copying, each alone."""
        return max(self.compute_seconds + self.decode_seconds, self.copy_seconds)


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


class _Busy(NamedTuple):
    """A time in which computing is slower: the part of its usual rate that is left."""

    start: float
    stop: float
    rate: float


class _Lanes:
    """The streams, block by block."""

    def __init__(self, blocks: Sequence[SimulatedBlock], streaming: Streaming, links: Links) -> None:
        self.blocks = blocks
        self.streaming = streaming
        self.links = links
        self.gathers = streaming.transfer == "all_gather" and streaming.ranks > 1
        self.shares = streaming.ranks if self.gathers else 1
        self.compute_end = 0.0
        self._copy_end = self._decode_end = self._gather_end = 0.0
        self._laps = 0
        self._spans: list[list[Span]] = []
        staying = ("whole",) if self.gathers else ("whole", "shard")
        self._fetched = [i for i, block in enumerate(blocks) if block.stays not in staying]
        self._users: list[int] = []
        "Of each fetch so far, by running number: which block in the whole row of laps it was for."
        self._arrivals: list[float] = []
        "When what the host sends of a fetch is at its place; with staging, of more fetches than have a slot."
        self._ready: dict[int, float] = {}
        self._released: dict[int, float] = {}
        self._sent = 0
        "How many fetches went to staging buffers."
        self._staged: list[float] = []
        "Ends of the gathers that read staging buffers."
        self._decoded: list[float] = []
        "Ends of the decodings, of all coded shards."
        self._busy: list[_Busy] = []

    def run_lap(self) -> None:
        """Computes all blocks once."""
        self._spans.append([])
        for index, block in enumerate(self.blocks):
            number = self._laps * len(self.blocks) + index
            self._fetch_before(number)
            start = max(self.compute_end, self._ready.get(number, 0.0))
            self.compute_end = self._end_of(start, block.seconds)
            self._released[number] = self.compute_end
            self._note("compute", index, start, self.compute_end)
        self._laps += 1

    def _note(self, stream: str, index: int, start: float, stop: float) -> float:
        self._spans[-1].append(Span(stream, index, start, stop))
        return stop

    def _fetch_before(self, number: int) -> None:
        """All fetches whose slot has been left by a block before this one, and what is staged ahead of these."""
        while self._fetched:
            fetch = len(self._users)
            lap, place = divmod(fetch, len(self._fetched))
            freeing = fetch - self.streaming.num_slots
            if freeing >= 0 and self._users[freeing] >= number:
                break
            slot_free = self._released[self._users[freeing]] if freeing >= 0 else 0.0
            if fetch == len(self._arrivals):
                self._send(slot_free)
            index = self._fetched[place]
            self._users.append(lap * len(self.blocks) + index)
            self._ready[self._users[-1]] = self._gather(index, self._arrivals[fetch], slot_free)
        while self._can_stage_ahead():
            self._send(0.0)

    def _is_staged(self, block: SimulatedBlock) -> bool:
        return self.gathers and self.streaming.staging_buffers > 0 and not block.stays

    def _can_stage_ahead(self) -> bool:
        """Whether it is known when the next fetch has its staging buffer; a lap ahead of the slots at most."""
        fetch = len(self._arrivals)
        if not self.gathers or not self._fetched or fetch - len(self._users) >= len(self._fetched):
            return False
        block = self.blocks[self._fetched[fetch % len(self._fetched)]]
        if not block.stays:
            return self._is_staged(block) and self._sent - self.streaming.staging_buffers < len(self._staged)
        return self.streaming.staging_buffers > 0

    def _send(self, slot_free: float) -> None:
        """Copies what the host has to send of the next fetch, and decodes it."""
        index = self._fetched[len(self._arrivals) % len(self._fetched)]
        block, free = self.blocks[index], slot_free
        if self._is_staged(block):
            before = self._sent - self.streaming.staging_buffers
            free = self._staged[before] if before >= 0 else 0.0
            self._sent += 1
        arrived = 0.0
        if not block.stays and not block.coded:
            arrived = self._copy(index, block.nbytes / self.shares, max(free, self._decode_end))
        elif not block.stays:
            for nbytes in block.coded:
                before = len(self._decoded) - CODED_BUFFERS
                arrived = self._copy(index, nbytes, self._decoded[before] if before >= 0 else 0.0)
                start = max(self._decode_end, arrived, free)
                arrived = self._decode_end = start + self._decode_seconds(block) / len(block.coded)
                self._note("decode", index, start, arrived)
                self._decoded.append(arrived)
                self._busy.append(_Busy(start, arrived, 0.0))
        self._arrivals.append(arrived)

    def _copy(self, index: int, nbytes: float, free: float) -> float:
        start = max(self._copy_end, free)
        self._copy_end = start + nbytes / self.links.h2d
        return self._note("copy", index, start, self._copy_end)

    def _gather(self, index: int, arrived: float, slot_free: float) -> float:
        """Gathers a block; when it is ready."""
        block = self.blocks[index]
        if not self.gathers:
            return arrived
        start = max(self._gather_end, arrived, slot_free)
        self._gather_end = self._note("gather", index, start, start + self._gather_seconds(block))
        if self._is_staged(block):
            self._staged.append(self._gather_end)
        if self.links.gather_slowdown and not (block.stays and self.streaming.gather == "pull"):
            self._busy.append(_Busy(start, self._gather_end, 1 / (1 + self.links.gather_slowdown)))
        return self._gather_end

    def _gather_seconds(self, block: SimulatedBlock) -> float:
        others = block.nbytes * (self.streaming.ranks - 1) / self.streaming.ranks
        return others / self.links.gather + self.links.gather_latency

    def _decode_seconds(self, block: SimulatedBlock) -> float:
        return block.nbytes / self.shares / self.links.decode

    def _end_of(self, start: float, seconds: float) -> float:
        """When a block that begins at `start` ends, slowed down by the gathers and decodings that run meanwhile."""
        self._busy = [busy for busy in self._busy if busy.stop > start]
        now = start
        while True:
            rate = math.prod(busy.rate for busy in self._busy if busy.start <= now < busy.stop)
            change = min((edge for busy in self._busy for edge in busy[:2] if edge > now), default=math.inf)
            if rate and seconds <= rate * (change - now):
                return now + seconds / rate
            seconds -= rate * (change - now)
            now = change

    def summarize(self, ends: Sequence[float]) -> Simulation:
        """The last lap; if laps of several lengths take turns, their mean."""
        first, begin, end = ends[1], ends[-2], ends[-1]
        seconds = end - begin
        if len(ends) > _MAX_LAPS:
            seconds = (ends[-1] - ends[len(ends) // 2]) / (len(ends) - 1 - len(ends) // 2)
        spans = [span for lap in self._spans[-3:] for span in lap if span.stop > begin and span.start < end]
        compute = sum(block.seconds for block in self.blocks)
        computing = sum(span.stop - span.start for span in self._spans[-1] if span.stream == "compute")
        sent = [block for block in self.blocks if not block.stays]
        copied = sum(sum(block.coded) if block.coded else block.nbytes / self.shares for block in sent)
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
            gather_nbytes=int(sum(block.nbytes for block in gathered) * (self.shares - 1) / self.shares),
            spans=tuple(
                Span(span.stream, span.block, span.start - begin, span.stop - begin)
                for span in sorted(spans, key=lambda span: (span.start, span.stream))
            ),
            decode_seconds=sum(self._decode_seconds(block) for block in sent if block.coded),
        )
