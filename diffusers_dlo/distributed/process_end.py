# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what happens before this process ends, or its process groups do, and in its forked children: a rank that others
still need has to serve them until they are done, and a child is no rank. Must not know what is served.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


_DESTROY = "destroy_process_group"
_leave: list[weakref.WeakMethod] = []
_process: int | None = None
_disarm: list[weakref.WeakMethod] = []


def before_exit(leave: Callable[[], None]) -> None:
    """
    Has a method called, once, before this process ends or destroys its process groups, also after an exception. Its
    object is not kept alive by this.
    """
    global _process
    _leave[:] = [known for known in _leave if known() is not None and known() != leave]
    _leave.append(weakref.WeakMethod(leave))
    if _process == os.getpid():
        return
    _process = os.getpid()
    atexit.register(_leave_all)
    if multiprocessing.parent_process() is not None:
        # Children of multiprocessing end without the interpreter's own exit handlers.
        multiprocessing.util.Finalize(None, _leave_all, exitpriority=100)
    for module in (dist, dist.distributed_c10d):
        setattr(module, _DESTROY, _leaving_first(getattr(module, _DESTROY)))


def _leaving_first(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            _leave_all()
        destroy(group)

    return destroy_process_group


def _leave_all() -> None:
    if os.getpid() != _process:
        return  # a forked child is no rank
    while _leave:
        leave = _leave.pop()()
        if leave is not None:
            leave()


def in_forked_children(disarm: Callable[[], None]) -> None:
    """Has a method called in every child that this process forks. Its object is not kept alive by this."""
    _disarm[:] = [known for known in _disarm if known() is not None]
    _disarm.append(weakref.WeakMethod(disarm))


def _disarm_all() -> None:
    for known in _disarm:
        disarm = known()
        if disarm is not None:
            disarm()


os.register_at_fork(after_in_child=_disarm_all)
