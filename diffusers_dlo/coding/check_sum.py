# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the check sum by which coded shards are known again on the device that will decode them. Must not wait for it.

[Note: Check sums]
    A sum of all 32-bit words, each times an odd number of 64 bits that its place determines, modulo 2^64, and the
    number of bytes. It is the same on every device, since integers add up exactly in any order, and one changed word
    always changes it. It finds damage, and no forgery: whoever writes a checkpoint can write its sums too.
"""

from __future__ import annotations

import torch


_ROW = 1 << 18
"""Words that one row of numbers is for."""
_ROWS = 16
"""Rows that are added up at a time: what is taken in memory meanwhile follows from it."""
_MASK = (1 << 64) - 1


class CheckSums:
    """
    Makes check sums on one device ([Note: Check sums]).

    Args:
        device (`torch.device`): where the data is.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = _odd_numbers(_ROW, 1, device)

    def queue(self, data: torch.Tensor) -> torch.Tensor:
        """The check sum of `data`, `(nbytes,)` of `uint8`, a multiple of 4: a tensor on its device, for `as_text`."""
        words = (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)
        total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
        factors = _odd_numbers(-(-words.numel() // _ROW), 2, data.device)
        full = words.numel() // _ROW * _ROW
        for start in range(0, full, _ROW * _ROWS):
            rows = words[start : min(start + _ROW * _ROWS, full)].view(-1, _ROW)
            first = start // _ROW
            sums = (rows.to(torch.int64) * self._numbers).sum(1)
            total += (sums * factors[first : first + rows.shape[0]]).sum()
        if full < words.numel():
            rest = words[full:]
            total += (rest.to(torch.int64) * self._numbers[: rest.numel()]).sum() * factors[-1]
        return total


def as_text(total: torch.Tensor) -> str:
    """A check sum as checkpoints hold it, 16 hexadecimal digits; waits for it."""
    return f"{int(total) & _MASK:016x}"


def _odd_numbers(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """`(count,)` odd 64-bit numbers that look random: the same for a seed everywhere."""
    mixed = torch.arange(count, dtype=torch.int64, device=device) * -7046029254386353131 + seed * 1442695040888963407
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) | 1
