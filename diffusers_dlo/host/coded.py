# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the coded store: blocks in the coded shards of a coded checkpoint, all else as in the mapped store. Must not
decode what streams: it says what is copied, and how that is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..checkpoint.mapped import FileRange, FileStamp
from ..coding.block_reader import BlockReader, check_content, check_shard
from ..coding.check_sum import CheckSums
from ..coding.codec import Codec
from ..coding.coded_block import CodedShard
from ..device.interface import Platform
from ..offload_plan import OffloadPlan
from .mapped import MappedStore
from .store import CodedSource, Extent, tensor_view


class CodedStore(MappedStore):
    """
    Weights in a coded checkpoint ([Note: Coded checkpoint]). To read one on the host, its block is decoded for that.

    Args:
        stamps (`Mapping[str, FileStamp]`): every file of the plan, as all ranks saw it.
        codec (`Codec`): what the shards are decoded with.

    Raises:
        `RuntimeError`: as for the mapped store; or a shard is not made up as it is described.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        rank: int,
        platform: Platform,
        fd: int | None,
        stamps: Mapping[str, FileStamp],
        codec: Codec,
    ) -> None:
        self._codec = codec
        self._read: tuple[int, torch.Tensor, set[int]] | None = None
        "the unit that was read last, its image, and the tensors of it that are still to be read"
        super().__init__(plan, rank, platform, fd, stamps)
        try:
            for source, coded in self._every_coded_source():
                check_shard(source, coded.shard, codec)
        except BaseException:
            self.close()
            raise

    @property
    def kind(self) -> str:
        return "coded+packed" if self._memory.numel() else "coded"

    @property
    def codec(self) -> Codec:
        return self._codec

    @property
    def scratch_nbytes(self) -> int:
        shards = (shard for layout in self.layouts if layout.coded is not None for shard in layout.coded.shards)
        sizes = [segment.nbytes for shard in shards for segment in shard.segments if segment.is_coded]
        return self._codec.scratch_nbytes(max(sizes)) if sizes else 0

    @property
    def files_nbytes(self) -> int:
        coded = (layout.coded.coded_nbytes for layout in self.layouts if layout.coded is not None)
        return super().files_nbytes + sum(coded)

    def check_sums(self) -> None:
        # By way of the device. The files are known to be the same from then on ([Note: Changed files]).
        device = self._codec.device
        sums = CheckSums(device)
        found = [(coded.shard, sums.queue(_on(device, coded.pieces))) for _, coded in self._every_coded_source()]
        for shard, total in found:
            check_content(shard, total)

    def extents(self, unit: int) -> list[Extent]:
        if self.layouts[unit].coded is None:
            return super().extents(unit)
        base, _ = self.copied_bounds(unit)
        return [Extent(coded.shard.offset - base, source, coded) for source, coded in self._coded_sources(unit)]

    def view(self, unit: int, tensor: int) -> torch.Tensor | None:
        return super().view(unit, tensor) if self.layouts[unit].coded is None else self._decoded(unit, tensor)

    def private_view(self, unit: int, tensor: int) -> torch.Tensor | None:
        return super().private_view(unit, tensor) if self.layouts[unit].coded is None else self._decoded(unit, tensor)

    def check_readable(self, unit: int) -> None:
        super().check_readable(unit)
        coded = self.layouts[unit].coded
        for path in {shard.place.path for shard in coded.shards} if coded is not None else ():
            self._files[path].check_content()

    def close(self) -> None:
        super().close()
        self._read = None

    def _decoded(self, unit: int, tensor: int) -> torch.Tensor:
        """A tensor of a coded block, in memory of its own."""
        layout = self.layouts[unit]
        assert layout.coded is not None
        read = self._read
        if read is None or read[0] != unit:
            self._read = None  # first: two images need not be there at once
            # Copies first: no transfer may cross the border of what is page-locked.
            sources = (self._source(shard).clone() for shard in layout.coded.shards)
            image = BlockReader(self._codec).read(layout.coded, sources)
            read = self._read = unit, image, set(range(len(layout.tensors)))
        _, image, unread = read
        unread.discard(tensor)
        if not unread and self._read is read:
            self._read = None  # a block is read as a whole as a rule, and its image is large
        return tensor_view(image, layout.tensors[tensor]).clone()

    def _source(self, shard: CodedShard) -> torch.Tensor:
        return self._files[shard.place.path].content[shard.place.offset :][: shard.place.nbytes]

    def _every_coded_source(self) -> Iterator[tuple[torch.Tensor, CodedSource]]:
        for unit, layout in enumerate(self.layouts):
            if layout.coded is not None:
                yield from self._coded_sources(unit)

    def _coded_sources(self, unit: int) -> Iterator[tuple[torch.Tensor, CodedSource]]:
        for shard in self._copied_shards(unit):
            source = self._source(shard)
            yield source, CodedSource(shard, tuple(self._registrations.split(source)))

    def _copied_shards(self, unit: int) -> list[CodedShard]:
        """What this rank copies of a coded block, without shards of nothing."""
        coded = self.layouts[unit].coded
        assert coded is not None
        shards = coded.shards if self.copies_whole[unit] else coded.shards[self.rank : self.rank + 1]
        return [shard for shard in shards if shard.nbytes]

    def _pieces(self, unit: int) -> list[tuple[int, FileRange]]:
        if self.layouts[unit].coded is None:
            return super()._pieces(unit)
        return [(shard.offset, shard.place) for shard in self._copied_shards(unit)]


def _on(device: torch.device, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """A coded shard in the device's memory, for a moment; where that is the host's, as it lies there."""
    moved = [piece.to(device, non_blocking=True) for piece in pieces]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
