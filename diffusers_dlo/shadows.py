# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what stands in for methods of single objects while they are offloaded, and taking it back. Must not know what is
refused, or why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Shadows:
    """
    Attributes of instances, which are found before the methods of their classes; classes stay as they are. All are
    taken back together.
    """

    def __init__(self) -> None:
        # Held weakly: what the user drops has to be free to go.
        self._shadows: list[tuple[weakref.ref, str, weakref.ref, Any]] = []

    def put(self, owner: Any, name: str, replacement: Callable) -> None:
        """Has `replacement` be called in the place of a method."""
        previous = vars(owner).get(name)
        object.__setattr__(owner, name, replacement)
        self._shadows.append((weakref.ref(owner), name, weakref.ref(replacement), previous))

    def remove(self) -> None:
        """Takes all back, but for those that somebody has exchanged since. Idempotent."""
        while self._shadows:
            find_owner, name, find_shadow, previous = self._shadows.pop()
            owner, shadow = find_owner(), find_shadow()
            if owner is None or shadow is None or vars(owner).get(name) is not shadow:
                continue
            if previous is None or _is_over(previous):
                del vars(owner)[name]
            else:
                object.__setattr__(owner, name, previous)


def _is_over(method: Any) -> bool:
    """Whether what stood in for a method, before this did, was taken back meanwhile."""
    return any(getattr(one, "is_over", False) for one in (method, getattr(method, "__self__", None)))


def refusal(what: str, name: str, reason: str) -> Callable:
    """A method that raises, saying what is refused while `what` streams, and why."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"'{name}' is refused while {what} is under distributed layerwise offload: {reason}.")

    return refuse
