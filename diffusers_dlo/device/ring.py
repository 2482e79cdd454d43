# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the slots: device byte buffers that hold one block each, the stamp that says which, the events that order their
use, and the views made into them. Must not decide what is fetched, nor when.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..block_layout import BlockLayout
from ..host.store import CodedSource, Extent, tensor_view
from .interface import Event, Platform, Stream


OF_NOTHING = ("", -1)
"""What was copied ahead into a slot is of no use."""


class Copy(NamedTuple):
    """What fills a range of device memory, `target`: host memory, or what that is decoded to (`coded`)."""

    target: torch.Tensor
    source: torch.Tensor
    coded: CodedSource | None = None


Copies = tuple[Copy, ...]
"""One for each extent of a shard."""


@dataclass(frozen=True)
class Stamp:
    """What a slot holds: a block of a component, brought by the ring's fetch number `seq`."""

    component: str
    block: int
    seq: int

    def __str__(self) -> str:
        return f"block {self.block} of '{self.component}'"


@dataclass
class Slot:
    """
    One block-sized buffer. `arrived` follows the copy of a fetch, `ready` the whole of it, `free` the computing that
    last used it. `stream` has waited for `ready`, and computes. `used` says whether anything has waited for the last
    fetch since. `pending` is a collective that the host has to wait for before it reads `buffer`, and the views that
    it fills. `copied_ahead` is the block, by component and index, whose shard was copied there before its fetch;
    `arrived` then follows that copy. `input` is where this rank's shard is copied to, if that is not its place in
    `buffer`.
    """

    index: int
    buffer: torch.Tensor
    ready: Event
    arrived: Event
    free: Event
    stamp: Stamp | None = None
    holds: int = 0
    used: bool = True
    stream: Stream = None
    pending: tuple[Any, BlockViews] | None = None
    copied_ahead: tuple[str, int] | None = None
    input: torch.Tensor | None = None

    @property
    def fence(self) -> Event:
        """What the next fetch into this slot has to wait for: its last use or, if it had none, the fetch before."""
        return self.free if self.used else self.ready

    def fences(self, fence: Event) -> tuple[Event, ...]:
        """What the stream that records `ready` waits for: `fence`, unless its own order ensures that already."""
        return () if fence is self.ready else (fence,)


@dataclass(frozen=True)
class BlockViews:
    """Everything about one block in one slot, made once: a pass only uses it."""

    copies: Copies
    image: torch.Tensor
    "the padded image in the slot: the output of the gather"
    shard: torch.Tensor
    "the input of the gather: this rank's part of `image`, or of the slot's `input`"
    parts: tuple[torch.Tensor, ...]
    "all ranks' parts of `image`"
    tensors: tuple[torch.Tensor, ...]
    realigned: tuple[list[torch.Tensor], list[torch.Tensor]]
    "(targets, sources): parts of `image` that are copied inside it once it has arrived"


