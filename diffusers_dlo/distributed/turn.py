# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whose turn it is: what the main thread wants, what it was granted, and who drives the open lap, all under one
lock. Must not talk to other ranks: the service thread does ([Note: Ghost service]).
"""

from __future__ import annotations

import enum
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..interrupts import DeferredInterrupts
from .control import LATE_SECONDS, POLL_SECONDS, GroupLost, RankLost, logger


class Owner(enum.Enum):
    """Who fetches: nobody where no lap is open."""

    NOBODY = enum.auto()
    MAIN = enum.auto()
    SERVICE = enum.auto()


class Step(enum.Enum):
    """What the service thread does next."""

    STOP = enum.auto()
    PAUSE = enum.auto()
    WAIT = enum.auto()
    ROUND = enum.auto()


@dataclass(frozen=True)
class PassOptions:
    """Of a configuration, what passes depend on; see `DistributedLayerwiseOffloadConfig`."""

    timeout: float
    grace: float
    uneven: str


class Turn:
    """
    The state that the main thread of a rank and its service thread share.

    Args:
        rank (`int`): this rank, for messages.
        options (`PassOptions`): how patient it is.
        wake (`Callable[[], None]`): ends the service thread's wait for other ranks.
        describe (`Callable[[Iterable[int]], str]`): names ranks, for messages.
    """

    def __init__(
        self,
        rank: int,
        options: PassOptions,
        wake: Callable[[], None],
        describe: Callable[[Iterable[int]], str],
    ) -> None:
        self.options = options
        self.interrupts = DeferredInterrupts()
        self._rank = rank
        self._wake = wake
        self._describe = describe
        self._state = threading.Condition(threading.RLock())
        self._owner = Owner.NOBODY
        self._asked: dict[str, Any] | None = None
        self._refusal: str | None = None
        self._driving = 0
        self._driver: int | None = None
        self._touched = time.monotonic()
        self._present = True
        self._goodbye = self._goodbye_said = False
        self.leaving = False
        self._joined = self._seen = 0
        "rounds in which all ranks said BYE, and those that `join` has told its caller of"
        self._paused = self._pause_then = False
        self._stopping = False
        self._last_round = time.monotonic()
        self._not_joined: list[int] = []
        self._failure: RankLost | None = None
        self._end: RankLost | None = None
        "the failure, once it is known what it has done to this rank"
        self._forked = False
        _turns.add(self)

    def disarm(self) -> None:
        """This is a forked child: it has no service thread, and whoever held the lock is not here."""
        self._forked = True
        self._state = threading.Condition(threading.RLock())

    # What the main thread calls

    @contextmanager
    def driving(self) -> Iterator[None]:
        """The main thread is in the engine: its lap is not taken from it, nor is it interrupted but at waits."""
        if self._forked:
            raise RuntimeError(
                f"rank {self._rank}: a forked child of this process called a streamed model. It is not a rank; use "
                "the model in the process that enabled the offload."
            )
        with self.interrupts:
            with self._state:
                self._driving += 1
                self._driver = threading.get_ident()
            try:
                yield
            finally:
                with self._state:
                    self._driving -= 1
                    self._touched = time.monotonic()

    @property
    def owns_lap(self) -> bool:
        """Whether the main thread may fetch."""
        return self._owner is Owner.MAIN

    def check(self) -> None:
        """
        Raises:
            `RankLost`: there are no passes any more.
        """
        if self._failure is not None:
            with self._state:  # what was computed has to be looked at before anybody goes on
                self._state.wait_for(lambda: self._end is not None or self._stopping)
            raise self._end or self._failure
        if self._stopping:
            raise GroupLost(f"rank {self._rank} has left the group.")

    def request(self, asked: dict[str, Any]) -> None:
        """
        Asks for a pass until it is granted; then the main thread owns the lap. `asked` names the `component`.

        Raises:
            `RuntimeError`: it was refused, on all ranks that asked for this component. `RankLost`: see `check`.
        """
        with self._state:
            self.check()
            self.hand_back()
            self._asked, self._refusal = asked, None
            self._goodbye = False  # of an earlier, interrupted join
            self._seen = self._joined
            self._notify()
            try:
                self._wait(lambda: self._asked is None)
            finally:
                self._asked = None
            if self._refusal is not None:
                raise RuntimeError(self._refusal)

    def hand_back(self) -> None:
        """The main thread fetches no more of the open lap."""
        with self._state:
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
        with self._state:
            self.check()
            self.hand_back()
            if self._joined == self._seen or pause or leaving:  # else an interrupted one has been completed since
                before, start = self._joined, time.monotonic()
                self._pause_then, self.leaving, self._last_round = pause, leaving, start
                self._goodbye, self._goodbye_said = True, False
                self._notify()
                try:
                    self._wait(lambda: self._joined > before, lambda: self._check_joining(start))
                finally:
                    self._pause_then = self.leaving = False
            self._seen = self._joined

    def say_goodbye(self) -> None:
        """As `join`, and goes on at once. May be called from any thread."""
        with self._state:
            self._goodbye, self._goodbye_said = True, False
            self._notify()

    def resume(self) -> None:
        """Ends the pause of a `join`."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    def await_failure(self, seconds: float) -> None:
        """Waits for the service thread to notice a loss, if it does."""
        with self._state:
            self._state.wait_for(lambda: self._failure is not None, seconds)

    def _notify(self) -> None:
        self._wake()
        self._state.notify_all()

    def _wait(self, until: Callable[[], bool], check: Callable[[], None] | None = None) -> None:
        """Waits, under the lock, which it lets go of meanwhile."""
        while not until():
            self.check()
            if check is not None:
                check()
            self._state.wait(POLL_SECONDS)
            self.interrupts.deliver()

    def _check_joining(self, start: float) -> None:
        now = time.monotonic()
        if now - self._last_round > self.options.timeout and self._owner is Owner.NOBODY:
            raise GroupLost(
                f"rank {self._rank} waited {now - self._last_round:.0f} s in 'join' for "
                f"{self._describe(self._not_joined)}, which neither computed nor joined. Look for its traceback, or "
                "raise 'timeout' if it is only slow."
            )
        if self.leaving and LATE_SECONDS < now - start <= LATE_SECONDS + POLL_SECONDS:
            logger.warning(
                f"rank {self._rank} is done, and stays to transfer its shards for {self._describe(self._not_joined)}"
            )

    # What the service thread calls

    def next_step(self, heard: bool) -> Step:
        """What to do; `heard` is whether another rank has said something."""
        with self._state:
            self.check_failure()
            if self._stopping:
                return Step.STOP
            if self._paused:
                self._state.wait(POLL_SECONDS)
                return Step.PAUSE
            if heard or self._asked is not None or (self._goodbye and not self._goodbye_said):
                return Step.ROUND
            return Step.WAIT

    def answer(self, check: Callable[[], None]) -> tuple[dict[str, Any] | None, str | None]:
        """
        What this rank asks for, and what it says: after a grace for the main thread, if that is expected. None where
        the rank is leaving.
        """
        strict = self.options.uneven == "error"
        patience = float("inf") if strict else self.options.grace if self._present else 0.0
        deadline = time.monotonic() + patience
        with self._state:
            while self._asked is None and not self._goodbye and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._state.wait(min(left, POLL_SECONDS))
                self.check_failure()
                check()
            if self._stopping:
                return None, None
            if self._asked is not None:
                return self._asked, "run"
            if self._goodbye:
                self._goodbye_said = True
                return None, "bye"
            return None, "ghost"

    def round_made(self, not_joined: list[int]) -> None:
        """All ranks have answered; those in `not_joined` not with BYE."""
        with self._state:
            self._last_round, self._not_joined = time.monotonic(), not_joined

    def granted(self, asked: dict[str, Any] | None, component: str) -> bool:
        """A lap of `component` is open. Whether the main thread drives it: it had `asked` for that, and still does."""
        with self._state:
            mine = asked is not None and self._asked is asked and asked["component"] == component
            self._present = mine or self._asked is not None
            self._owner = Owner.MAIN if mine else Owner.SERVICE
            if mine:
                self._asked, self._touched = None, time.monotonic()
                self._state.notify_all()
            return mine

    def nobody_granted(self, asked: dict[str, Any] | None, refusal: str | None) -> None:
        """The round brought no pass; if what this rank had `asked` for was refused, the main thread hears why."""
        with self._state:
            self._present = False
            if refusal is not None and self._asked is asked:
                self._refusal, self._asked = refusal, None
                self._state.notify_all()

    def watch(
        self, check: Callable[[], None], is_driven: Callable[[float], bool], take_over: Callable[[], None]
    ) -> None:
        """Waits until the main thread does not drive its lap any more, for whatever reason."""
        with self._state:
            while self._owner is Owner.MAIN and not self._stopping:
                self._state.wait(POLL_SECONDS)
                self.check_failure()
                check()
                if self._owner is not Owner.MAIN or self._driving:
                    continue
                if not is_driven(time.monotonic() - self._touched):
                    take_over()
                    self._owner, self._present = Owner.SERVICE, False

    def lap_finished(self) -> None:
        """No lap is open."""
        with self._state:
            self._owner = Owner.NOBODY
            self._state.notify_all()

    def all_joined(self, nothing_left: bool) -> None:
        """All ranks said BYE; with `nothing_left`, the service ends."""
        with self._state:
            self._stopping |= nothing_left
            self._goodbye = self._goodbye_said = False
            self._present = True  # what follows a join is begun by all
            self._paused |= self._pause_then
            self._joined += 1
            self._state.notify_all()

    # What both call

    def check_failure(self) -> None:
        """Raises the failure, if there is one, whatever it has done."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: RankLost) -> RankLost | None:
        """Passes are over. The first reason, which stays; None if this rank was about to leave."""
        with self._state:
            if self._stopping:
                return None
            self._failure = self._failure or error
            self._state.notify_all()
            return self._failure

    def end(self, error: RankLost) -> int | None:
        """
        What the main thread meets from now on. If it is outside of the engine and has been inside, its thread's
        number.
        """
        with self._state:
            self._end = error
            self._owner = Owner.NOBODY
            self._state.notify_all()
            return None if self._driving else self._driver

    def stop(self) -> None:
        """The service is to end."""
        with self._state:
            self._stopping = True
            self._state.notify_all()


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()


def _disarm_all() -> None:
    for turn in _turns:
        turn.disarm()


os.register_at_fork(after_in_child=_disarm_all)
