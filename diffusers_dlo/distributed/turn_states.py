# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the states of a turn are called: who fetches, and what the service thread does next. Must not hold a state.
"""

from __future__ import annotations

import enum


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
