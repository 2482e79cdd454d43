# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns blocks whose shards all stay on the devices: a rank copies them into its slots from there, whenever it needs them
([Note: Pull]). Must not talk to other ranks once it is filled.
"""

from __future__ import annotations

from .device.platform import Event, Platform
from .device.ring import Slot, realign
from .distributed.gather import InPlaceGather
from .local_lane import LocalLane
from .shard_transfer import copy, pull
from .units import Component, Counters, Unit


class PullLane(LocalLane):
    """
    As where ranks copy for themselves, but from all ranks' devices.

    Args:
        gather (`InPlaceGather`): of the ranks, for what stays whole, while the offload is enabled.
    """

    kind = "pull"

    def __init__(self, platform: Platform, counters: Counters, gather: InPlaceGather) -> None:
        super().__init__(platform, counters, gather.rank, gather.size)
        self._gather = gather
        self._pulls = platform.new_stream(high_priority=True)

    def fill(self, component: Component) -> None:
        """
        Brings everything to where it stays, and waits for it. All ranks do this together, and none may read what
        another one has not brought.
        """
        for block in component.blocks:
            if block.shard is not None:
                self._copy_shard(block)
            else:
                self._settle_home(block)
        self.platform.synchronize()

    def _copy_shard(self, block: Unit) -> None:
        shard = block.shard
        assert shard is not None
        self.counters.count_h2d(shard.copies)
        self.platform.submit(self._copy, lambda: copy(shard.copies), after=(shard.arrived,), record=shard.arrived)
        shard.filled = True

    def _settle_home(self, block: Unit) -> None:
        home = block.home
        assert home is not None
        self.counters.count_h2d(home.views.copies)
        copied = home.slot.arrived
        self.platform.submit(self._copy, lambda: copy(home.views.copies), after=(home.slot.fence,), record=copied)

        def gather() -> None:
            if self.platform.waits_on_host:
                self._gather.start(home.views.image, home.views.shard).wait()
            else:
                self._gather(home.views.image, home.views.shard)
            realign(home.views.realigned)

        self.platform.submit(self._pulls, gather, after=(copied,), record=home.slot.ready)
        self.counters.count_gather(home.views)
        home.filled = True

    def _transfer(self, slot: Slot, block: Unit, fence: Event) -> None:
        assert block.shard is not None and block.shard.filled
        pull(self.transfers, self._pulls, block, slot, block.shard, self.rank, fence)
        self.counters.count_gather(block.views_in(slot))
