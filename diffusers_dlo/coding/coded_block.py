# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of a block that lies in coded shards: these, their segments, and the tensors that they decode to.
Must not know where that was read, nor how anything is coded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..checkpoint.mapped import FileRange


CODED_BUFFERS = 2
"""Coded shards that are on a device at a time: one arrives while another is decoded."""


class Segment(NamedTuple):
    """`nbytes` bytes from `offset` of a shard, which are `coded_nbytes` from `coded_offset` of the coded shard."""

    offset: int
    nbytes: int
    coded_offset: int
    coded_nbytes: int

    @property
    def is_coded(self) -> bool:
        """Whether it has to be decoded, and not only copied."""
        return self.coded_nbytes < self.nbytes


@dataclass(frozen=True)
class CodedShard:
    """
    One coded shard: `nbytes` bytes of its block's image from `offset` on, without padding at its end.

    Attributes:
        place (`FileRange`): where the coded bytes lie.
        check_sum (`str`): of these ([Note: Check sums]).
        segments (`tuple[Segment, ...]`): what they are made up of ([Note: Coded shards]).
    """

    block: str
    offset: int
    nbytes: int
    place: FileRange
    check_sum: str
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return f"the coded shard of block '{self.block}' at byte {self.place.offset} of '{self.place.path}'"


@dataclass(frozen=True)
class CodedTensor:
    """A tensor of a coded block, by the names it has in the model: what its values will be like."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class CodedBlock:
    """A block in coded shards. `digest` is that of its layout, `nbytes` its image's size without padding."""

    name: str
    digest: str
    nbytes: int
    tensors: tuple[CodedTensor, ...]
    shards: tuple[CodedShard, ...]

    @property
    def coded_nbytes(self) -> int:
        """Bytes of all its coded shards."""
        return sum(shard.place.nbytes for shard in self.shards)

    @property
    def tensors_nbytes(self) -> int:
        """Bytes of its weights when they are not coded."""
        return sum(tensor.nbytes for tensor in self.tensors)
