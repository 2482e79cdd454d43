# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns memory that all ranks of a group can read where it is: a part on each rank's device, mapped by the others. Must
not know what is kept there.
"""

from __future__ import annotations

import mmap
import os

import torch

from .device.interface import Platform
from .distributed.group import OffloadGroup
from .host.shared_file import refusable, share_memory


_PROBE_NBYTES = 256


def open_arena(group: OffloadGroup, platform: Platform, nbytes: int) -> list[torch.Tensor]:
    """
    A part of `nbytes` bytes on each rank's device, `(nbytes,)` of `uint8`, by rank; the own one is among them. All
    ranks of the group call it together.

    Raises:
        `Refused`: it is not to be had on all ranks, or wrong bytes came through it.
    """
    nbytes = max(nbytes, _PROBE_NBYTES)
    if platform.device.type == "cpu":
        parts = _open_shared(group, nbytes)
    else:
        parts = _open_peers(group, platform, nbytes)
    with refusable(group, "enable: write to arena"):
        parts[group.rank][:_PROBE_NBYTES].fill_(group.rank + 1)
        platform.synchronize()
    with refusable(group, "enable: read from arena"):
        seen = [part[:_PROBE_NBYTES].clone().cpu() for part in parts]
        if any(int(probe.min()) != rank + 1 or int(probe.max()) != rank + 1 for rank, probe in enumerate(seen)):
            raise RuntimeError("reading the memory of other devices brought wrong bytes")
    return parts


def _open_shared(group: OffloadGroup, nbytes: int) -> list[torch.Tensor]:
    """On the CPU, devices' memory is host memory."""
    fd = share_memory(nbytes * group.size, group)
    assert fd is not None
    try:
        with refusable(group, "enable: map arena"):
            with torch.inference_mode(False):
                memory = torch.frombuffer(mmap.mmap(fd, nbytes * group.size), dtype=torch.uint8)
                return list(memory.split(nbytes))
    finally:
        os.close(fd)


def _open_peers(group: OffloadGroup, platform: Platform, nbytes: int) -> list[torch.Tensor]:
    with refusable(group, "enable: arena memory"):
        own = platform.peer_memory(nbytes)
    with refusable(group, "enable: map arena"):
        assert group.gather is not None
        return group.gather.map_peers(own)