class Ring:
    """
    `num_slots` buffers of `slot_nbytes` bytes, used by running number: fetch `seq` goes to slot `seq % num_slots`, so
    neither odd block counts nor more slots than blocks are special. Each has `input_nbytes` beside it, where shards
    are not to be gathered from their place in it.
    """

    def __init__(self, platform: Platform, num_slots: int, slot_nbytes: int, input_nbytes: int = 0) -> None:
        self._platform = platform
        self.slot_nbytes = slot_nbytes
        self.input_nbytes = input_nbytes
        self.slots = [new_slot(platform, index, slot_nbytes, input_nbytes) for index in range(num_slots)]
        self.seq = 0
        self._where: dict[tuple[str, int], int] = {}

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots."""
        return len(self.slots) * (self.slot_nbytes + self.input_nbytes)

    def find(self, component: str, block: int) -> Slot | None:
        """The slot that holds a block, or None. Looked up by what the slot holds, never by where it ought to be."""
        index = self._where.get((component, block))
        if index is None:
            return None
        slot = self.slots[index]
        stamp = slot.stamp
        if stamp is None or (stamp.component, stamp.block) != (component, block):
            raise RuntimeError(f"slot {index} is stamped {stamp} and listed as block {block} of '{component}'")
        return slot

    @property
    def next_slot(self) -> Slot:
        """The slot that the next fetch goes to."""
        return self.slots[self.seq % len(self.slots)]

    def take(self, component: str, block: int) -> Slot:
        """Stamps the next slot for a fetch of a block; what it held is gone."""
        index = self.seq % len(self.slots)
        slot = self.slots[index]
        if slot.holds:
            raise RuntimeError(f"slot {index} would be overwritten while {slot.stamp} computes in it")
        self.vacate(slot)
        # Another slot may hold the same block (of a short lap) and even compute with it: the newest one is listed.
        slot.stamp = Stamp(component, block, self.seq)
        slot.used = False
        self._where[component, block] = index
        self.seq += 1
        return slot

    def vacate(self, slot: Slot) -> None:
        """What a slot holds is about to be overwritten in part."""
        if slot.stamp is not None and self._where.get((slot.stamp.component, slot.stamp.block)) == slot.index:
            del self._where[slot.stamp.component, slot.stamp.block]
        slot.stamp = None

    def forget(self, component: str | None = None) -> None:
        """Clears the stamps of one component, or of all: what is in those slots is not trusted any more."""
        for slot in self.slots:
            if slot.stamp is not None and component in (None, slot.stamp.component):
                self._where.pop((slot.stamp.component, slot.stamp.block), None)
                slot.stamp = None
            if slot.copied_ahead is not None and component in (None, slot.copied_ahead[0]):
                slot.copied_ahead = OF_NOTHING  # still to be waited for

    def views(self, layout: BlockLayout, extents: Sequence[Extent], shards: int, rank: int) -> list[BlockViews]:
        """The views of one block for each slot. `rank` is the shard this rank copies, of `shards`."""
        return [make_views(slot.buffer, layout, extents, shards, rank, slot.input) for slot in self.slots]

    def close(self) -> None:
        """Waits for everything that uses the slots and gives their memory back."""
        self._platform.synchronize()
        self.slots = []
        self._where.clear()


def new_slot(platform: Platform, index: int, nbytes: int, input_nbytes: int = 0) -> Slot:
    """A slot that nothing uses. Its memory may be such that the current stream has still to be done with."""
    slot = Slot(index, platform.empty(nbytes), platform.new_event(), platform.new_event(), platform.new_event())
    slot.input = platform.empty(input_nbytes) if input_nbytes else None
    platform.compute_record(slot.free)
    return slot


def make_views(
    buffer: torch.Tensor,
    layout: BlockLayout,
    extents: Sequence[Extent],
    shards: int,
    rank: int,
    beside: torch.Tensor | None = None,
) -> BlockViews:
    """
    The views of one block in a buffer that holds all of it. `rank` is the shard this rank copies, of `shards`: to
    `beside` and not into the buffer, if that is given and there are several.
    """
    shard_nbytes = layout.shard_nbytes(shards)
    base = rank * shard_nbytes if shards > 1 else 0
    with torch.inference_mode(False):
        shard = buffer[base : base + shard_nbytes] if beside is None or shards == 1 else beside[:shard_nbytes]
        image = buffer[: shard_nbytes * shards]
        return BlockViews(
            copies=copy_pairs(shard, extents),
            image=image,
            shard=shard,
            parts=image.split(shard_nbytes),
            tensors=tuple(tensor_view(buffer, tensor) for tensor in layout.tensors),
            realigned=realigned_parts(layout, buffer),
        )


def copy_pairs(shard: torch.Tensor, extents: Sequence[Extent]) -> Copies:
    """What to copy where, to have this rank's part of a block in `shard`."""
    with torch.inference_mode(False):
        return tuple(Copy(shard[e.offset : e.offset + e.nbytes], e.source, e.coded) for e in extents)


def become_right(platform: Platform, slots: Iterable[Slot], seconds: float) -> bool:
    """
    Waits until nothing computes, or is going to, with what may never arrive in one of the slots; whether that was so
    within `seconds`.
    """
    deadline, waiting = time.monotonic() + seconds, list(slots)
    while waiting := [slot for slot in waiting if not _is_right(platform, slot)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_right(platform: Platform, slot: Slot) -> bool:
    return platform.is_done(slot.ready) or (not slot.used and platform.is_done(slot.free))


def realigned_parts(layout: BlockLayout, image: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The targets and the sources of a block's realignments, as views of its image on the device."""
    return (
        [image[target : target + nbytes] for _, target, nbytes in layout.realigned],
        [image[source : source + nbytes] for source, _, nbytes in layout.realigned],
    )


def realign(parts: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    """Queues the copies of a block's realignments on the current stream; all of them in one kernel."""
    targets, sources = parts
    if targets:
        torch._foreach_copy_(targets, sources)
