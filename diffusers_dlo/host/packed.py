# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the packed store: one shared-memory file per host that holds every image, written by all its ranks, mapped by
each. Must not outlive its mappings: the file has no name, so nothing is left behind whoever dies.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

import torch

from ..device.platform import Platform
from ..offload_plan import OffloadPlan
from .registration import Registrations
from .store import Extent, HostStore, copy_range


_MADV_POPULATE_WRITE = 23
"""`madvise` advice of Linux 5.14 and later, which the standard library does not name yet."""


def _align_page(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def image_offsets(plan: OffloadPlan) -> tuple[list[int], int]:
    """Where each unit's image begins in the file, on a page of its own, and the size of the file; bytes."""
    offsets, end = [], 0
    for _, unit in plan.units:
        offsets.append(end)
        end += _align_page(unit.padded_nbytes(plan.group_size))
    return offsets, end


def create_shared_file(nbytes: int) -> int:
    """
    A file descriptor of nameless shared memory of `nbytes`, none of it reserved yet; else of an unlinked file.

    Raises:
        `RuntimeError`: the system refused.
    """
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("diffusers_dlo", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
    except OSError as error:
        raise RuntimeError(f"Cannot create a shared file for the packed weights ({error.strerror}).") from error
    os.ftruncate(fd, nbytes)
    return fd


class PackedStore(HostStore):
    """
    One copy of all weights per host. Images follow each other in the plan's order, each on its own page, so a rank can
    page-lock exactly what it copies. Each rank reserves the shards it will copy: a lack of memory is then an error
    here and not a bus error later, and on machines with several memory nodes a shard lies near the rank that reads it.

    Args:
        fd (`int`): the shared file; the store takes it over.

    Raises:
        `RuntimeError`: the memory is not to be had, or the driver does not page-lock it.
    """

    kind = "packed"

    def __init__(self, plan: OffloadPlan, rank: int, platform: Platform, fd: int) -> None:
        super().__init__(plan, rank)
        self._fd: int | None = fd
        self._registrations = Registrations(platform)
        try:
            self._offsets, nbytes = image_offsets(plan)
            mapping = mmap.mmap(fd, nbytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a wish: DMA from large pages needs fewer translations
                    mapping.madvise(mmap.MADV_HUGEPAGE)
            self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
            self._private: mmap.mmap | None = None
            for unit in range(len(self.layouts)):
                self._reserve(mapping, unit)
            for unit in range(len(self.layouts)):
                self._registrations.add(self._part(unit, self.whole[unit]))
        except BaseException:
            self.close()
            raise

    @property
    def private_nbytes(self) -> int:
        return 0

    @property
    def shared_nbytes(self) -> int:
        return self._memory.numel()

    def extents(self, unit: int) -> list[Extent]:
        return [Extent(0, self._part(unit, self.whole[unit]))]

    def image(self, unit: int) -> torch.Tensor:
        return self._part(unit, whole=True)

    def private_image(self, unit: int) -> torch.Tensor:
        if self._private is None:
            # Copy-on-write: ranks go on sharing the pages that none of them writes to. One mapping for all images,
            # since each takes a file descriptor.
            assert self._fd is not None
            self._private = mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        count = self.layouts[unit].padded_nbytes(1)
        return torch.frombuffer(self._private, dtype=torch.uint8, offset=self._offsets[unit], count=count)

    def write(self, unit: int, tensors: Sequence[torch.Tensor]) -> None:
        shard = self.layouts[unit].shard_nbytes(self.plan.group_size)
        copy_range(self.layouts[unit], tensors, self.rank * shard, self._part(unit, whole=False))

    def close(self) -> None:
        self._registrations.close()
        self._private = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _reserve(self, mapping: mmap.mmap, unit: int) -> None:
        """Has this rank's shard of a unit in memory, as an error where there is none left."""
        if sys.platform != "linux":
            return  # one rank, and memory comes as it is written to
        shard = self.layouts[unit].shard_nbytes(self.plan.group_size)
        start = self._offsets[unit] + self.rank * shard
        page = start // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, page, start + shard - page)
        except OSError as error:
            if error.errno != errno.EINVAL:
                self._refuse(error)
            try:
                assert self._fd is not None
                os.posix_fallocate(self._fd, start, shard)  # kernels before 5.14; in small pages
            except OSError as older:
                self._refuse(older)

    def _refuse(self, error: OSError) -> NoReturn:
        share = self._memory.numel() / self.plan.group_size / 2**30
        raise RuntimeError(
            f"Cannot reserve {share:.2f} GiB of shared memory on rank {self.rank} for the packed weights "
            f"({error.strerror}). Free host memory or raise the container's limit."
        ) from error

    def _part(self, unit: int, whole: bool) -> torch.Tensor:
        layout, start = self.layouts[unit], self._offsets[unit]
        if whole:
            return self._memory[start : start + layout.padded_nbytes(1)]
        shard = layout.shard_nbytes(self.plan.group_size)
        return self._memory[start + self.rank * shard : start + (self.rank + 1) * shard]
