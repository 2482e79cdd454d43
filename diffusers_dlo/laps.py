# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what a lap is: a function of what all ranks have said, and the same on all of them. Must not fetch, wait or talk.

[Note: Pass]
    In a gathered lane collectives happen only inside a pass, in the lap's order, on every rank. A pass starts by
    agreement and runs one lap of one component: the blocks of its order that the last lap left out, then the first
    `num_slots - 1` again for the next pass; blocks that stay on the device whole are fetched once, in the first.
    Within a lap no rank leaves out a fetch: a block that its model skips is fetched and overwritten, and one that lies
    behind the lap asks for another pass. The lap is a function of what was agreed (component, order, and what the ring
    holds), and that is compared at the agreement: two ranks that would gather different blocks raise before a byte
    moves. A fetch that was interrupted in the middle leaves the group's order unknown, so the lane refuses to go on
    rather than guess.

[Note: Order]
    The order is that of registration at first. A rank proposes the order it saw in its first complete pass, without
    the blocks it did not visit; when all ranks propose the same, it is adopted. Whoever needs a block that the order
    lacks asks for the full order, which then stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from .distributed.companions import missing_companions
from .distributed.control import RankLost
from .units import Component, Unit


class Lap:
    """One turn through a component's blocks: those still to fetch, in order. The next one begins with `after`."""

    def __init__(self, component: Component, blocks: Sequence[int], after: Sequence[int]) -> None:
        self.component = component
        self._blocks = tuple(blocks)
        self._after = tuple(after)
        self._last = {block: place for place, block in enumerate(blocks)}
        self._position = 0

    @property
    def done(self) -> bool:
        """Whether everything has been fetched."""
        return self._position == len(self._blocks)

    @property
    def expected(self) -> Unit | None:
        """What the next lap fetches first, should it be one of the same component and order."""
        return self.component.blocks[self._after[0]] if self._after else None

    @property
    def next_block(self) -> Unit:
        """What is fetched next."""
        return self.component.blocks[self._blocks[self._position]]

    def ahead_of(self, block: int) -> bool:
        """Whether a block is still to be fetched."""
        return self._last.get(block, -1) >= self._position

    def upcoming(self) -> Iterator[Unit]:
        """What follows on the next block, here and in the next lap of the same component, should that be next."""
        blocks = self.component.blocks
        for place in range(self._position + 1, len(self._blocks)):
            yield blocks[self._blocks[place]]
        for block in self._after:
            yield blocks[block]

    def advance(self) -> None:
        """What was next has been fetched."""
        self._position += 1


class LapPlan:
    """What laps were and are, as far as the next one depends on it."""

    def __init__(self) -> None:
        self._passes = 0
        self._ahead: tuple[tuple[str, int], ...] = ()
        "what the last lap has fetched for the next one"

    def describe(self, seq: int, components: Mapping[str, Component], abandoned: Collection[str]) -> dict[str, Any]:
        """
        What a rank says in a round: all that its next lap follows from, which has to be the same everywhere, and what
        it computes no more. `seq` is the number of the ring's next fetch.
        """
        state: list[Any] = [seq, [list(item) for item in self._ahead]]
        state += [
            [name, component.order_digest, component.residency_digest]
            for name, component in sorted(components.items())
        ]
        return {"passes": self._passes, "state": state, "abandoned": sorted(abandoned)}

    def choose(
        self, rank: int, replies: Sequence[Mapping[str, Any]], components: Mapping[str, Component]
    ) -> Component | None:
        """
        Which component the ranks agreed to run, from what all of them said. None if no rank asked, or one that did
        says why it cannot be, or all that did lack companions ([Note: Companions]).

        Raises:
            `RankLost`: the next lap would not be the same on all ranks.
        """
        own = replies[rank]
        for other, reply in enumerate(replies):
            if (reply["passes"], reply["state"]) != (own["passes"], own["state"]):
                raise RankLost(
                    f"rank {other} counts {reply['passes']} passes and rank {rank} counts {self._passes}, or their "
                    "slots or orders differ: a rank enabled, disabled or failed alone. Start all ranks again."
                )
        asking = [(other, reply) for other, reply in enumerate(replies) if reply["kind"] == "run"]
        complete = [(other, reply) for other, reply in asking if not missing_companions(other, replies)]
        if not complete or any(reply["refused"] for _, reply in asking):
            return None
        _, first = min(complete, key=lambda item: (item[0] - self._passes) % len(replies))
        component = components[first["component"]]
        same = [reply for _, reply in asking if reply["component"] == component.name]
        proposal = same[0]["proposal"]
        if any(reply["full"] for reply in same):
            component.adopt(component.full_order)
        elif proposal is not None and len(same) == len(replies) and all(r["proposal"] == proposal for r in same):
            component.adopt(tuple(proposal))
        return component

    def open(self, component: Component, num_slots: int) -> Lap:
        """The lap of the pass that begins."""
        self._passes += 1
        streamed, blocks = component.streamed_order, component.blocks
        ahead = streamed[: num_slots - 1]
        held = 0
        while held < min(len(self._ahead), len(streamed)) and self._ahead[held] == (component.name, streamed[held]):
            held += 1
        wanted = [block for block in component.order if block not in streamed[:held] and not blocks[block].settled]
        return Lap(component, (*wanted, *ahead), streamed[len(ahead) :] + ahead)

    def close(self, lap: Lap, num_slots: int) -> None:
        """A lap is complete."""
        ahead = lap.component.streamed_order[: num_slots - 1]
        self._ahead = tuple((lap.component.name, block) for block in ahead)

    def forget(self) -> None:
        """The ring holds nothing any more."""
        self._ahead = ()
