# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the pinned store: page-locked memory of this rank alone, with its shard of each block, or whole blocks where the
plan has the rank copy them whole. For devices that cannot register memory they did not allocate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device.interface import Platform
from ..offload_plan import OffloadPlan
from .store import Extent, HostStore, apart, copy_range, tensor_view


_CHUNK_NBYTES = 256 << 20
"""Pinned allocators round up to a power of two: chunks of one waste nothing, and the last is cut to what is left."""


class PinnedStore(HostStore):
    """
    This rank's part of the weights in page-locked chunks; a part may straddle two chunks, and is then two extents.
    """

    def __init__(self, plan: OffloadPlan, rank: int, platform: Platform) -> None:
        super().__init__(plan, rank)
        self._starts: list[int] = []
        end = 0
        for unit in range(len(self.layouts)):
            self._starts.append(end)
            low, high = self.copied_bounds(unit)
            end += high - low
        self._chunks: list[torch.Tensor] = []
        for start in range(0, end, _CHUNK_NBYTES):
            self._chunks.append(platform.pinned_empty(min(_CHUNK_NBYTES, end - start)))

    @property
    def kind(self) -> str:
        return "pinned"

    @property
    def private_nbytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    @property
    def shared_nbytes(self) -> int:
        return 0

    def extents(self, unit: int) -> list[Extent]:
        start, (low, high) = self._starts[unit], self.copied_bounds(unit)
        return [Extent(at - start, source) for at, source in self._pieces(start, start + high - low)]

    def is_whole(self, unit: int) -> bool:
        return self.copies_whole[unit] or self.plan.group_size == 1

    def view(self, unit: int, tensor: int) -> torch.Tensor | None:
        if not self.is_whole(unit):
            return None
        place = self.layouts[unit].tensors[tensor]
        start = self._starts[unit] + place.offset
        pieces = [source for _, source in self._pieces(start, start + place.nbytes)]
        memory = apart(pieces[0]) if len(pieces) == 1 else torch.cat(pieces)
        return tensor_view(memory, place, base=place.offset)

    def private_view(self, unit: int, tensor: int) -> torch.Tensor | None:
        view = self.view(unit, tensor)
        # A copy: the chunks are page-locked, and go back only if nothing points into them.
        return None if view is None else view.clone()

    def _pieces(self, start: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Bytes `[start, stop)` of all chunks laid end to end, cut where chunks end; each with its position."""
        found, position = [], start
        while position < stop:
            chunk, offset = divmod(position, _CHUNK_NBYTES)
            count = min(stop - position, _CHUNK_NBYTES - offset)
            found.append((position, self._chunks[chunk][offset : offset + count]))
            position += count
        return found

    def write(self, unit: int, tensors: Sequence[torch.Tensor]) -> None:
        base, _ = self.copied_bounds(unit)
        for extent in self.extents(unit):
            copy_range(self.layouts[unit], tensors, base + extent.offset, extent.source)

    def close(self) -> None:
        self._chunks = []
