# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how an error of one rank is told to the others, and raised there under the same type. Must not send it.
"""

from __future__ import annotations

from collections.abc import Sequence


_ERRORS = {cls.__name__: cls for cls in (ValueError, TypeError, RuntimeError, NotImplementedError, MemoryError)}


def describe_error(error: BaseException | None) -> list[str] | None:
    """An error as it is told to other ranks: its type and text."""
    return None if error is None else [type(error).__name__, str(error)[:4000] or type(error).__name__]


def raise_agreed(own: BaseException | None, errors: Sequence[list[str] | None]) -> None:
    """Raises this rank's own error, or else that of the first rank that has one, under the same type."""
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error is not None:
            raise _ERRORS.get(error[0], RuntimeError)(f"rank {rank} failed: {error[1]}")
