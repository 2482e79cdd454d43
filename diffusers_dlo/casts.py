# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns casts that are still to be done: which a tensor has, its size and bytes once they are done, and doing them in
pieces. Must not know who put them off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


_CASTS = "distributed_layerwise_offload_casts"
_SAMPLE_NBYTES = 64
_CAST_NBYTES = 16 << 20
"""What is cast at a time: a private copy of no more than this exists. A multiple of every item size."""


def set_pending_casts(tensor: torch.Tensor, casts: Sequence[torch.dtype]) -> None:
    """Has `tensor` count as cast to each of `casts` in turn, which is done where its bytes are stored or placed."""
    if casts or hasattr(tensor, _CASTS):
        setattr(tensor, _CASTS, (tuple(casts), tensor.data_ptr() if casts else 0))


def pending_casts(tensor: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes that `tensor` has still to be cast to, in turn; see `mapped_loading`."""
    return getattr(tensor, _CASTS, ((), 0))[0]


def had_casts(tensor: torch.Tensor) -> bool:
    """Whether casts are pending on this very tensor, or were until they were done."""
    return hasattr(tensor, _CASTS)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has other memory than when its casts were put off: its value may be another one."""
    casts, address = getattr(tensor, _CASTS, ((), 0))
    return bool(casts) and tensor.data_ptr() != address


def run_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that a model computes with, once pending casts are done."""
    return pending_casts(tensor)[-1] if pending_casts(tensor) else tensor.dtype


def cast(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` after its pending casts; itself where there are none."""
    for dtype in pending_casts(tensor):
        tensor = tensor.to(dtype)
    return tensor


def copy_bytes(tensor: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """
    Copies bytes `[start, start + len(out))` of a dense `tensor`, in storage order and after its pending casts, into
    `out` on the host. Only what is copied is cast, a piece at a time. From a device it comes by way of other memory:
    `out` may be page-locked for devices that read it, and no device may write to it then.
    """
    casts, itemsize = pending_casts(tensor), run_dtype(tensor).itemsize
    if not casts and tensor.device == out.device:
        out.copy_(flat_bytes(tensor)[start : start + out.numel()])
        return
    elements = _elements(tensor)
    stop = start + out.numel()
    for low in range(start - start % itemsize, stop, _CAST_NBYTES):
        high = min(low + _CAST_NBYTES, stop)
        piece = elements[low // itemsize : -(-high // itemsize)]
        for dtype in casts:
            piece = piece.to(dtype)
        begin = max(low, start)
        out[begin - start : high - start].copy_(piece.to(out.device).view(torch.uint8)[begin - low : high - low])


def run_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor after its pending casts."""
    return tensor.numel() * run_dtype(tensor).itemsize


def middle_bytes(tensor: torch.Tensor) -> bytes:
    """Up to 64 bytes from the middle of a dense tensor, in storage order and after its pending casts."""
    middle = run_nbytes(tensor) // 2
    out = torch.empty(min(_SAMPLE_NBYTES, run_nbytes(tensor) - middle), dtype=torch.uint8)
    copy_bytes(tensor, middle, out)
    return bytes(out.tolist())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense `tensor` in storage order, `(nbytes,)` of `uint8`; shares its memory."""
    return _elements(tensor).view(torch.uint8)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense `tensor` in storage order, as an ordinary tensor whatever its class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
