# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns writing the weights of a model as a coded checkpoint ([Note: Coded checkpoint]). Must not know what lies beside
that file, nor choose the codec.

[Note: Writing coded weights]
    Blocks are coded and written shard by shard, so that no more than one shard is in memory, with what coding it
    takes. Each is decoded again and compared before it is written. How large the header will be is not known until all
    is coded: room is left for that of the same file if nothing had become smaller, with all that it might say. A block
    that has not become smaller is written over, and comes with the ordinary tensors behind all coded shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ..block_discovery import FoundUnit, find_units
from ..block_layout import BlockLayout, lay_out
from ..casts import copy_bytes
from ..checkpoint.container import Container, chunk_digests, content_digest, write_bytes
from ..checkpoint.mapped import FileRange
from ..checkpoint.safetensors_file import peek_header, read_metadata
from ..packed_weights import groups_of, new_file, progress, state_of
from .check_sum import CheckSums, as_text
from .codec import Codec
from .coded_file import (
    DIGEST_KEY,
    METADATA_KEY,
    CodedBlock,
    CodedFile,
    CodedShard,
    CodedTensor,
    header_digest,
    shard_key,
)
from .shard_coding import (
    CODED_DTYPES,
    Region,
    Segment,
    check_segments,
    decode_shard,
    encode_shard,
    regions_of,
    shard_bounds,
)


_NO_DIGEST = "0" * 64
_NO_SUM = "0" * 16


def write_coded(module: nn.Module, path: str, title: str, codec: Codec, ranks: int, dtype: torch.dtype) -> CodedFile:
    """
    Writes the weights of a model to a file, those of its blocks coded where that makes them smaller.

    Args:
        module (`nn.Module`): on the host, with casts pending or not.
        title (`str`): of the progress bar.
        ranks (`int`): shards of each block.
        dtype (`torch.dtype`): what the model is packed in.

    Returns:
        `CodedFile`: what the file says of itself; with no blocks if none has become smaller, and the file is of no
        use then.

    Raises:
        `RuntimeError`: what was coded does not decode to what it was.
    """
    state = state_of(module)
    groups = groups_of(module, state)
    candidates = _candidates(module, state)
    empty = CodedFile(path, codec.name, codec.version, ranks, str(dtype).removeprefix("torch."), {})
    raw = replace(empty, blocks={layout.name: _as_it_is(layout, unit, ranks, path) for layout, unit in candidates})
    room = len(Container(groups, _metadata(_with_sizes(raw, candidates)), _runs(raw)).header)
    total = sum(block.nbytes for block in raw.blocks.values())
    if not candidates:
        return empty
    with new_file(path) as fd:
        with progress(f"Coding {title}", total) as bar:
            coder = _Coder(fd, room, codec, ranks, bar.update)
            for layout, unit in candidates:
                coder.add(layout, unit)
        if not coder.blocks:
            return empty
        coded = replace(empty, blocks=coder.blocks, sizes=coder.sizes, content=_NO_DIGEST)
        rest = {key: tensor for key, tensor in state.items() if key not in coded.tensor_names}
        container = Container(groups_of(module, rest), _metadata(coded), _runs(coded), room)
        assert len(container.header) == room
        os.ftruncate(fd, container.nbytes)
        with progress(f"Packing {title}", container.nbytes - coder.end) as bar:
            container.write_share(fd, 0, 1, bar.update)
        with progress(f"Digesting {title}", container.nbytes - room) as bar:
            coded = replace(coded, content=content_digest(dict(chunk_digests(fd, room, 0, 1, bar.update))))
        container.write_header(fd, **_metadata(coded))
        digest = header_digest(peek_header(path), read_metadata(path))
        container.write_header(fd, **{**_metadata(coded), DIGEST_KEY: digest})
    return coded


