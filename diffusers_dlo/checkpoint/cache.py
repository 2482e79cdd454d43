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
    killed leaves nothing behind, and nobody sees half a file. The directory is locked meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from diffusers.utils import logging

from ..comparison import digest_of, sample
from ..distributed.group import OffloadGroup
from ..offload_plan import OffloadPlan
from ..tensor_utils import OwnedTensor, copy_bytes, flat_bytes, pending_casts
from .container import Container, Entry, chunk_digests, content_digest, is_storable
from .mapped import FileRange, Located
from .safetensors_file import StoredTensor, read_header


logger = logging.get_logger(__name__)

_VERSION = "1"
_SAMPLE_NBYTES = 64


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
        self._plan = plan
        self._group = group
        self._groups = [
            [Entry(f"{component.name}.{item.name}", item.tensor) for item in tensors if is_storable(item.tensor)]
            for (component, _), tensors in zip(plan.units, owned)
        ]
        self._entries = [entry for entries in self._groups for entry in entries]
        self._located = located
        self._path = ""
        self._folder_fd = -1
        self._temporary: str | None = None

    def open(self) -> dict[int, FileRange] | None:
        """
        Finds the file, or writes it: where each tensor lies in it, by the tensor's id. None if ranks have weights from
        different files, which then are not cached.

        Raises:
            `RuntimeError`: it cannot be written, with the reason; nothing is left of it.
        """
        key = self._agree_on_key()
        if key is None:
            logger.info(f"The cache in '{self._folder}' is not used: ranks loaded their weights from different files")
            return None
        self._path = os.path.join(self._folder, f"{key}.safetensors")
        if not self._is_there(key):
            self._write(key)
        with self._group.agreement("enable: cache: open"):
            return self._places()

    def _agree_on_key(self) -> str | None:
        """The file's name, the same on all ranks and for any number of them; None where ranks differ."""
        said: dict[str, Any] = {}
        with self._group.agreement("enable: cache: key", said) as replies:
            try:
                os.makedirs(self._folder, exist_ok=True)
            except OSError as error:
                raise RuntimeError(
                    f"The cache directory '{self._folder}' cannot be made ({error.strerror})."
                ) from error
            said |= {"identity": digest_of(self._identity()), "content": self._own_content()}
        if len({reply["identity"] for reply in replies}) > 1:
            return None
        content = {int(unit): digest for reply in replies for unit, digest in reply["content"].items()}
        return digest_of([replies[0]["identity"], *(f"{unit} {content[unit]}" for unit in sorted(content))])

    def _identity(self) -> Iterator[str]:
        """What the weights are, but for the content of those that are in no file."""
        yield f"version {_VERSION}"
        for component, unit in self._plan.units:
            yield f"{component.name} {unit.describe()}"
        files: dict[str, str] = {}
        for entry in self._entries:
            place = self._located.ranges.get(id(entry.tensor))
            if place is not None:
                if place.path not in files:
                    files[place.path] = _describe_file(place.path)
                yield f"{entry.name} {place.offset} {files[place.path]} {sample(entry.tensor).hex()}"

    def _own_content(self) -> dict[int, str]:
        """
        For every `size`-th unit, from number `rank`, a digest of the content of its tensors that are in no file. All
        of it is read: there is no other way to know these weights again.
        """
        found = {}
        for unit in range(self._group.rank, len(self._groups), self._group.size):
            loose = [entry.tensor for entry in self._groups[unit] if id(entry.tensor) not in self._located.ranges]
            if loose:
                digest = hashlib.sha256()
                for tensor in loose:
                    digest.update(f"{tensor.dtype} {pending_casts(tensor)} ".encode())
                    digest.update(flat_bytes(tensor).cpu().numpy().data)
                found[unit] = digest.hexdigest()[:32]
        return found

    def _is_there(self, key: str) -> bool:
        """Whether a complete and undamaged file of this key is there. One that is neither is taken away."""
        said: dict[str, Any] = {"chunks": {}}
        with self._group.agreement("enable: cache: look", said) as replies:
            said["exists"] = os.path.lexists(self._path)
            said["known"], expected = self._look(key) if said["exists"] else (False, None)
            if expected is not None:
                said |= {"expected": expected, "chunks": self._digest_share()}
        if not any(reply["exists"] for reply in replies):
            return False
        chunks = {int(number): digest for reply in replies for number, digest in reply["chunks"].items()}
        digests = {reply["expected"] for reply in replies if "expected" in reply}
        if all(reply["known"] for reply in replies) and digests <= {content_digest(chunks)}:
            return True
        logger.warning(f"'{self._path}' is damaged, or was changed; it is written anew")
        with self._agreement("take away"):
            if self._group.rank == 0:
                _remove(self._path)
        return False

    def _look(self, key: str) -> tuple[bool, str | None]:
        """
        Whether the file is one of `key`, as far as can be told without reading it all, and the digest that its content
        has to have; no digest if it is as it was written.
        """
        try:
            metadata, tensors, _ = read_header(self._path)
        except RuntimeError as error:
            logger.info(str(error))
            return False, None
        stored = {tensor.key: tensor for tensor in tensors}
        expected = metadata.get("content", "")
        if metadata.get("key") != key or any(entry.name not in stored for entry in self._entries):
            return False, None
        with open(self._path, "rb") as file:
            if not all(_has_sample(file.fileno(), stored[entry.name], entry) for entry in self._entries):
                return False, None
            unchanged = metadata.get("written_ns") == str(os.fstat(file.fileno()).st_mtime_ns)
        return True, None if unchanged else expected

    def _digest_share(self) -> dict[int, str]:
        """The digests of this rank's share of the file's chunks."""
        start = read_header(self._path).data_offset
        with open(self._path, "rb") as file:
            fd = file.fileno()
            with self._bar("Checking the cache", os.fstat(fd).st_size - start) as bar:
                return dict(chunk_digests(fd, start, self._group.rank, self._group.size, bar.update))

    def _places(self) -> dict[int, FileRange]:
        stored = {tensor.key: tensor for tensor in read_header(self._path).tensors}
        return {id(e.tensor): FileRange(self._path, stored[e.name].offset, e.nbytes) for e in self._entries}

    # Writing

    def _write(self, key: str) -> None:
        """Writes the file, all ranks their share of each tensor ([Note: Cache])."""
        written_ns = time.time_ns() // 1_000_000 * 1_000_000  # a time that every file system can hold
        metadata = {"format": "pt", "key": key, "content": "0" * 64, "written_ns": str(written_ns)}
        container = Container(self._groups, metadata)
        with ExitStack() as undo:
            fd = self._share_new_file(container.nbytes, undo)
            if fd is None:
                return
            start, rank, size = len(container.header), self._group.rank, self._group.size
            with self._bar("Writing the cache", container.nbytes - start) as bar, self._agreement("write"):
                container.write_share(fd, rank, size, bar.update)
            said: dict[str, Any] = {}
            with self._bar("Digesting the cache", container.nbytes - start) as bar:
                with self._agreement("digest", said) as replies:
                    said["chunks"] = dict(chunk_digests(fd, start, rank, size, bar.update))
            with self._agreement("name"):
                if rank == 0:
                    chunks = {int(n): digest for reply in replies for n, digest in reply["chunks"].items()}
                    container.write_header(fd, content=content_digest(chunks))
                    os.fsync(fd)
                    os.utime(fd, ns=(written_ns, written_ns))
                    self._give_name(fd)
        logger.info(f"The streamed weights are in '{self._path}' for later starts ({container.nbytes / 1e9:.2f} GB)")

    @contextmanager
    def _agreement(self, step: str, said: dict[str, Any] | None = None) -> Iterator[list[dict[str, Any]]]:
        """An agreement on a step of writing, with the remedy in its errors."""
        with self._group.agreement(f"enable: cache: {step}", said) as replies:
            try:
                yield replies
            except OSError as error:
                raise RuntimeError(
                    f"'{self._path}' cannot be written ({error.strerror or error}); nothing is left of it. Free disk "
                    "space, name another 'cache_dir', or leave it out."
                ) from error

    def _share_new_file(self, nbytes: int, undo: ExitStack) -> int | None:
        """
        A file of `nbytes` in the directory that nobody else sees, open on all ranks; the directory is locked until
        `undo`. None if another start has written the cache while this one waited for the lock.
        """
        fd = -1
        said: dict[str, Any] = {}
        with self._agreement("make", said) as replies:
            if self._group.rank == 0:
                self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, self._folder_fd)
                with suppress(OSError):  # a file system without locks: the worst is that two write the same
                    fcntl.flock(self._folder_fd, fcntl.LOCK_EX)
                said["there"] = os.path.exists(self._path)
                if not said["there"]:
                    fd = self._new_file(undo)
                    os.posix_fallocate(fd, 0, nbytes)
        if replies[0]["there"]:
            return None
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
            fd, self._temporary = tempfile.mkstemp(prefix=".", suffix=".incomplete", dir=self._folder)
            undo.callback(_remove, self._temporary)
        undo.callback(os.close, fd)
        return fd

    def _give_name(self, fd: int) -> None:
        """Makes the complete file appear under its name, in one step."""
        if self._temporary is not None:
            os.replace(self._temporary, self._path)
        else:
            with suppress(FileExistsError):  # without a lock, another start may have written the same
                # A directory is named because that makes Python follow the link in /proc.
                os.link(f"/proc/self/fd/{fd}", self._path, src_dir_fd=self._folder_fd, follow_symlinks=True)
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


def _has_sample(fd: int, stored: StoredTensor, entry: Entry) -> bool:
    """Whether a few bytes from the middle of a tensor are in an open file."""
    middle = entry.nbytes // 2
    expected = torch.empty(min(_SAMPLE_NBYTES, entry.nbytes - middle), dtype=torch.uint8)
    copy_bytes(entry.tensor, middle, expected)
    found = os.pread(fd, expected.numel(), stored.offset + middle)
    return stored.nbytes == entry.nbytes and found == bytes(expected.tolist())


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _describe_file(path: str) -> str:
    """What tells a file of weights from every other, without reading the weights."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            length = min(int.from_bytes(os.pread(fd, 8, 0), "little"), status.st_size)
            header = hashlib.sha256(os.pread(fd, length, 8)).hexdigest()
        finally:
            os.close(fd)
    except OSError as error:
        raise RuntimeError(f"'{path}', where weights were loaded from, cannot be read ({error.strerror}).") from error
    return f"{status.st_size} bytes, changed {status.st_mtime_ns}, header {header}"
