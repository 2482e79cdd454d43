# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns page-locked registrations of host memory: made through the platform, taken back on close, rolled back when one of
several fails. Must not own the memory itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence

import torch

from ..device.interface import Platform


class Registrations:
    """
    The ranges of host memory that this rank has page-locked for DMA. Whole pages, and none twice: neighbours that
    share a page are one range.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._ranges: list[tuple[int, int]] = []
        "start and stop addresses, ascending"

    def add(self, memories: Iterable[torch.Tensor]) -> None:
        """
        Page-locks the pages that hold `memories`, but for those that are locked already.

        Raises:
            `RuntimeError`: the driver refused, with its reason; nothing of this call stays registered.
        """
        done: list[tuple[int, int]] = []
        try:
            for start, stop in self._missing(_page_ranges(memories)):
                self._platform.register_host_memory(start, stop - start)
                done.append((start, stop))
        except BaseException:
            for start, _ in reversed(done):
                self._platform.unregister_host_memory(start)
            raise
        self._ranges = sorted(self._ranges + done)

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """`memory` in pieces none of which crosses a border between two registered ranges: a copy may not."""
        start, nbytes = memory.data_ptr(), memory.numel()
        borders = {address for bounds in self._ranges for address in bounds if start < address < start + nbytes}
        cuts = [0, *(address - start for address in sorted(borders)), nbytes]
        return [memory[low:high] for low, high in zip(cuts, cuts[1:])]

    def close(self) -> None:
        """Takes back every registration. Idempotent."""
        while self._ranges:
            self._platform.unregister_host_memory(self._ranges.pop()[0])

    def _missing(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of `ranges` is not registered yet."""
        missing = []
        for start, stop in ranges:
            for low, high in self._ranges:
                if low < stop and high > start:
                    if start < low:
                        missing.append((start, low))
                    start = max(start, high)
            if start < stop:
                missing.append((start, stop))
        return missing


def _page_ranges(memories: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """The pages that hold `memories`, as start and stop addresses; those that share a page joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((m.data_ptr(), m.data_ptr() + m.numel()) for m in memories if m.numel()):
        start, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
