# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which ranks a thread waits for in a collective, as its stack says. Must not wait itself.
"""

from __future__ import annotations

import sys
import time
from types import FrameType

import torch.distributed as dist

from . import control


_STUCK_SECONDS = 5.0
"""Who has been in one collective for so long waits there for a rank that does not come."""


class CollectiveWatch:
    """
    Looks again and again at a thread, and knows how long it has been in one and the same collective. Keeps the frame
    of that in between, since another frame may come to lie in the same place.
    """

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._since = 0.0

    def look(self, thread: int) -> list[int]:
        """The ranks of the world in the collective in which `thread` has been for long; none if it is in no such."""
        found: FrameType | None = None
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code.co_filename in (dist.distributed_c10d.__file__, control.__file__):
                found = frame  # the outermost one: what the user called
            frame = frame.f_back
        now = time.monotonic()
        if found is not self._frame:
            self._frame, self._since = found, now
        if found is None or now - self._since < _STUCK_SECONDS:
            return []
        return _ranks_of(found)

    def forget(self) -> None:
        """Keeps nothing."""
        self._frame = None


def _ranks_of(frame: FrameType) -> list[int]:
    group = frame.f_locals.get("group")
    try:
        return sorted(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError, TypeError):
        return list(range(dist.get_world_size())) if dist.is_initialized() else []
