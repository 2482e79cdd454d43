# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns driving laps on the main thread, for the hooks of gathered blocks. Must not decide when a pass begins
(`distributed/turn.py`), nor what its lap is (`laps.py`).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from .caller import Caller
from .device.ring import Slot
from .distributed.companions import companions_in_group
from .lap_lane import LapLane
from .units import Component, Unit


class GatherLane(LapLane):
    """
    Blocks that ranks gather from their shards. When a pass begins and who drives it is up to the `PassService`; alone,
    the main thread does everything.
    """

    # What hooks call, on the main thread

    def enter(self, component: Component) -> None:
        super().enter(component)
        if self._lap is not None and self._lap.component is component:
            self.finish()  # one that an interrupt ended: torch ran no hooks after it

    def acquire(self, block: Unit, caller: Caller | None = None) -> None:
        self._caller = caller
        super().acquire(block)

    def finish(self) -> None:
        if self.service is not None:
            if self.platform.waits_on_host and torch.autograd._profiler_enabled() and self.service.turn.drives_here:
                # Torch crashes where a collective that was begun in a profile ends after it, in another thread.
                for slot in self._all_slots:
                    self._settle(slot)
            self.service.turn.hand_back()
        elif self._lap is not None:
            self.finish_lap(is_ghost=False)

    def join(self, pause: bool = False, leaving: bool = False) -> None:
        """See `Turn.join`."""
        if self.service is None:
            self.finish()
            return
        if self.service.turn.drives_here:
            self._refuse_held("'join' was called")
        self.service.turn.join(pause, leaving)

    def read(self, block: Unit) -> torch.Tensor:
        self._check()
        return super().read(block)

    # Driving a lap

    def _reach(self, component: Component, block: Unit) -> Slot:
        assert self.ring is not None
        if self.service is None and self._issuing:  # what a fetch that failed has stamped, it may not have brought
            self._recover(block)
        while True:
            self._check()
            lap = self._lap
            if lap is not None and lap.component is component and (self.service is None or self.service.turn.owns_lap):
                if block.settled:
                    assert block.home is not None
                    return block.home.slot
                slot = self.ring.find(component.name, block.index)
                if slot is not None:
                    return slot
                if lap.ahead_of(block.index):
                    self._fetch_next()
                    continue
            self._refuse_held(f"{block} is needed")
            self._begin(component, block)

    def _begin(self, component: Component, block: Unit) -> None:
        """Has a pass of `component` begin, and this thread drive it."""
        asked = {
            "component": component.name,
            "full": block.index not in component.order,
            "proposal": list(component.proposal) if component.proposal is not None else None,
            "refused": component.find_change(),
            "companions": companions_in_group(component.companions, self._group.ranks),
        }
        self._has_companions = bool(asked["companions"])
        if self.service is not None:
            timing = self.transfers.timing
            with timing.waiting_for_ranks(component) if timing is not None else nullcontext():
                self.service.turn.request(asked)
        else:
            self.finish()
            if asked["refused"]:
                raise RuntimeError(f"rank {self.rank}: {asked['refused']}")
            self.grant([{"kind": "run", **asked, **self.describe_state()}])
        self.counters.passes += 1

    def _fetch_first(self, component: Component) -> None:
        lap = self._lap
        if self._shards is None or self.ring is None or lap is None or lap.component is not component or not lap.done:
            return
        if lap.expected is not None and (self.service is None or self.service.turn.drives_here):
            self._shards.copy_ahead(self.ring, lap.expected)

    def _refuse_held(self, why: str) -> None:
        """A lap that this thread has left is completed in its slots, so none may be in use."""
        held = ", ".join(sorted(str(unit) for c in self.components.values() for unit in c.blocks if unit.held))
        if held:
            raise RuntimeError(
                f"rank {self.rank}: {why} while {held} compute, one inside the other, and would take a pass of its "
                'own. Use transfer="local" for models that call each other like this.'
            )

    def _fetch_ahead(self, component: Component, block: Unit) -> None:
        """
        A slot that is not held may wait for its turn, so what is fetched into next has to have been passed: by the
        block that is acquired, where it is in a slot itself, else by the last one that was.
        """
        assert self.ring is not None and self._lap is not None and block.slot is not None
        in_ring = block.home is None or block.slot is not block.home.slot
        passed = block.slot.stamp.seq - 1 if in_ring and block.slot.stamp is not None else self._passed
        while not self._lap.done:
            takes_slot = self._lap.next_block.home is None
            if takes_slot and (self.ring.next_slot.holds or self.ring.seq - len(self.ring.slots) > passed):
                return
            self._fetch_next()
