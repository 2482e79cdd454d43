# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns passes: what ranks that gather blocks from shards agree on, and the lap that follows. Asking (`_agree`), driving
(`_reach`, `_fetch_ahead`) and finishing (`finish`) a lap are separate steps.

[Note: Pass]
    In a gathered lane collectives happen only inside a pass, in the lap's order, on every rank. A pass starts by
    agreement and runs one lap of one component: the blocks of its order that the last lap left out, then the first
    `num_slots - 1` again for the next pass. Within a lap no rank leaves out a fetch: a block that its model skips is
    fetched and overwritten, and one that lies behind the lap asks for another pass. The lap is a function of what was
    agreed (component, order, and what the ring holds), and that is compared at the agreement: two ranks that would
    gather different blocks raise before a byte moves. A fetch that was interrupted in the middle leaves the group's
    order unknown, so the lane refuses to go on rather than guess.

[Note: Order]
    The order is that of registration at first. A rank proposes the order it saw in its first complete pass, without
    the blocks it did not visit; when all ranks propose the same, it is adopted. Whoever needs a block that the order
    lacks asks for the full order, which then stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from .caller import Caller
from .device.platform import Event, Platform
from .device.ring import BlockViews, Slot, realign
from .distributed.control import POLL_SECONDS, GroupLost, RankLost
from .distributed.group import OffloadGroup
from .distributed.pass_service import PassService
from .distributed.turn import PassOptions
from .lane import Lane, copy_extents
from .units import Component, Counters, Unit


_TURN = timedelta(seconds=POLL_SECONDS)
_ABORT_SECONDS = 5.0
"""How long after a loss gathers that all ranks had begun may take to complete."""


class Lap:
    """One turn through a component's blocks: those still to fetch, in order."""

    def __init__(self, component: Component, blocks: Sequence[int]) -> None:
        self.component = component
        self._blocks = tuple(blocks)
        self._last = {block: place for place, block in enumerate(blocks)}
        self._position = 0

    @property
    def done(self) -> bool:
        """Whether everything has been fetched."""
        return self._position == len(self._blocks)

    @property
    def next_block(self) -> Unit:
        """What is fetched next."""
        return self.component.blocks[self._blocks[self._position]]

    def ahead_of(self, block: int) -> bool:
        """Whether a block is still to be fetched."""
        return self._last.get(block, -1) >= self._position

    def advance(self) -> None:
        """What was next has been fetched."""
        self._position += 1


