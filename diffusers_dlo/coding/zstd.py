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
_LEVEL, _HASH_LOG = 1, 8
"""
A plane of exponents repeats by chance only, and a match that is found costs more than the entropy code alone: the
quickest level, with a table too small to find many, takes 0.664 of 2 M normal weights at five times the speed of level
3, which takes 0.703.
"""


class ZstdCodec(Codec):
    """
    Zstandard on the plane of exponents, signs and mantissas beside it ([Note: Planes]). Any number of threads may use
    it at once.

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
        self._library = zstandard
        self._parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, hash_log=_HASH_LOG, write_checksum=True
        )

    def encode(self, data: torch.Tensor) -> torch.Tensor:
        words = data.numpy().view(np.uint16)
        rotated = (words << 1) | (words >> 15)
        # The library's objects are for one thread at a time, and take microseconds to make.
        compressor = self._library.ZstdCompressor(compression_params=self._parameters)
        frame = compressor.compress((rotated >> 8).astype(np.uint8).data)
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
        try:
            found = self._library.get_frame_parameters(_high_plane(coded, count))
        except self._library.ZstdError as error:
            raise ValueError(f"a run has no frame of zstandard ({error})") from None
        # The library allocates whatever size a frame claims, and verifies a check sum only where the frame has one.
        if found.content_size != count or not found.has_checksum:
            raise ValueError(
                f"a run of {count} values has a frame of {found.content_size}, or one without a check sum"
            )

    def scratch_nbytes(self, nbytes: int) -> int:
        return 0

    def decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        count = out.numel() // 2
        try:
            self.check(coded, out.numel())
            decompressor = self._library.ZstdDecompressor()
            high = decompressor.decompress(_high_plane(coded, count), allow_extra_data=False)
        except (ValueError, self._library.ZstdError) as error:
            raise RuntimeError(
                f"A run coded by '{ON_HOST}' cannot be decoded: {error}. Its file is damaged: make it anew."
            ) from error
        rotated = np.frombuffer(high, np.uint8).astype(np.uint16) << 8
        rotated |= coded.numpy()[_HEADER_NBYTES : _HEADER_NBYTES + count]
        np.bitwise_or(rotated >> 1, rotated << 15, out=out.numpy().view(np.uint16))


def _high_plane(coded: torch.Tensor, count: int) -> memoryview:
    """The compressed high bytes of a run of so many values."""
    begin = _HEADER_NBYTES + align(count)
    return coded[begin : begin + int(coded[:8].numpy().view("<i8")[0])].numpy().data
