# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns where each tensor lies in its block's byte image, and which parts of the image are runs of a file. Pure: reads
metadata of tensors, so a meta model will do, and imports no devices and no process groups.

[Note: Image]
    An image has up to three parts. *Runs*: bytes as they lie together in a file, so that each run is one copy; small
    gaps between tensors are copied along. Then room for *realigned* tensors: on the device every tensor begins at a
    multiple of `ALIGNMENT`, in a file at whatever its neighbours leave. A run is placed so that its large tensors are
    aligned; a large one that does not fit begins another run, and a small one is copied, on the device, from the run
    to this second part once the image has arrived. Last, from `memory_offset` on, what is in no file: aligned one
    after the other, and kept in memory by the host store. An image of a model that is in no file is all third part.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .casts import run_dtype, run_nbytes
from .checkpoint.mapped import FileRange
from .coding.coded_block import CodedBlock
from .tensor_utils import OwnedTensor


ALIGNMENT = 256
"""Bytes. Every tensor of an image, and every shard, begins at a multiple of it: what device allocators give, and
enough for the results of a vectorised kernel not to depend on where a weight lies."""

SMALL_NBYTES = 64 << 10
"""Up to this size, a tensor is rather realigned on the device, and a gap in a file rather copied along, than that a
run ends there: at 55 GB/s, 64 KiB take about a microsecond, and one more copy has to be started too."""


def align(nbytes: int) -> int:
    """`nbytes` rounded up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class TensorLayout:
    """
    Where one tensor lies in its block's image on the device: `offset` and `nbytes` in bytes, `shape` and `stride` in
    elements. `file` is where it lies on disk, None where it is in no file.
    """

    name: str
    kind: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    file: FileRange | None = None


class FileRun(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of an image that lie together in a file, from `file_offset` on."""

    path: str
    file_offset: int
    offset: int
    nbytes: int


