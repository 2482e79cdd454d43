# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which shards and blocks stay on the device for a budget. Pure: imports no devices and no process groups; what it
says is the same on all ranks that pass the same in.

[Note: Staging]
    With a budget, a part of the weights stays on the device. Where ranks gather, first shards do: 1/N of a block's
    bytes each, which its gather reads in place of what the host sends. Once all shards stay, whole blocks do, which
    need no gather any more. Where a rank copies for itself, blocks stay whole. What stays is spread evenly between
    what streams, so that the host link is busy all the time.

    A copy into a slot can begin only when the slot is free, `num_slots - 1` blocks ahead of the computing. If more
    than so many blocks lie between two that stream, the link would idle; so shards are then copied into a ring of
    shard-sized *staging* buffers first, further ahead than the slots, and gathered from there. Two are enough: the
    next copy runs while the gather reads the one before, and a gather is shorter than a copy. Staging counts in the
    budget. It is a matter of each rank alone: the other ranks see the same gathers in the same order. Nothing is
    staged where gathers have to read the slots ([Note: Vendors]).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .block_layout import BlockLayout


STAGING_BUFFERS = 2
"""See [Note: Staging]."""


_MARGIN_NBYTES = 1 << 30
_MARGIN_SHARE = 0.05


def device_margin(total: int) -> int:
    """
    Device bytes of `total` that are left free where a budget is measured or planned: the allocator cannot use every
    gap.
    """
    return max(_MARGIN_NBYTES, int(_MARGIN_SHARE * total))


class Candidate(NamedTuple):
    """A block that may stay: the component it belongs to, its number there, and its layout."""

    component: str
    block: int
    layout: BlockLayout


@dataclass(frozen=True)
class ResidentPlan:
    """
    What stays on the device of each rank, by component and index of block.

    Attributes:
        shards (`Mapping[str, frozenset[int]]`): blocks of which this rank's shard stays.
        whole (`Mapping[str, frozenset[int]]`): blocks that stay whole.
        leaves (`Mapping[str, frozenset[int]]`): leaves that stay, by their index among the component's leaves.
        staging_nbytes (`int`): bytes of one staging buffer; 0 where none is needed.
        nbytes (`int`): device bytes of all of it, staging included.
    """

    shards: Mapping[str, frozenset[int]] = field(default_factory=dict)
    whole: Mapping[str, frozenset[int]] = field(default_factory=dict)
    leaves: Mapping[str, frozenset[int]] = field(default_factory=dict)
    staging_nbytes: int = 0
    nbytes: int = 0

    @property
    def count(self) -> int:
        """How many blocks stay, in part or whole."""
        return sum(map(len, (*self.shards.values(), *self.whole.values())))

    def __bool__(self) -> bool:
        return self.count > 0 or bool(self.leaves)


def plan_residents(
    candidates: Sequence[Candidate],
    shards: int,
    num_slots: int,
    budget: int,
    leaves: Sequence[Candidate] = (),
    stages: bool = True,
) -> ResidentPlan:
    """
    What stays on the device for a budget ([Note: Staging]). Leaves come first, as far as they fit, since they cost and
    save as many bytes as blocks do and computing waits for all of theirs; but not if without them all shards of
    several ranks would stay, for then nothing is copied for blocks any more.

    Args:
        candidates (`Sequence[Candidate]`): in streaming order.
        shards (`int`): in how many shards blocks cross the host link; 1 where each rank copies for itself.
        num_slots (`int`): slots of the ring.
        budget (`int`): bytes on each rank.
        leaves (`Sequence[Candidate]`): those that every forward calls; `block` is their index among leaves.
        stages (`bool`, defaults to True): whether shards may be gathered from staging buffers.
    """
    kept: dict[str, frozenset[int]] = {}
    nbytes = 0
    needed = sum(candidate.layout.shard_nbytes(shards) for candidate in candidates)
    room = budget - needed if shards > 1 and budget >= needed else budget
    for component, index, layout in leaves:
        if nbytes + layout.padded_nbytes(1) <= room:
            nbytes += layout.padded_nbytes(1)
            kept[component] = kept.get(component, frozenset()) | {index}
    plan = _plan_blocks(candidates, shards, num_slots, budget - nbytes, stages)
    return replace(plan, leaves=kept, nbytes=plan.nbytes + nbytes)


def _plan_blocks(
    candidates: Sequence[Candidate], shards: int, num_slots: int, budget: int, stages: bool
) -> ResidentPlan:
    if shards == 1:
        sizes = [candidate.layout.padded_nbytes(1) for candidate in candidates]
        chosen = _spread_within(sizes, budget)
        return ResidentPlan(whole=_by_component(candidates, chosen), nbytes=sum(sizes[i] for i in chosen))
    sizes = [candidate.layout.shard_nbytes(shards) for candidate in candidates]
    total = sum(sizes)
    if total > budget:
        return _some_shards(candidates, sizes, num_slots, budget, stages)
    extra = [(shards - 1) * nbytes for nbytes in sizes]
    whole = _spread_within(extra, budget - total)
    rest = frozenset(range(len(candidates))) - whole
    return ResidentPlan(
        _by_component(candidates, rest),
        _by_component(candidates, whole),
        nbytes=total + sum(extra[i] for i in whole),
    )


def _some_shards(
    candidates: Sequence[Candidate], sizes: list[int], num_slots: int, budget: int, stages: bool
) -> ResidentPlan:
    chosen = _spread_within(sizes, budget)
    staging = 0
    if stages and (len(sizes) - len(chosen)) * (num_slots - 1) < len(sizes):
        staging = max(sizes)
        chosen = _spread_within(sizes, budget - STAGING_BUFFERS * staging)
    if not chosen:
        return ResidentPlan()
    return ResidentPlan(
        _by_component(candidates, chosen),
        staging_nbytes=staging,
        nbytes=sum(sizes[i] for i in chosen) + STAGING_BUFFERS * staging,
    )


def _spread_within(sizes: Sequence[int], budget: int) -> frozenset[int]:
    """As many positions as a budget allows, evenly spread over all of them."""
    for count in range(len(sizes), 0, -1):
        chosen = spread(len(sizes), count)
        if sum(sizes[i] for i in chosen) <= budget:
            return chosen
    return frozenset()


def spread(total: int, count: int) -> frozenset[int]:
    """`count` of the positions 0 to `total - 1`, as evenly as they go."""
    return frozenset((2 * place + 1) * total // (2 * count) for place in range(count))


def _by_component(candidates: Sequence[Candidate], chosen: frozenset[int]) -> dict[str, frozenset[int]]:
    names = dict.fromkeys(candidates[i].component for i in sorted(chosen))
    return {name: frozenset(candidates[i].block for i in chosen if candidates[i].component == name) for name in names}
