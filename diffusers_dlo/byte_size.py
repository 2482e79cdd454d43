# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns amounts of memory as people write and read them. Must not know what they are amounts of."""

from __future__ import annotations

import math
import re


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, name: str) -> int:
    """
    An amount of memory in bytes, from a number of bytes or text such as `"40GiB"` or `"512 MB"`.

    Args:
        value (`int` or `str`): binary (KiB, MiB, GiB, TiB) or decimal (kB, MB, GB, TB) units, in any case.
        name (`str`): what it is, for messages.

    Raises:
        `TypeError`: neither a number nor text. `ValueError`: not an amount, or a negative one.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"'{name}' must not be negative, got {value}.")
        return value
    if not isinstance(value, str):
        raise TypeError(f"'{name}' must be a whole number of bytes or text such as '40GiB', got {value!r}.")
    match = _AMOUNT.fullmatch(value)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None or not math.isfinite(float(match[1])):
        raise ValueError(
            f"'{name}' must be an amount of memory, got {value!r}; write a number and one of KiB, MiB, GiB, TiB, kB, "
            "MB, GB, TB: '40GiB'."
        )
    return int(float(match[1]) * factor)


def format_bytes(nbytes: float) -> str:
    """`nbytes` for people: binary units, three digits."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    unit = units[0]
    if unit == "B" or nbytes >= 99.95:
        return f"{nbytes:,.0f} {unit}"
    return f"{nbytes:.3g} {unit}"
