# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whose turn it is: what the main thread wants, what it was granted, and who drives the open lap, all under one
lock. Must not talk to other ranks: the service thread does ([Note: Ghost service]).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..config import DistributedLayerwiseOffloadConfig
from ..interrupts import interrupts
from .companions import Hold
from .control import POLL_SECONDS, RankLost, logger
from .ending import Ending
from .farewell import Farewell
from .presence import Presence
from .process_end import in_forked_children
from .turn_states import Owner, Step


class Turn(Ending):
    """
    The state that the main thread of a rank and its service thread share.

    Args:
        rank (`int`): this rank, for messages.
        options (`DistributedLayerwiseOffloadConfig`): `timeout`, `grace` and `uneven` of it.
        wake (`Callable[[], None]`): ends the service thread's wait for other ranks.
        describe (`Callable[[Iterable[int]], str]`): names ranks, for messages.
    """

    def __init__(
        self,
        rank: int,
        options: DistributedLayerwiseOffloadConfig,
        wake: Callable[[], None],
        describe: Callable[[Iterable[int]], str],
    ) -> None:
        self.options = options
        super().__init__(rank)
        self._wake = wake
        self._owner = Owner.NOBODY
        self._asked: dict[str, Any] | None = None
        self._refusal: str | None = None
        self._driving = 0
        self._driver: int | None = None
        self._touched = time.monotonic()
        self._presence = Presence()
        self._farewell = Farewell(rank, describe)
        self._hold = Hold(rank, describe)
        self._at_its_end = False
        self._sought = False
        self.forked = False
        in_forked_children(self.disarm)

    def disarm(self) -> None:
        """This is a forked child: it has no service thread, and whoever held the lock is not here."""
        self.forked = True
        self._state = threading.Condition(threading.RLock())

    # What the main thread calls

    @contextmanager
    def driving(self) -> Iterator[None]:
        """The main thread is in the engine: its lap is not taken from it, nor is it interrupted but at waits."""
        if self.forked:
            raise RuntimeError(
                f"rank {self._rank}: a forked child of this process called a streamed model. It is not a rank; use "
                "the model in the process that enabled the offload."
            )
        with interrupts:
            with self._state:
                self._driving += 1
            try:
                yield
            finally:
                with self._state:
                    self._driving -= 1
                    self._touched = time.monotonic()
            self.raise_alarm()

    @property
    def leaving(self) -> bool:
        """Whether this rank says that it is about to end."""
        return self._farewell.leaving

    @property
    def owns_lap(self) -> bool:
        """Whether the main thread may fetch."""
        return self._owner is Owner.MAIN

    @property
    def drives_here(self) -> bool:
        """Whether it is this thread that drives the open lap."""
        return self._owner is Owner.MAIN and self._driver == threading.get_ident()

    @property
    def driver(self) -> int:
        """The thread that is the main one in the sense of this class: it drove the last lap."""
        return self._driver or threading.main_thread().ident or 0

    def request(self, asked: dict[str, Any]) -> None:
        """
        Asks for a pass until it is granted; then the main thread owns the lap. `asked` names the `component`.

        Raises:
            `RuntimeError`: it was refused, on all ranks that asked for this component, or its companions do not come.
            `RankLost`: see `check`.
        """
        with interrupts, self._state:
            self.check()
            if self._at_its_end:
                raise RankLost(f"rank {self._rank}: this process is at its end, and computes no more.")
            self.hand_back()
            self._driver = threading.get_ident()
            self._asked, self._refusal = asked, None
            self._hold.end()
            self._farewell.take_back()
            self._notify()
            try:
                self._wait(lambda: self._asked is None, lambda: self._hold.check(self.options.timeout))
            finally:
                self._asked = None
                self._hold.end()
            if self._refusal is not None:
                raise RuntimeError(self._refusal)

    def hand_back(self) -> None:
        """The main thread fetches no more of the open lap."""
        with interrupts, self._state:
            if self._owner is Owner.MAIN:
                self._owner = Owner.SERVICE
                self._state.notify_all()

    def join(self, pause: bool = False, leaving: bool = False) -> None:
        """
        Says BYE, and waits until all ranks have. With `pause`, the service rests from then on, until `resume`. With
        `leaving`, the others hear that this rank is about to end.

        Raises:
            `RankLost`: see `check`; or nobody asked for anything within the timeout, and not all have joined.
        """
        with interrupts, self._state:
            self.check()
            if self.drives_here:
                self.hand_back()
            self._at_its_end |= leaving
            if self._farewell.was_completed(pause) and not leaving:
                if pause:
                    self._farewell.pause()
            else:
                before = self._farewell.begin(pause, leaving)
                self._notify()
                with self._farewell.waiting():
                    self._wait(
                        lambda: self._farewell.completed > before or self._farewell.unneeded, self._check_farewell
                    )
            self._farewell.told()

    def _check_farewell(self) -> None:
        self._farewell.check(self.options.timeout, self._owner is Owner.NOBODY)
        if self._farewell.to_be_said:
            self._wake()

    def say_goodbye(self) -> None:
        """As `join`, and goes on at once. May be called from any thread."""
        with interrupts, self._state:
            self._farewell.begin()
            self._notify()

    def seek_round(self) -> None:
        """Has a round be made soon, without asking for a pass."""
        with interrupts, self._state:
            self._sought = True
            self._notify()

    def resume(self) -> None:
        """Ends the pause of a `join`."""
        with interrupts, self._state:
            self._farewell.resume()
            self._state.notify_all()

    def _notify(self) -> None:
        self._wake()
        self._state.notify_all()

    def _wait(self, until: Callable[[], bool], check: Callable[[], None] | None = None) -> None:
        """
        Waits, under the lock, which it lets go of meanwhile. An interrupt ends it; but where the others pause until
        this rank has done its part of an agreement, it comes where all ranks hear of it, unless it comes twice.
        """
        told = False
        while not until():
            self.check()
            if check is not None:
                check()
            self._state.wait(POLL_SECONDS)
            if until():
                return
            if self._farewell.pausing and interrupts.noted and not told:
                told = True
                logger.warning(
                    f"rank {self._rank} waits for the other ranks; interrupt it again to leave them waiting"
                )
            interrupts.deliver(at_least=2 if self._farewell.pausing else 1)

    # What the service thread calls

    def next_step(self, heard: bool) -> Step:
        """What to do; `heard` is whether another rank has said something."""
        with self._state:
            if self._stopping:
                return Step.STOP
            self.check_failure()
            if self._farewell.paused:
                self._state.wait(POLL_SECONDS)
                return Step.PAUSE
            asks = self._asked is not None and not self._hold.on
            if heard or asks or self._farewell.to_be_said or self._sought:
                self._sought = False
                return Step.ROUND
            return Step.WAIT

    def answer(self, check: Callable[[], None]) -> tuple[dict[str, Any] | None, str]:
        """
        What this rank asks for, and what it says: after a grace for the main thread, if that is expected.
        """
        start = time.monotonic()
        with self._state:
            strict = self.options.uneven == "error"
            grace = min(self.options.grace, self.options.timeout / 2)  # the others must not lose theirs
            deadline = float("inf") if strict else start + self._presence.patience(grace)
            while self._asked is None and not self._farewell.wanted:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._state.wait(min(left, POLL_SECONDS))
                self.check_failure()
                check()
            if self._asked is not None:
                self._presence.came(time.monotonic() - start)
                return self._asked, "run"
            if self._farewell.wanted:
                self._farewell.said()
                return None, "bye"
            return None, "ghost"

    def round_made(self, not_joined: list[int], stuck: list[int]) -> None:
        """All ranks have answered; those in `not_joined` not with BYE, of which `stuck` wait in collectives."""
        with self._state:
            self._farewell.heard(not_joined, stuck)
            self._state.notify_all()

    def granted(self, asked: dict[str, Any] | None, component: str) -> bool:
        """A lap of `component` is open. Whether the main thread drives it: it had `asked` for that, and still does."""
        with self._state:
            mine = asked is not None and self._asked is asked and asked["component"] == component
            self._presence.pass_begins(expected=mine or self._asked is not None)
            self._owner = Owner.MAIN if mine else Owner.SERVICE
            if mine:
                self._asked, self._touched = None, time.monotonic()
                self._state.notify_all()
            return mine

    def nobody_granted(self, asked: dict[str, Any] | None, refusal: str | None) -> None:
        """The round brought no pass; if what this rank had `asked` for was refused, the main thread hears why."""
        with self._state:
            self._presence.stop_expecting()
            if refusal is not None:
                self._refuse(asked, refusal)

    def companions_missing(self, asked: dict[str, Any], missing: list[int], conflict: str | None) -> None:
        """
        What this rank had `asked` for does not count without those ([Note: Companions]); with a `conflict`, it never
        will.
        """
        with self._state:
            if conflict is not None:
                self._refuse(asked, conflict)
            elif self._asked is asked:
                self._hold.begin(missing)

    def _refuse(self, asked: dict[str, Any] | None, reason: str) -> None:
        if self._asked is asked:
            self._refusal, self._asked = reason, None
            self._state.notify_all()

    def watch(
        self, check: Callable[[], None], is_driven: Callable[[float], bool], take_over: Callable[[], None]
    ) -> None:
        """Waits until the main thread does not drive its lap any more, for whatever reason."""
        with self._state:
            while self._owner is Owner.MAIN:
                self._state.wait(POLL_SECONDS)
                self.check_failure()
                check()
                if self._owner is not Owner.MAIN or self._driving:
                    continue
                if not is_driven(time.monotonic() - self._touched):
                    take_over()
                    self._owner = Owner.SERVICE
                    self._presence.stop_expecting()

    def lap_finished(self) -> None:
        """No lap is open."""
        with self._state:
            self._owner = Owner.NOBODY
            self._state.notify_all()

    def all_joined(self, nothing_wanted: bool) -> None:
        """All ranks said BYE. With `nothing_wanted`, this rank has dropped all that is left, and its BYE stands."""
        with self._state:
            self._presence.begin_anew()
            self._farewell.complete(standing=nothing_wanted)
            self._state.notify_all()

    def end(self, error: RankLost, intact: bool) -> int | None:
        """
        What the main thread meets from now on; at the latest when it leaves the engine, if it is there and what it
        computed is not `intact`. If it is outside then, the number of its thread.
        """
        with self._state:
            self._owner = Owner.NOBODY
            self.settle(error, alarm=not intact and self._driving > 0)
            return None if intact or self._driving else self._driver
