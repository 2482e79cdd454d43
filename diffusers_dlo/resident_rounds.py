# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whose residents the ranks agree on in rounds, and until when. Must not decide what stays
(`resident_agreement.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol


class AgreedResidents(Protocol):
    """What stays on the device, where that is agreed in rounds."""

    def say(self) -> list[Any]:
        """What this rank says in a round."""

    def hear(self, said: list[list[Any] | None]) -> None:
        """What all ranks said, by rank. No lap is open."""

    def stop(self) -> None:
        """There are no rounds any more, and nothing stays."""


class ResidentRounds:
    """The residents that are agreed in rounds, each for as long as one of its components is there."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[AgreedResidents, frozenset[str]]] = {}
        "by the name of the first component, which is the same on all ranks; with the names of all of them"

    def add(self, components: Sequence[str], residents: AgreedResidents) -> None:
        """From now on ranks agree on the `residents` of these components."""
        self._entries[components[0]] = residents, frozenset(components)

    def keep_only(self, components: Iterable[str]) -> None:
        """Ends what belongs to none of these components."""
        there: Collection[str] = set(components)
        for key in [key for key, (_, names) in self._entries.items() if names.isdisjoint(there)]:
            residents, _ = self._entries.pop(key)
            residents.stop()

    def say(self) -> dict[str, list[Any]]:
        """What this rank says in a round."""
        return {key: residents.say() for key, (residents, _) in self._entries.items()}

    def hear(self, said: Sequence[Mapping[str, list[Any]]]) -> None:
        """What all ranks said, by rank. No lap is open."""
        for key, (residents, _) in list(self._entries.items()):
            residents.hear([reply.get(key) for reply in said])
