# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns reading coded blocks outside of streaming: whether a coded shard is what was written, and the values of a block on
the host. Must not open files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..block_layout import align
from .check_sum import CheckSums, as_text
from .codec import Codec
from .coded_block import CodedBlock, CodedShard, Segment
from .shard_coding import check_segments, decode_shard


def damaged_shard(shard: CodedShard, why: object) -> RuntimeError:
    """The error for a coded shard that cannot be decoded."""
    return RuntimeError(
        f"{shard} is damaged: {why}. Download the checkpoint again (force_download=True), or pack it anew."
    )


def check_shard(source: torch.Tensor, shard: CodedShard, codec: Codec) -> None:
    """
    Makes sure that a coded shard, `source` on the host, is made up as it is described: for what decoding relies on.

    Raises:
        `RuntimeError`: it is not, with its block and file.
    """
    try:
        check_segments(source, shard.segments, shard.nbytes, codec)
    except ValueError as error:
        raise damaged_shard(shard, error) from error


def check_content(shard: CodedShard, total: torch.Tensor) -> None:
    """
    Makes sure that a coded shard has the check sum it was written with; waits for `total`, that of what is there.

    Raises:
        `RuntimeError`: it has another one, with its block and file.
    """
    if as_text(total) != shard.check_sum:
        raise damaged_shard(shard, f"its check sum is {as_text(total)}, and was {shard.check_sum} when it was written")


def decoded(coded: torch.Tensor, segments: Sequence[Segment], nbytes: int, codec: Codec) -> torch.Tensor:
    """A coded shard, checked and intact, as the `nbytes` bytes that it was; both on the codec's device."""
    out = torch.empty(nbytes, dtype=torch.uint8, device=codec.device)
    most = max((segment.nbytes for segment in segments if segment.is_coded), default=0)
    scratch = torch.empty(codec.scratch_nbytes(most) if most else 0, dtype=torch.uint8, device=codec.device)
    decode_shard(coded, segments, out, codec, scratch)
    return out


class BlockReader:
    """
    Decodes whole blocks, one at a time and each to the end.

    Args:
        codec (`Codec`): of their file.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._sums = CheckSums(codec.device)

    def read(self, block: CodedBlock, sources: Iterable[torch.Tensor]) -> torch.Tensor:
        """
        A block's image on the host, `(nbytes,)` of `uint8`.

        Args:
            block (`CodedBlock`): which.
            sources (`Iterable[torch.Tensor]`): the bytes of each of its shards, on the host.

        Raises:
            `RuntimeError`: a shard is damaged.
        """
        image = torch.empty(align(block.nbytes), dtype=torch.uint8)
        for shard, source in zip(block.shards, sources):
            check_shard(source, shard, self._codec)
            coded = source.to(self._codec.device)
            check_content(shard, self._sums.queue(coded))
            image[shard.offset : shard.offset + shard.nbytes] = decoded(
                coded, shard.segments, shard.nbytes, self._codec
            )
        return image
