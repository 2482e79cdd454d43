# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns laps that all ranks do together, from a round to their end: what is said and granted, fetching, which components
take part, and what becomes of them when a rank is lost. Must not decide when a pass begins (`distributed/turn.py`),
nor what its lap is (`laps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .caller import Caller
from .config import DistributedLayerwiseOffloadConfig
from .device.interface import Event, Platform
from .device.resident import Allocation
from .device.ring import Ring, Slot, become_right, realign
from .distributed.control import GroupLost, RankLost
from .distributed.group import OffloadGroup
from .distributed.pass_service import PassService
from .lane import Lane
from .laps import Lap, LapPlan
from .resident_rounds import AgreedResidents, ResidentRounds
from .shard_transfer import ShardTransfer
from .units import Component, Counters, Unit


_SETTLE_SECONDS = 5.0
"""How long after a loss gathers that all ranks had begun may take to complete."""


class LapLane(Lane):
    """
    Blocks come in shards and are gathered, in passes that all ranks of the group do together ([Note: Pass]): what the
    service thread does of it.

    Args:
        group (`OffloadGroup`): the ranks.
        options (`DistributedLayerwiseOffloadConfig`): how patient they are with each other.
        on_dropped (`Callable[[Component], None]`): told of an abandoned component that no rank needs any more.
        on_freed (`Callable[[Component], None]`): told of it again once nothing uses its store any more.
    """

    kind = "all_gather"

    def __init__(
        self,
        platform: Platform,
        counters: Counters,
        group: OffloadGroup,
        options: DistributedLayerwiseOffloadConfig,
        on_dropped: Callable[[Component], None],
        on_freed: Callable[[Component], None],
    ) -> None:
        super().__init__(platform, counters, group.rank, group.size)
        self._group = group
        self._comm = platform.new_stream(high_priority=True)
        self._lap: Lap | None = None
        self._plan = LapPlan()
        self._on_dropped = on_dropped
        self._on_freed = on_freed
        self._dropped: list[Component] = []
        self._abandoned: set[str] = set()
        self._caller: Caller | None = None
        self._has_companions = False
        self._shards: ShardTransfer | None = None
        if group.gather is not None:
            self._shards = ShardTransfer(self.transfers, counters, self._copy, self._comm, group.gather, self._settle)
        self._residents = ResidentRounds()
        self.service: PassService | None = None
        if group.passes is not None:
            self.service = PassService(group.passes, self, options, group.world.rank)
            self.transfers.wait_on_host = self._wait_on_host
            self.service.start()

    def driving(self) -> AbstractContextManager[Any]:
        return self.service.turn.driving() if self.service is not None else super().driving()

    @property
    def in_lockstep(self) -> bool:
        return self.service is not None and self.service.turn.options.uneven == "error"

    # Membership

    def add_staging(self, allocation: Allocation) -> None:
        """Memory for the staging buffers that an allocation needs."""
        if self._shards is not None:
            allocation.staging = self._shards.fit_staging(allocation.staging_nbytes)

    def keep(self, component: Component, allocation: Allocation) -> None:
        super().keep(component, allocation)
        if self._shards is not None and allocation.staging is not None:
            self._shards.use_staging(allocation.staging)

    def give_back(self, component: Component) -> None:
        super().give_back(component)
        if self._shards is not None:
            self._shards.forget(component.name)
            self._shards.trim_staging(self.components.values())

    @property
    def resident_nbytes(self) -> int:
        return super().resident_nbytes + (self._shards.staging_nbytes if self._shards is not None else 0)

    def remove(self, component: Component, shrink: bool = True) -> None:
        super().remove(component, shrink)
        self._abandoned.discard(component.name)
        self._residents.keep_only(self.components)
        if not self.components:
            self.close()

    def abandon(self, component: Component) -> None:
        """
        This rank computes a component no more. Its part of the passes that others ask for goes on until none does.
        """
        if self.service is None:
            super().remove(component, shrink=False)
            self._on_dropped(component)
            self._on_freed(component)
            return
        if self.service.turn.forked:
            return
        with self.driving():
            self._let_go(component.blocks)
            self._abandoned.add(component.name)
        if self._abandoned == set(self.components):
            self.service.turn.say_goodbye()

    def agree_on(self, components: Sequence[Component], residents: AgreedResidents) -> None:
        """What stays of these components is agreed in rounds, for as long as one of them is here."""
        self._residents.add([component.name for component in components], residents)

    def seek_round(self) -> None:
        """Has the ranks hear soon what this one says, whether or not any asks for a pass."""
        if self.service is not None:
            self.service.turn.seek_round()

    def reconfigure(self, config: DistributedLayerwiseOffloadConfig) -> None:
        """Other options from now on."""
        if self.service is not None:
            self.service.turn.options = config

    def lend_ring(self) -> Ring:
        """The ring, for other transfers while no pass can begin. All ranks forget what their slots held."""
        assert self.ring is not None and self._lap is None
        self.platform.synchronize()
        self.ring.forget()
        self._plan.forget()
        return self.ring

    def close(self) -> None:
        """Ends the service and gives the slots back. Idempotent."""
        if self.service is not None:
            self.service.stop()
        self._drop_ring()

    @property
    def abandoned(self) -> frozenset[str]:
        """Names of the components that this rank computes no more."""
        return frozenset(self._abandoned)

    def retire(self) -> None:
        """
        Passes are over. Lets all components go, but for the blocks that compute: their bytes have arrived, and stay.
        """
        if self.service is not None:
            self.service.stop()
        self._residents.keep_only(())
        for component in self.components.values():
            self.give_back(component)
            for block in component.blocks:
                block.views = []
        self.components = {}
        self._drop_ring()

    def _input_nbytes(self, slot_nbytes: int) -> int:
        gather = self._group.gather
        return 0 if gather is None or gather.in_place else slot_nbytes // gather.size

    def _drop_ring(self) -> None:
        self._lap = None
        self._plan.forget()
        super()._drop_ring()

    # Fetching

    def _fetch_next(self) -> None:
        lap = self._lap
        assert lap is not None
        block = lap.next_block
        try:
            self._fetch(block)
        except RankLost:
            raise
        except RuntimeError as error:
            if self._issuing and self.service is not None:  # ranks may differ in what they did
                raise self.service.waits.lose(f"the fetch of {block}", error) from error
            raise
        lap.advance()

    def _transfer(self, slot: Slot, block: Unit, fence: Event) -> None:
        if self._shards is None:  # alone: what is copied is the block
            super()._transfer(slot, block, fence)
        else:
            self._shards.transfer(slot, block, fence, self._lap.upcoming() if self._lap is not None else ())

    def _settle(self, slot: Slot) -> None:
        if slot.pending is None:
            return
        work, views = slot.pending
        assert self.service is not None
        self.service.waits.wait_for(work, f"the gather of {slot.stamp}")
        if (timing := self.transfers.timing) is not None and slot.stamp is not None:
            timing.gathered(slot.stamp)
        realign(views.realigned)
        slot.pending = None

    def _wait_on_host(self, event: Event) -> None:
        """For a page-locked buffer, the copy from which may be behind a gather, and so behind other ranks."""
        assert self.service is not None
        self.service.waits.wait_until(lambda: self.platform.is_done(event), "the gathers before a copy")

    def _confirm(self) -> None:
        self._check()  # a loss that was noticed meanwhile found this slot unused, and its gather may never arrive

    def _recover(self, block: Unit) -> None:
        reason = f"a fetch was interrupted before that of {block}, so rank {self.rank} does not know the group's order"
        if self.service is None:
            super()._recover(block)
        else:
            lost = GroupLost(reason)
            self.service.turn.fail(lost)
            raise lost

    def _check(self) -> None:
        if self.service is not None:
            self.service.waits.check()

    # What the service calls (`Laps`)

    @contextmanager
    def service_thread(self) -> Iterator[None]:
        """Of the torch state that belongs to a thread, what transfers need."""
        self.platform.use_in_this_thread()
        with torch.no_grad():
            yield

    def describe_state(self) -> dict[str, Any]:
        said = self._plan.describe(self.ring.seq if self.ring else 0, self.components, self._abandoned)
        return said | {"residents": self._residents.say()}

    def grant(self, replies: list[dict[str, Any]]) -> str | None:
        component = self._plan.choose(self.rank, replies, self.components)
        self._residents.hear([reply["residents"] for reply in replies])
        if component is None:
            return None
        self._lap = self._plan.open(component, self.num_slots)
        return component.name

    def is_driven(self, idle_seconds: float) -> bool:
        assert self.service is not None
        held = any(unit.held for c in self.components.values() for unit in c.blocks)
        caller = self._caller
        if caller is not None and (held or caller.is_root) and not caller.is_running():
            return False
        options = self.service.turn.options
        return held or idle_seconds < options.grace or options.uneven == "error" or self._has_companions

    def take_over(self) -> None:
        self._caller = None
        self.platform.synchronize()  # what the interrupted call queued, on whatever stream
        for component in self.components.values():
            self._let_go(component.blocks)

    def finish_lap(self, is_ghost: bool) -> None:
        assert self._lap is not None and self.ring is not None
        self._caller = None
        self.transfers.for_others = is_ghost
        while not self._lap.done:
            block = self._lap.next_block
            try:  # not `check`: of a file that was only replaced, the rest comes as the other ranks expect it
                block.store.check_readable(block.key)
            except RuntimeError as error:
                raise RankLost(f"Streaming by all_gather has stopped: {error}") from error
            self._fetch_next()
        for slot in self._all_slots:
            self._settle(slot)
        self._plan.close(self._lap, self.num_slots)
        self._lap, self.transfers.for_others = None, False
        self.counters.ghost_passes += is_ghost

    def all_joined(self, replies: list[dict[str, Any]]) -> tuple[bool, bool]:
        for name in sorted(set.intersection(*(set(reply["abandoned"]) for reply in replies))):
            component = self.components.pop(name)
            self._abandoned.discard(name)
            self._residents.keep_only(self.components)
            self._dropped.append(component)
            if self.ring is not None:
                self.ring.forget(name)
            self._plan.forget()
            self._on_dropped(component)
        return not self.components, self._abandoned == set(self.components)

    def free_dropped(self) -> None:
        if not self.components:
            self._drop_ring()
        while self._dropped:
            component = self._dropped.pop()
            self.give_back(component)
            for block in component.blocks:
                block.views = []
            self._on_freed(component)

    def is_intact(self) -> bool:
        if self.ring is None or self.platform.waits_on_host:
            return True
        return become_right(self.platform, self._all_slots, _SETTLE_SECONDS)

    @property
    def _all_slots(self) -> list[Slot]:
        """Those of the ring, and those of blocks that stay whole."""
        homes = [b.home.slot for c in self.components.values() for b in c.blocks if b.home is not None]
        return [*(self.ring.slots if self.ring is not None else ()), *homes]

    def abort(self) -> None:
        # A host's own waits are bounded, and its collectives fail by themselves.
        if self._group.gather is not None and not self.platform.waits_on_host:
            self._group.gather.abort(self.platform)
