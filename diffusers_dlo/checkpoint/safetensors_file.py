# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of a safetensors file: its header, checked, and its tensors as views of the mapped file. Must not
read weights.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""What safetensors calls dtypes. Those of less than a byte (F4, F6) are left out: their elements cannot be cast."""


_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""

_LISTED = 20
"""How many names of each kind an error lists."""


class StoredTensor(NamedTuple):
    """A tensor as the header of its file describes it: `nbytes` bytes at `offset` of the file."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: str) -> list[StoredTensor]:
    """
    The tensors in a file. safetensors itself refuses a header whose ranges have holes, overlap, leave the file or do
    not match dtype and shape; of a name that is there twice it takes the last one, which is refused here.

    Raises:
        `RuntimeError`: the file cannot be read, or is not sound; with the reason.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
        return _parse_header(path)
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise damaged(path, error) from None


def peek_header(path: str) -> list[StoredTensor]:
    """
    As `read_header`, without mapping the file, which takes as much address space as a host may have memory: for sizes,
    not for reading weights. Of the file it is checked that it is as long as its header says.

    Raises:
        `RuntimeError`: the file cannot be read, or is cut off; with the reason.
    """
    try:
        stored = _parse_header(path)
        there, needed = os.path.getsize(path), max((one.offset + one.nbytes for one in stored), default=0)
        if there < needed:
            raise ValueError(f"it has {there:,} bytes, and by its header {needed:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise damaged(path, error) from None
    return stored


def read_metadata(path: str) -> dict[str, str]:
    """
    What the writer of a file has noted in its header.

    Raises:
        `RuntimeError`: the file cannot be read.
    """
    try:
        metadata = _load_header(path)[0].get("__metadata__", {})
        return {str(key): str(value) for key, value in metadata.items()}
    except (OSError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise damaged(path, error) from None


def _load_header(path: str) -> tuple[dict[str, Any], int]:
    """The header of a file as it stands there, and the byte at which the tensors begin."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError("its header is too large")
        return json.loads(file.read(length), object_pairs_hook=without_repeats), 8 + length


def _parse_header(path: str) -> list[StoredTensor]:
    header, begin = _load_header(path)
    header.pop("__metadata__", None)
    stored = []
    for key, entry in header.items():
        start, stop = entry["data_offsets"]
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
            raise ValueError(f"{key!r} is said to lie at {start!r} to {stop!r}")
        stored.append(StoredTensor(key, path, entry["dtype"], tuple(entry["shape"]), begin + start, stop - start))
    return stored


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dictionary; a `ValueError` where a name is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in it twice")
    return found


def map_tensors(stored: Iterable[StoredTensor]) -> dict[StoredTensor, torch.Tensor]:
    """
    Each tensor as a view of its file: private, and writable without reaching the file, as safetensors gives them. Its
    own `get_tensor` reads a byte of each, and the kernel what lies around that: of a cold file easily all of it.

    Raises:
        `RuntimeError`: a file cannot be mapped.
    """
    every = list(stored)
    stops: dict[str, int] = {}
    for one in every:
        stops[one.file] = max(stops.get(one.file, 0), one.offset + one.nbytes)
    files: dict[str, Any] = {}
    try:
        for path, stop in stops.items():
            files[path] = torch.UntypedStorage.from_file(path, False, stop)
        return {
            one: torch.empty(0, dtype=DTYPES[one.dtype], device="cpu").set_(
                files[one.file][one.offset : one.offset + one.nbytes], 0, one.shape, ()
            )
            for one in every
        }
    except RuntimeError as error:
        raise RuntimeError(f"'{path}' cannot be mapped: {error}. Load the model anew.") from None
    finally:
        files.clear()  # an error's traceback would keep them mapped


def damaged(path: str, reason: object) -> RuntimeError:
    """The error for a file that cannot be used."""
    return RuntimeError(
        f"'{path}' cannot be used: {reason}. Download the checkpoint again (force_download=True), or convert it anew."
    )


def list_some(names: list[str]) -> str:
    """The first of many names, for an error."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
