# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what streams in this process, whatever the number of pipelines: one lane for each kind of transfer, leaves that
are fetched on demand, and the rule that one thread computes at a time. Must not touch modules: hooks call it.
"""

from __future__ import annotations

import threading

import torch

from .device.platform import Platform
from .distributed.group import OffloadGroup
from .gather_lane import GatherLane
from .host.store import tensor_view
from .lane import Lane
from .local_lane import LocalLane
from .units import Component, Counters, Unit


class Engine:
    """Everything that streams in this process: a lane for each kind of transfer, and leaves on demand."""

    def __init__(self, platform: Platform, group: OffloadGroup) -> None:
        self.platform = platform
        self.group = group
        self.counters = Counters()
        self.lanes: dict[str, Lane] = {}
        self._components: dict[str, Component] = {}
        self._thread: int | None = None
        self._names = 0
        self._discarded: list[Component] = []

    def new_name(self, name: str) -> str:
        """A component name that no other pipeline of this process uses, the same on all ranks."""
        self._names += 1
        return name if self._names == 1 or name not in self._components else f"{name}#{self._names}"

    def attach(self, component: Component, num_slots: int) -> None:
        """Takes a component in; allocates its slots."""
        transfer = component.plan.transfer
        if transfer not in self.lanes:
            self.lanes[transfer] = (
                GatherLane(self.platform, self.counters, self.group)
                if transfer == "all_gather"
                else LocalLane(self.platform, self.counters)
            )
        self._components[component.name] = component
        self.lanes[transfer].add(component, num_slots)

    def detach(self, component: Component, shrink: bool = True) -> None:
        """Lets a component go, and its slots with the last one; see `Lane.remove`."""
        lane = self.lanes.get(component.plan.transfer)
        if lane is not None:
            lane.remove(component, shrink)
            if not lane.components:
                del self.lanes[lane.transfer]
        for leaf in component.leaves:
            leaf.holds = min(leaf.holds, 1)
            self._release_leaf(leaf)
        self._components.pop(component.name, None)

    def discard(self, component: Component) -> None:
        """
        Lets go of a component whose module is gone, and of its store with the last of its components: now, or once the
        forward that this interrupts has ended.
        """
        self._discarded.append(component)
        if self._thread is None:
            self._bury()

    def _bury(self) -> None:
        while self._discarded:
            component = self._discarded.pop()
            # Ranks collect garbage at different times, so what they share stays as it is.
            self.detach(component, shrink=False)
            store = component.units[0].store
            if all(unit.store is not store for other in self._components.values() for unit in other.units):
                store.close()

    @property
    def names(self) -> list[str]:
        """The components that stream now."""
        return sorted(self._components)

    @property
    def idle(self) -> bool:
        """Whether nothing is attached."""
        return not self._components

    @property
    def device_slot_nbytes(self) -> int:
        """Device bytes of all slots that exist now."""
        return sum(lane.device_nbytes for lane in self.lanes.values())

    def enter(self, component: Component) -> None:
        """A forward of the component begins."""
        self._claim_thread(component.name)
        for leaf in component.leaves:
            leaf.holds = min(leaf.holds, 1)
            self._release_leaf(leaf)
        self.lanes[component.plan.transfer].enter(component)

    def leave(self, component: Component, complete: bool) -> None:
        """A forward of the component has ended; `complete` is False where it raised."""
        try:
            self.lanes[component.plan.transfer].leave(component, complete)
        finally:
            self._thread = None
            self._bury()

    def acquire(self, unit: Unit) -> None:
        """Makes a unit's tensors readable on the current stream."""
        if self._thread is not None:
            self._claim_thread(unit.component)
        if unit.layout.is_leaf:
            self._acquire_leaf(unit)
        else:
            self._lane(unit).acquire(unit)

    def release(self, unit: Unit) -> None:
        """Gives a unit's memory free again. A call that was refused for its thread releases nothing."""
        if self._thread not in (None, threading.get_ident()):
            return
        if unit.layout.is_leaf:
            self._release_leaf(unit)
        elif unit.held:
            self._lane(unit).release(unit)

    def read(self, unit: Unit) -> torch.Tensor:
        """A unit's whole image on the CPU, for the caller to keep. A collective where the store has only shards."""
        image = unit.store.private_image(unit.key)
        return self._lane(unit).read(unit) if image is None else image

    def join(self) -> None:
        """See `GatherLane.join`."""
        lane = self.lanes.get("all_gather")
        if isinstance(lane, GatherLane):
            lane.join()

    def _lane(self, unit: Unit) -> Lane:
        return self.lanes[self._components[unit.component].plan.transfer]

    def _acquire_leaf(self, leaf: Unit) -> None:
        leaf.holds += 1
        if leaf.holds > 1:
            return
        # On the current stream: the allocator then knows when the memory may be used again.
        leaf.buffer = self.platform.empty(leaf.layout.padded_nbytes(1))
        for offset, source in leaf.extents:
            leaf.buffer[offset : offset + source.numel()].copy_(source, non_blocking=True)
            self.counters.on_demand_nbytes += source.numel()
        with torch.inference_mode(False):
            leaf.point([tensor_view(leaf.buffer, tensor) for tensor in leaf.layout.tensors])

    def _release_leaf(self, leaf: Unit) -> None:
        if leaf.holds > 1:
            leaf.holds -= 1
        elif leaf.holds == 1:
            leaf.unpoint()
            leaf.holds = 0
            leaf.buffer = None

    def _claim_thread(self, component: str) -> None:
        here = threading.get_ident()
        if self._thread not in (None, here) and any(t.ident == self._thread for t in threading.enumerate()):
            raise RuntimeError(
                f"'{component}' is called from a second thread while another one computes on rank {self.group.rank}. "
                "The slots serve one forward at a time: call it from one thread, or put a lock around it."
            )
        self._thread = here


_engine: Engine | None = None


def get_engine(platform: Platform, group: OffloadGroup) -> Engine:
    """
    The engine of this process.

    Raises:
        `ValueError`: it runs on another device, or for other ranks.
    """
    global _engine
    if _engine is None or _engine.idle:
        _engine = Engine(platform, group)
    elif _engine.platform.device != platform.device:
        raise ValueError(
            f"Other components stream to '{_engine.platform.device}' already, and '{platform.device}' was asked for; "
            "a process streams to one device. Disable the others first."
        )
    elif _engine.group is not group:
        raise ValueError("Other components share their weights among other ranks already; disable them first.")
    return _engine
