# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns very large leaves outside blocks: fetched whole when their module is called, over this rank's own link, and
dropped after. Must not touch slots.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .device.interface import Platform
from .device.ring import copy_pairs, realign, realigned_parts
from .host.store import tensor_view
from .transfers import Transfers
from .units import Counters, Unit


class Leaves:
    """
    Leaves on demand.

    Args:
        platform (`Platform`): the onload device.
        counters (`Counters`): what is moved is added to it.
    """

    def __init__(self, platform: Platform, counters: Counters) -> None:
        self._platform = platform
        self._counters = counters
        self._transfers = Transfers(platform)
        self._known: set[Unit] = set()

    @property
    def pinned_nbytes(self) -> int:
        """Host bytes of the page-locked buffers that leaves are copied through."""
        return self._transfers.pinned_nbytes

    def add(self, leaves: Iterable[Unit]) -> None:
        """Leaves that may be called from now on."""
        self._known.update(leaves)
        self._transfers.fit(self._known)

    def acquire(self, leaf: Unit) -> None:
        """Fetches a leaf, unless it is there already, on the current stream: the allocator then knows its use."""
        leaf.holds += 1  # first: what stays may be given back by another thread, but not while it is held
        if leaf.holds > 1 or not leaf.streams:
            return
        try:
            buffer = leaf.buffer
            if buffer is None:
                buffer = leaf.buffer = self._fetch(leaf)
            elif leaf.stream != self._platform.current_stream:
                self._platform.compute_wait(leaf.arrived)
            with torch.inference_mode(False):
                leaf.point([tensor_view(buffer, tensor) for tensor in leaf.layout.tensors])
        except BaseException:
            self.let_go([leaf])
            raise

    def _fetch(self, leaf: Unit) -> torch.Tensor:
        leaf.store.prepare(leaf.key)
        buffer = self._platform.empty(leaf.layout.padded_nbytes(1))
        copies = copy_pairs(buffer, leaf.extents)
        self._transfers.copy_now(leaf, copies)
        self._counters.on_demand_nbytes += sum(copy.source.numel() for copy in copies)
        realign(realigned_parts(leaf.layout, buffer))
        if leaf.arrived is None:
            leaf.arrived = self._platform.new_event()
        self._platform.compute_record(leaf.arrived)
        leaf.stream = self._platform.current_stream
        return buffer

    def release(self, leaf: Unit) -> None:
        """Drops a leaf, unless another call still uses it, or it stays."""
        leaf.holds -= 1
        if leaf.holds == 0:
            self.let_go([leaf])

    def let_go(self, leaves: Iterable[Unit]) -> None:
        """Drops leaves whoever uses them, but for what stays. Tolerates those that are not there."""
        for leaf in leaves:
            leaf.unpoint()
            leaf.holds = 0
            if not leaf.stays:
                leaf.buffer = None

    def drop(self, leaves: Iterable[Unit]) -> None:
        """As `let_go`, and nothing stays: they are not called any more."""
        leaves = list(leaves)
        self.let_go(leaves)
        for leaf in leaves:
            leaf.leave()
        self._known.difference_update(leaves)
        if not self._known:
            self._transfers.drop()
