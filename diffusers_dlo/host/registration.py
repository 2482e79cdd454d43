# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns page-locked registrations of host memory: made through the platform, taken back on close, rolled back when one of
several fails. Must not own the memory itself.
"""

from __future__ import annotations

import mmap

import torch

from ..device.platform import Platform


class Registrations:
    """The ranges of host memory that this rank has page-locked for DMA."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._addresses: list[int] = []

    def add(self, memory: torch.Tensor) -> None:
        """
        Page-locks the pages that hold `memory`. Pages must not be added twice.

        Raises:
            `RuntimeError`: the driver refused, with its reason; nothing of this call stays registered.
        """
        start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(memory.data_ptr() + memory.numel()) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._platform.register_host_memory(start, stop - start)
        self._addresses.append(start)

    def close(self) -> None:
        """Takes back every registration. Idempotent."""
        while self._addresses:
            self._platform.unregister_host_memory(self._addresses.pop())
