# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which component is in which lane: one lane for each kind of transfer. Must not drive lanes, nor talk to other
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from .config import DistributedLayerwiseOffloadConfig
from .device.interface import Platform
from .device.resident import Allocation, Home, new_shard
from .distributed.control import RankLost
from .distributed.group import OffloadGroup
from .distributed.process_end import before_exit
from .gather_lane import GatherLane
from .lane import Lane
from .local_lane import LocalLane
from .lone_gather import LoneGather
from .pull_lane import PullLane
from .residency import ResidentPlan
from .timing import Timing
from .units import Component, Counters


class LaneSet:
    """
    The lanes of a process.

    Args:
        platform (`Platform`), counters (`Counters`), group (`OffloadGroup`): of all lanes.
        on_dropped (`Callable[[Component], None]`), on_freed (`Callable[[Component], None]`): as for `GatherLane`.
        before_end (`Callable[[], None]`): called before the process ends, if it ever had a lane of gathers.
    """

    def __init__(
        self,
        platform: Platform,
        counters: Counters,
        group: OffloadGroup,
        on_dropped: Callable[[Component], None],
        on_freed: Callable[[Component], None],
        before_end: Callable[[], None],
    ) -> None:
        self._platform = platform
        self._counters = counters
        self._group = group
        self._on_dropped = on_dropped
        self._on_freed = on_freed
        self._before_end = before_end
        self._lanes: dict[str, Lane] = {}
        self._timing: Timing | None = None

    @property
    def every(self) -> list[Lane]:
        """All lanes that there are now."""
        return list(self._lanes.values())

    def find(self, kind: str) -> Lane | None:
        """The lane of a kind, if there is one."""
        return self._lanes.get(kind)

    def of(self, component: Component) -> Lane:
        """The lane that a component is in."""
        return self._lanes[component.lane]

    @property
    def device_slot_nbytes(self) -> int:
        """Device bytes of all slots that exist now."""
        return sum(lane.device_nbytes for lane in self.every)

    @property
    def pinned_nbytes(self) -> int:
        """Host bytes of the page-locked buffers that copies go through."""
        return sum(lane.pinned_nbytes for lane in self.every)

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of what stays, staging included."""
        return sum(lane.resident_nbytes for lane in self.every)

    def time(self, timing: Timing | None) -> None:
        """Tells `timing` from now on what is queued, in lanes that are still to be made too."""
        self._timing = timing
        for lane in self.every:
            lane.transfers.timing = timing

    # Membership

    def join(self, component: Component, config: DistributedLayerwiseOffloadConfig) -> None:
        """Takes a component into its lane; allocates its slots."""
        lane = self._lanes.get(component.lane)
        if lane is None:
            lane = self._new_lane(component.lane, config)
        elif isinstance(lane, GatherLane):
            lane.reconfigure(config)
        lane.add(component, config.slots)

    def leave(self, component: Component, shrink: bool = True) -> None:
        """Takes a component out of its lane, if it is there; see `Lane.remove`."""
        lane = self._lanes.get(component.lane)
        if lane is not None:
            lane.remove(component, shrink)
            self.drop_empty(component.lane)

    def drop_empty(self, kind: str) -> None:
        """Forgets a lane that has no components any more."""
        lane = self._lanes.get(kind)
        if lane is not None and not lane.components:
            del self._lanes[kind]

    def go_local(self, components: Sequence[Component], config: DistributedLayerwiseOffloadConfig) -> None:
        """Each rank copies these components for itself from now on. All ranks do this, while no pass can begin."""
        for component in components:
            self.leave(component)
            component.go_local()
            self.join(component, config)

    def go_pull(self, component: Component, config: DistributedLayerwiseOffloadConfig) -> None:
        """Each rank pulls a component for itself from now on. As `go_local`."""
        self.leave(component)
        component.lane = "pull"
        self.join(component, config)

    def go_on_locally(self, lane: GatherLane, components: Sequence[Component]) -> None:
        """As `go_local`, for one rank alone whose `lane` of gathers is over, also in the middle of a forward."""
        del self._lanes[lane.kind]
        lane.retire()
        for component in components:
            component.go_local()
            local = self._lanes.get(component.lane) or self._new_lane(component.lane)
            local.admit(component, lane.num_slots)  # slots are made as they are needed, which may fail

    def end_passes(self, lost: RankLost) -> None:
        """Ranks differ in what they gathered: there are no passes any more."""
        lane = self._lanes.get("all_gather")
        if isinstance(lane, GatherLane) and lane.service is not None:
            lane.service.turn.fail(lost)

    def _new_lane(self, kind: str, config: DistributedLayerwiseOffloadConfig | None = None) -> Lane:
        lane: Lane
        if kind == "all_gather":
            assert config is not None
            before_exit(self._before_end)
            lane = GatherLane(self._platform, self._counters, self._group, config, self._on_dropped, self._on_freed)
        elif kind == "pull":
            assert config is not None
            gathers = LoneGather(self._platform, self._group, config.timeout, self.end_passes)
            lane = PullLane(self._platform, self._counters, self._group, gathers)
        else:
            lane = LocalLane(self._platform, self._counters)
        lane.transfers.timing = self._timing
        self._lanes[kind] = lane
        return lane

    # What stays on the device

    def allocate(
        self, component: Component, residents: ResidentPlan, peers: Mapping[int, Sequence[torch.Tensor]] | None = None
    ) -> Allocation:
        """
        Memory for what `residents` says of a component. `peers` are the places of all ranks' shards, by block, where
        each rank can read them.
        """
        name, lane = component.plan.name, self.of(component)
        allocation = Allocation(residents.staging_nbytes, leaves=residents.leaves.get(name, frozenset()))
        for index in residents.whole.get(name, ()):
            block = component.blocks[index]
            allocation.homes[index] = Home(lane.platform, block.layout, block.extents, lane.size, lane.rank)
        for index in residents.shards.get(name, ()):
            block = component.blocks[index]
            nbytes, places = block.layout.shard_nbytes(lane.size), peers[index] if peers else ()
            allocation.shards[index] = new_shard(lane.platform, nbytes, block.extents, places, lane.rank)
        return allocation

    def add_staging(self, component: Component, allocation: Allocation) -> None:
        """Memory for the staging buffers that a component and others of its plan need, into an `allocation` of it."""
        lane = self.of(component)
        if isinstance(lane, GatherLane):
            lane.add_staging(allocation)

    def fill(self, component: Component) -> None:
        """Brings what stays to the device now, where no pass does: all ranks together."""
        lane = self.of(component)
        if isinstance(lane, PullLane):
            lane.fill(component)

    def agreeing_lane(self, component: Component) -> GatherLane | None:
        """The lane of a component if its laps, and so what stays of it, are agreed in rounds."""
        lane = self._lanes.get(component.lane)
        return lane if isinstance(lane, GatherLane) and lane.service is not None else None
