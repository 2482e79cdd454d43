# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what streams in this process, whatever the number of pipelines: one lane for each kind of transfer, the leaves,
and which forwards are open, by one thread at a time. Must not touch modules: hooks call it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .caller import Caller, find_caller
from .config import DistributedLayerwiseOffloadConfig
from .device.platform import Platform
from .distributed.control import GroupEnded, GroupLost, RankLost, logger
from .distributed.group import OffloadGroup
from .distributed.process_end import before_exit
from .gather_lane import GatherLane
from .host.store import tensor_view
from .lane import Lane
from .leaves import Leaves
from .local_lane import LocalLane
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
        self.lanes: dict[str, Lane] = {}
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
        transfer = component.plan.transfer
        lane = self.lanes.get(transfer)
        if lane is None:
            if transfer == "all_gather":
                lane = GatherLane(self.platform, self.counters, self.group, config, self._forget, self._close_store)
                before_exit(self.leave_group)
            else:
                lane = LocalLane(self.platform, self.counters)
            lane.timing = self.timing
            self.lanes[transfer] = lane
        elif isinstance(lane, GatherLane):
            lane.reconfigure(config)
        self._components[component.name] = component
        lane.add(component, config.slots)

    def detach(self, component: Component, shrink: bool = True) -> None:
        """Lets a component go, and its slots with the last one; see `Lane.remove`."""
        lane = self.lanes.get(component.plan.transfer)
        if lane is not None:
            lane.remove(component, shrink)
            if not lane.components:
                self.lanes.pop(lane.transfer, None)
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
            self._leaves.let_go(component.leaves)
            lane = self.lanes.get(component.plan.transfer)
            if isinstance(lane, GatherLane) and component.name in lane.components:
                lane.abandon(component)  # ranks collect garbage at different times
            else:
                self.detach(component, shrink=False)
                self._close_store(component)

    def _forget(self, component: Component) -> None:
        """No rank needs a component any more. Called by the service thread too: it must not wait, nor iterate."""
        self._components.pop(component.name, None)
        lane = self.lanes.get(component.plan.transfer)
        if lane is not None and not lane.components:
            self.lanes.pop(lane.transfer, None)

    def _close_store(self, component: Component) -> None:
        """Closes the store of a component, unless another one's weights are in it too."""
        store = component.store
        if all(unit.store is not store for other in list(self._components.values()) for unit in other.units):
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

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of all blocks and shards that stay there."""
        return sum(lane.resident_nbytes for lane in self.lanes.values())

    @contextmanager
    def timed(self) -> Iterator[Timing]:
        """Times all passes in it. Where it is entered twice at once, both get the same."""
        timing = self.timing if self.timing is not None else Timing(self.platform)
        self._timers += 1
        self._set_timing(timing)
        try:
            yield timing
        finally:
            self._timers -= 1
            if self._timers == 0:
                self._set_timing(None)

    def _set_timing(self, timing: Timing | None) -> None:
        self.timing = timing
        for lane in list(self.lanes.values()):
            lane.timing = timing

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
            lane = self._lane_of(component)
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
            for lane in list(self.lanes.values()):
                with lane.driving():
                    lane.let_go_all()
            for other in list(self._components.values()):
                self._leaves.let_go(other.leaves)

    def leave(self, component: Component, complete: bool) -> None:
        """A forward of the component has ended; `complete` is False where it raised."""
        try:
            lane = self._lane_of(component)
            with lane.driving():
                if self.timing is not None:
                    self.timing.leave(component, complete)
                lane.leave(component, complete)
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
            return
        component = self._components[unit.component]
        timing = None if unit.held else self.timing
        if timing is not None:
            timing.arrive(unit)
        try:
            lane = self._lane_of(component)
            with lane.driving():
                lane.acquire(unit, self._open[0][1] if self._open else find_caller(is_root=False))
        except GroupLost as lost:
            self._go_on_alone(lost)
            self._lane_of(component).acquire(unit)
        if timing is not None:
            timing.begin(unit)

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
            return
        if self.timing is not None and unit.holds == 1:
            self.timing.end(unit)
        lane = self._lane_of(self._components[unit.component])
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
        lane = self._lane_of(self._components[unit.component])
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
        lane = self.lanes.get("all_gather")
        if isinstance(lane, GatherLane):
            try:
                with lane.driving():
                    lane.join(pause)
            except GroupLost as lost:
                self._go_on_alone(lost)

    def resume(self) -> None:
        """Ends the pause of a `join`."""
        lane = self.lanes.get("all_gather")
        if isinstance(lane, GatherLane) and lane.service is not None:
            lane.service.turn.resume()

    def leave_group(self) -> None:
        """This process is about to end, or its process groups are: serves the others until none needs it any more."""
        self._close_interrupted()
        lane = self.lanes.get("all_gather")
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
        lane = self.lanes["all_gather"]
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
        del self.lanes["all_gather"]
        lane.retire()
        for component in dropped:
            self._forget(component)
            self._close_store(component)
        local = self.lanes.setdefault("local", LocalLane(self.platform, self.counters))
        local.timing = self.timing
        for component in components:
            component.go_local()
            local.admit(component, lane.num_slots)  # slots are made as they are needed, which may fail

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


def _is_running(caller: Caller | None) -> bool:
    return caller is not None and caller.is_running()
