# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Different requests on different ranks at the same time: `generate_concurrently` in a script that all ranks run, and
`WaveExecutor` for a program that drives ranks of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .generate import ConcurrentGenerationError, generate_concurrently
from .wave import WaveError, WaveTimeoutError, WorkerError


if TYPE_CHECKING:
    from .executor import WaveExecutor

__all__ = [
    "ConcurrentGenerationError",
    "WaveError",
    "WaveExecutor",
    "WaveTimeoutError",
    "WorkerError",
    "generate_concurrently",
]


def __getattr__(name: str) -> Any:
    # A worker process runs a module of this package, which must not have been imported before.
    if name == "WaveExecutor":
        from .executor import WaveExecutor

        return WaveExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