class _Coder:
    """
    Codes blocks, and writes their shards one after the other.

    Args:
        fd (`int`): of the file.
        begin (`int`): where in it the first shard is to lie.
        done (`Callable`): hears of bytes of weights as they are coded.

    Attributes:
        end (`int`): where in the file the last shard ends.
        blocks (`dict[str, CodedBlock]`): those that have become smaller, by name.
        sizes (`dict[str, tuple[int, int]]`): of their bytes, see `CodedFile`.
    """

    def __init__(self, fd: int, begin: int, codec: Codec, ranks: int, done: Callable[[int], object]) -> None:
        self.end = begin
        self.blocks: dict[str, CodedBlock] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self._fd, self._codec, self._ranks, self._done = fd, codec, ranks, done
        self._sums = CheckSums(codec.device)

    def add(self, layout: BlockLayout, unit: FoundUnit) -> None:
        """Codes a block; if that does not make it smaller, it is as if it had not been there."""
        begin, shards, sizes = self.end, [], dict(self.sizes)
        regions = regions_of(layout)
        for shard in range(self._ranks):
            bounds = shard_bounds(layout.nbytes, self._ranks, shard)
            coded, check_sum, segments = self._code(layout, unit, bounds, regions)
            place = FileRange("", self.end, coded.numel())
            shards.append(CodedShard(layout.name, bounds[0], bounds[1] - bounds[0], place, check_sum, tuple(segments)))
            write_bytes(self._fd, coded.numpy().data, self.end)
            self.end += coded.numel()
            for segment, region in zip(segments, _regions_in(regions, bounds)):
                before, after = sizes.get(region.dtype, (0, 0))
                sizes[region.dtype] = before + segment.nbytes, after + segment.coded_nbytes
            self._done(max(0, min(bounds[1], layout.nbytes) - bounds[0]))
        if any(segment.is_coded for shard in shards for segment in shard.segments):
            block = CodedBlock(layout.name, layout.digest, layout.nbytes, _tensors_of(layout, unit), tuple(shards))
            self.blocks[layout.name], self.sizes = block, sizes
        else:
            self.end = begin

    def _code(
        self, layout: BlockLayout, unit: FoundUnit, bounds: tuple[int, int], regions: list[Region]
    ) -> tuple[torch.Tensor, str, list[Segment]]:
        """One shard of a block, coded, on the host; its check sum and segments. Decoded again before."""
        codec, nbytes = self._codec, bounds[1] - bounds[0]
        data = _image(layout, unit, bounds).to(codec.device)
        coded, found = encode_shard(data, bounds, regions, codec)
        segments = [segment for segment, _ in found]
        on_host = coded.to("cpu")
        check_segments(on_host, segments, nbytes, codec)
        decoded = torch.empty_like(data)
        largest = max((segment.nbytes for segment in segments), default=0)
        scratch = torch.empty(codec.scratch_nbytes(largest), dtype=torch.uint8, device=codec.device)
        decode_shard(coded, segments, decoded, codec, scratch)
        if not torch.equal(decoded, data):
            raise RuntimeError(
                f"Bytes {bounds[0]} to {bounds[1]} of block '{layout.name}' do not decode to what they were with "
                f"'{codec.name}' {codec.version}; nothing was written. Pack with another --codec, or without."
            )
        return on_host, as_text(self._sums.queue(coded)), segments


def _candidates(module: nn.Module, state: dict[str, torch.Tensor]) -> list[tuple[BlockLayout, FoundUnit]]:
    """The blocks that may be coded: with 16-bit floats, and all of whose tensors the checkpoint would hold."""
    found = []
    for unit in find_units(module)[0]:
        stored = all(
            state.get(owner.name) is owned.tensor and owned.tensor.is_contiguous()
            for owned in unit.tensors
            for owner in owned.owners
        )
        if stored and not unit.is_leaf:
            layout = lay_out(unit.name, unit.tensors, is_leaf=False)
            if any(region.dtype in CODED_DTYPES for region in regions_of(layout)):
                found.append((layout, unit))
    return found


def _image(layout: BlockLayout, unit: FoundUnit, bounds: tuple[int, int]) -> torch.Tensor:
    """Bytes `bounds` of a block's image, zeros between its tensors."""
    image = torch.zeros(bounds[1] - bounds[0], dtype=torch.uint8)
    for tensor, owned in zip(layout.tensors, unit.tensors):
        start, stop = max(tensor.offset, bounds[0]), min(tensor.offset + tensor.nbytes, bounds[1])
        if start < stop:
            copy_bytes(owned.tensor, start - tensor.offset, image[start - bounds[0] : stop - bounds[0]])
    return image


def _tensors_of(layout: BlockLayout, unit: FoundUnit) -> tuple[CodedTensor, ...]:
    return tuple(
        CodedTensor(tuple(owner.name for owner in owned.owners), tensor.dtype, tensor.shape)
        for tensor, owned in zip(layout.tensors, unit.tensors)
    )


def _regions_in(regions: list[Region], bounds: tuple[int, int]) -> list[Region]:
    """The parts of regions that lie in a shard: one for each of its segments."""
    cut = [Region(max(r.start, bounds[0]), min(r.stop, bounds[1]), r.dtype) for r in regions]
    return [region for region in cut if region.start < region.stop]


def _as_it_is(layout: BlockLayout, unit: FoundUnit, ranks: int, path: str) -> CodedBlock:
    """What would be said of a block if coding it had no effect."""
    shards = []
    for shard in range(ranks):
        start, stop = bounds = shard_bounds(layout.nbytes, ranks, shard)
        segments = tuple(
            Segment(region.start - start, region.stop - region.start, region.start - start, region.stop - region.start)
            for region in _regions_in(regions_of(layout), bounds)
        )
        place = FileRange(path, start, stop - start)
        shards.append(CodedShard(layout.name, start, stop - start, place, _NO_SUM, segments))
    return CodedBlock(layout.name, layout.digest, layout.nbytes, _tensors_of(layout, unit), tuple(shards))


def _with_sizes(raw: CodedFile, candidates: list[tuple[BlockLayout, FoundUnit]]) -> CodedFile:
    """With sizes that take as much room as any could, and a digest."""
    most = sum(block.coded_nbytes for block in raw.blocks.values())
    dtypes = {region.dtype for layout, _ in candidates for region in regions_of(layout)}
    return replace(raw, sizes=dict.fromkeys(sorted(dtypes), (most, most)), content=_NO_DIGEST)


def _runs(coded: CodedFile) -> list[tuple[str, int]]:
    return [
        (shard_key(block.name, index), shard.place.nbytes)
        for block in coded.blocks.values()
        for index, shard in enumerate(block.shards)
    ]


def _metadata(coded: CodedFile) -> dict[str, str]:
    return {"format": "pt", METADATA_KEY: coded.as_text(), DIGEST_KEY: _NO_DIGEST}
