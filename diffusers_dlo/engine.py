# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what streams in this process, whatever the number of pipelines: one lane for each kind of transfer, the leaves,
and which forwards are open, by one thread at a time. Must not touch modules: hooks call it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .caller import Caller, find_caller, is_inside_package
from .config import DistributedLayerwiseOffloadConfig
from .device.interface import Platform
from .distributed.control import GroupEnded, GroupLost, RankLost, logger
from .distributed.group import OffloadGroup
from .gather_lane import GatherLane
from .host.store import tensor_view
from .lane_set import LaneSet
from .leaves import Leaves
from .timing import Timing
from .units import Component, Counters, Unit


class Engine:
    """
    Everything that streams in this process: a lane for each kind of transfer, and leaves on demand.

    Attributes:
        timing (`Timing`, *optional*): what is told when things begin and end, while somebody asks (`timed`).
    """

    def __init__(self, platform: Platform, group: OffloadGroup) -> None:
        self.platform = platform
        self.group = group
        self.counters = Counters()
        self.lanes = LaneSet(platform, self.counters, group, self._forget, self._close_store, self.leave_group)
        self._leaves = Leaves(platform, self.counters)
        self._components: dict[str, Component] = {}
        self._open: list[tuple[Component, Caller | None]] = []
        self._thread: int | None = None
        self._discarded: list[Component] = []
        self.timing: Timing | None = None
        self._timers = 0

    # Membership

    def new_name(self, name: str) -> str:
        """A component name that no other pipeline of this process uses, the same on all ranks."""
        number, free = 1, name
        while free in self._components:
            number += 1
            free = f"{name}#{number}"
        return free

    def attach(self, component: Component, config: DistributedLayerwiseOffloadConfig) -> None:
        """Takes a component in; allocates its slots."""
        self._bury()
        self._components[component.name] = component
        self._leaves.add(component.leaves)
        self.lanes.join(component, config)

    def detach(self, component: Component, shrink: bool = True) -> None:
        """Lets a component go, and its slots with the last one; see `Lane.remove`."""
        self.lanes.leave(component, shrink)
        self._leaves.drop(component.leaves)
        if self._components.pop(component.name, None) is not None:
            self._close(component)

    def discard(self, component: Component) -> None:
        """
        Lets go of a component whose module was collected, and of its store with the last of its components. A
        collector calls this at any point and from any thread, so what may not happen now waits for the next call of
        the engine.
        """
        self._discarded.append(component)
        if threading.current_thread() is not threading.main_thread():
            return
        if self._open and not is_inside_package() and self.lanes.find("all_gather") is None:
            self._close_interrupted()
            self._thread = self._thread if self._open else None
        if not self._open and self._thread is None:
            self._bury()

    def _bury(self) -> None:
        while self._discarded:
            component = self._discarded.pop()
            self._leaves.drop(component.leaves)
            lane = self.lanes.find(component.lane)
            if isinstance(lane, GatherLane) and component.name in lane.components:
                lane.abandon(component)  # ranks collect garbage at different times
            else:
                self.detach(component, shrink=False)
                self._close_store(component)

    def _forget(self, component: Component) -> None:
        """No rank needs a component any more. Called by the service thread too: it must not wait, nor iterate."""
        self._components.pop(component.name, None)
        self.lanes.drop_empty(component.lane)

    def _close_store(self, component: Component) -> None:
        """Closes the store of a component, unless another one's weights are in it too."""
        store = component.store
        if all(unit.store is not store for other in list(self._components.values()) for unit in other.units):
            self.platform.synchronize()  # copies ahead may still read it
            store.close()

    @property
    def names(self) -> list[str]:
        """The components that stream now."""
        return sorted(self._components)

    @property
    def idle(self) -> bool:
        """Whether nothing is attached."""
        return not self._components

    @contextmanager
    def timed(self) -> Iterator[Timing]:
        """Times all passes in it. Where it is entered twice at once, both get the same."""
        timing = self.timing = self.timing if self.timing is not None else Timing(self.platform)
        self._timers += 1
        self.lanes.time(timing)
        try:
            yield timing
        finally:
            self._timers -= 1
            if self._timers == 0:
                self.timing = None
                self.lanes.time(None)

    @property
    def host_nbytes(self) -> int:
        """Host bytes of the page-locked buffers that copies go through ([Note: Pinned ring])."""
        return self.lanes.pinned_nbytes + self._leaves.pinned_nbytes

    # What hooks call

    def enter(self, component: Component) -> None:
        """
        A forward of the component begins. Forwards that a KeyboardInterrupt ended, after which torch runs no hooks,
        are closed first: those whose call is no longer on this thread's stack.
        """
        self._claim_thread(component.name)
        self._close_interrupted()
        self._open.append((component, find_caller(is_root=True)))
        try:
            if component.watcher is not None:
                component.watcher.begin()
            lane = self.lanes.of(component)
            with lane.driving():
                if self.timing is not None:
                    self.timing.enter(component)
                lane.enter(component)
        except BaseException:
            self._close(component)
            raise

    def _close_interrupted(self) -> None:
        """Closes forwards whose call has ended without its hooks, and lets go of what they held."""
        while self._open and not _is_running(self._open[-1][1]):
            self._open.pop()
        if not self._open:
            self._bury()
            for lane in self.lanes.every:
                with lane.driving():
                    lane.let_go_all()
            for other in list(self._components.values()):
                self._leaves.let_go(other.leaves)

    def leave(self, component: Component, complete: bool) -> None:
        """A forward of the component has ended; `complete` is False where it raised."""
        try:
            lane = self.lanes.of(component)
            with lane.driving():
                if self.timing is not None:
                    self.timing.leave(component, complete)
                lane.leave(component, complete)
            if component.watcher is not None:
                component.watcher.end(complete)
        finally:
            self._close(component)

    def offer(self, unit: Unit) -> bool:
        """A unit is called, and a step cache may leave it out: whether that needs no acquire then."""
        if unit.layout.is_leaf:
            return True
        component = self._components[unit.component]
        component.called.add(unit.index)
        return not self.lanes.of(component).in_lockstep

    def acquire(self, unit: Unit) -> None:
        """Makes a unit's tensors readable on the current stream."""
        if self._thread is not None:
            self._claim_thread(unit.component)
        if unit.layout.is_leaf or (not self._open and self._components[unit.component].lane == "local"):
            unit.store.check()  # where no pass and no forward does
        if unit.layout.is_leaf:
            self._leaves.acquire(unit)
            return
        component = self._components[unit.component]
        timing = None if unit.held else self.timing
        if timing is not None:
            timing.arrive(unit)
        try:
            lane = self.lanes.of(component)
            with lane.driving():
                lane.acquire(unit, self._open[0][1] if self._open else find_caller(is_root=False))
        except GroupLost as lost:
            self._go_on_alone(lost)
            self.lanes.of(component).acquire(unit)
        if timing is not None:
            timing.begin(unit)

    def release(self, unit: Unit) -> None:
        """Gives a unit's memory free again. A call that was refused for its thread releases nothing."""
        if not unit.held or self._thread not in (None, threading.get_ident()):
            return
        if unit.layout.is_leaf:
            self._leaves.release(unit)
            return
        if self.timing is not None and unit.holds == 1:
            self.timing.end(unit)
        lane = self.lanes.of(self._components[unit.component])
        with lane.driving():
            lane.release(unit)

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
        lane = self.lanes.of(self._components[unit.component])
        with lane.driving():
            image = lane.read(unit)
        return [tensor_view(image, tensor) for tensor in unit.layout.tensors]

    def find(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """The unit that `tensor` streams with, and its index there; None for one that stays on the device."""
        for component in self._components.values():
            for unit in component.units:
                for index, managed in enumerate(unit.tensors):
                    if managed.born is tensor:
                        return unit, index
        return None

    def join(self, pause: bool = False) -> None:
        """See `Turn.join`; if ranks are lost, this one goes on alone, where it can."""
        self._close_interrupted()
        if not self._open:
            self._thread = None
        self._bury()
        lane = self.lanes.find("all_gather")
        if isinstance(lane, GatherLane):
            try:
                with lane.driving():
                    lane.join(pause)
            except GroupLost as lost:
                self._go_on_alone(lost)

    def resume(self) -> None:
        """Ends the pause of a `join`."""
        lane = self.lanes.find("all_gather")
        if isinstance(lane, GatherLane) and lane.service is not None:
            lane.service.turn.resume()

    def leave_group(self) -> None:
        """This process is about to end, or its process groups are: serves the others until none needs it any more."""
        self._close_interrupted()
        lane = self.lanes.find("all_gather")
        if isinstance(lane, GatherLane) and lane.service is not None:
            try:
                if not lane.service.turn.failed:  # which this rank has been told, or will be
                    with lane.driving():
                        lane.join(leaving=True)
            except GroupEnded as ended:
                logger.info(f"rank {self.group.rank} leaves, and nobody needs it: {ended}")
            except RuntimeError as error:
                logger.warning(f"rank {self.group.rank} leaves without the other ranks: {error}")
            except KeyboardInterrupt:
                logger.warning(f"rank {self.group.rank} was interrupted, and leaves while others may need its shards")
            finally:
                lane.service.stop()

    def _go_on_alone(self, lost: GroupLost) -> None:
        """
        The group's passes are over. Whoever can read all weights copies them for itself from now on.

        Raises:
            `RankLost`: this rank has only shards.
        """
        lane = self.lanes.find("all_gather")
        assert isinstance(lane, GatherLane)
        components = [component for name, component in lane.components.items() if name not in lane.abandoned]
        dropped = [component for name, component in lane.components.items() if name in lane.abandoned]
        for component in components:
            if not all(component.store.is_whole(unit.key) for unit in component.units):
                raise RankLost(
                    f"rank {self.group.rank}: streaming by all_gather has stopped: {lost} The weights of "
                    f"'{component.name}' are 'pinned', a shard on each rank, so no rank can go on. Start all ranks "
                    'again; with host="packed" the others finish their work.'
                ) from lost
        logger.warning(
            f"rank {self.group.rank} goes on by itself and copies whole blocks from now on, as with "
            f'transfer="local", because the group is broken: {lost}'
        )
        self.lanes.go_on_locally(lane, components)
        for component in dropped:
            self._forget(component)
            self._close_store(component)

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


def _is_running(caller: Caller | None) -> bool:
    return caller is not None and caller.is_running()
