# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the interface of a host store, and the copying of a module's tensors into images. Must not know of devices beyond
the platform it is handed for page-locking, nor of passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..block_layout import BlockLayout, TensorLayout
from ..casts import copy_bytes
from ..coding.codec import Codec
from ..coding.coded_block import CodedShard
from ..offload_plan import OffloadPlan
from ..tensor_utils import typed_view


class CodedSource(NamedTuple):
    """How a coded shard lies on the host: `pieces` are the parts that can be copied in one go, one after the other."""

    shard: CodedShard
    pieces: tuple[torch.Tensor, ...]


class Extent(NamedTuple):
    """
    A run of bytes that is contiguous on the host: `source` goes to `offset` of what is fetched, or what it is decoded
    to, where it is a coded shard (`coded`).
    """

    offset: int
    source: torch.Tensor
    coded: CodedSource | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is fetched."""
        return self.source.numel() if self.coded is None else self.coded.shard.nbytes


class HostStore(ABC):
    """
    The bytes of every unit (block or leaf) of a plan, by the unit's index in `plan.units`. All ranks of a group write
    their part of a unit (`write`) before anyone reads it.

    Args:
        plan (`OffloadPlan`): what is stored.
        rank (`int`): this rank's index in its group.
    """

    def __init__(self, plan: OffloadPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.layouts: list[BlockLayout] = [unit for _, unit in plan.units]
        self.copies_whole: list[bool] = [plan.whole_on_rank(component, unit) for component, unit in plan.units]

    @property
    @abstractmethod
    def kind(self) -> str:
        """Its name: `"coded"`, `"mapped"`, `"packed"`, `"pinned"`; joined by `+` where it is of several kinds."""

    @property
    def codec(self) -> Codec | None:
        """What decodes its coded extents, if it has any."""
        return None

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes that decoding takes, beside the buffers that coded shards arrive in."""
        return 0

    def check_sums(self) -> None:  # noqa: B027
        """
        Reads all that this rank copies of coded shards, and compares it with their check sums: once, before anything
        is decoded.

        Raises:
            `RuntimeError`: a shard is damaged, with its block and file.
        """

    @property
    def is_page_locked(self) -> bool:
        """Whether the device reads what this rank copies by DMA, as far as it is known."""
        return True

    @property
    @abstractmethod
    def private_nbytes(self) -> int:
        """Host bytes that belong to this rank alone."""

    @property
    @abstractmethod
    def shared_nbytes(self) -> int:
        """Host bytes that all ranks of the group share, counted once."""

    @property
    def files_nbytes(self) -> int:
        """Bytes of `shared_nbytes` that lie in files, and so in the page cache."""
        return 0

    def shard_bounds(self, unit: int) -> tuple[int, int]:
        """The bytes of a unit's image that are this rank's shard: where they begin and end."""
        nbytes = self.layouts[unit].shard_nbytes(self.plan.group_size)
        return self.rank * nbytes, (self.rank + 1) * nbytes

    def copied_bounds(self, unit: int) -> tuple[int, int]:
        """The bytes of a unit's image that this rank copies to the device: its shard, or the whole."""
        return (0, self.layouts[unit].padded_nbytes(1)) if self.copies_whole[unit] else self.shard_bounds(unit)

    def copy_whole(self, unit: int) -> None:
        """From now on this rank copies the whole of a unit, which it can read (`is_whole`)."""
        self.copies_whole[unit] = True

    def whole_extents(self, unit: int) -> list[Extent]:
        """
        As `extents`, of the whole of a unit, whatever this rank copies of it otherwise. Page-locks it.

        Raises:
            `RuntimeError`: the driver refused, or this rank has only a shard.
        """
        if not self.copies_whole[unit]:
            raise RuntimeError(f"'{self.layouts[unit].name}' is not whole on any one rank")
        return self.extents(unit)

    def prepare(self, unit: int) -> None:  # noqa: B027
        """
        Makes a leaf ready to be copied, which is called before each use of it: what only a first use needs is done
        then.
        """

    @abstractmethod
    def extents(self, unit: int) -> list[Extent]:
        """What this rank copies to the device for a unit: of its shard, or of the whole where the plan says so."""

    @abstractmethod
    def view(self, unit: int, tensor: int) -> torch.Tensor | None:
        """One tensor of a unit, for reading only; None where this rank has only a shard of the unit."""

    @abstractmethod
    def private_view(self, unit: int, tensor: int) -> torch.Tensor | None:
        """As `view`, but the caller may keep it after `close`, and only this rank sees what is written to it."""

    @abstractmethod
    def write(self, unit: int, tensors: Sequence[torch.Tensor]) -> None:
        """Stores this rank's part of a unit, from its tensors in the order of the layout."""

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and registrations. Idempotent."""

    def writes(self, unit: int) -> bool:
        """Whether there is anything to write for a unit: the same on all ranks."""
        return True

    def is_whole(self, unit: int) -> bool:
        """Whether this rank can read all of a unit once all ranks have written it."""
        return True

    def check(self) -> None:  # noqa: B027
        """
        Makes sure that the bytes are still those that were stored; called before each pass.

        Raises:
            `RuntimeError`: they changed, or may have; the message names the culprit.
        """

    def check_readable(self, unit: int) -> None:  # noqa: B027
        """As `check`, for reading the values of one unit: what was only replaced is still here to be read."""


def tensor_view(image: torch.Tensor, tensor: TensorLayout, base: int = 0) -> torch.Tensor:
    """The tensor that a layout describes, as a view of bytes that begin at byte `base` of its block's image."""
    dtype = getattr(torch, tensor.dtype)
    return typed_view(image, tensor.offset - base, tensor.nbytes, dtype, tensor.shape, tensor.stride)


def apart(memory: torch.Tensor) -> torch.Tensor:
    """
    The same bytes, with a storage of their own: what is pickled is a tensor's whole storage, and what has one storage
    goes into one file of a checkpoint.
    """
    return torch.from_numpy(memory.numpy()) if memory.numel() else memory


def copy_range(layout: BlockLayout, tensors: Sequence[torch.Tensor], start: int, out: torch.Tensor) -> None:
    """
    Copies bytes `[start, start + len(out))` of a block's image, made up of `tensors`, into `out` on the host; of those
    tensors whose place in the image lies there.
    """
    stop = start + out.numel()
    for place, tensor in zip(layout.tensors, tensors):
        low, high = max(start, place.offset), min(stop, place.offset + place.nbytes)
        if low < high:
            copy_bytes(tensor, low - place.offset, out[low - start : high - start])
