# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whether passes are over, and why. Must not end anything: whoever is told so raises, or returns.
"""

from __future__ import annotations

import threading

from ..interrupts import interrupts
from .control import POLL_SECONDS, GroupLost, RankLost


class Ending:
    """
    What ends the passes of a rank: a failure, whose consequences are looked at before the main thread hears of it, or
    the rank's own leaving.

    Args:
        rank (`int`): this rank, for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._state = threading.Condition(threading.RLock())
        self._stopping = False
        self._failure: RankLost | None = None
        self._end: RankLost | None = None
        "the failure, once it is known what it has done to this rank"
        self._alarm = False

    @property
    def failed(self) -> bool:
        """Whether passes are over for another reason than that this rank leaves."""
        return self._failure is not None

    def check(self) -> None:
        """
        Raises:
            `RankLost`: there are no passes any more.
        """
        if self._failure is not None:
            with interrupts, self._state:  # what was computed has to be looked at before anybody goes on
                while self._end is None and not self._stopping:
                    self._state.wait(POLL_SECONDS)
                    interrupts.deliver()
            self._alarm = False
            raise self._end or self._failure
        if self._stopping:
            raise GroupLost(f"rank {self._rank} has left the group.")

    def check_failure(self) -> None:
        """Raises the failure, if there is one, whatever it has done; also where the thread is to end."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise GroupLost(f"rank {self._rank} has left the group.")

    def fail(self, error: RankLost) -> RankLost | None:
        """Passes are over. The first reason, which stays; None if this rank was about to leave."""
        with interrupts, self._state:
            if self._stopping:
                return None
            self._failure = self._failure or error
            self._state.notify_all()
            return self._failure

    def settle(self, error: RankLost, alarm: bool) -> None:
        """What the main thread meets from now on, and with `alarm` before it goes back to the caller."""
        with self._state:
            self._end, self._alarm = error, alarm
            self._state.notify_all()

    def raise_alarm(self) -> None:
        """Raises the end of passes if it must not go unheard until the next call."""
        if self._alarm and self._end is not None:
            self._alarm = False
            raise self._end

    def await_failure(self, seconds: float) -> None:
        """Waits for the service thread to notice a loss, if it does."""
        with interrupts, self._state:
            self._state.wait_for(lambda: self._failure is not None, seconds)

    def stop(self) -> None:
        """The service is to end."""
        with interrupts, self._state:
            self._stopping = True
            self._state.notify_all()
