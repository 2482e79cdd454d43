# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what streams, at run time: a block or leaf with its tensors (`Unit`), and a component with the order of its blocks
(`Component`). Must not fetch anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch

from .block_layout import BlockLayout
from .device.interface import Event, Stream
from .device.resident import Home, ShardBuffer
from .device.ring import BlockViews, Copies, Slot
from .host.store import Extent, HostStore
from .managed_tensor import ManagedTensor
from .offload_plan import ComponentPlan


@dataclass
class Counters:
    """What an engine has moved so far; bytes are those of this rank."""

    passes: int = 0
    ghost_passes: int = 0
    h2d_nbytes: int = 0
    gather_nbytes: int = 0
    on_demand_nbytes: int = 0
    skipped_blocks: int = 0
    decoded_nbytes: int = 0

    def count_h2d(self, copies: Copies) -> None:
        """Copies from the host were queued."""
        self.decoded_nbytes += sum(copy.target.numel() for copy in copies if copy.coded is not None)
        self.h2d_nbytes += sum(copy.source.numel() for copy in copies)

    def count_gather(self, views: BlockViews) -> None:
        """The shards of the other ranks were."""
        self.gather_nbytes += views.image.numel() - views.shard.numel()

    def since(self, start: Counters) -> Counters:
        """What was counted after `start`, a copy made then."""
        return Counters(*(getattr(self, f.name) - getattr(start, f.name) for f in fields(self)))


class Unit:
    """
    A block or leaf at run time: its tensors, where its bytes are, and the slot it is in while it computes. `home` is
    its memory if it stays on the device whole, `shard` if this rank's shard of it does. Of a leaf, `buffer` is the
    memory it was fetched into on `stream`, `arrived` follows that, and it `stays` if it is not to be fetched anew.
    """

    def __init__(
        self,
        component: str,
        index: int,
        layout: BlockLayout,
        tensors: Sequence[ManagedTensor],
        store: HostStore,
        key: int,
    ) -> None:
        self.component = component
        self.index = index
        self.layout = layout
        self.tensors = tuple(tensors)
        self.store = store
        self.key = key
        self.views: list[BlockViews] = []
        self.home: Home | None = None
        self.shard: ShardBuffer | None = None
        self.slot: Slot | None = None
        self.buffer: torch.Tensor | None = None
        self.arrived: Event = None
        self.stream: Stream = None
        self.stays = False
        self.holds = 0
        self._streaming = list(enumerate(self.tensors))
        self._pointed: Sequence[torch.Tensor] = ()

    @property
    def held(self) -> bool:
        """Whether its tensors are pointed at its bytes."""
        return self.holds > 0

    @property
    def memory(self) -> torch.Tensor | None:
        """The device memory its tensors point at now."""
        return self.slot.buffer if self.slot is not None else self.buffer

    @property
    def key_in_component(self) -> tuple[str, int]:
        """The component it belongs to, and its index there."""
        return self.component, self.index

    @property
    def settled(self) -> bool:
        """Whether it is on the device for good, and needs no transfer."""
        return self.home is not None and self.home.filled

    def leave(self) -> None:
        """Of a leaf: it stays no more; its memory goes when no call uses it."""
        self.stays = False
        if self.holds == 0:
            self.buffer = None

    def views_in(self, slot: Slot) -> BlockViews:
        """Its views in a slot of the ring, or at home."""
        if self.home is not None and slot is self.home.slot:
            return self.home.views
        return self.views[slot.index]

    @property
    def streams(self) -> bool:
        """Whether any of its tensors does still."""
        return bool(self._streaming)

    @property
    def extents(self) -> list[Extent]:
        """The host memory this rank copies for it."""
        return self.store.extents(self.key)

    def value(self, index: int) -> torch.Tensor:
        """
        The value of one of its tensors: a view of the host store, for reading only.

        Raises:
            `RuntimeError`: no rank has the whole of it, or the file it lies in has changed.
        """
        self.store.check_readable(self.key)
        value = self.store.view(self.key, index) if self.store.is_whole(self.key) else None
        if value is None:
            raise RuntimeError(
                f"'{self.tensors[index].name}' of '{self.component}' is not whole on any one rank: its host store is "
                "'pinned', with a shard on each. Enable with host=\"packed\", or disable first."
            )
        return value

    def point(self, views: Sequence[torch.Tensor]) -> None:
        """Points its tensors at its bytes on the device."""
        for _, tensor in self._streaming:
            tensor.check_unwritten()
        self._pointed = views
        for index, tensor in self._streaming:
            tensor.point(views[index])

    def unpoint(self) -> None:
        """Takes its tensors back; those that forward wrote to stay with their new value and stream no more."""
        views, self._pointed = self._pointed, ()
        if not views:
            return
        for index, tensor in self._streaming:
            tensor.unpoint(views[index])
        if any(tensor.kept for _, tensor in self._streaming):
            self._streaming = [(index, tensor) for index, tensor in self._streaming if not tensor.kept]

    def keep(self) -> None:
        """Its tensors, which are pointed at its bytes, stay there for good and stream no more."""
        for _, tensor in self._streaming:
            tensor.kept = True
        self._streaming, self._pointed = [], ()

    def __str__(self) -> str:
        return f"block '{self.layout.name}' of '{self.component}'"


