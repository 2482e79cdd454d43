# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns blocks whose shards all stay on the devices: a rank copies them into its slots from there, whenever it needs them
([Note: Pull]). Must not talk to other ranks once it is filled.
"""

from __future__ import annotations

from .device.interface import Event, Platform
from .device.ring import Slot
from .distributed.control import RankLost
from .distributed.group import OffloadGroup
from .local_lane import LocalLane
from .lone_gather import LoneGather
from .shard_transfer import pull
from .units import Component, Counters, Unit


class PullLane(LocalLane):
    """
    As where ranks copy for themselves, but from all ranks' devices.

    Args:
        group (`OffloadGroup`): the ranks.
        gathers (`LoneGather`): brings what stays whole, while the offload is enabled.
    """

    kind = "pull"

    def __init__(self, platform: Platform, counters: Counters, group: OffloadGroup, gathers: LoneGather) -> None:
        super().__init__(platform, counters, group.rank, group.size)
        self._gathers = gathers
        self._pulls = platform.new_stream(high_priority=True)

    def fill(self, component: Component) -> None:
        """
        Brings everything to where it stays, and waits for it. All ranks do this together, and none may read what
        another one has not brought: they agree on how it went afterwards ([Note: Lone gather]).

        Raises:
            `RankLost`: a gather failed; the group is over. Other errors: a copy failed, and no gather did.
        """
        failure: Exception | None = None
        for block in component.blocks:
            try:
                if block.shard is not None:
                    self._copy_shard(block)
                else:
                    self._settle_home(block)
            except RankLost:
                raise
            except Exception as error:
                failure = failure or error
        for block in component.blocks:
            if block.settled:
                assert block.home is not None
                self._gathers.wait(block.home.slot.ready, str(block))
        self.platform.synchronize()
        if failure is not None:
            raise failure

    def _copy_shard(self, block: Unit) -> None:
        shard = block.shard
        assert shard is not None
        self.counters.count_h2d(shard.copies)
        self.transfers.copy(block, self._copy, shard.copies, (shard.arrived,), shard.arrived)
        shard.filled = True

    def _settle_home(self, block: Unit) -> None:
        home = block.home
        assert home is not None
        failure: Exception | None = None
        copied = home.slot.arrived
        try:
            self.transfers.copy(block, self._copy, home.views.copies, (home.slot.fence,), copied)
            self.counters.count_h2d(home.views.copies)
        except Exception as error:
            failure = error
        self._gathers.queue(self._pulls, home.views, (copied,), home.slot.ready, str(block))
        self.counters.count_gather(home.views)
        home.filled = True
        if failure is not None:
            raise failure

    def _transfer(self, slot: Slot, block: Unit, fence: Event) -> None:
        assert block.shard is not None and block.shard.filled
        pull(self.transfers, self._pulls, block, slot, block.shard, self.rank, slot.fences(fence))
        self.counters.count_gather(block.views_in(slot))
