# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the cache directory: streamed weights as they are used, written once by all ranks, and found again by later
starts. Must not choose what streams, nor read weights from anywhere but tensors and its own files.

[Note: Cache]
    A file's name is the digest of what it was made from: names, dtypes, shapes and strides of all tensors, and for
    their values the file ranges they were loaded from (with the header, size and time of change of those files, and a
    sample) or, where they are in no file, their whole content. The header holds the digest of the file's content, and
    the time of change that the file was given when it was complete. A file with another time was written to, or
    copied, and counts only if its content still has that digest.

    It is written without a name, by all ranks at once, synced, and then given its name in one step: a start that is
    killed leaves nothing behind, and nobody sees half a file. (A file system without nameless files, as NFS, gets a
    hidden one, which a kill leaves.) The directory is locked meanwhile. What a rank has digested it writes itself,
    since other ranks may hold something else; and the files that weights came from are compared again at the end.

    All ranks look at one open file, and what is used is that file as it was when they looked. Its header has to be
    byte for byte what would be written now. What this cannot notice: two sources of equal size, header and time of
    change which differ outside the samples only; and a cache whose content changed and whose time did not.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from diffusers.utils import logging

from ..casts import middle_bytes
from ..checkpoint.container import Container, Entry, chunk_digests, content_digest
from ..checkpoint.mapped import FileRange, FileStamp, Located
from ..comparison import digest_of
from ..distributed.group import OffloadGroup
from ..offload_plan import OffloadPlan
from ..tensor_utils import OwnedTensor
from .cache_key import WeightIdentity


logger = logging.get_logger(__name__)

_POLL_SECONDS = 0.05
_SECONDS_NS = 2_000_000_000
"""Times of change are given in steps of two seconds, which every file system can hold."""
_REMEDY = "Name another 'cache_dir', or leave it out."


