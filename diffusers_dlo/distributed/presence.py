# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how long the other ranks wait for this one before they compute without it. Must not wait: its owner does, and
calls it under its lock.

[Note: Grace]
    A rank that is only a little late should be waited for, or it runs a pass behind the others until the end; one that
    does something else should not be, or all lose that time. Nobody can tell one from the other, so waiting may cost a
    fifth of a pass, or a few times what this rank was late before, but never more than the grace. Where there is no
    such experience yet, it is waited for in full.
"""

from __future__ import annotations

import time
from collections import deque


_PART_OF_PASS = 0.2
_TIMES_LATE = 4.0
_LEAST = 0.05
"""The part of the grace that is always waited."""
_FIRST = 3
"""Passes after which there is experience."""


class Presence:
    """
    Whether a rank is expected in the next pass, and for how long.

    Attributes:
        expected (`bool`): it computed the last pass, or has just joined.
    """

    def __init__(self) -> None:
        self.expected = True
        self._late: deque[float] = deque(maxlen=8)
        self._granted = time.monotonic()
        self._period = 0.0

    def patience(self, grace: float) -> float:
        """Seconds to wait for the main thread, see [Note: Grace]."""
        if not self.expected:
            return 0.0
        if len(self._late) < _FIRST:
            return grace
        return min(grace, max(_LEAST * grace, _PART_OF_PASS * self._period, _TIMES_LATE * max(self._late)))

    def came(self, seconds: float) -> None:
        """The main thread asked, after it had been waited for `seconds`."""
        self._late.append(seconds)

    def pass_begins(self, expected: bool) -> None:
        """A pass begins; whether this rank is expected in the next one."""
        self._period, self._granted = time.monotonic() - self._granted, time.monotonic()
        self.expected = expected

    def stop_expecting(self) -> None:
        """The rank is not expected in the next pass."""
        self.expected = False

    def begin_anew(self) -> None:
        """All ranks begin something together, as far as is known."""
        self.expected = True
        self._late.clear()
