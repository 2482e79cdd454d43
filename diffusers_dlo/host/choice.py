# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the choice of a host store, made by all ranks of a group alike. Must not fill it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from diffusers.utils import logging

from ..checkpoint.mapped import FileStamp
from ..coding.codec import Codec
from ..device.interface import Platform
from ..distributed.group import OffloadGroup
from ..offload_plan import OffloadPlan
from .coded import CodedStore
from .mapped import MappedStore
from .memory_limit import check_container_memory
from .packed import PackedStore, image_offsets
from .pinned import PinnedStore
from .shared_file import Refused, refusable, share_memory
from .store import HostStore


logger = logging.get_logger(__name__)


def create_store(
    plans: Sequence[OffloadPlan],
    group: OffloadGroup,
    platform: Platform,
    stamps: Mapping[str, FileStamp] | None = None,
    codec: Codec | None = None,
) -> HostStore:
    """
    An empty store for the first of `plans` whose kind (`plan.host`) works on all ranks.

    Args:
        plans (`Sequence[OffloadPlan]`): in order of preference, the same on all ranks.
        stamps (`Mapping[str, FileStamp]`, *optional*): the files of a mapped or coded plan, as all ranks saw them.
        codec (`Codec`, *optional*): that of a coded plan.

    Raises:
        `RuntimeError`: no kind works; with the reason of each.
    """
    reasons: list[str] = []
    for plan in plans:
        try:
            store = _create(plan, group, platform, stamps or {}, codec)
        except Refused as refusal:
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


def _create(
    plan: OffloadPlan,
    group: OffloadGroup,
    platform: Platform,
    stamps: Mapping[str, FileStamp],
    codec: Codec | None,
) -> HostStore:
    with ExitStack() as undo:
        store: HostStore
        if plan.host == "pinned":
            with refusable(group, "enable: pinned memory"):
                check_container_memory(plan.host_nbytes_per_rank * plan.group_size, "pinned weights")
                store = PinnedStore(plan, group.rank, platform)
                undo.callback(store.close)
        else:
            nbytes = image_offsets(plan)[1]
            with refusable(group, f"enable: the limit on {plan.host} memory"):
                check_container_memory(nbytes, f"{plan.host} weights")
                if plan.host in ("coded", "mapped") and platform.has_host_link:
                    # Pages of files do not go when memory is wanted once they are page-locked.
                    check_container_memory(plan.copied_nbytes, "page-locked files", may_be_there=True)
            fd = share_memory(nbytes, group)
            with refusable(group, f"enable: {plan.host} memory"):
                # The store closes the file, also when it cannot be made.
                if plan.host == "coded":
                    assert codec is not None
                    store = CodedStore(plan, group.rank, platform, fd, stamps, codec)
                elif plan.host == "mapped":
                    store = MappedStore(plan, group.rank, platform, fd, stamps)
                else:
                    store = PackedStore(plan, group.rank, platform, fd)
                undo.callback(store.close)
        undo.pop_all()
        return store