class WeightCache:
    """
    The file in a cache directory that holds the weights of one plan.

    Args:
        folder (`str`): the directory; made if it is not there.
        plan (`OffloadPlan`): what streams, laid out for a store without files.
        owned (`Sequence[Sequence[OwnedTensor]]`): the tensors of each unit, in the plan's order.
        located (`Located`): where they lie in files.
        group (`OffloadGroup`): the ranks that write and read it together. All methods are called by all of them.
    """

    def __init__(
        self,
        folder: str,
        plan: OffloadPlan,
        owned: Sequence[Sequence[OwnedTensor]],
        located: Located,
        group: OffloadGroup,
    ) -> None:
        self._folder = os.path.realpath(folder)
        self._weights = WeightIdentity(plan, owned, located)
        self._group = group
        self._entries = self._weights.entries
        self._path = ""
        self._folder_fd = -1
        self._temporary: str | None = None

    def open(self) -> tuple[dict[int, FileRange], str, dict[str, FileStamp]] | None:
        """
        Finds the file, or writes it: where each tensor lies in it, by the tensor's id; why others do not; and the
        file's stamp from before it was looked at. None if ranks have weights from different files: not cached.

        Raises:
            `RuntimeError`: it cannot be written, with the reason; nothing is left of it.
        """
        key = self._agree_on_key()
        if key is None:
            logger.info(f"The cache in '{self._folder}' is not used: ranks loaded their weights from different files")
            return None
        self._path = os.path.join(self._folder, f"{key}.safetensors")
        metadata = {"format": "pt", "key": key, "content": "0" * 64, "written_ns": "0" * 19}
        self._container = Container(self._weights.groups, metadata)
        with ExitStack() as undo:
            fd, there = self._open_existing(undo)
            stamp = self._check(fd)
            if stamp is None:
                self._lock(undo)
                again, there = self._open_existing(undo)
                if again is not None and (fd is None or not os.path.sameopenfile(fd, again)):
                    stamp = self._check(again)  # another start has written it meanwhile
            if stamp is None:
                if there:
                    logger.warning(f"'{self._path}' is damaged, or was changed; it is written anew")
                self._write(undo)
                stamp = self._check(self._open_existing(undo)[0])
                if stamp is None:
                    raise RuntimeError(f"'{self._path}' was changed as soon as it was written. {_REMEDY}")
        places = self._container.places(self._path)
        ranges = {id(entry.tensor): places[entry.name] for entry in self._entries}
        return ranges, "their dtypes are not known to safetensors", {self._path: stamp}

    def _agree_on_key(self) -> str | None:
        """The file's name, the same on all ranks and for any number of them; None where ranks differ."""
        said: dict[str, Any] = {}
        with self._group.agreement("enable: cache: key", said) as replies:
            try:
                os.makedirs(self._folder, exist_ok=True)
            except OSError as error:
                raise RuntimeError(
                    f"The cache directory '{self._folder}' cannot be made ({error.strerror}). Name another "
                    "'cache_dir', or leave it out."
                ) from error
            said["identity"] = digest_of(self._weights.describe())
            said["content"] = self._weights.digest_loose(self._group.rank, self._group.size)
        if len({reply["identity"] for reply in replies}) > 1:
            return None
        content = {int(unit): digest for reply in replies for unit, digest in reply["content"].items()}
        return digest_of([replies[0]["identity"], *(f"{unit} {content[unit]}" for unit in sorted(content))])

    def _open_existing(self, undo: ExitStack) -> tuple[int | None, bool]:
        """
        The file, opened by rank 0 for all, so that all look at the same one; and whether there is anything in its
        place.
        """
        said: dict[str, Any] = {}
        fd: int | None = None
        with self._agreement("look", said) as replies:
            if self._group.rank == 0:
                said["there"] = os.path.lexists(self._path)
                try:
                    fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                    undo.callback(os.close, fd)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP):  # also a link to nowhere, or to itself
                        raise
                if fd is not None and not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(0, "it is there, and no file")
                said["opened"] = fd is not None
        if replies[0]["opened"]:
            with self._agreement("hand out"):
                if self._group.rank == 0:
                    self._group.control.send_file(fd)  # type: ignore[arg-type]
                else:
                    fd = self._group.control.receive_file(0)
                    undo.callback(os.close, fd)
        return fd, replies[0]["there"]

    def _check(self, fd: int | None) -> FileStamp | None:
        """The stamp of an open file if it is the complete and undamaged file of the key."""
        if fd is None:
            return None
        said: dict[str, Any] = {"chunks": {}}
        with self._agreement("check", said) as replies:
            stamp = FileStamp.of(fd)
            found = self._metadata_of(fd, stamp)
            said["known"] = found is not None
            if found is not None and found.get("written_ns") != str(stamp.changed_ns):
                with self._bar("Checking the cache", stamp.nbytes) as bar:
                    start, rank, size = len(self._container.header), self._group.rank, self._group.size
                    said |= {
                        "expected": found["content"],
                        "chunks": dict(chunk_digests(fd, start, rank, size, bar.update)),
                    }
        chunks = {int(number): digest for reply in replies for number, digest in reply["chunks"].items()}
        digests = {reply["expected"] for reply in replies if "expected" in reply}
        if not all(reply["known"] for reply in replies) or not digests <= {content_digest(chunks)}:
            return None
        return stamp

    def _metadata_of(self, fd: int, stamp: FileStamp) -> dict[str, str] | None:
        """The metadata of a file that is in every other respect what would be written now."""
        begin = os.pread(fd, len(self._container.header), 0)
        try:
            metadata = json.loads(begin[8:])["__metadata__"]
            expected = self._container.header_with(content=metadata["content"], written_ns=metadata["written_ns"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if begin != expected or stamp.nbytes != self._container.nbytes:
            return None
        places = self._container.places(self._path)
        same = all(_has_sample(fd, places[entry.name].offset, entry) for entry in self._entries)
        return metadata if same else None

    # Writing

    def _write(self, undo: ExitStack) -> None:
        """Writes the file, all ranks their share of each tensor ([Note: Cache])."""
        container, rank, size = self._container, self._group.rank, self._group.size
        start = len(container.header)
        fd = self._share_new_file(container.nbytes, undo)
        with self._bar("Writing the cache", container.nbytes - start) as bar, self._agreement("write"):
            container.write_share(fd, rank, size, bar.update, self._weights.sole_writers(size))
        said: dict[str, Any] = {}
        with self._bar("Digesting the cache", container.nbytes - start) as bar:
            with self._agreement("digest", said) as replies:
                said["chunks"] = dict(chunk_digests(fd, start, rank, size, bar.update))
                self._weights.check_sources()
        with self._agreement("name"):
            if rank == 0:
                written_ns = time.time_ns() // _SECONDS_NS * _SECONDS_NS
                chunks = {int(n): digest for reply in replies for n, digest in reply["chunks"].items()}
                container.write_header(fd, content=content_digest(chunks), written_ns=str(written_ns))
                os.fsync(fd)
                os.utime(fd, ns=(written_ns, written_ns))
                self._give_name(fd)
        logger.info(f"The streamed weights are in '{self._path}' for later starts ({container.nbytes / 1e6:,.0f} MB)")

    @contextmanager
    def _agreement(self, step: str, said: dict[str, Any] | None = None) -> Iterator[list[dict[str, Any]]]:
        """An agreement on a step of writing, with the remedy in its errors."""
        with self._group.agreement(f"enable: cache: {step}", said) as replies:
            try:
                yield replies
            except (OSError, MemoryError) as error:
                why = "out of memory" if isinstance(error, MemoryError) else error.strerror or error
                raise RuntimeError(
                    f"'{self._path}' cannot be used or written ({why}); nothing is left half "
                    "written. Free disk space, name another 'cache_dir', or leave it out."
                ) from error

    def _lock(self, undo: ExitStack) -> None:
        """Has this start alone write in the directory until `undo`."""
        with self._agreement("lock"):
            if self._group.rank == 0:
                self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, self._folder_fd)
                self._wait_for_lock()

    def _wait_for_lock(self) -> None:
        deadline, told = time.monotonic() + self._group.control.timeout, False
        while True:
            try:
                return fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Another process has been writing to '{self._folder}' for longer than 'timeout'. {_REMEDY}"
                    ) from None
            except OSError:
                return None  # a file system without locks: the first that is done gives the name
            if not told:
                logger.info(f"Waiting for another process that writes to '{self._folder}'")
                told = True
            time.sleep(_POLL_SECONDS)

    def _share_new_file(self, nbytes: int, undo: ExitStack) -> int:
        """A file of `nbytes` in the directory that nobody else sees, open on all ranks."""
        fd = -1
        with self._agreement("make"):
            if self._group.rank == 0:
                _remove(self._path)
                fd = self._new_file(undo)
                os.posix_fallocate(fd, 0, nbytes)
        with self._agreement("hand out"):
            if self._group.rank == 0:
                self._group.control.send_file(fd)
            else:
                fd = self._group.control.receive_file(0)
                undo.callback(os.close, fd)
        return fd

    def _new_file(self, undo: ExitStack) -> int:
        try:
            fd = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
            # A file system (NFS) without nameless files.
            self._temporary = os.path.join(self._folder, f".{secrets.token_hex(8)}.incomplete")
            fd = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            undo.callback(_remove, self._temporary)
        undo.callback(os.close, fd)
        return fd

    def _give_name(self, fd: int) -> None:
        """
        Makes the complete file appear under its name, in one step. A file that another start, without a lock, gave
        that name meanwhile stays: that start streams from it.
        """
        try:
            # A directory is named because that makes Python follow the link in /proc.
            source = self._temporary or f"/proc/self/fd/{fd}"
            os.link(source, self._path, src_dir_fd=self._folder_fd, follow_symlinks=True)
        except FileExistsError:
            pass
        except OSError:
            if self._temporary is None:
                raise
            os.rename(self._temporary, self._path)  # a file system without hard links
        with suppress(OSError):  # the name is given; not every file system can sync a directory
            os.fsync(self._folder_fd)

    def _bar(self, what: str, nbytes: int) -> Any:
        # Ranks do equal shares at the same time, so that of rank 0 stands for all.
        return logging.tqdm(
            total=nbytes // self._group.size,
            desc=what,
            unit="B",
            unit_scale=True,
            disable=None if self._group.rank == 0 else True,
            leave=False,
        )


def _has_sample(fd: int, offset: int, entry: Entry) -> bool:
    """Whether a few bytes from the middle of a tensor are in an open file."""
    expected = middle_bytes(entry.tensor)
    return os.pread(fd, len(expected), offset + entry.nbytes // 2) == expected


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
