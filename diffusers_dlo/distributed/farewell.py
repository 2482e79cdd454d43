# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whether this rank has said that it is done, and whether all have. Must not wait or talk: its owner does, and
calls it under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from .control import LATE_SECONDS, RankLost, logger


_AGAIN_SECONDS = 1.0
"""How often a rank that is leaving asks whether it is still needed."""


class Farewell:
    """
    The BYE of one rank ([Note: Rendezvous]).

    Args:
        rank (`int`): this rank, for messages.
        describe (`Callable[[Iterable[int]], str]`): names ranks, for messages.

    Attributes:
        wanted (`bool`): this rank answers BYE.
        to_be_said (`bool`): it has not yet, so a round has to be made.
        leaving (`bool`): this rank is about to end.
        pausing (`bool`): the round in which all say BYE makes the service pause.
        paused (`bool`): it does.
        completed (`int`): rounds in which all ranks said BYE.
        unneeded (`bool`): this rank is leaving, and every other one is done or waits in a collective that only the
            end of this one will end.
    """

    def __init__(self, rank: int, describe: Callable[[Iterable[int]], str]) -> None:
        self.wanted = self.to_be_said = False
        self.leaving = False
        self.pausing = self.paused = False
        self.completed = 0
        self.unneeded = False
        self._told = 0
        self._waiting = 0
        self._interrupted: bool | None = None
        "whether the join that was interrupted was a pausing one; None if none was"
        self._warned = False
        self._rank = rank
        self._describe = describe
        self._begun = self._last_round = self._last_said = time.monotonic()
        self._not_joined: Sequence[int] = ()

    def was_completed(self, pause: bool) -> bool:
        """Whether a join of this kind that was interrupted has been completed since."""
        return self.completed > self._told and self._interrupted is pause

    def begin(self, pause: bool = False, leaving: bool = False) -> int:
        """This rank is done. The number of joins completed before."""
        self.wanted = self.to_be_said = True
        self.pausing, self.leaving, self.unneeded = pause, leaving, False
        self._begun = self._last_round = self._last_said = time.monotonic()
        self._interrupted, self._warned = None, False
        return self.completed

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A thread waits for the others to be done."""
        self._waiting += 1
        try:
            yield
        except BaseException:
            self._interrupted = self.pausing
            raise
        finally:
            self._waiting -= 1
            self.pausing = self.leaving = False

    def take_back(self) -> None:
        """
        This rank is not done: what is left of an interrupted join is void. If a thread waits for the others to be
        done, the BYE stands, behind what another one asks for.
        """
        self.wanted = self.to_be_said = self._waiting > 0
        self.told()

    def said(self) -> None:
        """This rank has answered BYE."""
        self.to_be_said = False

    def pause(self) -> None:
        """The service rests."""
        self.paused = True

    def resume(self) -> None:
        """The service goes on."""
        self.paused = False

    def told(self) -> None:
        """The caller of `join` knows of all that were completed."""
        self._told, self._interrupted = self.completed, None

    def heard(self, not_joined: Sequence[int], stuck: Collection[int]) -> None:
        """
        All ranks have answered in a round; those in `not_joined` not with BYE, of which `stuck` wait in collectives.
        """
        self._last_round, self._not_joined = time.monotonic(), not_joined
        self.unneeded = self.leaving and set(not_joined) <= set(stuck)

    def complete(self, standing: bool) -> None:
        """All ranks said BYE in one round. If it is `standing`, this rank goes on saying it when others do."""
        self.wanted, self.to_be_said = standing, False
        self.paused |= self.pausing
        self.completed += 1
        if not self._waiting and self._interrupted is None:
            self._told = self.completed  # nobody will ask

    def check(self, timeout: float, idle: bool) -> None:
        """
        Called at each turn of the wait for the others; `idle` is whether no lap is open.

        Raises:
            `RankLost`: no rank asked for anything within the timeout, and not all have joined.
        """
        now = time.monotonic()
        waited, whole = now - self._last_round, now - self._begun
        if self.leaving:
            # The others answer, so they live, and may need this rank for as long as they like.
            if now - self._last_said > _AGAIN_SECONDS:
                self._last_said, self.to_be_said = now, True
            if whole > LATE_SECONDS and not self._warned:
                self._warned = True
                logger.warning(
                    f"rank {self._rank} is done, and stays to transfer its shards for "
                    f"{self._describe(self._not_joined)}"
                )
        elif idle and waited > timeout:
            raise RankLost(
                f"rank {self._rank} waited {waited:.0f} s in 'join' for {self._describe(self._not_joined)}, which "
                "neither computed nor joined. Look for its traceback, or raise 'timeout' if it is only slow."
            )
