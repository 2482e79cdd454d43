# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whether a call is still running: torch runs no hooks after a KeyboardInterrupt, so its frame is looked for on the
stack. Must not keep a frame longer than its owner wants: a frame keeps what it computes with, and its callers'. Where
an interrupt has ended it and nobody asks, the next full collection lets it go.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from types import FrameType

from torch import nn


_CALL_IMPL = nn.Module._call_impl.__code__


class Caller:
    """
    The module call in which a hook is running, in this thread.

    Attributes:
        is_root (`bool`): whether it is that of a whole component, or of one block.
    """

    def __init__(self, frame: FrameType, is_root: bool) -> None:
        self.is_root = is_root
        self._frame: FrameType | None = frame
        self._thread = threading.get_ident()
        _callers[:] = [*(find for find in _callers if find() is not None), weakref.ref(self)]

    def is_running(self) -> bool:
        """Whether it has not ended. May be asked from any thread."""
        frame = self._frame
        if frame is None:
            return False
        if self._thread == threading.get_ident():
            return _is_under(sys._getframe(), frame)
        top = sys._current_frames().get(self._thread)
        if top is None:
            return False
        # The other thread goes on meanwhile. A stack whose top is still the same has not changed under it.
        return _is_under(top, frame) or sys._current_frames().get(self._thread) is not top

    def forget_ended(self) -> None:
        """Lets the frame go if it has ended."""
        if not self.is_running():
            self._frame = None


_callers: list[weakref.ref[Caller]] = []


def _collecting(phase: str, info: dict[str, int]) -> None:
    if phase == "start" and info["generation"] == 2:
        for find in tuple(_callers):
            caller = find()
            if caller is not None:
                caller.forget_ended()


gc.callbacks.append(_collecting)


def find_caller(is_root: bool) -> Caller | None:
    """The innermost module call of this thread; None where it is not to be seen (a compiled one)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL_IMPL:
        frame = frame.f_back
    return None if frame is None else Caller(frame, is_root)


def is_inside_package() -> bool:
    """Whether the caller's caller, or who called that, is code of this package: a collector runs anywhere."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__package__") != __package__:
        frame = frame.f_back
    return frame is not None


def _is_under(frame: FrameType | None, wanted: FrameType) -> bool:
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is not None