class Realignment(NamedTuple):
    """A copy inside an image on the device, of `nbytes` bytes from `source` to `target`."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class BlockLayout:
    """
    The byte image of one block, or of a leaf that is fetched on demand ([Note: Image]): `nbytes` without the padding
    at its end.
    """

    name: str
    nbytes: int
    tensors: tuple[TensorLayout, ...]
    is_leaf: bool = False
    is_lookup: bool = False
    "Whether it is an embedding, which every forward calls."
    runs: tuple[FileRun, ...] = ()
    realigned: tuple[Realignment, ...] = ()
    memory_offset: int = 0
    coded: CodedBlock | None = None
    "Its coded shards, if it lies in such."

    def shard_nbytes(self, group_size: int) -> int:
        """Bytes of a rank's equal share of the padded image."""
        return align(-(-self.nbytes // group_size))

    def padded_nbytes(self, group_size: int) -> int:
        """Bytes of the image once padded to `group_size` equal shards."""
        return self.shard_nbytes(group_size) * group_size

    def memory_nbytes(self, group_size: int) -> int:
        """Bytes of the padded image that a host store keeps in memory, because they are in no file."""
        if self.coded is not None:
            return 0
        return self.padded_nbytes(group_size) - self.memory_offset if self.nbytes > self.memory_offset else 0

    @cached_property
    def digest(self) -> str:
        """A short digest of everything in this layout."""
        return hashlib.sha256(self.describe().encode()).hexdigest()[:16]

    def describe(self) -> str:
        """This layout as text, one tensor a line: what ranks compare."""
        lines = [f"block '{self.name}' {self.nbytes} bytes{' (leaf)' if self.is_leaf else ''}"]
        lines += [f"  {t.name} {t.kind} at {t.offset} {t.dtype} {t.shape} stride {t.stride}" for t in self.tensors]
        lines += [f"  at {run.offset}: {run.nbytes} bytes at {run.file_offset} of {run.path}" for run in self.runs]
        if self.coded is not None:
            lines += [f"  coded at {shard.place}: {shard.check_sum}" for shard in self.coded.shards]
        return "\n".join(lines)


def lay_out(
    name: str, tensors: Sequence[OwnedTensor], is_leaf: bool, files: Mapping[int, FileRange] | None = None
) -> BlockLayout:
    """
    The layout of a block's image.

    Args:
        tensors (`Sequence[OwnedTensor]`): the block's tensors, on any device, also on meta.
        files (`Mapping[int, FileRange]`, *optional*): the file range of tensors that lie in files as they are to be
            used, by the tensor's id.
    """
    files = files or {}
    sizes = {id(o.tensor): run_nbytes(o.tensor) for o in tensors}
    offsets: dict[int, int] = {}
    runs, realigned, end = [], [], 0
    for draft in _draft_runs({key: files[key] for key in sizes if key in files}):
        run = draft.placed_after(end)
        runs.append(run)
        end = run.offset + run.nbytes
        offsets |= {key: run.offset + place.offset - run.file_offset for key, place in draft.members}
    for key, offset in offsets.items():
        if offset % ALIGNMENT:
            offsets[key] = align(end)
            realigned.append(Realignment(offset, align(end), sizes[key]))
            end = align(end) + sizes[key]
    memory_offset = align(end)
    for key, nbytes in sizes.items():
        if key not in offsets:
            offsets[key] = align(end)
            end = align(end) + nbytes
    return BlockLayout(
        name=name,
        nbytes=end,
        tensors=tuple(_describe(o, offsets[id(o.tensor)], sizes[id(o.tensor)], files) for o in tensors),
        is_leaf=is_leaf,
        runs=tuple(runs),
        realigned=tuple(realigned),
        memory_offset=memory_offset,
    )


def _describe(owned: OwnedTensor, offset: int, nbytes: int, files: Mapping[int, FileRange]) -> TensorLayout:
    tensor = owned.tensor
    return TensorLayout(
        name=owned.name,
        kind=owned.owners[0].kind,
        offset=offset,
        nbytes=nbytes,
        dtype=str(run_dtype(tensor)).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        file=files.get(id(tensor)),
    )


class _Draft:
    """A run that is being put together: its members in the order of the file, and what they ask of its place."""

    def __init__(self, key: int, place: FileRange) -> None:
        self.members = [(key, place)]
        self.stop = place.offset + place.nbytes
        self._phase = _phase_of(place)

    def takes(self, key: int, place: FileRange) -> bool:
        """Takes the next tensor of the file in, if it continues the run and can be aligned with it."""
        phase = _phase_of(place)
        if (
            place.path != self.members[0][1].path
            or not 0 <= place.offset - self.stop <= SMALL_NBYTES
            or (phase is not None and self._phase not in (None, phase))
        ):
            return False
        self.members.append((key, place))
        self.stop = place.offset + place.nbytes
        self._phase = self._phase if self._phase is not None else phase
        return True

    def placed_after(self, end: int) -> FileRun:
        """The run behind byte `end` of an image: its large tensors aligned or, if it has none, most of the others."""
        phase = self._phase
        if phase is None:
            phase = Counter(place.offset % ALIGNMENT for _, place in self.members).most_common(1)[0][0]
        start = self.members[0][1].offset
        return FileRun(self.members[0][1].path, start, align(end) + (start - phase) % ALIGNMENT, self.stop - start)


def _phase_of(place: FileRange) -> int | None:
    """Where in a run's alignment a tensor has to lie; None for a small one, which may be realigned."""
    return place.offset % ALIGNMENT if place.nbytes > SMALL_NBYTES else None


def _draft_runs(places: Mapping[int, FileRange]) -> Iterator[_Draft]:
    draft: _Draft | None = None
    for key, place in sorted(places.items(), key=lambda item: (item[1].path, item[1].offset)):
        if draft is None or not draft.takes(key, place):
            if draft is not None:
                yield draft
            draft = _Draft(key, place)
    if draft is not None:
        yield draft
