# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how one shard of a block's image is coded: in which segments, and which of them are worth it. Must not know of
files, nor of when anything is decoded.

[Note: Coded shards]
    A shard is cut where a large tensor follows that is not like what is before it: 16-bit floats are like those of
    their dtype, and all other dtypes are alike. Small tensors and padding go along with what is before them, whatever
    they are: any bytes come back as they were. A segment of 16-bit floats is coded if that takes at most 95 % of its
    bytes; all others lie in the coded shard as they are. Coded segments follow each other at multiples of 256 bytes,
    so that each can be decoded, or copied, from one buffer straight to its place in the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..block_layout import ALIGNMENT, SMALL_NBYTES, BlockLayout, align
from .codec import Codec
from .coded_block import Segment


CODED_DTYPES = ("bfloat16", "float16")
"""Dtypes whose exponents are worth coding."""

_WORTH = 0.95
"""A segment is kept as it is if coding leaves more of it than this."""


class Region(NamedTuple):
    """Bytes `[start, stop)` of an image, most of which are of one dtype."""

    start: int
    stop: int
    dtype: str


def shard_bounds(image_nbytes: int, shards: int, shard: int) -> tuple[int, int]:
    """Where one of `shards` shards of an image of so many bytes begins and ends, without the padding of the last."""
    nbytes, end = align(-(-image_nbytes // shards)), align(image_nbytes)
    return min(shard * nbytes, end), min((shard + 1) * nbytes, end)


def regions_of(layout: BlockLayout) -> list[Region]:
    """The image of a block in runs of one dtype ([Note: Coded shards]), without gaps."""
    regions: list[Region] = []
    for tensor in sorted((one for one in layout.tensors if one.nbytes), key=lambda tensor: tensor.offset):
        stop = align(tensor.offset + tensor.nbytes)
        last = regions[-1] if regions else None
        if last is not None and (tensor.nbytes <= SMALL_NBYTES or _kind(tensor.dtype) == _kind(last.dtype)):
            regions[-1] = Region(last.start, stop, last.dtype)
        else:
            regions.append(Region(last.stop if last is not None else 0, stop, tensor.dtype))
    return regions


def cut_regions(regions: Sequence[Region], bounds: tuple[int, int]) -> list[Region]:
    """The parts of regions that lie in a shard: one for each of its segments."""
    cut = [Region(max(r.start, bounds[0]), min(r.stop, bounds[1]), r.dtype) for r in regions]
    return [region for region in cut if region.start < region.stop]


def _kind(dtype: str) -> str:
    return dtype if dtype in CODED_DTYPES else ""


def encode_shard(
    data: torch.Tensor, bounds: tuple[int, int], regions: Sequence[Region], codec: Codec
) -> tuple[torch.Tensor, list[tuple[Segment, str]]]:
    """
    One shard, coded.

    Args:
        data (`torch.Tensor`): its bytes, `(nbytes,)` of `uint8`, on the codec's device.
        bounds (`tuple[int, int]`): where it begins and ends in the image.
        regions (`Sequence[Region]`): of the image.

    Returns:
        The coded bytes, on that device, and the segments with the dtype of each.
    """
    parts, segments, end = [], [], 0
    for start, stop, dtype in cut_regions(regions, bounds):
        part = data[start - bounds[0] : stop - bounds[0]]
        if dtype in CODED_DTYPES:
            coded = codec.encode(part)
            part = coded if coded.numel() <= _WORTH * part.numel() else part
        segments.append((Segment(start - bounds[0], stop - start, end, part.numel()), dtype))
        parts.append(part)
        end += part.numel()
    return torch.cat(parts) if parts else data.new_empty(0), segments


def decode_shard(
    coded: torch.Tensor, segments: Sequence[Segment], out: torch.Tensor, codec: Codec, scratch: torch.Tensor
) -> None:
    """
    Queues the decoding of a shard, checked and intact, into `out`, `(nbytes,)` of `uint8`, on the current stream.
    `scratch` is as for `Codec.decode`.
    """
    for segment in segments:
        source = coded[segment.coded_offset : segment.coded_offset + segment.coded_nbytes]
        target = out[segment.offset : segment.offset + segment.nbytes]
        if segment.is_coded:
            codec.decode(source, target, scratch)
        else:
            target.copy_(source)


def check_places(segments: Sequence[Segment], nbytes: int, coded_nbytes: int) -> None:
    """
    Makes sure that segments are `nbytes` bytes in `coded_nbytes`, one after the other, without gaps.

    Raises:
        `ValueError`: they are not, with the reason.
    """
    end = coded_end = 0
    for segment in segments:
        if segment.offset != end or segment.coded_offset != coded_end:
            raise ValueError("its segments do not follow each other")
        if not 0 < segment.coded_nbytes <= segment.nbytes:
            raise ValueError(f"a segment of {segment.nbytes} bytes has {segment.coded_nbytes} coded ones")
        if any(number % ALIGNMENT for number in segment):
            raise ValueError("a segment is not aligned")
        end, coded_end = end + segment.nbytes, coded_end + segment.coded_nbytes
    if end != nbytes or coded_end != coded_nbytes:
        raise ValueError(f"its segments are {end} bytes in {coded_end}, and it is {nbytes} in {coded_nbytes}")


def check_segments(coded: torch.Tensor, segments: Sequence[Segment], nbytes: int, codec: Codec) -> None:
    """
    Makes sure that decoding a coded shard, on the host, reads and writes nothing outside of it and of `nbytes` bytes.

    Raises:
        `ValueError`: it would, with the reason.
    """
    check_places(segments, nbytes, coded.numel())
    for segment in segments:
        if segment.is_coded:
            codec.check(coded[segment.coded_offset : segment.coded_offset + segment.coded_nbytes], segment.nbytes)
