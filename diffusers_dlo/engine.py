# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what streams in this process, whatever the number of pipelines: one lane for each kind of transfer, the leaves,
and which forwards are open, by one thread at a time. Must not touch modules: hooks call it.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from .device.platform import Platform
from .distributed.group import OffloadGroup
from .gather_lane import GatherLane
from .host.store import tensor_view
from .lane import Lane
from .leaves import Leaves
from .local_lane import LocalLane
from .units import Component, Counters, Unit


class Engine:
    """Everything that streams in this process: a lane for each kind of transfer, and leaves on demand."""

    def __init__(self, platform: Platform, group: OffloadGroup) -> None:
        self.platform = platform
        self.group = group
        self.counters = Counters()
        self.lanes: dict[str, Lane] = {}
        self._leaves = Leaves(platform, self.counters)
        self._components: dict[str, Component] = {}
        self._open: list[tuple[Component, FrameType | None]] = []
        self._thread: int | None = None
        self._discarded: list[Component] = []

    # Membership

    def new_name(self, name: str) -> str:
        """A component name that no other pipeline of this process uses, the same on all ranks."""
        number, free = 1, name
        while free in self._components:
            number += 1
            free = f"{name}#{number}"
        return free

    def attach(self, component: Component, num_slots: int) -> None:
        """Takes a component in; allocates its slots."""
        self._bury()
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
        self._leaves.let_go(component.leaves)
        if self._components.pop(component.name, None) is not None:
            self._close(component)

    def discard(self, component: Component) -> None:
        """
        Lets go of a component whose module was collected, and of its store with the last of its components. A
        collector calls this at any point and from any thread, so what may not happen now waits for the next call of
        the engine.
        """
        self._discarded.append(component)
        if not self._open and self._thread is None and threading.current_thread() is threading.main_thread():
            self._bury()

    def _bury(self) -> None:
        while self._discarded:
            component = self._discarded.pop()
            # Ranks collect garbage at different times, so what they share stays as it is.
            self.detach(component, shrink=False)
            store = component.store
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

    # What hooks call

    def enter(self, component: Component) -> None:
        """
        A forward of the component begins. Forwards that a KeyboardInterrupt ended, after which torch runs no hooks,
        are closed first: those whose call is no longer on this thread's stack.
        """
        self._claim_thread(component.name)
        self._close_interrupted()
        self._open.append((component, _calling_frame()))
        try:
            self._lane_of(component).enter(component)
        except BaseException:
            self._close(component)
            raise

    def _close_interrupted(self) -> None:
        """Closes forwards whose call has ended without its hooks, and lets go of what they held."""
        while self._open and not _on_stack(self._open[-1][1]):
            self._open.pop()
        if not self._open:
            self._bury()
            for lane in self.lanes.values():
                lane.let_go_all()
            for other in self._components.values():
                self._leaves.let_go(other.leaves)

    def leave(self, component: Component, complete: bool) -> None:
        """A forward of the component has ended; `complete` is False where it raised."""
        try:
            self._lane_of(component).leave(component, complete)
        finally:
            self._close(component)

    def acquire(self, unit: Unit) -> None:
        """Makes a unit's tensors readable on the current stream."""
        if self._thread is not None:
            self._claim_thread(unit.component)
        if unit.layout.is_leaf or (not self._open and self._components[unit.component].plan.transfer == "local"):
            unit.store.check()  # where no pass and no forward does
        if unit.layout.is_leaf:
            self._leaves.acquire(unit)
        else:
            self._lane_of(self._components[unit.component]).acquire(unit)

    def own_output(self, unit: Unit, output: Any) -> Any:
        """
        None if the output of a call has memory of its own; else the output with copies in place of what lies in a slot
        (a block may return a weight, or a view of one).
        """
        memory = unit.memory
        if memory is None or not any(_lies_in(leaf, memory) for leaf in tree_leaves(output)):
            return None
        return tree_map(lambda leaf: leaf.clone() if _lies_in(leaf, memory) else leaf, output)

    def release(self, unit: Unit) -> None:
        """Gives a unit's memory free again. A call that was refused for its thread releases nothing."""
        if not unit.held or self._thread not in (None, threading.get_ident()):
            return
        if unit.layout.is_leaf:
            self._leaves.release(unit)
        else:
            self._lane_of(self._components[unit.component]).release(unit)

    def read(self, unit: Unit) -> list[torch.Tensor]:
        """
        The values of a unit's tensors on the CPU, for the caller to keep. A collective where the store has only
        shards.

        Raises:
            `RuntimeError`: they are not to be had any more.
        """
        unit.store.check_readable(unit.key)
        if unit.store.is_whole(unit.key):
            return [unit.store.private_view(unit.key, index) for index in range(len(unit.tensors))]  # type: ignore
        image = self._lane_of(self._components[unit.component]).read(unit)
        return [tensor_view(image, tensor) for tensor in unit.layout.tensors]

    def find(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """The unit that `tensor` streams with, and its index there; None for one that stays on the device."""
        for component in self._components.values():
            for unit in component.units:
                for index, managed in enumerate(unit.tensors):
                    if managed.born is tensor:
                        return unit, index
        return None

    def join(self) -> None:
        """See `GatherLane.join`."""
        self._close_interrupted()
        if not self._open:
            self._thread = None
        self._bury()
        lane = self.lanes.get("all_gather")
        if isinstance(lane, GatherLane):
            lane.join()

    def _lane_of(self, component: Component) -> Lane:
        return self.lanes[component.plan.transfer]

    def _close(self, component: Component) -> None:
        """Takes a forward off the open ones, with whatever was open inside it."""
        for index, (entered, _) in enumerate(self._open):
            if entered is component:
                del self._open[index:]
                break
        if not self._open:
            self._thread = None
            self._bury()

    def _claim_thread(self, component: str) -> None:
        here = threading.get_ident()
        if self._thread not in (None, here) and any(t.ident == self._thread for t in threading.enumerate()):
            raise RuntimeError(
                f"rank {self.group.rank}: '{component}' is called from a second thread while another one computes. "
                "Only one forward may run at a time in a process: call it from one thread, or put a lock around it."
            )
        self._thread = here


def _lies_in(value: object, memory: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory.untyped_storage()._cdata


_CALL_IMPL = nn.Module._call_impl.__code__


def _calling_frame() -> FrameType | None:
    """The frame of the module call whose hook is running; None where it is not to be seen (a compiled one)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL_IMPL:
        frame = frame.f_back
    return frame


def _on_stack(wanted: FrameType | None) -> bool:
    """Whether a frame is still running in this thread, by identity."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None


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


def find_streamed(tensor: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit of this process that `tensor` streams with, and its index there; None where it does not stream."""
    return None if _engine is None else _engine.find(tensor)
