# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how a gathered block gets into its slot: this rank's shard from the host, in place or through staging, or from
where it stays; then the others' by the backend's all-gather, or from their devices. Must not decide which block comes
next.

[Note: Pull]
    Where all ranks can read the memory in which each keeps its shards (an arena), a block whose shards stay needs no
    collective: a rank copies them into its slot for itself, by copy engines. A shard may be read once it has arrived.
    In a pass, the first fetch of a block is still a gather, out of the arena: it ends on a rank only when all shards
    have arrived, and what this rank pulls is queued behind it. Where all shards stay, there are no passes: shards are
    brought when the offload is enabled, and the ranks agree once they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from diffusers.utils import logging

from .byte_size import format_bytes
from .device.interface import Event, Stream
from .device.resident import ShardBuffer, Staging, StagingBuffer
from .device.ring import OF_NOTHING, Copies, Ring, Slot, copy_pairs, realign
from .distributed.gather import ShardGather
from .residency import STAGING_BUFFERS
from .timeline import GATHER
from .transfers import Transfers
from .units import Component, Counters, Unit


logger = logging.get_logger(__name__)


class ShardTransfer:
    """
    Transfers of one lane.

    Args:
        transfers (`Transfers`): of the lane.
        counters (`Counters`): what is moved is added to it.
        copy (`Stream`), comm (`Stream`): where copies from the host and gathers are queued.
        gather (`ShardGather`): of the ranks.
        settle (`Callable[[Slot], None]`): waits for what a slot is to hold, on devices without streams.
    """

    def __init__(
        self,
        transfers: Transfers,
        counters: Counters,
        copy: Stream,
        comm: Stream,
        gather: ShardGather,
        settle: Callable[[Slot], None],
    ) -> None:
        self._transfers = transfers
        self._platform = transfers.platform
        self._counters = counters
        self._copy = copy
        self._comm = comm
        self._gather = gather
        self._settle = settle
        self._staging: Staging | None = None
        self._staged_copies: dict[tuple[int, str, int], Copies] = {}

    @property
    def rank(self) -> int:
        """This rank, in the order of shards."""
        return self._gather.rank

    @property
    def staging_nbytes(self) -> int:
        """Device bytes of the staging buffers."""
        return self._staging.nbytes if self._staging is not None else 0

    def fit_staging(self, nbytes: int) -> Staging | None:
        """Staging buffers of `nbytes`, for `use_staging`; None where those that are in use do."""
        return Staging(self._platform, STAGING_BUFFERS, nbytes) if nbytes > self._buffer_nbytes else None

    def use_staging(self, staging: Staging) -> None:
        """Has `staging` take the place of smaller buffers. No lap may be open."""
        if staging.buffer_nbytes > self._buffer_nbytes:
            self._replace_staging(staging)

    def trim_staging(self, components: Iterable[Component]) -> None:
        """As `use_staging`, with buffers that these components need, or none; none too where there is no room."""
        nbytes = max((component.staging_nbytes for component in components), default=0)
        if nbytes == self._buffer_nbytes:
            return
        self._replace_staging(None)
        try:
            self._staging = self.fit_staging(nbytes)
        except torch.OutOfMemoryError:  # what is not staged is copied into its slot, which no other rank sees
            logger.warning(f"No device memory for staging buffers of {format_bytes(nbytes)}: copies run less ahead.")

    @property
    def _buffer_nbytes(self) -> int:
        return self._staging.buffer_nbytes if self._staging is not None else 0

    def _replace_staging(self, staging: Staging | None) -> None:
        if self._staging is not None:
            self._platform.synchronize()  # copies and gathers may still use it
        self._staged_copies.clear()
        self._staging = staging

    def forget(self, component: str) -> None:
        """A component is let go."""
        self._staged_copies = {key: copies for key, copies in self._staged_copies.items() if key[1] != component}
        if self._staging is not None:
            self._staging.forget(component)

    def transfer(self, slot: Slot, block: Unit, fence: Event, upcoming: Iterable[Unit]) -> None:
        """
        Queues all that brings `block` into `slot` once `fence` has passed; then what can be staged of the `upcoming`
        blocks, which are those after it.
        """
        views = block.views_in(slot)
        shard = block.shard
        ahead, slot.copied_ahead = slot.copied_ahead, None
        # What was copied ahead is behind the fence, and whoever writes to the slot next comes behind that.
        fences = slot.fences(fence) if ahead is None else (slot.arrived,)
        if shard is not None and shard.is_pulled:
            self._settle_reader(shard)  # the others' shards have arrived when its gather has ended
            pull(self._transfers, self._comm, block, slot, shard, self._gather.rank, fences)
            self._counters.count_gather(views)
        elif shard is not None:
            if not shard.filled:
                self._copy_into(block, shard, shard.copies)
                shard.filled = True
            self._gather_from(block, slot, shard, fences)
        elif self._staging is not None and self._fits(block):
            buffer = self._staging.find(block.component, block.index) or self._stage(block)
            buffer.holds = None
            self._gather_from(block, slot, buffer, fences)
        else:
            if ahead != block.key_in_component:
                self._queue_copy(block, views.copies, (fence,) if ahead is None else (), slot.arrived)
            self._queue_gather(block, slot, views.shard, (slot.arrived,))
        self._stage_ahead(upcoming)

    def copy_ahead(self, ring: Ring, block: Unit) -> None:
        """
        No slot is in use: copies this rank's shard of the block that is likely to be fetched next to its slot, which
        concerns no other rank, so that the host link is busy until the next forward.
        """
        slot = ring.next_slot
        if slot.holds or slot.copied_ahead is not None or self._staging is not None:
            return
        if block.shard is not None or block.home is not None or ring.find(block.component, block.index) is not None:
            return
        if not _is_readable(block):
            return
        self._settle(slot)
        ring.vacate(slot)
        slot.copied_ahead = OF_NOTHING  # a copy that fails in the middle is not to be taken for the block
        self._queue_copy(block, block.views[slot.index].copies, (slot.fence,), slot.arrived)
        slot.copied_ahead = block.key_in_component

    # Where this rank's shard comes from

    def _stage_ahead(self, upcoming: Iterable[Unit]) -> None:
        if self._staging is None or self._staging.next_buffer.holds is not None:
            return
        for block in upcoming:
            if block.shard is not None or not self._fits(block):
                continue
            if self._staging.find(block.component, block.index) is not None:
                continue
            if not _is_readable(block):
                return
            self._stage(block)
            if self._staging.next_buffer.holds is not None:
                return

    def _fits(self, block: Unit) -> bool:
        """Whether a block is staged: one of another offload may be larger than those that staging was made for."""
        assert self._staging is not None
        return block.home is None and block.layout.shard_nbytes(self._gather.size) <= self._staging.buffer_nbytes

    def _stage(self, block: Unit) -> StagingBuffer:
        assert self._staging is not None
        buffer = self._staging.take(block.component, block.index)
        key = (self._staging.buffers.index(buffer), block.component, block.index)
        if key not in self._staged_copies:
            self._staged_copies[key] = copy_pairs(buffer.memory, block.extents)
        self._copy_into(block, buffer, self._staged_copies[key])
        return buffer

    def _copy_into(self, block: Unit, buffer: ShardBuffer, copies: Copies) -> None:
        """Queues the copy of a shard, behind the gather that read the buffer last."""
        self._settle_reader(buffer)
        reader = buffer.reader
        # A slot that was fetched into again since: its later gather is behind the one that read this buffer.
        fence = buffer.arrived if reader is None else reader.ready
        self._queue_copy(block, copies, (fence,), buffer.arrived)
        buffer.awaited = False

    def _queue_copy(self, block: Unit, copies: Copies, after: tuple[Event, ...], arrived: Event) -> None:
        self._counters.count_h2d(copies)
        self._transfers.copy(block, self._copy, copies, after, arrived)

    def _settle_reader(self, buffer: ShardBuffer) -> None:
        reader = buffer.reader
        if reader is not None and reader.stamp is not None and reader.stamp.seq == buffer.reader_seq:
            self._settle(reader)

    def _gather_from(self, block: Unit, slot: Slot, buffer: ShardBuffer, fences: tuple[Event, ...]) -> None:
        assert slot.stamp is not None
        shard = buffer.memory[: block.views_in(slot).shard.numel()]
        buffer.reader, buffer.reader_seq = slot, slot.stamp.seq
        self._queue_gather(block, slot, shard, fences if buffer.awaited else (buffer.arrived, *fences))
        buffer.awaited = True

    def _queue_gather(self, block: Unit, slot: Slot, source: torch.Tensor, after: tuple[Event, ...]) -> None:
        views = block.views_in(slot)
        shard = views.shard if self._platform.gathers_from_slots_only else source

        def work() -> None:
            if shard is not source:
                shard.copy_(source)
            if self._platform.waits_on_host:
                slot.pending = self._gather.start(views.image, shard), views
            else:
                self._gather(views.image, shard)
                realign(views.realigned)

        self._transfers.submit(GATHER, block, self._comm, work, after=after, record=slot.ready)
        self._counters.count_gather(views)


def _is_readable(block: Unit) -> bool:
    """Whether a block can be copied ahead. Where it cannot, its fetch will say why."""
    try:
        block.store.check_readable(block.key)
    except RuntimeError:
        return False
    return True


def pull(
    transfers: Transfers,
    stream: Stream,
    block: Unit,
    slot: Slot,
    shard: ShardBuffer,
    rank: int,
    after: tuple[Event, ...],
) -> None:
    """
    Queues `rank`'s copies of all ranks' shards of a block, which have arrived, into its slot ([Note: Pull]).
    """
    views, size = block.views_in(slot), len(shard.peers)
    parts = views.parts

    def work() -> None:
        for step in range(size):  # each rank begins with another one, so that no device is asked by all at once
            peer = (rank + step) % size
            parts[peer].copy_(shard.peers[peer], non_blocking=True)
        realign(views.realigned)

    transfers.submit(GATHER, block, stream, work, after=after, record=slot.ready)
