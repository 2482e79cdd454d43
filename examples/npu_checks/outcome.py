# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns how the check of a row can end, on one rank and on all together. Must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Failed(Exception):
    """The assumption does not hold; the message says what was seen."""


class Skipped(Exception):
    """The assumption cannot be checked here; the message says why."""


@dataclass(frozen=True)
class Finding:
    """What was seen where an assumption holds: in words, and in numbers."""

    text: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """
    How a row ended.

    Attributes:
        status (`str`): `"passed"`, `"failed"` or `"skipped"`.
        text (`str`): what was measured, or the reason.
        figures (`Mapping[str, Any]`): the numbers behind it.
        seconds (`float`): how long it took.
        is_stuck (`bool`): whether the rank is not able to go on.
    """

    status: str
    text: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    is_stuck: bool = False

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def combine(results: Mapping[int, Result], size: int) -> Result:
    """What a row came to on `size` ranks; one that said nothing has failed."""
    silent = {
        rank: Result(FAILED, "gave no answer: it has ended, or is stopped", is_stuck=True)
        for rank in range(size)
        if rank not in results
    }
    every = {**results, **silent}
    seconds = max(result.seconds for result in every.values())
    is_stuck = any(result.is_stuck for result in every.values())
    for status in (FAILED, SKIPPED):
        reasons = {rank: result.text for rank, result in sorted(every.items()) if result.status == status}
        if reasons:
            same = len(set(reasons.values())) == 1 and len(reasons) == size
            text = every[0].text if same else "; ".join(f"rank {rank}: {text}" for rank, text in reasons.items())
            return Result(status, text, every[0].figures, seconds, is_stuck)
    return Result(PASSED, every[0].text, every[0].figures, seconds, is_stuck)
