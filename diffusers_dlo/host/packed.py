# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the packed store: one shared-memory file per host that holds every image (of an image that partly lies in files,
the rest), written by all its ranks, mapped by each. Must not outlive its mappings: the file has no name, so nothing is
left behind whoever dies.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from diffusers.utils import logging

from ..device.interface import Platform
from ..offload_plan import OffloadPlan
from .registration import Registrations
from .store import Extent, HostStore, apart, copy_range, tensor_view


logger = logging.get_logger(__name__)

_MADV_POPULATE_WRITE = 23
"""`madvise` advice of Linux 5.14 and later, which the standard library does not name yet."""


def _align_page(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def image_offsets(plan: OffloadPlan) -> tuple[list[int], int]:
    """Where each unit's part begins in the file, on a page of its own, and the size of the file; bytes."""
    offsets, end = [], 0
    for _, unit in plan.units:
        offsets.append(end)
        end += _align_page(unit.memory_nbytes(plan.group_size))
    return offsets, end


class PackedStore(HostStore):
    """
    One copy of all weights per host. Images follow each other in the plan's order, each on its own page, so a rank can
    page-lock exactly what it copies; on devices that cannot have that, nothing is ([Note: Pinned ring]). Each rank
    reserves the shards it will copy: a lack of memory is then an error here and not a bus error later, and on machines
    with several memory nodes a shard lies near the rank that reads it.

    Args:
        fd (`int`, *optional*): the shared file; the store takes it over. None where nothing is to be kept in memory.

    Raises:
        `RuntimeError`: the memory is not to be had, or the driver does not page-lock it.
    """

    def __init__(self, plan: OffloadPlan, rank: int, platform: Platform, fd: int | None) -> None:
        super().__init__(plan, rank)
        self._fd = fd
        self._registers = platform.registers_host_memory
        self._registrations = Registrations(platform)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._private: mmap.mmap | None = None
        self._pageable = False
        self._offsets, nbytes = image_offsets(plan)
        try:
            if nbytes:
                assert fd is not None
                self._open(fd, nbytes)
        except BaseException:
            self.close()
            raise

    def _open(self, fd: int, nbytes: int) -> None:
        try:
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            raise RuntimeError(f"Cannot map {nbytes} bytes of shared memory ({error.strerror}).") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a wish: DMA from large pages needs fewer translations
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        for unit in range(len(self.layouts)):
            self._reserve(mapping, unit)
        units = range(len(self.layouts))
        self._lock_memory(extent.source for unit in units for extent in self._memory_extents(unit))

    @property
    def kind(self) -> str:
        return "packed"

    @property
    def is_page_locked(self) -> bool:
        return self._registers and not self._pageable

    @property
    def private_nbytes(self) -> int:
        return 0

    @property
    def shared_nbytes(self) -> int:
        return self._memory.numel()

    def extents(self, unit: int) -> list[Extent]:
        return self._memory_extents(unit)

    def whole_extents(self, unit: int) -> list[Extent]:
        copies_whole, self.copies_whole[unit] = self.copies_whole[unit], True
        try:
            self._lock_memory(extent.source for extent in self.extents(unit))
            return self.extents(unit)
        finally:
            self.copies_whole[unit] = copies_whole

    def copy_whole(self, unit: int) -> None:
        super().copy_whole(unit)
        if self._pageable:
            return
        try:
            self._lock_memory(extent.source for extent in self.extents(unit))
        except RuntimeError as error:
            self._pageable = True
            logger.warning(f"What other ranks used to copy comes from pageable memory, which is slower ({error})")

    def _lock_memory(self, memories: Iterable[torch.Tensor]) -> None:
        """Page-locks `memories`, for devices that can have that."""
        if self._registers:
            self._registrations.add(memories)

    def _memory_extents(self, unit: int) -> list[Extent]:
        base, _ = bounds = self.copied_bounds(unit)
        low, high = self._in_memory(unit, bounds)
        found = []
        for source in self._registrations.split(self._part(unit, low, high)) if low < high else ():
            found.append(Extent(low - base, source))
            low += source.numel()
        return found

    def view(self, unit: int, tensor: int) -> torch.Tensor | None:
        place = self.layouts[unit].tensors[tensor]
        memory = self._part(unit, place.offset, place.offset + place.nbytes)
        return tensor_view(apart(memory), place, base=place.offset)

    def private_view(self, unit: int, tensor: int) -> torch.Tensor | None:
        if self._private is None:
            # Copy-on-write: ranks go on sharing the pages that none of them writes to. One mapping for all images,
            # since each takes a file descriptor.
            assert self._fd is not None
            self._private = mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        place = self.layouts[unit].tensors[tensor]
        offset = self._offsets[unit] + place.offset - self.layouts[unit].memory_offset
        image = torch.frombuffer(self._private, dtype=torch.uint8, offset=offset, count=place.nbytes)
        return tensor_view(image, place, base=place.offset)

    def writes(self, unit: int) -> bool:
        return self.layouts[unit].memory_nbytes(self.plan.group_size) > 0

    def write(self, unit: int, tensors: Sequence[torch.Tensor]) -> None:
        low, high = self._in_memory(unit, self.shard_bounds(unit))
        if low < high:
            copy_range(self.layouts[unit], tensors, low, self._part(unit, low, high))

    def close(self) -> None:
        self._registrations.close()
        self._private = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _reserve(self, mapping: mmap.mmap, unit: int) -> None:
        """Has this rank's shard of a unit in memory, as an error where there is none left."""
        low, high = self._in_memory(unit, self.shard_bounds(unit))
        if sys.platform != "linux" or low >= high:
            return  # not Linux: one rank, and memory comes as it is written to
        start, nbytes = self._offsets[unit] + low - self.layouts[unit].memory_offset, high - low
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, page, start + nbytes - page)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._refuse(error)
            try:
                assert self._fd is not None
                os.posix_fallocate(self._fd, start, nbytes)  # kernels before 5.14; in small pages
            except OSError as older:
                self._refuse(older)

    def _refuse(self, error: OSError) -> NoReturn:
        share = self._memory.numel() / self.plan.group_size / 2**30
        raise RuntimeError(
            f"Cannot reserve {share:.2f} GiB of shared memory on rank {self.rank} for the packed weights "
            f"({error.strerror}). Free host memory or raise the container's limit."
        ) from error

    def _in_memory(self, unit: int, bounds: tuple[int, int]) -> tuple[int, int]:
        """What of bytes `bounds` of a unit's image is in memory."""
        layout = self.layouts[unit]
        end = layout.memory_offset + layout.memory_nbytes(self.plan.group_size)
        return max(bounds[0], layout.memory_offset), min(bounds[1], end)

    def _part(self, unit: int, low: int, high: int) -> torch.Tensor:
        """Bytes `[low, high)` of a unit's image, which are in memory."""
        start = self._offsets[unit] - self.layouts[unit].memory_offset
        return self._memory[start + low : start + high]
