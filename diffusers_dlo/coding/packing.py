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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..block_discovery import FoundUnit, find_units
from ..block_layout import BlockLayout, lay_out
from ..casts import copy_bytes
from ..checkpoint.container import Container, Entry, chunk_digests, content_digest, write_bytes
from ..checkpoint.mapped import FileRange
from ..checkpoint.safetensors_file import peek_header, read_metadata
from ..packed_weights import groups_of, new_file, progress, state_of
from .block_reader import decoded
from .check_sum import CheckSums, as_text
from .codec import Codec
from .coded_block import CodedBlock, CodedShard, CodedTensor, Segment
from .coded_file import DIGEST_KEY, METADATA_KEY, CodedFile, header_digest, shard_key
from .shard_coding import CODED_DTYPES, Region, check_segments, cut_regions, encode_shard, regions_of, shard_bounds


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
    candidates = list(_candidates(module, state))
    empty = CodedFile(path, codec.name, codec.version, ranks, str(dtype).removeprefix("torch."), {})
    if not candidates:
        return empty
    room = _room_for(empty, groups, candidates)
    with new_file(path) as fd:
        with progress(f"Coding {title}", sum(one.layout.nbytes for one in candidates)) as bar:
            coder = _Coder(path, fd, room, codec, ranks, bar.update)
            for candidate in candidates:
                coder.add(candidate)
        if not coder.blocks:
            return empty
        coded = replace(empty, blocks=coder.blocks, sizes=coder.sizes, content=_NO_DIGEST)
        rest = {key: tensor for key, tensor in state.items() if key not in coded.tensor_names}
        container = Container(groups_of(module, rest), metadata_of(coded), _runs(coded), room)
        assert len(container.header) == room
        os.ftruncate(fd, container.nbytes)
        with progress(f"Packing {title}", container.nbytes - coder.end) as bar:
            container.write_share(fd, 0, 1, bar.update)
        with progress(f"Digesting {title}", container.nbytes - room) as bar:
            coded = replace(coded, content=content_digest(dict(chunk_digests(fd, room, 0, 1, bar.update))))
        write_header(container, fd, path, coded)
    return coded


def metadata_of(coded: CodedFile) -> dict[str, str]:
    """What a coded file says of itself in its header, before there is a digest of that."""
    return {"format": "pt", METADATA_KEY: coded.as_text(), DIGEST_KEY: _NO_DIGEST}


def write_header(container: Container, fd: int, path: str, coded: CodedFile) -> None:
    """Completes a coded file, open as `fd`, whose container was made with such metadata: its header, with a digest."""
    container.write_header(fd, **metadata_of(coded))
    digest = header_digest(peek_header(path), read_metadata(path))
    container.write_header(fd, **{**metadata_of(coded), DIGEST_KEY: digest})


@dataclass(frozen=True)
class _Candidate:
    """A block that may be coded."""

    layout: BlockLayout
    unit: FoundUnit
    tensors: tuple[CodedTensor, ...]
    regions: list[Region]

    def image(self, bounds: tuple[int, int]) -> torch.Tensor:
        """Bytes `bounds` of the image, zeros between its tensors."""
        image = torch.zeros(bounds[1] - bounds[0], dtype=torch.uint8)
        for tensor, owned in zip(self.layout.tensors, self.unit.tensors):
            start, stop = max(tensor.offset, bounds[0]), min(tensor.offset + tensor.nbytes, bounds[1])
            if start < stop:
                copy_bytes(owned.tensor, start - tensor.offset, image[start - bounds[0] : stop - bounds[0]])
        return image

    def coded(self, shards: Iterable[CodedShard]) -> CodedBlock:
        """What is said of it with these shards."""
        return CodedBlock(self.layout.name, self.layout.digest, self.layout.nbytes, self.tensors, tuple(shards))

    def as_it_is(self, ranks: int) -> CodedBlock:
        """What would be said of it if coding had no effect."""
        shards = []
        for shard in range(ranks):
            start, stop = bounds = shard_bounds(self.layout.nbytes, ranks, shard)
            segments = tuple(
                Segment(first - start, last - first, first - start, last - first)
                for first, last, _ in cut_regions(self.regions, bounds)
            )
            place = FileRange("", start, stop - start)
            shards.append(CodedShard(self.layout.name, start, stop - start, place, _NO_SUM, segments))
        return self.coded(shards)


