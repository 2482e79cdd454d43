# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the layout of the safetensors files that this package writes: tensors in the order of blocks, so that a block is a
run of the file. Must not know where a file comes to lie, nor who else writes to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..casts import copy_bytes, run_dtype, run_nbytes
from .mapped import FileRange
from .safetensors_file import DTYPES


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED = 256
"""Sizes that are a multiple of this leave what follows them aligned for the device."""
_DATA_ALIGNMENT = 4096
"""Where the tensors begin in a file: on a page."""
_PIECE_NBYTES = 16 << 20
"""What is copied at a time: a private copy of no more than this exists."""
_CHUNKS, _CHUNK_NBYTES = 256, 64 << 20
"""A file's content is digested in chunks of 64 MiB or more, at most so many: ranks share them out."""


class Entry(NamedTuple):
    """A tensor and the name it is to have; what is written are its bytes in the order they lie in memory."""

    name: str
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Its bytes after pending casts."""
        return run_nbytes(self.tensor)


def is_storable(tensor: torch.Tensor) -> bool:
    """Whether safetensors has a name for the dtype of a tensor."""
    return run_dtype(tensor) in _NAMES


class Container:
    """
    One safetensors file, laid out.

    Args:
        groups (`Sequence[Sequence[Entry]]`): the tensors of each block, in streaming order. Those whose size would
            leave their successors unaligned come after all others.
        metadata (`Mapping[str, str]`): goes into the file's header.
        runs (`Sequence[tuple[str, int]]`): runs of bytes that come before all tensors, by name, with their sizes:
            multiples of 256. Who makes them writes them.
        header_nbytes (`int`): the header takes at least as many bytes.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Entry]],
        metadata: Mapping[str, str],
        runs: Sequence[tuple[str, int]] = (),
        header_nbytes: int = 0,
    ) -> None:
        every = [entry for group in groups for entry in group]
        odd = [entry for entry in every if entry.nbytes % _ALIGNED]
        # Larger items first: the item size of a tensor divides where it begins.
        odd.sort(key=lambda entry: -run_dtype(entry.tensor).itemsize)
        self.entries = [entry for entry in every if entry.nbytes % _ALIGNED == 0] + odd
        self._metadata = dict(metadata)
        self._runs = tuple(runs)
        self._header_nbytes = header_nbytes
        starts, end = [], sum(nbytes for _, nbytes in runs)
        for entry in self.entries:
            starts.append(end)
            end += entry.nbytes
        self._starts = starts
        self.header = self._make_header(self._metadata)
        self.nbytes = len(self.header) + end

    def _make_header(self, metadata: Mapping[str, str]) -> bytes:
        described: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name, nbytes in self._runs:
            described[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}
            end += nbytes
        for entry, start in zip(self.entries, self._starts):
            described[entry.name] = {
                "dtype": _NAMES[run_dtype(entry.tensor)],
                "shape": _memory_shape(entry.tensor),
                "data_offsets": [start, start + entry.nbytes],
            }
        text = json.dumps(described, separators=(",", ":")).encode()
        nbytes = max(-(-(8 + len(text)) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT, self._header_nbytes) - 8
        return nbytes.to_bytes(8, "little") + text.ljust(nbytes)

    def places(self, path: str) -> dict[str, FileRange]:
        """Where each tensor lies in the file, once it is at `path`."""
        return {
            entry.name: FileRange(path, len(self.header) + start, entry.nbytes)
            for entry, start in zip(self.entries, self._starts)
        }

    def write_share(
        self,
        fd: int,
        rank: int,
        size: int,
        done: Callable[[int], object],
        whole: Mapping[str, int] | None = None,
    ) -> None:
        """
        Writes part `rank` of `size` of each tensor to an open file; of those in `whole` all or nothing, as it names
        this rank or another. `done` hears of bytes as they are written.
        """
        buffer = torch.frombuffer(bytearray(_PIECE_NBYTES), dtype=torch.uint8)
        for entry, start in zip(self.entries, self._starts):
            low, high = (entry.nbytes * part // size for part in (rank, rank + 1))
            writer = (whole or {}).get(entry.name)
            if writer is not None:
                low, high = 0, entry.nbytes if writer == rank else 0
            for begin in range(low, high, _PIECE_NBYTES):
                piece = buffer[: min(_PIECE_NBYTES, high - begin)]
                copy_bytes(entry.tensor, begin, piece)
                write_bytes(fd, piece.numpy().data, len(self.header) + start + begin)
                done(piece.numel())

    def write_header(self, fd: int, **metadata: str) -> None:
        """
        Writes the header, with values in place of those that the metadata had so far; of the same lengths, so that
        nothing moves.
        """
        header = self.header_with(**metadata)
        assert len(header) == len(self.header)
        write_bytes(fd, memoryview(header), 0)

    def header_with(self, **metadata: str) -> bytes:
        """The header with values in place of those of the metadata."""
        return self._make_header({**self._metadata, **metadata})


def _memory_shape(tensor: torch.Tensor) -> list[int]:
    """The shape of a dense tensor's bytes as they lie in memory: its own if it is contiguous."""
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride(dim), reverse=True)
    return [tensor.shape[dim] for dim in (range(tensor.dim()) if tensor.is_contiguous() else order)]


def write_bytes(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset` of an open file."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def chunk_digests(
    fd: int, start: int, rank: int, size: int, done: Callable[[int], object]
) -> Iterator[tuple[int, str]]:
    """Number and SHA-256 of every `size`-th chunk, from number `rank`, of an open file from byte `start` on."""
    total = os.fstat(fd).st_size - start
    nbytes = max(_CHUNK_NBYTES, -(-total // _CHUNKS))
    buffer = memoryview(bytearray(_PIECE_NBYTES))
    for number in range(rank, -(-total // nbytes), size):
        digest = hashlib.sha256()
        position, stop = start + number * nbytes, start + min((number + 1) * nbytes, total)
        while position < stop:
            count = os.preadv(fd, [buffer[: min(_PIECE_NBYTES, stop - position)]], position)
            if not count:
                raise OSError("it ends early")
            digest.update(buffer[:count])
            position += count
            done(count)
        yield number, digest.hexdigest()


def content_digest(chunks: Mapping[int, str]) -> str:
    """The digest of a file's content from those of all its chunks, by number."""
    return hashlib.sha256(" ".join(chunks[number] for number in sorted(chunks)).encode()).hexdigest()