class Watcher(Protocol):
    """Who is told of the forwards of a component."""

    def begin(self) -> None:
        """One begins."""

    def end(self, complete: bool) -> None:
        """It has ended, or raised, where it is not `complete`; then what it raised is being handled."""


class Component:
    """
    A streamed component at run time. `order` and `trace` hold indices of its blocks ([Note: Order]), and so do
    `called` (of those that hooks decide about, what this forward came to) and `skipped` (what the last one left out).
    `lane` is the kind of lane it is in: its transfer, or `"pull"`. `companions` are the ranks of the world that
    compute one forward of it together, if not each computes its own ([Note: Companions]).
    """

    def __init__(self, name: str, plan: ComponentPlan, blocks: Sequence[Unit], leaves: Sequence[Unit]) -> None:
        self.name = name
        self.plan = plan
        self.blocks = tuple(blocks)
        self.leaves = tuple(leaves)
        self.full_order = tuple(range(len(self.blocks)))
        self.order = self.full_order
        self.order_digest = 0
        self.proposal: tuple[int, ...] | None = None
        self.settled = False
        self.trace: dict[int, None] = {}
        self.called: set[int] = set()
        self.skipped: frozenset[int] = frozenset()
        self._computed: set[int] = set()
        self.staging_nbytes = 0
        self.watcher: Watcher | None = None
        self.companions: tuple[int, ...] = ()
        self.lane = plan.transfer

    @property
    def streamed_order(self) -> tuple[int, ...]:
        """Its order, without blocks that stay whole, or are going to."""
        return tuple(block for block in self.order if self.blocks[block].home is None)

    @property
    def expected_order(self) -> tuple[int, ...]:
        """Its order, without what the last forward left out."""
        if not self.skipped:
            return self.order
        return tuple(block for block in self.order if block not in self.skipped)

    @property
    def residency_digest(self) -> int:
        """Of what no gather brings, as all ranks have agreed: equal on all of them."""
        homes = [(block.index, block.settled) for block in self.blocks if block.home is not None]
        pulled = [block.index for block in self.blocks if block.shard is not None and block.shard.is_pulled]
        return zlib.crc32(repr((homes, pulled)).encode())

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of its shards and blocks that stay."""
        homes = sum(block.home.nbytes for block in self.blocks if block.home is not None)
        shards = sum(block.shard.memory.numel() for block in self.blocks if block.shard is not None)
        leaves = sum(leaf.buffer.numel() for leaf in self.leaves if leaf.stays and leaf.buffer is not None)
        return homes + shards + leaves

    @property
    def store(self) -> HostStore:
        """Where the bytes of its units are."""
        return self.blocks[0].store

    @property
    def units(self) -> tuple[Unit, ...]:
        """Its blocks, then its leaves."""
        return self.blocks + self.leaves

    @property
    def stand_ins(self) -> dict[int, ManagedTensor]:
        """Which tensor of its units each stand-in in a module is for, by the stand-in's id."""
        return {id(held): tensor for unit in self.units for tensor in unit.tensors for held in tensor.held}

    def find_change(self) -> str | None:
        """What has changed about the host's copy of its weights, None if nothing has."""
        try:
            self.store.check()
        except RuntimeError as error:
            return str(error)
        return None

    def go_local(self) -> None:
        """From now on this rank copies its blocks whole."""
        self.plan, self.lane = replace(self.plan, transfer="local", transient=False), "local"
        for block in self.blocks:
            block.store.copy_whole(block.key)

    def begin_forward(self) -> None:
        """Nothing of this forward is known yet."""
        self.trace = {}
        self.called = set()

    def end_forward(self) -> int:
        """How many blocks a complete forward left out, of those that it came to or that earlier ones computed."""
        self._computed.update(self.trace)
        self.skipped = frozenset(self._computed | self.called).difference(self.trace)
        return len(self.skipped)

    def propose(self) -> None:
        """After a complete pass in which no step cache left out a block: proposes the order that was seen, once."""
        if not self.settled and self.trace and self.called.issubset(self.trace):
            self.proposal = tuple(self.trace)
            self.settled = True
            if self.proposal == self.order:
                self.proposal = None

    def adopt(self, order: tuple[int, ...]) -> None:
        """Makes `order` the one that laps follow from now on."""
        self.order = order
        self.order_digest = zlib.crc32(repr(order).encode())
        self.proposal = None
        self.settled = True
