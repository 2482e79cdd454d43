# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns when weights begin to stay on the device, how much of them with `device_budget="auto"`, and when they leave: as
all ranks agree. Must not decide which blocks stay.

[Note: Auto]
    The first complete forward streams everything. What it leaves free at its peak, less a margin, is this rank's
    budget. Where ranks gather, laps follow from what stays whole, so all take the smallest budget of the group, in
    rounds ([Note: Rendezvous]): once all have said theirs, each allocates and says whether it could; once all could,
    it counts. Blocks come to where they stay as they are fetched for the next pass, with no more copied than without.
    When a device is out of memory, what stays leaves in the same way, on all ranks. The main thread may wish that
    at any point of a round, so it is kept apart from the step, which only rounds change.

    Several offloads may measure before any of them allocates. Each leaves free what the others have measured for
    themselves and are still to take, and the highest peak of any.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .device.interface import Platform
from .residency import device_margin


class Step(enum.Enum):
    """How far it has come. `RETURNING` is only said: that a rank wishes it."""

    MEASURING = "measuring"
    MEASURED = "measured"
    ALLOCATED = "allocated"
    REFUSED = "refused"
    KEPT = "kept"
    RETURNING = "returning"
    OFF = "off"


class ResidentAgreement:
    """
    What stays of one offload, as far as one rank knows ([Note: Auto]).

    Args:
        platform (`Platform`): the device.
        allocate (`Callable[[int], bool]`): allocates for a budget in bytes; whether there was room.
        keep (`Callable[[], None]`): has what was allocated stay.
        drop (`Callable[[], None]`): lets go of what was allocated, or stays.
        step (`Step`): where it begins.
        most_nbytes (`int`): more could not be used.
    """

    def __init__(
        self,
        platform: Platform,
        allocate: Callable[[int], bool],
        keep: Callable[[], None],
        drop: Callable[[], None],
        step: Step,
        most_nbytes: int = 1 << 62,
    ) -> None:
        self.step = step
        self.nbytes = 0
        self.peak_nbytes = 0
        self._wants_return = False
        self._lock = threading.RLock()
        self._most_nbytes = most_nbytes
        _agreements.add(self)
        self._platform = platform
        self._allocate = allocate
        self._keep = keep
        self._drop = drop

    def begin(self) -> None:
        """A forward begins."""
        if self.step is Step.MEASURING:
            self._platform.watch_peak()

    def end(self) -> None:
        """A forward is complete."""
        if self.step is not Step.MEASURING:
            return
        self._platform.synchronize()
        left = self._platform.memory_left()
        margin = device_margin(self._platform.memory_total)
        self.peak_nbytes = self._platform.peak_above_now()
        there = [other for other in list(_agreements) if other.step is not Step.OFF]
        taken = sum(other.nbytes for other in there if other.step is Step.MEASURED)
        nbytes = (left or 0) - taken - max(other.peak_nbytes for other in there) - margin
        with self._lock:  # a round may have ended it meanwhile
            if self.step is Step.MEASURING:
                self.nbytes = max(min(nbytes, self._most_nbytes), 0)
                self.step = Step.MEASURED

    def settle(self) -> None:
        """Nobody else has to agree."""
        if self._wants_return:
            self._return()
        elif self.step is Step.MEASURED:
            self._take(self.nbytes)
            self._conclude(self.step is Step.ALLOCATED)

    def give_back(self) -> bool:
        """
        The memory is needed for something else. Whether there is anything to give back. While it is still measured
        there is not, and a forward that was too large says nothing of the next one.
        """
        if self._wants_return or self.step in (Step.OFF, Step.MEASURING):
            return False
        self._wants_return = True
        return self.step in (Step.KEPT, Step.ALLOCATED)

    def stop(self) -> None:
        """Nothing stays any more, nor will."""
        self.step, self._wants_return = Step.OFF, False

    # In rounds

    def say(self) -> list[Any]:
        """What this rank says."""
        return [(Step.RETURNING if self._wants_return else self.step).value, self.nbytes]

    def hear(self, said: list[list[Any] | None]) -> None:
        """What all ranks said, by rank; None from one that computes the components no more."""
        steps = [Step(reply[0]) if reply is not None else None for reply in said]
        with self._lock:
            self._decide(said, steps)

    def _decide(self, said: list[list[Any] | None], steps: list[Step | None]) -> None:
        if Step.RETURNING in steps:
            self._return()
        elif all(step is Step.MEASURED for step in steps):
            self._take(min(reply[1] for reply in said if reply is not None))
        elif all(step in (Step.ALLOCATED, Step.REFUSED) for step in steps):
            self._conclude(all(step is Step.ALLOCATED for step in steps))

    def _take(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.step = Step.ALLOCATED if self._allocate(nbytes) else Step.REFUSED

    def _conclude(self, everywhere: bool) -> None:
        if everywhere:
            self.step = Step.KEPT
            self._keep()
        else:
            self._return()

    def _return(self) -> None:
        self.step, self._wants_return = Step.OFF, False
        self._drop()


_agreements: weakref.WeakSet[ResidentAgreement] = weakref.WeakSet()
"""All of this process, which has one device."""
