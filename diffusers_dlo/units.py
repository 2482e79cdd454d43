# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what streams, at run time: a block or leaf with its tensors (`Unit`), and a component with the order of its blocks
(`Component`). Must not fetch anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from .block_layout import BlockLayout
from .device.ring import BlockViews, Slot
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

    def since(self, start: Counters) -> Counters:
        """What was counted after `start`, a copy made then."""
        return Counters(*(getattr(self, f.name) - getattr(start, f.name) for f in fields(self)))


class Unit:
    """A block or leaf at run time: its tensors, where its bytes are, and the slot it is in while it computes."""

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
        self.slot: Slot | None = None
        self.buffer: torch.Tensor | None = None
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

    def __str__(self) -> str:
        return f"block '{self.layout.name}' of '{self.component}'"


class Component:
    """A streamed component at run time. `order` and `trace` hold indices of its blocks ([Note: Order])."""

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

    @property
    def store(self) -> HostStore:
        """Where the bytes of its units are."""
        return self.blocks[0].store

    @property
    def units(self) -> tuple[Unit, ...]:
        """Its blocks, then its leaves."""
        return self.blocks + self.leaves

    def find_change(self) -> str | None:
        """What has changed about the host's copy of its weights, None if nothing has."""
        try:
            self.store.check()
        except RuntimeError as error:
            return str(error)
        return None

    def go_local(self) -> None:
        """From now on this rank copies its blocks whole."""
        self.plan = replace(self.plan, transfer="local", transient=False)
        for block in self.blocks:
            block.store.copy_whole(block.key)

    def propose(self) -> None:
        """After a complete pass: proposes the order that was seen, once."""
        if not self.settled and self.trace:
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
