# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is fetched next where each rank copies whole blocks for itself. Must not talk to other ranks.
"""

from __future__ import annotations

from .device.ring import Slot
from .lane import Lane
from .units import Component, Unit


class LocalLane(Lane):
    """Each rank copies whole blocks, in the order it expects; a block that is skipped is not copied. No passes."""

    transfer = "local"

    def _reach(self, component: Component, block: Unit) -> Slot:
        assert self.ring is not None
        if component.proposal is not None:
            component.adopt(component.proposal)
        if block.index not in component.order:
            component.adopt(component.full_order)
        return self.ring.find(component.name, block.index) or self._fetch(block)

    def _fetch_ahead(self, component: Component, block: Unit) -> None:
        assert self.ring is not None
        order = component.order
        position = order.index(block.index)
        wraps = not self.transient
        for ahead in range(1, len(self.ring.slots)):
            if position + ahead >= len(order) and not wraps:
                return
            expected = component.blocks[order[(position + ahead) % len(order)]]
            if self.ring.find(component.name, expected.index) is None:
                if self.ring.next_slot.holds:
                    return
                self._fetch(expected)

    def enter(self, component: Component) -> None:
        component.store.check()
        super().enter(component)

    def leave(self, component: Component, complete: bool) -> None:
        if complete:
            self.counters.passes += 1
        super().leave(component, complete)
