# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the engine of this process: there is one, whatever the number of pipelines. Must not drive it: hooks do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .device.interface import Platform
from .distributed.control import RankLost
from .distributed.group import OffloadGroup
from .engine import Engine
from .units import Unit


_engine: Engine | None = None


def get_engine(platform: Platform, group: OffloadGroup) -> Engine:
    """
    The engine of this process.

    Raises:
        `ValueError`: it runs on another device, or for other ranks.
    """
    global _engine
    if _engine is None or _engine.idle:
        _engine = Engine(platform, group)
    elif _engine.platform.device != platform.device:
        raise ValueError(
            f"Other components stream to '{_engine.platform.device}' already, and '{platform.device}' was asked for; "
            "a process streams to one device. Disable the others first."
        )
    elif _engine.group is not group:
        raise ValueError("Other components share their weights among other ranks already; disable them first.")
    return _engine


@contextmanager
def pausing(group: OffloadGroup) -> Iterator[RankLost | None]:
    """
    While ranks change what streams, none begins a pass. All ranks of `group` enter it together. Why this one could
    not pause, for the agreement that follows, or None.
    """
    engine = _engine if _engine is not None and _engine.group is group else None
    failure: RankLost | None = None
    if engine is not None:
        try:
            engine.join(pause=True)
        except RankLost as error:
            failure = error
    try:
        yield failure
    finally:
        if engine is not None:
            engine.resume()


def find_streamed(tensor: torch.Tensor) -> tuple[Unit, int] | None:
    """The unit of this process that `tensor` streams with, and its index there; None where it does not stream."""
    return None if _engine is None else _engine.find(tensor)
