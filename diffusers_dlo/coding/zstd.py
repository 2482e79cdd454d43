# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the codec that runs on the host. Must not be given memory of a device.

[Note: Planes]
    A 16-bit float is rotated left by one bit, which puts its sign last: the high byte is then the exponent of a
    bfloat16 (of a float16 the exponent and three bits of the mantissa), the low byte mantissa and sign. Weights have
    few exponents, and any mantissa: the high bytes are compressed, the low ones stay as they are. All 16 bits come
    back, so it makes no difference whether they were a float at all.
"""

from __future__ import annotations

import numpy as np
import torch

from ..block_layout import align
from .codec import ON_HOST, Codec


_HEADER_NBYTES = 256
"""Before the low plane: how long both planes are, as little-endian 64-bit numbers."""
_LEVEL = 3


class ZstdCodec(Codec):
    """
    Zstandard on the plane of exponents, signs and mantissas beside it ([Note: Planes]).

    Raises:
        `RuntimeError`: the package `zstandard` is missing.
    """

    name = ON_HOST

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise RuntimeError(
                f"The codec '{ON_HOST}' needs the package 'zstandard', which is not installed: pip install "
                '"diffusers-dlo[coded]".'
            ) from error
        self.version = ".".join(map(str, zstandard.ZSTD_VERSION))
        self.device = torch.device("cpu")
        self._error = zstandard.ZstdError
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, data: torch.Tensor) -> torch.Tensor:
        words = data.numpy().view(np.uint16)
        rotated = (words << 1) | (words >> 15)
        frame = self._compressor.compress((rotated >> 8).astype(np.uint8).data)
        low = _HEADER_NBYTES + align(words.size)
        coded = torch.zeros(low + align(len(frame)), dtype=torch.uint8)
        out = coded.numpy()
        out[:16].view("<i8")[:] = (len(frame), words.size)
        out[_HEADER_NBYTES : _HEADER_NBYTES + words.size] = (rotated & 0xFF).astype(np.uint8)
        out[low : low + len(frame)] = np.frombuffer(frame, np.uint8)
        return coded

    def check(self, coded: torch.Tensor, nbytes: int) -> None:
        count = nbytes // 2
        if coded.numel() < _HEADER_NBYTES:
            raise ValueError(f"a run has {coded.numel()} bytes, fewer than its own header")
        frame, words = (int(number) for number in coded[:16].numpy().view("<i8"))
        if words != count or not 0 < frame <= coded.numel() - _HEADER_NBYTES - align(count):
            raise ValueError(f"a run says that it has {words} values in {frame} bytes, of {count} in {coded.numel()}")

    def scratch_nbytes(self, nbytes: int) -> int:
        return 0

    def decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        source, count = coded.numpy(), out.numel() // 2
        frame, low = int(source[:8].view("<i8")[0]), _HEADER_NBYTES + align(count)
        try:
            high = self._decompressor.decompress(source[low : low + frame].data, max_output_size=count)
        except self._error as error:
            raise RuntimeError(f"A coded run cannot be decoded ({error}); it is damaged.") from error
        if len(high) != count:
            raise RuntimeError(f"A coded run holds {len(high)} values and not {count}; it is damaged.")
        rotated = np.frombuffer(high, np.uint8).astype(np.uint16) << 8
        rotated |= source[_HEADER_NBYTES : _HEADER_NBYTES + count]
        np.bitwise_or(rotated >> 1, rotated << 15, out=out.numpy().view(np.uint16))
