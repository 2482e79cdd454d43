# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the figures of timed passes: the spans of one, and the means over several. Must not know of devices or events:
it is given times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


COPY, DECODE, GATHER, COMPUTE, WAIT = "copy", "decode", "gather", "compute", "wait"
"""The kinds of spans. A wait lies before a block's computing: the time for which its transfer was exposed."""


class Span(NamedTuple):
    """
    What a device did from `begin_ms` to `end_ms`, in milliseconds after the pass began (before: negative). What is
    done in parts, which may lie apart, has a span for each, numbered from 0.
    """

    kind: str
    component: str
    block: str
    begin_ms: float
    end_ms: float
    part: int = 0

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.begin_ms


@dataclass(frozen=True)
class Timeline:
    """One pass: what was transferred and computed while it ran, and how long it took in milliseconds."""

    component: str
    pass_ms: float
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, timed: TimedPass, earlier: Iterable[Span]) -> Timeline:
        """That of a recorded pass; `earlier` are transfers that were queued before it, in its time."""
        spans = [span for span in (*earlier, *timed.spans) if span.end_ms > 0 and span.begin_ms < timed.pass_ms]
        return cls(timed.component, timed.pass_ms, tuple(sorted(spans, key=lambda span: span.begin_ms)))


@dataclass(frozen=True)
class TimedPass:
    """
    One pass as it was recorded. `spans` holds the transfers that were queued in it, which may end after it, or have
    begun before. `hook_ms` is the host's time in its `hooks` hooks, without `rank_wait_ms`, in which it waited for
    other ranks to agree on the pass.
    """

    component: str
    order: tuple[str, ...]
    "the component's blocks in streaming order"
    pass_ms: float
    spans: Sequence[Span]
    hook_ms: float
    hooks: int
    rank_wait_ms: float


@dataclass(frozen=True)
class BlockTiming:
    r"""
    Means over the last timed passes (16 at most), on the device's clock, in milliseconds; 0 for what did not happen.

    Attributes:
        name (`str`), component (`str`): the block.
        h2d_ms (`float`): one copy of what this rank brings of it from the host.
        gather_ms (`float`): one gather, waiting for slower ranks included.
        compute_ms (`float`): one call.
        exposed_ms (`float`): for how long computing had to wait before a call.
        decode_ms (`float`): one decoding of what was copied, where that was coded.
    """

    name: str
    component: str
    h2d_ms: float
    gather_ms: float
    compute_ms: float
    exposed_ms: float
    decode_ms: float = 0.0


@dataclass(frozen=True)
class PassTiming:
    r"""
    Means over the last timed passes of a component, in milliseconds.

    Attributes:
        component (`str`), passes (`int`): how many passes of it were timed.
        averaged (`int`): over how many of them the means are: the last ones, 16 at most.
        pass_ms (`float`): from the beginning of a forward to its end.
        h2d_ms (`float`), gather_ms (`float`): all copies, all gathers.
        transfer_ms (`float`): the time in which there was a copy, a decoding or a gather; where several were at once
            it counts once.
        compute_ms (`float`): all blocks.
        exposed_ms (`float`): the part of `pass_ms` in which computing waited for a block to arrive.
        hook_ms (`float`): the host's time in the hooks before and after blocks.
        rank_wait_ms (`float`): for how long this rank waited for the others to agree on the pass.
        decode_ms (`float`): all decodings of coded shards.
    """

    component: str
    passes: int
    averaged: int
    pass_ms: float
    h2d_ms: float
    gather_ms: float
    transfer_ms: float
    compute_ms: float
    exposed_ms: float
    hook_ms: float
    rank_wait_ms: float
    decode_ms: float = 0.0

    @property
    def overlap(self) -> float | None:
        """The part of the transfers that hid behind computing, 0 to 1; None where nothing was transferred."""
        return overlap_of([self])


