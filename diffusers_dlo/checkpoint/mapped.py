# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the answer to one question: in which file, and where in it, do the bytes of a tensor lie. Reads what the kernel
says about this process's memory, so it works for every loader that maps its files. Must not keep a file open or
mapped.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..casts import flat_bytes
from ..quantized_parameter import has_own_memory
from ..tensor_utils import is_dense


_PRESENT, _SWAPPED, _OF_FILE = 63, 62, 61
"""Bits of an entry of `/proc/self/pagemap` (kernel documentation, admin-guide/mm/pagemap)."""


@dataclass(frozen=True)
class FileRange:
    """`nbytes` bytes at `offset` of the file at `path`, which is absolute and free of symbolic links."""

    path: str
    offset: int
    nbytes: int


class FileStamp(NamedTuple):
    """What tells that a file is still the same, with the same content."""

    device: int
    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, file: str | int) -> FileStamp:
        """The stamp of a path or an open file, or an `OSError`."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass
class Located:
    """
    Where tensors lie in files, by the tensor's id; and for those that do not, why, with how many bytes of each reason.
    `written` are the ids of those that did lie in a file until they were written to, `stamps` are the files as they
    were when they were found to be the right ones.
    """

    ranges: dict[int, FileRange] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    stamps: dict[str, FileStamp] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def main_reason(self) -> str:
        """The reason that keeps most bytes from being in a file."""
        return max(self.reasons, key=lambda reason: self.reasons[reason], default="there are no weights")


@dataclass(frozen=True)
class _Mapping:
    """A run of addresses that shows a run of a file. `identity` is the file's device and inode."""

    start: int
    stop: int
    offset: int
    identity: str
    path: str
    shared_for_writing: bool


def map_read_only(fd: int) -> torch.Tensor:
    """
    The file behind `fd` as `(nbytes,)` of `uint8`, for reading only: a write to it ends the process. `fd` may be
    closed after; the pages are those of the page cache, shared with every process that maps the file.

    Raises:
        `OSError` or `ValueError`: it cannot be mapped; an empty file cannot.
    """
    mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors and says so
        return torch.frombuffer(mapping, dtype=torch.uint8)


