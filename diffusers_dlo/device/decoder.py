# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the way of coded shards: to buffers on the device, and decoded from there to where they are wanted. Must not know
which block comes next, nor whose memory it fills.

[Note: Decoding]
    A coded shard is copied to one of two buffers, and decoded from there by another stream, straight into its place:
    in a slot, a staging buffer, or where it stays. Only decoding waits for that place to be free; the copy waits for
    the decoding that read its buffer last. So copies run ahead of decoding, and the link is busy while a device
    decodes. What [Note: Slot reuse] says of copies holds of decodings: whoever is to come behind the fetch comes
    behind its last one. The host waits for none of this, and nothing is allocated: buffers and scratch memory are
    there from the start, and shards are decoded one at a time.

    Where a model has blocks that are not coded beside coded ones, both go to the same slots, by two streams. A copy
    that needs no decoding, also one through page-locked buffers, then waits for the latest decoding; a decoding waits
    for its own copy, which earlier copies come before. Each lane has a decoder of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..coding.codec import Codec
from ..coding.coded_block import CODED_BUFFERS
from ..coding.shard_coding import decode_shard
from .interface import Event, Platform
from .ring import Copy


@dataclass
class _Buffer:
    """Device memory for a coded shard; `arrived` follows the copy into it, `free` the decoding from it."""

    memory: torch.Tensor
    arrived: Event
    free: Event


@dataclass(frozen=True)
class Decoding:
    """
    One coded shard on its way: `copy` and `decode` queue their work on the current stream, each behind one event and
    followed by another.
    """

    copy: Callable[[], None]
    decode: Callable[[], None]
    free: Event
    arrived: Event


class Decoder:
    """
    Buffers for coded shards, and what decodes from them ([Note: Decoding]).

    Args:
        platform (`Platform`): allocates them.
        codec (`Codec`): decodes.
        coded_nbytes (`int`), scratch_nbytes (`int`): the largest coded shard, and what decoding takes beside it.

    Attributes:
        codec (`Codec`), coded_nbytes (`int`), scratch_nbytes (`int`): as they were given.
        stream (`Stream`): where decoding is to be queued.
    """

    def __init__(self, platform: Platform, codec: Codec, coded_nbytes: int, scratch_nbytes: int) -> None:
        self._platform = platform
        self.codec = codec
        self.coded_nbytes = coded_nbytes
        self.scratch_nbytes = scratch_nbytes
        self._scratch = platform.empty(scratch_nbytes)
        self._buffers = [
            _Buffer(platform.empty(coded_nbytes), platform.new_event(), platform.new_event())
            for _ in range(CODED_BUFFERS)
        ]
        self._turn = 0
        self.stream = platform.new_stream(high_priority=True)
        for buffer in self._buffers:
            platform.compute_record(buffer.free)  # the current stream may still use its memory

    @property
    def nbytes(self) -> int:
        """Device bytes of all buffers, scratch memory included."""
        return len(self._buffers) * self.coded_nbytes + self._scratch.numel()

    def fits(self, codec: Codec, coded_nbytes: int, scratch_nbytes: int) -> bool:
        """Whether it does for such shards."""
        return (
            codec.name == self.codec.name
            and coded_nbytes <= self.coded_nbytes
            and scratch_nbytes <= self.scratch_nbytes
        )

    @property
    def latest(self) -> Event:
        """Follows all that has been queued for decoding so far."""
        return self._buffers[(self._turn - 1) % len(self._buffers)].free

    def take(self, copy: Copy) -> Decoding:
        """The next buffer, for a coded shard."""
        assert copy.coded is not None
        buffer = self._buffers[self._turn % len(self._buffers)]
        self._turn += 1
        memory, segments, pieces = buffer.memory[: copy.source.numel()], copy.coded.shard.segments, copy.coded.pieces
        return Decoding(
            copy=lambda: _copy_pieces(memory, pieces),
            decode=lambda: decode_shard(memory, segments, copy.target, self.codec, self._scratch),
            free=buffer.free,
            arrived=buffer.arrived,
        )

    def close(self) -> None:
        """Waits for everything that uses the buffers and gives their memory back. Idempotent."""
        if self._buffers:
            self._platform.synchronize()
        self._buffers = []
        self._scratch = self._platform.empty(0)


def _copy_pieces(memory: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    start = 0
    for piece in pieces:
        memory[start : start + piece.numel()].copy_(piece, non_blocking=True)
        start += piece.numel()
