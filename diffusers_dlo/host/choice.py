# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the choice of a host store, made by all ranks of a group alike. Must not fill it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from diffusers.utils import logging

from ..checkpoint.mapped import FileStamp
from ..device.platform import Platform
from ..distributed.control import RankLost
from ..distributed.group import OffloadGroup
from ..offload_plan import OffloadPlan
from .mapped import MappedStore
from .packed import PackedStore, create_shared_file, image_offsets
from .pinned import PinnedStore
from .store import HostStore


logger = logging.get_logger(__name__)


def create_store(
    plans: Sequence[OffloadPlan],
    group: OffloadGroup,
    platform: Platform,
    stamps: Mapping[str, FileStamp] | None = None,
) -> HostStore:
    """
    An empty store for the first of `plans` whose kind (`plan.host`) works on all ranks.

    Args:
        plans (`Sequence[OffloadPlan]`): in order of preference, the same on all ranks.
        stamps (`Mapping[str, FileStamp]`, *optional*): the files of a mapped plan, as all ranks saw them.

    Raises:
        `RuntimeError`: no kind works; with the reason of each.
    """
    reasons: list[str] = []
    for plan in plans:
        try:
            store = _create(plan, group, platform, stamps or {})
        except _Refused as refusal:
            reasons.append(f"{plan.host}: {refusal}")
            continue
        if reasons and group.rank == 0:
            logger.warning(
                f"The weights are kept in a '{store.kind}' host store, because others do not work here. "
                + " ".join(reasons)
            )
        return store
    remedy = '. Use host="packed" or "pinned".' if plans[-1].host == "mapped" else ""
    raise RuntimeError("The weights cannot be kept in host memory: " + "; ".join(reasons) + remedy)


class _Refused(Exception):
    """A rank of the group could not make its part of a store: all know, and try the next kind."""


@contextmanager
def _refusable(group: OffloadGroup, step: str) -> Iterator[None]:
    """
    An agreement on a step which the world may refuse a rank, by a `RuntimeError`: all ranks raise `_Refused` then.
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
            raise _Refused(said.get("refused") or f"rank {rank}: {reply['refused']}")


def _create(plan: OffloadPlan, group: OffloadGroup, platform: Platform, stamps: Mapping[str, FileStamp]) -> HostStore:
    with ExitStack() as undo:
        store: HostStore
        if plan.host == "pinned":
            with _refusable(group, "enable: pinned memory"):
                store = PinnedStore(plan, group.rank, platform)
                undo.callback(store.close)
        else:
            fd = _share_memory(image_offsets(plan)[1], group)
            with _refusable(group, f"enable: {plan.host} memory"):
                # The store closes the file, also when it cannot be made.
                if plan.host == "mapped":
                    store = MappedStore(plan, group.rank, platform, fd, stamps)
                else:
                    store = PackedStore(plan, group.rank, platform, fd)
                undo.callback(store.close)
        undo.pop_all()
        return store


def _share_memory(nbytes: int, group: OffloadGroup) -> int | None:
    """Shared memory that rank 0 makes and hands to the others; None where there is nothing to keep in it."""
    if not nbytes:
        return None
    fd: int | None = None
    with ExitStack() as undo:
        with _refusable(group, "enable: shared memory"):
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