def _candidates(module: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[_Candidate]:
    """The blocks with 16-bit floats of which the checkpoint would hold all tensors, under all their names."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    for unit in find_units(module)[0]:
        if unit.is_leaf or not all(
            owned.tensor.is_contiguous() and all(owner.name in names[id(owned.tensor)] for owner in owned.owners)
            for owned in unit.tensors
        ):
            continue
        layout = lay_out(unit.name, unit.tensors, is_leaf=False)
        regions = regions_of(layout)
        if any(region.dtype in CODED_DTYPES for region in regions):
            tensors = tuple(
                CodedTensor(tuple(names[id(owned.tensor)]), tensor.dtype, tensor.shape)
                for tensor, owned in zip(layout.tensors, unit.tensors)
            )
            yield _Candidate(layout, unit, tensors, regions)


def _room_for(empty: CodedFile, groups: list[list[Entry]], candidates: list[_Candidate]) -> int:
    """Bytes of the header of a file with all blocks coded as they are, and all tensors too: more than may come."""
    blocks = {one.layout.name: one.as_it_is(empty.ranks) for one in candidates}
    most = sum(block.coded_nbytes for block in blocks.values())
    dtypes = {region.dtype for one in candidates for region in one.regions}
    raw = replace(empty, blocks=blocks, sizes=dict.fromkeys(sorted(dtypes), (most, most)), content=_NO_DIGEST)
    return len(Container(groups, metadata_of(raw), _runs(raw)).header)


class _Coder:
    """
    Codes blocks, and writes their shards one after the other.

    Args:
        path (`str`), fd (`int`): of the file.
        begin (`int`): where in it the first shard is to lie.
        done (`Callable`): hears of bytes of weights as they are coded.

    Attributes:
        end (`int`): where in the file the last shard ends.
        blocks (`dict[str, CodedBlock]`): those that have become smaller, by name.
        sizes (`dict[str, tuple[int, int]]`): of their bytes, see `CodedFile`.
    """

    def __init__(
        self, path: str, fd: int, begin: int, codec: Codec, ranks: int, done: Callable[[int], object]
    ) -> None:
        self.end = begin
        self.blocks: dict[str, CodedBlock] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self._path, self._fd, self._codec, self._ranks, self._done = path, fd, codec, ranks, done
        self._sums = CheckSums(codec.device)

    def add(self, block: _Candidate) -> None:
        """Codes a block; if that does not make it smaller, it is as if it had not been there."""
        begin, shards, sizes, nbytes = self.end, [], dict(self.sizes), block.layout.nbytes
        for shard in range(self._ranks):
            bounds = shard_bounds(nbytes, self._ranks, shard)
            coded, check_sum, found = self._code(block, bounds)
            segments = tuple(segment for segment, _ in found)
            place = FileRange(self._path, self.end, coded.numel())
            shards.append(CodedShard(block.layout.name, bounds[0], bounds[1] - bounds[0], place, check_sum, segments))
            write_bytes(self._fd, coded.numpy().data, self.end)
            self.end += coded.numel()
            for segment, dtype in found:
                before, after = sizes.get(dtype, (0, 0))
                sizes[dtype] = before + segment.nbytes, after + segment.coded_nbytes
            self._done(min(bounds[1], nbytes) - min(bounds[0], nbytes))
        if any(segment.is_coded for shard in shards for segment in shard.segments):
            self.blocks[block.layout.name], self.sizes = block.coded(shards), sizes
        else:
            self.end = begin

    def _code(self, block: _Candidate, bounds: tuple[int, int]) -> tuple[torch.Tensor, str, list[tuple[Segment, str]]]:
        """One shard, coded, on the host; its check sum, and its segments with their dtypes. It was decoded again."""
        codec, nbytes = self._codec, bounds[1] - bounds[0]
        data = block.image(bounds).to(codec.device)
        coded, found = encode_shard(data, bounds, block.regions, codec)
        segments = [segment for segment, _ in found]
        on_host = coded.to("cpu")
        check_segments(on_host, segments, nbytes, codec)
        if not torch.equal(decoded(coded, segments, nbytes, codec), data):
            raise RuntimeError(
                f"Bytes {bounds[0]} to {bounds[1]} of block '{block.layout.name}' do not decode to what they were "
                f"with '{codec.name}' {codec.version}; nothing was written. Pack with another --codec, or without."
            )
        return on_host, as_text(self._sums.queue(coded)), found


def _runs(coded: CodedFile) -> list[tuple[str, int]]:
    return [
        (shard_key(block.name, index), shard.place.nbytes)
        for block in coded.blocks.values()
        for index, shard in enumerate(block.shards)
    ]
