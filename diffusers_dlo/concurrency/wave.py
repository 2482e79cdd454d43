# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how a wave can fail, and what it says of that. Must not know how ranks are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerError:
    """
    What went wrong on one rank.

    Args:
        type (`str`): the name of the exception, or "WorkerDied", "MalformedReply" or "NoReply".
        message (`str`): its text.
        traceback (`str`): the worker's traceback, empty if it has none.
    """

    type: str
    message: str
    traceback: str = ""


class WaveError(RuntimeError):
    """
    Ranks of a wave failed. The message names each.

    Args:
        message (`str`): the text.
        errors (`Mapping[int, WorkerError]`): what went wrong, by rank.
        results (`Mapping[int, Any]`): what the other ranks returned.
    """

    def __init__(self, message: str, errors: Mapping[int, WorkerError], results: Mapping[int, Any]) -> None:
        super().__init__(message)
        self.errors = dict(errors)
        self.results = dict(results)


class WaveTimeoutError(WaveError, TimeoutError):
    """Ranks of a wave did not answer by its deadline, and none failed otherwise."""


def describe_wave(what: str, errors: Mapping[int, WorkerError], asked: int) -> str:
    """The message of a wave of `asked` ranks: what went wrong on each, and one traceback."""
    lines = [f"{what}: {len(errors)} of {asked} ranks failed."]
    for rank, error in sorted(errors.items()):
        told = f" {error.message}" if error.type in ("WorkerDied", "NoReply") else f": {error.type}: {error.message}"
        lines.append(f"  rank {rank}{told}".replace("\n", "\n    "))
    kinds = {error.type for error in errors.values()}
    if "WorkerDied" in kinds:
        lines.append("Look for what it printed. No further wave is possible: make a new WaveExecutor.")
    if "NoReply" in kinds:
        lines.append("What comes late is discarded. Raise the time limit for ranks that are only slow.")
    for rank, error in sorted(errors.items()):
        if error.traceback:
            return "\n".join([*lines, f"The traceback of rank {rank}:", error.traceback.rstrip()])
    return "\n".join(lines)