def overlap_of(passes: Iterable[PassTiming]) -> float | None:
    """`1 - exposed / transfer` of all passes together, 0 to 1; None where nothing was transferred."""
    passes = list(passes)
    transfer = sum(timing.transfer_ms * timing.passes for timing in passes)
    exposed = sum(timing.exposed_ms * timing.passes for timing in passes)
    if transfer <= 0:
        return None
    return min(max(1 - exposed / transfer, 0.0), 1.0)


@dataclass
class _Sum:
    """Milliseconds, and of how many spans."""

    ms: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.ms / self.count if self.count else 0.0


@dataclass
class _ComponentSums:
    order: tuple[str, ...]
    passes: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    blocks: dict[tuple[str, str], _Sum] = field(default_factory=dict)


class PassMeans:
    """
    Means over passes, which are added one by one.

    Args:
        timed (`Mapping[str, int]`): how many passes of each component were timed, if more than are added.
    """

    def __init__(self, timed: Mapping[str, int] | None = None) -> None:
        self._timed = timed or {}
        self._components: dict[str, _ComponentSums] = {}
        self._hook_ms = 0.0
        self._hooks = 0

    def add(self, timed: TimedPass) -> None:
        """Adds a pass."""
        sums = self._components.setdefault(timed.component, _ComponentSums(timed.order))
        sums.passes += 1
        transfers = [span for span in timed.spans if span.kind in (COPY, DECODE, GATHER)]
        amounts = {"pass": timed.pass_ms, "hook": timed.hook_ms, "rank_wait": timed.rank_wait_ms}
        amounts["transfer"] = covered_ms(transfers)
        for span in timed.spans:
            amounts[span.kind] = amounts.get(span.kind, 0.0) + span.duration_ms
            block = sums.blocks.setdefault((span.kind, span.block), _Sum())
            block.ms += span.duration_ms
            block.count += span.part == 0
        for name, amount in amounts.items():
            sums.totals[name] = sums.totals.get(name, 0.0) + amount
        self._hook_ms += timed.hook_ms
        self._hooks += timed.hooks

    @property
    def ms_per_hook(self) -> float | None:
        """The host's time in one hook; None before there was one."""
        return self._hook_ms / self._hooks if self._hooks else None

    @property
    def passes(self) -> tuple[PassTiming, ...]:
        """The means of each component, in the order in which they first ran."""
        made = []
        for component, sums in self._components.items():
            mean = {name: amount / sums.passes for name, amount in sums.totals.items()}
            made.append(
                PassTiming(
                    component=component,
                    passes=max(self._timed.get(component, 0), sums.passes),
                    averaged=sums.passes,
                    pass_ms=mean["pass"],
                    h2d_ms=mean.get(COPY, 0.0),
                    gather_ms=mean.get(GATHER, 0.0),
                    transfer_ms=mean["transfer"],
                    compute_ms=mean.get(COMPUTE, 0.0),
                    exposed_ms=mean.get(WAIT, 0.0),
                    hook_ms=mean["hook"],
                    rank_wait_ms=mean["rank_wait"],
                    decode_ms=mean.get(DECODE, 0.0),
                )
            )
        return tuple(made)

    @property
    def blocks(self) -> tuple[BlockTiming, ...]:
        """The means of each block that was transferred or called, in streaming order."""
        made = []
        for component, sums in self._components.items():
            seen = {block for _, block in sums.blocks}
            for name in sums.order:
                if name in seen:
                    kinds = (COPY, GATHER, COMPUTE, WAIT, DECODE)
                    means = [sums.blocks.get((kind, name), _Sum()).mean for kind in kinds]
                    made.append(BlockTiming(name, component, *means))
        return tuple(made)


def covered_ms(spans: Iterable[Span]) -> float:
    """The time that lies in at least one of the spans."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin_ms):
        if span.end_ms > reached:
            total += span.end_ms - max(span.begin_ms, reached)
            reached = span.end_ms
    return total