class GatherLane(Lane):
    """
    Blocks come in shards and are gathered, in passes that all ranks of the group do together ([Note: Pass]). When a
    pass begins and who drives it is up to the `PassService`; alone, the main thread does everything.

    Args:
        group (`OffloadGroup`): the ranks.
        options (`PassOptions`): how patient they are with each other.
        on_dropped (`Callable[[Component], None]`): told of an abandoned component that no rank needs any more.
    """

    transfer = "all_gather"

    def __init__(
        self,
        platform: Platform,
        counters: Counters,
        group: OffloadGroup,
        options: PassOptions,
        on_dropped: Callable[[Component], None],
    ) -> None:
        super().__init__(platform, counters, group.rank, group.size)
        self._group = group
        self._comm = platform.new_stream(high_priority=True)
        self._lap: Lap | None = None
        self._ahead: tuple[tuple[str, int], ...] = ()
        self._passes = 0
        self._broken: str | None = None
        self._on_dropped = on_dropped
        self._abandoned: set[str] = set()
        self._caller: Caller | None = None
        self.service: PassService | None = None
        if group.passes is not None:
            self.service = PassService(group.passes, self, options)
            self.service.start()

    # What hooks call, on the main thread

    def enter(self, component: Component) -> None:
        with self._driving():
            super().enter(component)
            if self._lap is not None and self._lap.component is component:
                self.finish()  # one that an interrupt ended: torch ran no hooks after it

    def acquire(self, block: Unit, caller: Caller | None = None) -> None:
        with self._driving():
            self._caller = caller
            super().acquire(block)

    def release(self, block: Unit) -> None:
        with self._driving():
            super().release(block)

    def leave(self, component: Component, complete: bool) -> None:
        with self._driving():
            super().leave(component, complete)

    def let_go_all(self) -> None:
        with self._driving():
            super().let_go_all()

    def finish(self) -> None:
        if self.service is not None:
            self.service.turn.hand_back()
        elif self._lap is not None:
            self.finish_lap(is_ghost=False)

    def join(self, pause: bool = False, leaving: bool = False) -> None:
        """See `Turn.join`."""
        if self.service is None:
            self.finish()
            return
        with self._driving():
            self._refuse_held("'join' was called")
            self.service.turn.join(pause, leaving)

    def _driving(self) -> AbstractContextManager[None]:
        return self.service.turn.driving() if self.service is not None else nullcontext()

    # Membership

    def remove(self, component: Component, shrink: bool = True) -> None:
        super().remove(component, shrink)
        self._abandoned.discard(component.name)
        if not self.components:
            self.close()

    def abandon(self, component: Component) -> None:
        """
        This rank computes a component no more. Its part of the passes that others ask for goes on until none does.
        """
        if self.service is None:
            self._on_dropped(component)
            return
        with self._driving():
            self._let_go(component.blocks)
            self._abandoned.add(component.name)
        if self._abandoned == set(self.components):
            self.service.turn.say_goodbye()

    def close(self) -> None:
        """Ends the service and gives the slots back. Idempotent."""
        if self.service is not None:
            self.service.stop()
        self._drop_ring()

    def retire(self) -> None:
        """
        Passes are over. Lets all components go, but for the blocks that compute: their bytes have arrived, and stay.
        """
        if self.service is not None:
            self.service.stop()
        for component in self.components.values():
            for block in component.blocks:
                block.views = []
        self.components = {}
        self._drop_ring()

    def read(self, block: Unit) -> torch.Tensor:
        self._check()
        with self._driving():
            return super().read(block)

    def _drop_ring(self) -> None:
        self._lap = None
        self._ahead = ()
        super()._drop_ring()

    # Driving a lap

    def _reach(self, component: Component, block: Unit) -> Slot:
        assert self.ring is not None
        while True:
            self._check()
            lap = self._lap
            if lap is not None and lap.component is component and (self.service is None or self.service.turn.owns_lap):
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
            "refused": _change_of(component),
        }
        if self.service is not None:
            self.service.turn.request(asked)
        else:
            self.finish()
            if asked["refused"]:
                raise RuntimeError(f"rank {self.rank}: {asked['refused']}")
            self.grant([{"kind": "run", **asked, **self.describe_state()}])
        self.counters.passes += 1

    def _refuse_held(self, why: str) -> None:
        """A lap that this thread has left is completed in its slots, so none may be in use."""
        held = ", ".join(sorted(str(unit) for c in self.components.values() for unit in c.blocks if unit.held))
        if held:
            raise RuntimeError(
                f"rank {self.rank}: {why} while {held} compute, one inside the other, and would take a pass of its "
                'own. Use transfer="local" for models that call each other like this.'
            )

    def _fetch_ahead(self, component: Component, block: Unit) -> None:
        assert self.ring is not None and self._lap is not None
        while not self._lap.done and not self.ring.next_slot.holds:
            self._fetch_next()

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
                raise self._lose(f"the fetch of {block}", error) from error
            raise
        lap.advance()

    def _transfer(self, slot: Slot, views: BlockViews, fence: Event) -> None:
        gather = self._group.gather
        if gather is None:  # alone: what is copied is the block
            super()._transfer(slot, views, fence)
            return
        self.platform.submit(self._copy, lambda: copy_extents(views), after=(fence,), record=slot.arrived)

        def work() -> None:
            if self.platform.waits_on_host:
                slot.pending = gather.start(views.image, views.shard), views
            else:
                gather(views.image, views.shard)
                realign(views.realigned)

        self.platform.submit(self._comm, work, after=(slot.arrived,), record=slot.ready)
        self.counters.gather_nbytes += views.image.numel() - views.shard.numel()

    def _settle(self, slot: Slot) -> None:
        if slot.pending is None:
            return
        work, views = slot.pending
        assert self.service is not None
        what, start = (
            f"the gather of block {slot.stamp.block} of '{slot.stamp.component}'" if slot.stamp else "",
            time.monotonic(),
        )
        while True:
            try:
                if work.wait(_TURN):
                    break
            except RuntimeError as error:
                if work.is_completed():
                    raise self._lose(what, error) from error
            try:
                self.service.keep_waiting(what, time.monotonic() - start)
            except RankLost as error:
                self.service.turn.fail(error)
                raise
        realign(views.realigned)
        slot.pending = None

    def _lose(self, what: str, error: RuntimeError) -> RankLost:
        """What to raise when a collective failed: the end of another rank, if that is why."""
        assert self.service is not None
        lost: RankLost = GroupLost(f"{what} failed on rank {self.rank} ({str(error).splitlines()[0]}).")
        try:
            self.service.explain()
        except RankLost as explained:
            lost = explained
        self.service.turn.fail(lost)
        return lost

    def _recover(self, block: Unit) -> None:
        reason = f"a fetch was interrupted before that of {block}, so rank {self.rank} does not know the group's order"
        if self.service is None:
            super()._recover(block)
        else:
            self.service.turn.fail(GroupLost(reason))
            self.service.turn.check()

    def _check(self) -> None:
        if self.service is not None:
            self.service.turn.check()

    # What the service calls (`Laps`)

    @contextmanager
    def service_thread(self) -> Iterator[None]:
        """Of the torch state that belongs to a thread, what transfers need."""
        self.platform.use_in_this_thread()
        with torch.no_grad():
            yield

    def describe_state(self) -> dict[str, Any]:
        state = [self.ring.seq if self.ring else 0, [list(item) for item in self._ahead]]
        state += [[name, component.order_digest] for name, component in sorted(self.components.items())]
        return {"passes": self._passes, "state": state, "abandoned": sorted(self._abandoned)}

    def grant(self, replies: list[dict[str, Any]]) -> str | None:
        """
        Which component the ranks agreed to run, from what all of them said; opens its lap. None if no rank asked, or
        one that did says why it cannot be.

        Raises:
            `RankLost`: the next lap would not be the same on all ranks.
        """
        own = replies[self.rank]
        for rank, reply in enumerate(replies):
            if (reply["passes"], reply["state"]) != (own["passes"], own["state"]):
                raise RankLost(
                    f"rank {rank} counts {reply['passes']} passes and rank {self.rank} counts {self._passes}, or "
                    "their slots or orders differ: a rank enabled, disabled or failed alone. Start all ranks again."
                )
        asking = [(rank, reply) for rank, reply in enumerate(replies) if reply["kind"] == "run"]
        if not asking or any(reply["refused"] for _, reply in asking):
            return None
        _, first = min(asking, key=lambda item: (item[0] - self._passes) % self.size)
        component = self.components[first["component"]]
        same = [reply for _, reply in asking if reply["component"] == component.name]
        proposal = same[0]["proposal"]
        if any(reply["full"] for reply in same):
            component.adopt(component.full_order)
        elif proposal is not None and len(same) == self.size and all(r["proposal"] == proposal for r in same):
            component.adopt(tuple(proposal))
        self._passes += 1
        self._open(component)
        return component.name

    def is_driven(self, idle_seconds: float) -> bool:
        assert self.service is not None
        held = any(unit.held for c in self.components.values() for unit in c.blocks)
        caller = self._caller
        if caller is not None and (held or caller.is_root) and not caller.is_running():
            return False
        return held or idle_seconds < self.service.turn.options.grace or self.service.turn.options.uneven == "error"

    def take_over(self) -> None:
        self._caller = None
        self.platform.synchronize()  # what the interrupted call queued, on whatever stream
        for component in self.components.values():
            self._let_go(component.blocks)

    def finish_lap(self, is_ghost: bool) -> None:
        assert self._lap is not None and self.ring is not None
        self._caller = None
        while not self._lap.done:
            block = self._lap.next_block
            # Not `check`: of a file that was only replaced, the rest comes as the other ranks expect it.
            block.store.check_readable(block.key)
            self._fetch_next()
        for slot in self.ring.slots:
            self._settle(slot)
        component = self._lap.component
        self._ahead = tuple((component.name, block) for block in component.order[: self._count_ahead(component)])
        self._lap = None
        self.counters.ghost_passes += is_ghost

    def all_joined(self, replies: list[dict[str, Any]]) -> bool:
        for name in sorted(set.intersection(*(set(reply["abandoned"]) for reply in replies))):
            component = self.components[name]
            super().remove(component, shrink=False)
            self._abandoned.discard(name)
            self._on_dropped(component)
        return not self.components

    def abort(self) -> bool:
        gather = self._group.gather
        if gather is None or self.ring is None or self.platform.waits_on_host:
            return True
        deadline = time.monotonic() + _ABORT_SECONDS
        while not (intact := all(self._is_right(slot) for slot in self.ring.slots)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        gather.abort()
        return intact

    def _is_right(self, slot: Slot) -> bool:
        """Whether nothing has computed, or will, with a gather that will never be complete."""
        return self.platform.is_done(slot.ready) or (not slot.used and self.platform.is_done(slot.free))

    def _open(self, component: Component) -> None:
        held = 0
        while held < min(len(self._ahead), len(component.order)) and self._ahead[held] == (
            component.name,
            component.order[held],
        ):
            held += 1
        tail = component.order[: self._count_ahead(component)]
        self._lap = Lap(component, component.order[held:] + tail)

    def _count_ahead(self, component: Component) -> int:
        return min(self.num_slots - 1, len(component.order))


def _change_of(component: Component) -> str | None:
    """What has changed about the host's copy of a component's weights."""
    try:
        component.store.check()
    except RuntimeError as error:
        return str(error)
    return None
