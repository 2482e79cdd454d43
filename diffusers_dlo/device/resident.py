# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns device memory beside the slots: shards and blocks that stay, and the staging buffers that copies run ahead in
([Note: Staging]). Must not decide what stays, nor when anything is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..block_layout import BlockLayout
from ..host.store import Extent
from .interface import Event, Platform
from .ring import BlockViews, Copies, Slot, copy_pairs, make_views, new_slot


class Home:
    """
    The memory of a block that stays whole: a slot of its own, `filled` once its fetch has been queued.

    Attributes:
        slot (`Slot`): never part of a ring.
        views (`BlockViews`): the block in it.
    """

    def __init__(
        self, platform: Platform, layout: BlockLayout, extents: Sequence[Extent], shards: int, rank: int
    ) -> None:
        self.slot = new_slot(platform, -1, layout.padded_nbytes(shards))
        self.views: BlockViews = make_views(self.slot.buffer, layout, extents, shards, rank)
        self.filled = False

    @property
    def nbytes(self) -> int:
        """Its device bytes."""
        return self.slot.buffer.numel()


@dataclass(eq=False)
class ShardBuffer:
    """
    Device memory for one shard: `arrived` follows the copy into it. `reader` is the slot whose gather read it last, by
    the ring's fetch number `reader_seq`. `awaited` says whether gathers come behind `arrived` by now. `peers` are the
    same shard's places on all ranks, where they can be read.
    """

    memory: torch.Tensor
    arrived: Event
    copies: Copies = ()
    filled: bool = False
    reader: Slot | None = None
    reader_seq: int = -1
    awaited: bool = False
    peers: Sequence[torch.Tensor] = ()

    @property
    def is_pulled(self) -> bool:
        """Whether blocks are put together from all ranks' shards where they are, without a gather."""
        return self.filled and bool(self.peers)


def new_shard(
    platform: Platform, nbytes: int, extents: Sequence[Extent], peers: Sequence[torch.Tensor] = (), rank: int = 0
) -> ShardBuffer:
    """
    Memory of `nbytes` for a shard that stays, which comes from `extents`: this rank's own place among its `peers`, if
    there are any.
    """
    memory = peers[rank] if peers else platform.empty(nbytes)
    shard = ShardBuffer(memory, platform.new_event(), copy_pairs(memory, extents), peers=peers)
    platform.compute_record(shard.arrived)  # the current stream may still use its memory
    return shard


class StagingBuffer(ShardBuffer):
    """A shard buffer that holds one block's shard after the other: `holds` says whose, until it has been gathered."""

    holds: tuple[str, int] | None = None


@dataclass
class Allocation:
    """
    Memory for what is to stay of one component, by block; the size of the staging buffers it needs, and these buffers
    where those that there are do not do.
    """

    staging_nbytes: int = 0
    homes: dict[int, Home] = field(default_factory=dict)
    shards: dict[int, ShardBuffer] = field(default_factory=dict)
    leaves: frozenset[int] = frozenset()
    "those that stay once they have been fetched, which takes their memory"
    staging: Staging | None = None


class Staging:
    """
    A ring of staging buffers, used by running number.

    Args:
        count (`int`), nbytes (`int`): how many, of how many bytes.
    """

    def __init__(self, platform: Platform, count: int, nbytes: int) -> None:
        self.buffer_nbytes = nbytes
        self.buffers = [StagingBuffer(platform.empty(nbytes), platform.new_event()) for _ in range(count)]
        self._seq = 0
        for buffer in self.buffers:
            platform.compute_record(buffer.arrived)  # the current stream may still use its memory

    @property
    def nbytes(self) -> int:
        """Device bytes of all buffers."""
        return len(self.buffers) * self.buffer_nbytes

    @property
    def next_buffer(self) -> StagingBuffer:
        """The one that the next copy goes to."""
        return self.buffers[self._seq % len(self.buffers)]

    def find(self, component: str, block: int) -> StagingBuffer | None:
        """The buffer that holds a block's shard which has not been gathered since."""
        return next((buffer for buffer in self.buffers if buffer.holds == (component, block)), None)

    def take(self, component: str, block: int) -> StagingBuffer:
        """The next buffer, for a block's shard; what it held is gone."""
        buffer = self.next_buffer
        buffer.holds = (component, block)
        self._seq += 1
        return buffer

    def forget(self, component: str | None = None) -> None:
        """What the buffers hold of one component, or of all, is not to be used any more."""
        for buffer in self.buffers:
            if buffer.holds is not None and component in (None, buffer.holds[0]):
                buffer.holds = None
