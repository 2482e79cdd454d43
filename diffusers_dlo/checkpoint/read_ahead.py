# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns bringing cold parts of files into the page cache: with large reads in parallel, where a mapped file would be read
page fault by page fault. Must not keep what it reads, nor leave a file open or a thread running, whatever happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from diffusers.utils import logging

from .mapped import FileRange, map_read_only


logger = logging.get_logger(__name__)

CHUNK_NBYTES = 8 << 20
"""
Bytes of one read: large, so that waiting for a far disk to answer is little beside the transfer, and small enough for
a stop, which waits for the reads under way, to wait for little.
"""

JOIN_NBYTES = 1 << 20
"""Ranges closer than this are read in one, with the gap: one request instead of two."""

_PROBE_NBYTES = 1 << 20
"""Distance of the bytes that stand for a chunk's: every page would be a system call each."""

_NETWORK_TYPES = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)

_LOCAL_FUSE_TYPES = frozenset(
    f"fuse.{name}"
    for name in [
        "bindfs",
        "dwarfs",
        "encfs",
        "fuse-overlayfs",
        "gocryptfs",
        "lxcfs",
        "mergerfs",
        "ntfs",
        "ntfs-3g",
        "portal",
        "snapfuse",
        "squashfuse",
        "squashfuse_ll",
        "unionfs",
        "xdg-document-portal",
    ]
)
"""File systems in user space that show what the machine's own disks hold. The others are clients of something far."""


@dataclass(frozen=True)
class _Chunk:
    """What one read brings in. `file_descriptor` is that of the file at `path`."""

    path: str
    file_descriptor: int
    offset: int
    nbytes: int


def read_ahead(ranges: Sequence[FileRange], *, show: bool = False, threads: int = 8) -> int:
    """
    Brings the parts of files that are not in the page cache yet into it; returns how many bytes were read for that.
    Whether they fit into memory is the caller's to know.

    What is there already the kernel tells of files that this user owns or may write to. Of others it is found by
    looking at a byte of every MiB, so a smaller hole may be missed and is left to page faults. Where neither is
    possible, all of it is read and counted: for what is cached that is a copy in memory.

    Args:
        ranges (`Sequence[FileRange]`): they may overlap, be empty and come in any order.
        show (`bool`, *optional*, defaults to `False`):
            Whether to show a progress bar, if there is something to read and standard error is a terminal.
        threads (`int`, *optional*, defaults to `8`): how many reads of 8 MiB are under way at a time.

    Raises:
        `RuntimeError`: a file is missing, cannot be read, or ends before a range of it does.
    """
    chunks: list[_Chunk] = []
    with contextlib.ExitStack() as files:
        # Each file is opened once: some file systems in user space drop what is cached of a file when it is opened.
        # All are probed before any is read, since reading, the kernel brings in more than it was asked for.
        for path, spans in _merge(ranges).items():
            try:
                file = files.enter_context(open(path, "rb", buffering=0))
                size = os.fstat(file.fileno()).st_size
            except OSError as error:
                raise _unreadable(path, error) from error
            if spans[-1][1] > size:
                raise _cut_off(path, size, spans[-1][1])
            chunks += _cold_chunks(path, file.fileno(), spans)
        if chunks:
            _log_sources(chunks)
            _read(chunks, show, threads)
    return sum(chunk.nbytes for chunk in chunks)


