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

from ..offload_plan import BlockLayout, OffloadPlan, TensorLayout
from ..tensor_utils import flat_bytes, typed_view


class Extent(NamedTuple):
    """A run of bytes that is contiguous on the host: `source` goes to `offset` of what is fetched."""

    offset: int
    source: torch.Tensor


class HostStore(ABC):
    """
    The bytes of every unit (block or leaf) of a plan, by the unit's index in `plan.units`. All ranks of a group write
    their part of a unit (`write`) before anyone reads it.

    Args:
        plan (`OffloadPlan`): what is stored.
        rank (`int`): this rank's index in its group.
    """

    kind: str

    def __init__(self, plan: OffloadPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.layouts: list[BlockLayout] = [unit for _, unit in plan.units]
        self.whole: list[bool] = [plan.whole_on_rank(component, unit) for component, unit in plan.units]

    @property
    @abstractmethod
    def private_nbytes(self) -> int:
        """Host bytes that belong to this rank alone."""

    @property
    @abstractmethod
    def shared_nbytes(self) -> int:
        """Host bytes that all ranks of the group share, counted once."""

    @abstractmethod
    def extents(self, unit: int) -> list[Extent]:
        """What this rank copies to the device for a unit: its shard, or the whole of it where the plan says so."""

    @abstractmethod
    def image(self, unit: int) -> torch.Tensor | None:
        """A unit's whole image, `(padded nbytes,)` of `uint8`, for reading only; None where this rank has a shard."""

    @abstractmethod
    def private_image(self, unit: int) -> torch.Tensor | None:
        """
        As `image`, but the caller, who asks once, may keep it after `close`, and only this rank sees what is written.
        """

    @abstractmethod
    def write(self, unit: int, tensors: Sequence[torch.Tensor]) -> None:
        """Stores this rank's part of a unit, from its tensors in the order of the layout."""

    @abstractmethod
    def close(self) -> None:
        """Gives back memory and registrations. Idempotent."""

    def view(self, unit: int, tensor: TensorLayout) -> torch.Tensor | None:
        """One tensor of a unit, for reading only; None where this rank has only a shard."""
        image = self.image(unit)
        return None if image is None else tensor_view(image, tensor)


def tensor_view(image: torch.Tensor, tensor: TensorLayout) -> torch.Tensor:
    """The tensor that a layout describes, as a view of an image that begins at its block's offset 0."""
    return typed_view(image, tensor.offset, tensor.nbytes, getattr(torch, tensor.dtype), tensor.shape, tensor.stride)


def copy_range(layout: BlockLayout, tensors: Sequence[torch.Tensor], start: int, out: torch.Tensor) -> None:
    """Copies bytes `[start, start + len(out))` of a block's image, made up of `tensors`, into `out` on the host."""
    stop = start + out.numel()
    for place, tensor in zip(layout.tensors, tensors):
        low, high = max(start, place.offset), min(stop, place.offset + place.nbytes)
        if low < high:
            out[low - start : high - start].copy_(flat_bytes(tensor)[low - place.offset : high - place.offset])
