# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the packed store: one shared-memory file per host that holds every image, written by all its ranks, mapped by
each. Must not outlive its mappings: the file has no name, so nothing is left behind whoever dies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from ..device.platform import Platform
from ..offload_plan import OffloadPlan
from .registration import Registrations
from .store import Extent, HostStore, copy_range


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
    A file descriptor of nameless shared memory of `nbytes`, reserved in full now, so that a lack of memory is an error
    here and not a bus error later. Where the system has no memfd, an unlinked temporary file.

    Raises:
        `RuntimeError`: the memory is not to be had.
    """
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("diffusers_dlo", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise RuntimeError(
            f"Cannot reserve {nbytes / 2**30:.2f} GiB of shared memory for the packed weights ({error.strerror}). "
            "Free host memory or raise the container's limit."
        ) from error
    return fd


class PackedStore(HostStore):
    """
    One copy of all weights per host. Images follow each other in the plan's order, each on its own page, so a rank can
    page-lock exactly what it copies.

    Args:
        fd (`int`): the shared file; the store takes it over.
    """

    kind = "packed"

    def __init__(self, plan: OffloadPlan, rank: int, platform: Platform, fd: int) -> None:
        super().__init__(plan, rank)
        self._fd: int | None = fd
        self._registrations = Registrations(platform)
        try:
            self._offsets, nbytes = image_offsets(plan)
            self._memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
            self._private: mmap.mmap | None = None
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
            # Copy-on-write: ranks go on sharing the pages that none of them writes to.
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

    def _part(self, unit: int, whole: bool) -> torch.Tensor:
        layout, start = self.layouts[unit], self._offsets[unit]
        if whole:
            return self._memory[start : start + layout.padded_nbytes(1)]
        shard = layout.shard_nbytes(self.plan.group_size)
        return self._memory[start + self.rank * shard : start + (self.rank + 1) * shard]
