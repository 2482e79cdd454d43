# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the choice of a host store, made by all ranks of a group alike. Must not fill it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

from diffusers.utils import logging

from ..device.platform import Platform
from ..distributed.group import OffloadGroup
from ..offload_plan import OffloadPlan
from .packed import PackedStore, create_shared_file, image_offsets
from .pinned import PinnedStore
from .store import HostStore


logger = logging.get_logger(__name__)


def create_store(plan: OffloadPlan, kind: str, group: OffloadGroup, platform: Platform) -> HostStore:
    """
    An empty store of `kind`; for `"auto"`, the first kind that works on all ranks.

    Raises:
        `RuntimeError`: no kind works; with the reason of each.
    """
    reasons = []
    for candidate in ("packed", "pinned") if kind == "auto" else (kind,):
        try:
            return _create(replace(plan, host=candidate), group, platform)
        except RuntimeError as error:
            reasons.append(f"{candidate}: {error}")
            if kind == "auto" and candidate == "packed":
                logger.warning(
                    f"The weights cannot be kept in one shared copy per host ({error}); trying pinned memory"
                )
    raise RuntimeError("The weights cannot be kept in host memory: " + "; ".join(reasons))


def _create(plan: OffloadPlan, group: OffloadGroup, platform: Platform) -> HostStore:
    with ExitStack() as undo:
        store: HostStore
        if plan.host == "pinned":
            with group.agreement("enable: pinned memory"):
                store = PinnedStore(plan, group.rank, platform)
                undo.callback(store.close)
        else:
            fd = -1
            with group.agreement("enable: shared memory"):
                if group.rank == 0:
                    fd = create_shared_file(image_offsets(plan)[1])
                    closing = undo.enter_context(ExitStack())
                    closing.callback(os.close, fd)
            with group.agreement("enable: map shared memory"):
                if group.rank == 0:
                    group.control.send_file(fd)
                    closing.pop_all()  # from here on the store closes it
                else:
                    fd = group.control.receive_file(0)
                store = PackedStore(plan, group.rank, platform, fd)
                undo.callback(store.close)
        undo.pop_all()
        return store
