# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns nameless memory that one rank makes and all ranks of its group map, and steps that the world may refuse a rank.
Must not know what is kept in the memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..distributed.control import RankLost
from ..distributed.group import OffloadGroup


class Refused(Exception):
    """A rank of the group could not do its part of a step: all know, and do without it."""


@contextmanager
def refusable(group: OffloadGroup, step: str) -> Iterator[None]:
    """
    An agreement on a step which the world may refuse a rank, by a `RuntimeError`: all ranks raise `Refused` then.
    Whatever else goes wrong ends enabling on all of them.
    """
    said: dict[str, str] = {}
    with group.agreement(step, said) as replies:
        try:
            yield
        except RankLost:
            raise
        except RuntimeError as error:
            said["refused"] = str(error)
    for rank, reply in enumerate(replies):
        if "refused" in reply:
            raise Refused(said.get("refused") or f"rank {rank}: {reply['refused']}")


def create_shared_file(nbytes: int) -> int:
    """
    A file descriptor of nameless shared memory of `nbytes`, none of it reserved yet; else of an unlinked file.

    Raises:
        `RuntimeError`: the system refused.
    """
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("diffusers_dlo", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
    except OSError as error:
        raise RuntimeError(f"Cannot create a shared file for the packed weights ({error.strerror}).") from error
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise RuntimeError(f"Cannot make a shared file of {nbytes} bytes ({error.strerror}).") from error
    return fd


def share_memory(nbytes: int, group: OffloadGroup) -> int | None:
    """Shared memory that rank 0 makes and hands to the others; None where there is nothing to keep in it."""
    if not nbytes:
        return None
    fd: int | None = None
    with ExitStack() as undo:
        with refusable(group, "enable: shared memory"):
            if group.rank == 0:
                fd = create_shared_file(nbytes)
                undo.callback(os.close, fd)
        with group.agreement("enable: hand out shared memory"):
            if fd is not None:
                group.control.send_file(fd)
            else:
                fd = group.control.receive_file(0)
                undo.callback(os.close, fd)
        undo.pop_all()
    return fd
