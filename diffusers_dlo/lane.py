# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the part of the state machine that all kinds of transfer share: which block is in which slot, holding it while it
computes, and fetching. Must not decide what is fetched next, nor touch modules: it points tensors.

[Note: Slot reuse]
    Whoever first writes to a slot in a fetch (the copy; the decoding of a coded shard, [Note: Decoding]; or the
    gather, where this rank's shard is staged or stays) waits on its stream for one event: the slot's `free`, which the
    release of the block that last used it recorded on whatever stream that block computed on. If nothing has used the
    slot since the fetch before (its block was skipped, or this rank does a pass for others), it waits for that fetch's
    `ready` instead: the gather of a slower rank may still read this rank's shard there. Computing waits for the slot's
    `ready`, recorded after the gather (after the copy or the last decoding, where there is none). A staging buffer is
    written to once the slot that was last gathered from it is `ready`. The host waits for none of them; where copies
    go through page-locked buffers, it waits for these ([Note: Pinned ring]). No stream waits for what its own order
    ensures: the one that records `ready` has no need to wait for that, computing not for a slot that it has used on
    the same stream, and gathers only once for a shard that stays. On some devices a wait costs more than a gather. A
    block that stays whole has a slot of its own, which is fetched into once.

    Fetches go by running number, and one is issued only when the *next different* block has been acquired: by then the
    release before it is in stream order, and a block that is called twice in a row costs nothing. Where blocks are
    copied whole through page-locked buffers, it is issued when that block has been released ([Note: Pinned ring]). A
    slot is held, not a block, and a held slot is never taken. What a slot holds is read off its stamp, so an
    exception, a skipped block or an odd count cannot make a stale slot look right.

    When a forward is complete, no slot is held, and the next block, or this rank's shard of it, is copied, so that the
    link is busy until the next forward (`_fetch_first`). A slot says what was copied ahead into it; whoever writes to
    it next waits for that copy, unless it is of the very block that is fetched then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .caller import Caller
from .device.interface import Event, Platform
from .device.resident import Allocation
from .device.ring import Ring, Slot, Stamp
from .interrupts import interrupts
from .transfers import Transfers, nothing
from .units import Component, Counters, Unit


class Lane:
    """
    The blocks that share a ring, and the rule by which they come into it. This class has what all lanes share: slots,
    holding, fetching.

    Args:
        platform (`Platform`): streams and events of the onload device.
        counters (`Counters`): what is moved is added to it.
        rank (`int`), size (`int`): this rank's shard of each block, and of how many.

    Attributes:
        transfers (`Transfers`): what it queues.
    """

    kind: str

    def __init__(self, platform: Platform, counters: Counters, rank: int = 0, size: int = 1) -> None:
        self.platform = platform
        self.counters = counters
        self.rank = rank
        self.size = size
        self.ring: Ring | None = None
        self.num_slots = 2
        self.components: dict[str, Component] = {}
        self.transfers = Transfers(platform)
        self._copy = platform.new_stream()
        self._issuing = False
        self._passed = -1
        "number of the last fetch whose block has been computed"

    # Membership

    def add(self, component: Component, num_slots: int) -> None:
        """Takes a component in; the ring grows to hold its largest block. No lap may be open."""
        self.finish()
        self.components[component.name] = component
        self.num_slots = max(self.num_slots, num_slots)
        self.transfers.fit(component.blocks)
        if self.transient:
            self._drop_ring()
        else:
            self._fit_ring()

    def admit(self, component: Component, num_slots: int) -> None:
        """As `add`, and slots are made at the next use."""
        self.components[component.name] = component
        self.num_slots = max(self.num_slots, num_slots)
        self.transfers.fit(component.blocks)
        self._drop_ring()

    def remove(self, component: Component, shrink: bool = True) -> None:
        """
        Lets a component go, and the ring with the last one. The ring is made anew for those that stay, unless `shrink`
        is False: then only what it holds of this component is forgotten. Tolerates one that never came in.
        """
        if self.components.pop(component.name, None) is None:
            return
        self._let_go(component.blocks)
        self.give_back(component)
        for block in component.blocks:
            block.views = []
        if shrink or not self.components:
            self._drop_ring()
            if self.components and not self.transient:
                self._fit_ring()
        elif self.ring is not None:
            self.ring.forget(component.name)

    def keep(self, component: Component, allocation: Allocation) -> None:
        """Has blocks and shards of a component stay, from their next fetch on."""
        for index, home in allocation.homes.items():
            component.blocks[index].home = home
        for index, shard in allocation.shards.items():
            component.blocks[index].shard = shard
        for index in allocation.leaves:
            component.leaves[index].stays = True
        component.staging_nbytes = allocation.staging_nbytes

    def give_back(self, component: Component) -> None:
        """Nothing of a component stays any more. Its blocks that compute now keep their memory until they have."""
        if component.resident_nbytes:
            self.platform.synchronize()
        for block in component.blocks:
            block.home = block.shard = None
        for leaf in component.leaves:
            leaf.leave()
        component.staging_nbytes = 0

    @property
    def transient(self) -> bool:
        """Whether the ring exists only while a component runs."""
        return all(component.plan.transient for component in self.components.values())

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks have to do the same passes, whatever their models leave out."""
        return False

    @property
    def device_nbytes(self) -> int:
        """Device bytes of the slots that exist now, and of what blocks are decoded from."""
        return (self.ring.nbytes if self.ring is not None else 0) + self.transfers.decoder_nbytes

    @property
    def pinned_nbytes(self) -> int:
        """Host bytes of the page-locked buffers that copies go through."""
        return self.transfers.pinned_nbytes

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of what stays, and of what is staged for the slots."""
        return sum(component.resident_nbytes for component in self.components.values())

    def _fit_ring(self) -> None:
        blocks = [block for component in self.components.values() for block in component.blocks]
        slot_nbytes = max(block.layout.padded_nbytes(self.size) for block in blocks)
        if self.ring is None or self.ring.slot_nbytes < slot_nbytes or len(self.ring.slots) < self.num_slots:
            self._drop_ring()
            self.ring = Ring(self.platform, self.num_slots, slot_nbytes, self._input_nbytes(slot_nbytes))
            self._passed = -1
            for block in blocks:
                block.views = []
        for block in blocks:
            if not block.views:
                block.views = self.ring.views(block.layout, block.extents, self.size, self.rank)

    def _input_nbytes(self, slot_nbytes: int) -> int:
        """Device bytes that each slot needs beside it."""
        return 0

    def _drop_ring(self) -> None:
        if self.ring is not None:
            slots = {id(slot) for slot in self.ring.slots}
            units = (unit for component in self.components.values() for unit in component.blocks)
            self._let_go(unit for unit in units if id(unit.slot) in slots)
        for component in self.components.values():
            for block in component.blocks:
                block.views = []
        if self.ring is not None:
            self.ring.close()
            self.ring = None
        if not self.components:
            self.transfers.drop()

    # What hooks call

    def driving(self) -> AbstractContextManager[Any]:
        """The context of all calls below: nothing takes the lane from this thread, or interrupts it, in between."""
        return interrupts

    def enter(self, component: Component) -> None:
        """A forward of the component begins."""
        self._let_go(component.blocks)
        component.begin_forward()
        if self.ring is None:
            self._fit_ring()

    def acquire(self, block: Unit, caller: Caller | None = None) -> None:
        """
        Makes a block's tensors readable on the current stream, and fetches ahead, unless that is done late. `caller`
        is the call that needs it.
        """
        if block.slot is not None:
            block.holds += 1
            return
        if self.ring is None:
            self._fit_ring()
        component = self.components[block.component]
        slot = self._reach(component, block)
        slot.holds += 1
        block.slot, block.holds = slot, 1
        try:
            self._settle(slot)
            if not self._fetches_late(block):
                self._fetch_ahead(component, block)
            stream = self.platform.current_stream
            if not slot.used or slot.stream != stream:
                self.transfers.wait(block, slot.fence)
            slot.used, slot.stream = True, stream
            self._confirm()
            block.point(block.views_in(slot).tensors)
        except BaseException:
            self._let_go([block])
            raise
        component.trace.setdefault(block.index)

    def release(self, block: Unit) -> None:
        """The block has been computed."""
        block.holds -= 1
        if block.holds == 0:
            self._let_go([block])
            if self._fetches_late(block):
                self._fetch_ahead(self.components[block.component], block)

    def leave(self, component: Component, complete: bool) -> None:
        """A forward of the component has ended, or raised."""
        self._let_go(component.blocks)
        if complete:
            component.propose()
            self.counters.skipped_blocks += component.end_forward()
        if self.transient:
            self._drop_ring()
            return
        if complete:
            self._fetch_first(component)
        self.finish()

    def let_go_all(self) -> None:
        """No forward is open: whatever an interrupted one left held is let go."""
        for component in list(self.components.values()):
            self._let_go(component.blocks)

    def finish(self) -> None:
        """Completes the open lap, if there is one."""

    def _let_go(self, blocks: Iterable[Unit]) -> None:
        for block in blocks:
            if block.slot is not None:
                block.unpoint()
                if block.slot.used:
                    self._record_use(block.slot)
                block.slot.holds -= 1
                if block.slot.stamp is not None:
                    self._passed = max(self._passed, block.slot.stamp.seq)
                block.slot, block.holds = None, 0

    def _record_use(self, slot: Slot) -> None:
        if slot.stream == self.platform.current_stream:
            self.platform.compute_record(slot.free)
        else:  # a forward that was interrupted: whoever lets go has not computed in the slot, nor waited for it
            self.platform.submit(slot.stream, nothing, record=slot.free)

    # Fetching

    def _reach(self, component: Component, block: Unit) -> Slot:
        """The slot that holds `block`, once it has been fetched."""
        raise NotImplementedError

    def _fetch_ahead(self, component: Component, block: Unit) -> None:
        """Fetches what comes after `block` into the slots that are free for it."""
        raise NotImplementedError

    def _fetches_late(self, block: Unit) -> bool:
        """Whether what comes after a block is fetched when that is released, since fetching keeps the host busy."""
        return False

    def _fetch_first(self, component: Component) -> None:
        """A forward is complete and no slot is in use: begins with what the next one needs first."""

    def _confirm(self) -> None:
        """Raises if what a slot holds is not to be trusted any more, now that it is going to be used."""

    def _settle(self, slot: Slot) -> None:
        """On devices without streams: waits until what a slot is to hold is there."""

    def _fetch(self, block: Unit) -> Slot:
        """
        Brings a block into the next slot: this rank's shard over its link, then the others' ([Note: Slot reuse]).
        """
        assert self.ring is not None
        if self._issuing:
            self._recover(block)
        home = block.home
        slot = self.ring.next_slot if home is None else home.slot
        self._settle(slot)
        self._issuing = True
        if slot.holds:
            self._issuing = False
            held = ", ".join(sorted(str(unit) for c in self.components.values() for unit in c.blocks if unit.held))
            raise RuntimeError(
                f"rank {self.rank}: {block} needs a slot while {held} compute, one inside the other. Raise "
                f"'num_slots' to {len(self.ring.slots) + 1}."
            )
        fence = slot.fence
        if home is None:
            self.ring.take(block.component, block.index)
        else:
            slot.stamp, slot.used = Stamp(block.component, block.index, -1), False
        self._transfer(slot, block, fence)
        if home is not None:
            home.filled = True
        self._issuing = False
        return slot

    def _transfer(self, slot: Slot, block: Unit, fence: Event) -> None:
        """Queues all that brings a block into a slot, once `fence` has passed."""
        views = block.views_in(slot)
        self.transfers.copy(block, self._copy, views.copies, slot.fences(fence), slot.ready, views.realigned)
        self.counters.count_h2d(views.copies)

    def _recover(self, block: Unit) -> None:
        """A fetch was interrupted in the middle. Alone, forget what the slots hold and go on."""
        assert self.ring is not None
        self.platform.synchronize()
        self.ring.forget()
        self._issuing = False

    def read(self, block: Unit) -> torch.Tensor:
        """A block's whole image on the CPU, `(nbytes,)` of `uint8`, by way of a slot."""
        if self.ring is None:
            self._fit_ring()
        assert self.ring is not None
        slot = block.home.slot if block.home is not None and block.home.filled else self._fetch(block)
        self._settle(slot)
        slot.used, slot.stream = True, self.platform.current_stream
        self.platform.compute_wait(slot.ready)
        image = block.views_in(slot).image[: block.layout.nbytes].to("cpu", copy=True)
        self._record_use(slot)
        return image