def network_file_system(path: str, mount_info: str | None = None) -> str | None:
    """
    The type and mount point of the network file system that holds `path` (such as "nfs4 at /mnt/models"), else `None`.

    Args:
        path (`str`): a file or directory, which need not exist.
        mount_info (`str`, *optional*):
            The mounts, in the form of `/proc/self/mountinfo` (proc(5)), which is read if this is left out.
    """
    if mount_info is None:
        try:
            with open("/proc/self/mountinfo", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as file:
                mount_info = file.read()
        except OSError:
            return None
    path = os.path.realpath(path)
    found_point, found_type = "", ""
    for line in mount_info.split("\n"):
        mount, separator, source = line.partition(" - ")  # between them are any number of optional fields
        if not separator:
            continue
        # Spaces, tabs, newlines and backslashes are written in octal.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(found_point):  # of those at one place, the last hides the others
            found_point, found_type = point, source.split(" ")[0]
    is_far = found_type in _NETWORK_TYPES or (found_type.startswith("fuse.") and found_type not in _LOCAL_FUSE_TYPES)
    return f"{found_type} at {found_point}" if is_far else None


def _merge(ranges: Sequence[FileRange]) -> Mapping[str, list[tuple[int, int]]]:
    """Starts and stops, ascending, of what to read of each file. Files without a byte to read are left out."""
    by_path: dict[str, list[FileRange]] = defaultdict(list)
    for item in ranges:
        if item.nbytes:
            by_path[item.path].append(item)
    merged: dict[str, list[tuple[int, int]]] = {}
    for path, items in by_path.items():
        spans = merged[path] = []
        for item in sorted(items, key=lambda item: item.offset):
            stop = item.offset + item.nbytes
            if spans and item.offset - spans[-1][1] < JOIN_NBYTES:
                spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
            else:
                spans.append((item.offset, stop))
    return merged


def _cut(path: str, file_descriptor: int, spans: Sequence[tuple[int, int]]) -> Iterator[_Chunk]:
    """Ascending, so that disks stream; at multiples of the chunk's size, where striped disks change over."""
    for start, stop in spans:
        while start < stop:
            end = min((start // CHUNK_NBYTES + 1) * CHUNK_NBYTES, stop)
            yield _Chunk(path, file_descriptor, start, end - start)
            start = end


def _cold_chunks(path: str, file_descriptor: int, spans: Sequence[tuple[int, int]]) -> list[_Chunk]:
    chunks = list(_cut(path, file_descriptor, spans))
    if os.fstat(file_descriptor).st_uid == os.geteuid() or os.access(path, os.W_OK):
        cold = _ask_kernel(file_descriptor, chunks)  # of other files it says that they are cached, whatever is true
        if cold is not None:
            return cold
    without_waiting = getattr(os, "RWF_NOWAIT", None)
    if without_waiting is None:
        return chunks
    try:
        # A probe that finds nothing starts the kernel's read-ahead, which this advice limits to the page asked for. A
        # fast disk may bring that page before the probe has looked again: it then passes for cached, at the price of
        # page faults on a disk where they are cheap.
        os.posix_fadvise(file_descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            return [chunk for chunk in chunks if not _is_cached(chunk, without_waiting)]
        finally:
            os.posix_fadvise(file_descriptor, 0, 0, os.POSIX_FADV_NORMAL)
    except OSError:
        return chunks  # the file system does not know the flag; and any other fault shows when the chunks are read


def _ask_kernel(file_descriptor: int, chunks: Sequence[_Chunk]) -> list[_Chunk] | None:
    """Those of `chunks` that are not wholly in the page cache, by `mincore`; None where that is not to be had."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        content = map_read_only(file_descriptor)
    except (OSError, AttributeError, ValueError):
        return None
    pages = ctypes.create_string_buffer(CHUNK_NBYTES // mmap.PAGESIZE + 1)
    cold = []
    for chunk in chunks:
        start = chunk.offset // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = chunk.offset + chunk.nbytes - start
        if mincore(ctypes.c_void_p(content.data_ptr() + start), ctypes.c_size_t(nbytes), pages):
            return None
        count = -(-nbytes // mmap.PAGESIZE)
        if pages.raw[:count].count(1) < count:
            cold.append(chunk)
    return cold


def _is_cached(chunk: _Chunk, without_waiting: int) -> bool:
    last, buffers = chunk.offset + chunk.nbytes - 1, [bytearray(1)]
    try:
        for offset in (*range(chunk.offset, last, _PROBE_NBYTES), last):
            if os.preadv(chunk.file_descriptor, buffers, offset, without_waiting) == 0:
                return False  # Linux 5.9 and 5.10 may say so of what is not cached
    except BlockingIOError:
        return False
    return True


def _log_sources(chunks: Sequence[_Chunk]) -> None:
    directories: dict[str, int] = defaultdict(int)
    for chunk in chunks:
        directories[os.path.dirname(chunk.path)] += chunk.nbytes
    for directory, nbytes in directories.items():
        network = network_file_system(directory)
        logger.info(f"Reading {nbytes / 1e6:,.0f} MB from '{directory}'{f' ({network})' if network else ''}.")


def _read(chunks: Sequence[_Chunk], show: bool, threads: int) -> None:
    """Reads the chunks in their order. At an error or an interrupt, waits for the reads under way and starts none."""
    own = threading.local()

    def read(chunk: _Chunk) -> int:
        if not hasattr(own, "memory"):
            own.memory = memoryview(bytearray(CHUNK_NBYTES))
        _read_chunk(chunk, own.memory[: chunk.nbytes])
        return chunk.nbytes

    executor = ThreadPoolExecutor(min(threads, len(chunks)), "diffusers_dlo_read_ahead")
    try:
        with logging.tqdm(
            total=sum(chunk.nbytes for chunk in chunks),
            desc="Reading weights",
            unit="B",
            unit_scale=True,
            disable=None if show else True,
            leave=False,
        ) as bar:
            for done in as_completed([executor.submit(read, chunk) for chunk in chunks]):
                bar.update(done.result())
    finally:
        executor.shutdown(cancel_futures=True)


def _read_chunk(chunk: _Chunk, memory: memoryview) -> None:
    done = 0
    while done < chunk.nbytes:
        try:
            count = os.preadv(chunk.file_descriptor, [memory[done:]], chunk.offset + done)
        except OSError as error:
            raise _unreadable(chunk.path, error) from error
        if count == 0:
            raise _cut_off(chunk.path, chunk.offset + done, chunk.offset + chunk.nbytes)
        done += count


def _unreadable(path: str, error: OSError) -> RuntimeError:
    return RuntimeError(
        f"Cannot read '{path}' ({error.strerror}). Restore the file, or the connection to the disk that holds it, and "
        "load the model again."
    )


def _cut_off(path: str, nbytes: int, expected: int) -> RuntimeError:
    return RuntimeError(
        f"'{path}' has {nbytes} bytes and had {expected} or more when it was loaded: it has been cut off since. "
        "Restore the file and load the model again."
    )
