# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is fetched next where each rank copies whole blocks for itself. Must not talk to other ranks.

[Note: Expecting skips]
    A forward is expected to leave out what the last one of its component left out (steps that a cache skips come in
    runs), until it computes some of that: then it is expected to compute all. So a run of skipped steps fetches
    nothing ahead that it does not need, and the first full step after it waits for one block at most.
"""

from __future__ import annotations

from .device.ring import Slot
from .lane import Lane
from .units import Component, Unit


class LocalLane(Lane):
    """Each rank copies whole blocks, in the order it expects; a block that is skipped is not copied. No passes."""

    kind = "local"

    def _reach(self, component: Component, block: Unit) -> Slot:
        assert self.ring is not None
        if self._issuing:  # what a fetch that failed has stamped, it may not have brought
            self._recover(block)
        if component.proposal is not None:
            component.adopt(component.proposal)
        if block.index not in component.order:
            component.adopt(component.full_order)
        if block.settled:
            assert block.home is not None
            return block.home.slot
        found = self.ring.find(component.name, block.index) if block.home is None else None
        return found or self._fetch(block)

    def _fetch_ahead(self, component: Component, block: Unit) -> None:
        assert self.ring is not None
        if block.index in component.skipped:
            component.skipped = frozenset()
        order = component.expected_order
        position = order.index(block.index)
        free = len(self.ring.slots) - (block.home is None)
        for ahead in range(1, len(order)):
            if free == 0 or (position + ahead >= len(order) and self.transient):
                return
            expected = component.blocks[order[(position + ahead) % len(order)]]
            if expected.home is not None:
                if not expected.home.filled:
                    self._fetch(expected)
                continue
            free -= 1
            if self.ring.find(component.name, expected.index) is None:
                if self.ring.next_slot.holds:
                    return
                self._fetch(expected)

    def _fetches_late(self, block: Unit) -> bool:
        return self.transfers.needs_host(block)

    def enter(self, component: Component) -> None:
        component.store.check()
        super().enter(component)

    def leave(self, component: Component, complete: bool) -> None:
        if complete:
            self.counters.passes += 1
        super().leave(component, complete)

    def _fetch_first(self, component: Component) -> None:
        assert self.ring is not None
        try:
            component.store.check()
        except RuntimeError:
            return  # the next forward will say so
        expected = [index for index in component.expected_order if component.blocks[index].home is None]
        for index in expected[: len(self.ring.slots)]:
            if self.ring.find(component.name, index) is None:
                if self.ring.next_slot.holds:
                    return
                self._fetch(component.blocks[index])
