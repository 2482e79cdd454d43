# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the codec that runs on NVIDIA devices: nvCOMP's ANS, by the batched calls of its C library. Must not know of
shards or files.

[Note: ANS runs]
    The library codes 16-bit floats by itself: exponents by an entropy code, the other bits as they are. It does so in
    chunks, which a device decodes side by side. A coded run begins with a table of three numbers of 64 bits for each
    chunk: where it lies in the run, its coded length and its length. The library wants addresses; they are made on the
    device, from the table and the two places of the run, so that a decoding takes three launches, one of them the
    library's, and the host nothing but these. Its Python package would allocate for each; the C calls are bound here,
    by `ctypes`.

    The library is not to be given damaged data: that can read outside of its memory, which ends the process. What is
    decoded has been checked before ([Note: Check sums]), and so have the tables (`check`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from ctypes import byref, c_char, c_int, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

import torch

from ..block_layout import ALIGNMENT, align
from ..coding.codec import Codec


ANS = "ans"
"""The name of the codec."""

_SERIES = 6
"""The first number of the library's version, whose calls are bound here."""
_CHUNK_NBYTES = 256 << 10
_FLOAT16, _ANY = 10, 0xFF
"""`NVCOMP_TYPE_FLOAT16`, which stands for all 16-bit floats, and `NVCOMP_TYPE_BITS`."""
_ALIGNMENT = 16
"""What the library asks of each coded chunk."""


class _CompressOptions(ctypes.Structure):
    """`nvcompBatchedANSCompressOpts_t`."""

    _fields_ = [
        ("type", c_int),
        ("data_type", c_int),
        ("max_sub_chunk_count", c_uint8),
        ("states_per_lane", c_uint8),
        ("histogram_reduction_log2", c_uint8),
        ("reserved", c_char * 53),
    ]


class _DecompressOptions(ctypes.Structure):
    """`nvcompBatchedANSDecompressOpts_t`."""

    _fields_ = [
        ("backend", c_int),
        ("data_type", c_int),
        ("max_sub_chunk_count", c_uint8),
        ("states_per_lane", c_uint8),
        ("skip_validate", c_uint8),
        ("reserved", c_char * 53),
    ]


class _Properties(ctypes.Structure):
    """`nvcompProperties_t`."""

    _fields_ = [("version", c_uint32), ("cudart_version", c_uint32)]


class AnsCodec(Codec):
    """
    ANS on a device ([Note: ANS runs]).

    Args:
        device (`torch.device`): an NVIDIA device.

    Raises:
        `RuntimeError`: the library is missing, or of another series.
    """

    name = ANS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library = _load_library()
        properties = _Properties()
        _check(self._library.nvcompGetProperties(byref(properties)), "nvcompGetProperties")
        number = properties.version
        self.version = f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
        if number // 1000 != _SERIES:
            raise RuntimeError(
                f"The codec '{ANS}' needs nvCOMP {_SERIES}, and version {self.version} is installed: pip install "
                f'"nvidia-libnvcomp-cu13>={_SERIES},<{_SERIES + 1}", or -cu12 for a torch that is built for CUDA 12.'
            )
        self._compress_options = _CompressOptions(0, _FLOAT16)
        self._decompress_options = _DecompressOptions(0, _ANY)

    def encode(self, data: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(self.device):  # the library uses the current one
            return self._encode(data)

    def _encode(self, data: torch.Tensor) -> torch.Tensor:
        count = _chunks_of(data.numel())
        most, temporary = c_size_t(), c_size_t()
        options, stream = self._compress_options, self._stream()
        _check(
            self._library.nvcompBatchedANSCompressGetMaxOutputChunkSize(c_size_t(_CHUNK_NBYTES), options, byref(most)),
            "nvcompBatchedANSCompressGetMaxOutputChunkSize",
        )
        _check(
            self._library.nvcompBatchedANSCompressGetTempSize(
                c_size_t(count),
                c_size_t(_CHUNK_NBYTES),
                options,
                byref(temporary),
                c_size_t(data.numel()),
                stream,
            ),
            "nvcompBatchedANSCompressGetTempSize",
        )
        pitch = -(-most.value // _ALIGNMENT) * _ALIGNMENT
        out = torch.empty(count * pitch, dtype=torch.uint8, device=self.device)
        scratch = torch.empty(max(temporary.value, 1), dtype=torch.uint8, device=self.device)
        numbers = torch.arange(count, device=self.device)
        lengths = (data.numel() - numbers * _CHUNK_NBYTES).clamp_(max=_CHUNK_NBYTES)
        sources, targets = numbers * _CHUNK_NBYTES + data.data_ptr(), numbers * pitch + out.data_ptr()
        sizes = torch.zeros(count, dtype=torch.int64, device=self.device)
        statuses = torch.full((count,), -1, dtype=torch.int32, device=self.device)
        _check(
            self._library.nvcompBatchedANSCompressAsync(
                c_void_p(sources.data_ptr()),
                c_void_p(lengths.data_ptr()),
                c_size_t(_CHUNK_NBYTES),
                c_size_t(count),
                c_void_p(scratch.data_ptr()),
                temporary,
                c_void_p(targets.data_ptr()),
                c_void_p(sizes.data_ptr()),
                options,
                c_void_p(statuses.data_ptr()),
                stream,
            ),
            "nvcompBatchedANSCompressAsync",
        )
        if int(statuses.abs().max()):
            raise RuntimeError(f"nvCOMP could not code a run of {data.numel()} bytes; pack it with --codec zstd.")
        begin = _table_nbytes(count)
        taken = (sizes + (_ALIGNMENT - 1)) // _ALIGNMENT * _ALIGNMENT
        offsets = begin + taken.cumsum(0) - taken
        table = torch.stack([offsets, sizes, lengths]).flatten().view(torch.uint8)
        lengths_coded = taken.tolist()
        chunks = [out[i * pitch : i * pitch + nbytes] for i, nbytes in enumerate(lengths_coded)]
        end = begin + sum(lengths_coded)
        gap, rest = (
            torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            for nbytes in (begin - table.numel(), align(end) - end)
        )
        return torch.cat([table, gap, *chunks, rest])

    def check(self, coded: torch.Tensor, nbytes: int) -> None:
        count = _chunks_of(nbytes)
        if coded.numel() < _table_nbytes(count):
            raise ValueError(f"a run has {coded.numel()} bytes, fewer than its table")
        offsets, sizes, lengths = _table(coded, count)
        expected = (nbytes - torch.arange(count) * _CHUNK_NBYTES).clamp_(max=_CHUNK_NBYTES)
        if not torch.equal(lengths, expected):
            raise ValueError("the lengths of its chunks do not add up to it")
        inside = (offsets >= _table_nbytes(count)) & (sizes > 0) & (sizes <= coded.numel())
        if not bool((inside & (offsets <= coded.numel() - sizes) & (offsets % _ALIGNMENT == 0)).all()):
            raise ValueError("a chunk lies outside of it")

    def scratch_nbytes(self, nbytes: int) -> int:
        temporary = self._temporary_nbytes(_chunks_of(nbytes), nbytes)
        return planned_scratch_nbytes(nbytes) + max(temporary - ALIGNMENT, 0)

    def decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        with torch.cuda.device(self.device):
            self._decode(coded, out, scratch)

    def _decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        count = _chunks_of(out.numel())
        offsets, sizes, lengths = _table(coded, count)
        step = align(8 * count)
        sources, targets, found, statuses = (
            scratch[i * step : i * step + 8 * count].view(torch.int64) for i in range(4)
        )
        torch.add(offsets, coded.data_ptr(), out=sources)
        begin = out.data_ptr()
        torch.arange(begin, begin + count * _CHUNK_NBYTES, _CHUNK_NBYTES, out=targets)
        _check(
            self._library.nvcompBatchedANSDecompressAsync(
                c_void_p(sources.data_ptr()),
                c_void_p(sizes.data_ptr()),
                c_void_p(lengths.data_ptr()),
                c_void_p(found.data_ptr()),
                c_size_t(count),
                c_void_p(scratch.data_ptr() + 4 * step),
                c_size_t(self._temporary_nbytes(count, out.numel())),
                c_void_p(targets.data_ptr()),
                self._decompress_options,
                c_void_p(statuses.data_ptr()),
                self._stream(),
            ),
            "nvcompBatchedANSDecompressAsync",
        )

    def _temporary_nbytes(self, count: int, nbytes: int) -> int:
        temporary = c_size_t()
        _check(
            self._library.nvcompBatchedANSDecompressGetTempSize(
                c_size_t(count),
                c_size_t(_CHUNK_NBYTES),
                self._decompress_options,
                byref(temporary),
                c_size_t(nbytes),
                self._stream(),
            ),
            "nvcompBatchedANSDecompressGetTempSize",
        )
        return temporary.value

    def _stream(self) -> c_void_p:
        return c_void_p(torch.cuda.current_stream(self.device).cuda_stream)


def planned_scratch_nbytes(nbytes: int) -> int:
    """
    `AnsCodec.scratch_nbytes`, known without a device: of a library that asks for no memory of its own, such as 6.0.0.
    """
    return 4 * align(8 * _chunks_of(nbytes)) + ALIGNMENT


def _chunks_of(nbytes: int) -> int:
    return -(-nbytes // _CHUNK_NBYTES)


def _table_nbytes(count: int) -> int:
    return align(24 * count)


def _table(coded: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Where each chunk of a run lies in it, its coded length and its length; each `(count,)` of `int64`."""
    return coded[: 24 * count].view(torch.int64).view(3, count).unbind(0)


def _load_library() -> Any:
    """
    The library, of the package that holds it, or of the system.

    Raises:
        `RuntimeError`: it is not installed, or cannot be loaded.
    """
    names = []
    try:
        spec = importlib.util.find_spec("nvidia.libnvcomp")
    except ModuleNotFoundError:
        spec = None
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        names.append(os.path.join(folder, "lib64", f"libnvcomp.so.{_SERIES}"))
    reasons = []
    for name in [*filter(os.path.isfile, names), f"libnvcomp.so.{_SERIES}"]:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise RuntimeError(
        f"The codec '{ANS}' needs nvCOMP {_SERIES}, which cannot be loaded ({'; '.join(reasons)}): pip install "
        '"diffusers-dlo[coded]", or nvidia-libnvcomp-cu12 for a torch that is built for CUDA 12.'
    )


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"nvCOMP refused '{call}' with status {status}.")