def locate_tensors(tensors: Iterable[torch.Tensor]) -> Located:
    """
    Finds the file range that each tensor shows: of whatever shape, as long as its elements fill a run of memory.

    A tensor that was written to after loading is not in the file any more (the kernel gave it pages of its own), nor
    is one whose file has been deleted, or replaced by another.

    Raises:
        `RuntimeError`: a file is shorter than what is mapped of it; reading that would end the process.
    """
    located = Located()
    unique = {id(tensor): tensor for tensor in tensors}
    if sys.platform != "linux":
        for tensor in unique.values():
            located.reasons["files are mapped on Linux only"] += _nbytes(tensor)
        return located
    try:
        mappings = _read_mappings()
    except OSError as error:
        for tensor in unique.values():
            located.reasons[f"the system does not say what is mapped ({error.strerror})"] += _nbytes(tensor)
        return located
    starts = [mapping.start for mapping in mappings]
    candidates: dict[tuple[str, str], list[tuple[torch.Tensor, _Mapping]]] = defaultdict(list)
    for tensor in unique.values():
        found = _mapping_of(tensor, mappings, starts)
        if isinstance(found, str):
            located.reasons[found] += _nbytes(tensor)
        else:
            candidates[found.path, found.identity].append((tensor, found))
    for (path, _), members in candidates.items():
        _locate_in_file(path, members, located)
    return located


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _read_mappings() -> list[_Mapping]:
    """What `/proc/self/maps` says of mapped files; neighbours that continue each other are one."""
    found: list[_Mapping] = []
    with open("/proc/self/maps", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            addresses, access, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if not path or not path[0].startswith("/") or inode == "0":
                continue
            start, stop = (int(address, 16) for address in addresses.split("-"))
            mapping = _Mapping(
                start,
                stop,
                int(offset, 16),
                f"{device} {inode}",
                path[0].replace("\\012", "\n"),
                access[1] == "w" and access[3] == "s",
            )
            last = found[-1] if found else None
            if (
                last is not None
                and (last.stop, last.offset + last.stop - last.start) == (start, mapping.offset)
                and (last.identity, last.path, last.shared_for_writing)
                == (mapping.identity, mapping.path, mapping.shared_for_writing)
            ):
                found[-1] = _Mapping(last.start, stop, last.offset, last.identity, last.path, last.shared_for_writing)
            else:
                found.append(mapping)
    return found


def mapped_addresses() -> list[tuple[int, int]]:
    """The runs of addresses of this process, ascending, that show files."""
    runs: list[tuple[int, int]] = []
    for mapping in _read_mappings() if sys.platform == "linux" else ():
        start = runs.pop()[0] if runs and runs[-1][1] == mapping.start else mapping.start
        runs.append((start, mapping.stop))
    return runs


def _mapping_of(tensor: torch.Tensor, mappings: Sequence[_Mapping], starts: Sequence[int]) -> _Mapping | str:
    """The mapping that shows the whole of `tensor`, or why there is none."""
    if not has_own_memory(tensor):
        return f"they are {type(tensor).__name__}s"
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return f"they are on '{tensor.device.type}'"
    if not tensor.numel() or not is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
        return "their elements do not fill a run of memory"
    address = tensor.data_ptr()
    index = bisect_right(starts, address) - 1
    if index < 0 or address + _nbytes(tensor) > mappings[index].stop:
        return (
            "they are not views of a mapped file: loaded with a cast, not from safetensors, or changed while loading"
        )
    mapping = mappings[index]
    if mapping.path.endswith(" (deleted)"):
        return "their file has been deleted"
    if mapping.shared_for_writing:
        return "their file is mapped for shared writing"
    return mapping


def _locate_in_file(path: str, members: Sequence[tuple[torch.Tensor, _Mapping]], located: Located) -> None:
    """Adds the members that still are what the file holds, and the reasons of the others."""

    def refuse(reason: str) -> None:
        located.reasons[reason] += sum(_nbytes(tensor) for tensor, _ in members)

    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return refuse(f"their file '{path}' cannot be opened ({error.strerror})")
    try:
        stamp = FileStamp.of(fd)
        if not stamp.nbytes:
            raise _cut_off(path, 0)
        content = map_read_only(fd)
    except (OSError, ValueError) as error:
        return refuse(f"their file '{path}' cannot be mapped ({error})")
    finally:
        os.close(fd)
    here = content.data_ptr()
    identity = next((m.identity for m in _read_mappings() if m.start <= here < m.stop), None)
    if identity != members[0][1].identity:
        return refuse(f"their file '{path}' has been replaced since it was loaded")
    dirty_pages: dict[_Mapping, list[int]] = {}
    for tensor, mapping in members:
        start = mapping.offset + tensor.data_ptr() - mapping.start
        nbytes = _nbytes(tensor)
        if start + nbytes > stamp.nbytes:
            raise _cut_off(path, stamp.nbytes)
        if mapping not in dirty_pages:
            try:
                dirty_pages[mapping] = _dirty_pages(mapping.start, mapping.stop)
            except OSError as error:
                return refuse(f"the kernel does not say whether they were written to (pagemap: {error.strerror})")
        if _was_written_to(tensor, content[start : start + nbytes], mapping.start, dirty_pages[mapping]):
            located.written.add(id(tensor))
            located.reasons["they were written to after loading"] += nbytes
        else:
            located.ranges[id(tensor)] = FileRange(path, start, nbytes)
            located.stamps[path] = stamp


def _cut_off(path: str, nbytes: int) -> RuntimeError:
    return RuntimeError(
        f"'{path}' has {nbytes} bytes, fewer than when it was loaded: it has been cut off since. Restore the file and "
        "load the model again."
    )


def _dirty_pages(start: int, stop: int) -> list[int]:
    """The indices, ascending, of the pages from address `start` to `stop` that are this process's own copies."""
    count = (stop - start) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * 8)
        data = bytearray()
        while len(data) < count * 8:
            piece = pagemap.read(count * 8 - len(data))
            if not piece:
                raise OSError(0, "it ends early")
            data += piece
    entries = torch.frombuffer(data, dtype=torch.int64)
    in_memory = ((entries >> _PRESENT) | (entries >> _SWAPPED)) & 1
    return (in_memory & ~(entries >> _OF_FILE)).nonzero().flatten().tolist()


def _was_written_to(tensor: torch.Tensor, content: torch.Tensor, start: int, dirty: Sequence[int]) -> bool:
    """Whether a page of its own makes a tensor differ from the file. `start` is the address of page 0 of `dirty`."""
    address, nbytes = tensor.data_ptr(), content.numel()
    first, last = (address - start) // mmap.PAGESIZE, (address + nbytes - 1 - start) // mmap.PAGESIZE
    mine = flat_bytes(tensor)
    for page in dirty[bisect_left(dirty, first) : bisect_right(dirty, last)]:
        begin = max(start + page * mmap.PAGESIZE - address, 0)
        end = min(start + (page + 1) * mmap.PAGESIZE - address, nbytes)
        if not torch.equal(mine[begin:end], content[begin:end]):
            return True
    return False
