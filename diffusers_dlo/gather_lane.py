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

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from .device.platform import Event, Platform
from .device.ring import BlockViews, Slot, realign
from .distributed.control import RankLost
from .distributed.group import OffloadGroup
from .lane import Lane, copy_extents
from .units import Component, Counters, Unit


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
    """Blocks come in shards and are gathered, in passes that all ranks of the group do together ([Note: Pass])."""

    transfer = "all_gather"

    def __init__(self, platform: Platform, counters: Counters, group: OffloadGroup) -> None:
        super().__init__(platform, counters, group.rank, group.size)
        self._group = group
        self._comm = platform.new_stream(high_priority=True)
        self._lap: Lap | None = None
        self._ahead: tuple[tuple[str, int], ...] = ()
        self._passes = 0
        self._broken: str | None = None

    def enter(self, component: Component) -> None:
        super().enter(component)
        if self._lap is not None and self._lap.component is component:
            self.finish()  # one that an interrupt ended: torch ran no hooks after it

    def finish(self) -> None:
        if self._lap is None:
            return
        self._check()
        while not self._lap.done:
            block = self._lap.next_block
            try:  # not `check`: of a file that was only replaced, the rest comes as the other ranks expect it
                block.store.check_readable(block.key)
            except RuntimeError as error:
                self._stop(str(error))
            self._fetch_next()
        component = self._lap.component
        self._ahead = tuple((component.name, block) for block in component.order[: self._count_ahead(component)])
        self._lap = None

    def join(self) -> None:
        """
        Says goodbye, and does the transfers of the passes that other ranks still ask for, until all have said it.

        Raises:
            `RankLost`: a rank is gone or late, or was before; the message names it.
        """
        self.finish()
        self._check()
        while True:
            replies = self._exchange("bye")
            if not any(reply["kind"] == "pass" for reply in replies):
                return
            if _refused(replies):
                continue
            self._grant(replies)
            self.counters.ghost_passes += 1
            self.finish()

    def read(self, block: Unit) -> torch.Tensor:
        self._check()
        return super().read(block)

    def remove(self, component: Component, shrink: bool = True) -> None:
        if self._lap is not None and self._lap.component is component and self._broken is None:
            if shrink:
                self.finish()  # the others count on it
            else:
                self._broken = f"'{component.name}' was dropped on rank {self.rank} in the middle of a pass"
        super().remove(component, shrink)

    def _drop_ring(self) -> None:
        self._lap = None
        self._ahead = ()
        super()._drop_ring()

    def _reach(self, component: Component, block: Unit) -> Slot:
        assert self.ring is not None
        self._check()
        while True:
            lap = self._lap
            if lap is not None and lap.component is component:
                slot = self.ring.find(component.name, block.index)
                if slot is not None:
                    return slot
                if lap.ahead_of(block.index):
                    self._fetch_next()
                    continue
            self.finish()
            self._begin(component, block)

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
        except RuntimeError as error:
            if self._issuing:  # the collective itself failed, so ranks may differ in what they did
                self._broken = f"the fetch of {block} failed on rank {self.rank} ({error})"
                raise RuntimeError(f"{self._broken}. Look for the traceback of another rank first.") from error
            raise
        lap.advance()

    def _transfer(self, slot: Slot, views: BlockViews, fence: Event) -> None:
        gather = self._group.gather
        if gather is None:  # alone: what is copied is the block
            super()._transfer(slot, views, fence)
            return
        self.platform.submit(self._copy, lambda: copy_extents(views), after=(fence,), record=slot.arrived)

        def work() -> None:
            gather(views.image, views.shard)
            realign(views.realigned)

        self.platform.submit(self._comm, work, after=(slot.arrived,), record=slot.ready)
        self.counters.gather_nbytes += views.image.numel() - views.shard.numel()

    def _begin(self, component: Component, block: Unit) -> None:
        """Asks for a pass of `component` until it is granted; passes of others are done for them meanwhile."""
        while (granted := self._agree(component, full=block.index not in component.order)) is not component:
            if granted is not None:
                self.counters.ghost_passes += 1
                self.finish()
        self.counters.passes += 1

    def _agree(self, component: Component, full: bool) -> Component | None:
        """
        One round of asking for a pass of `component`: which component got one, None if nobody did.

        Raises:
            `RuntimeError`: the weights of `component` have changed on the host, as this rank or another sees it. All
            ranks that asked for it raise, and none has begun anything.
        """
        proposal = list(component.proposal) if component.proposal is not None else None
        changed = _change_of(component)
        replies = self._exchange("pass", component=component.name, full=full, proposal=proposal, changed=changed)
        for rank, reply in enumerate(replies):
            if reply.get("changed") and reply["component"] == component.name:
                raise RuntimeError(f"rank {rank}: {reply['changed']}")
        return None if _refused(replies) else self._grant(replies)

    def _exchange(self, kind: str, **asked: Any) -> list[dict[str, Any]]:
        """One agreement: what is asked, and what a lap follows from, which has to be the same on all ranks."""
        state = [self.ring.seq if self.ring else 0, [list(item) for item in self._ahead]]
        state += [[name, component.order_digest] for name, component in sorted(self.components.items())]
        try:
            replies = self._group.control.exchange(kind, passes=self._passes, state=state, **asked)
        except RuntimeError as error:
            self._broken = str(error)
            raise
        for rank, reply in enumerate(replies):
            if reply["kind"] not in ("pass", "bye"):
                raise RuntimeError(
                    f"rank {rank} is at '{reply['kind']}' while rank {self.rank} is at '{kind}'. Enabling and "
                    "disabling are done by all ranks together, between forwards."
                )
            if reply["passes"] != self._passes or reply["state"] != state:
                self._stop(
                    f"rank {rank} counts {reply['passes']} passes and rank {self.rank} counts {self._passes}, or "
                    "their slots or orders differ: a rank enabled, disabled or failed alone"
                )
        return replies

    def _grant(self, replies: Sequence[dict[str, Any]]) -> Component:
        """
        Which component the ranks agreed to run, from what all of them said; opens its lap. That of the first asking
        rank, counted from `pass number mod N` upward, so that everyone who asks is served within N passes.
        """
        asking = [(rank, reply) for rank, reply in enumerate(replies) if reply["kind"] == "pass"]
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
        return component

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

    def _recover(self, block: Unit) -> None:
        self._stop(
            f"a fetch was interrupted before that of {block}, so rank {self.rank} does not know the group's order"
        )

    def _stop(self, reason: str) -> NoReturn:
        self._broken = reason.rstrip(".").removesuffix("and start all ranks again").rstrip(", ")
        raise RankLost(f"Streaming by all_gather has stopped: {self._broken}. Start all ranks again.")

    def _check(self) -> None:
        if self._broken is not None:
            self._stop(self._broken)


def _change_of(component: Component) -> str | None:
    """What has changed about the host's copy of a component's weights."""
    try:
        component.store.check()
    except RuntimeError as error:
        return str(error)
    return None


def _refused(replies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a round grants no pass, because weights that were asked for have changed on the host."""
    return any(reply.get("changed") for reply in replies)
