# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns when a KeyboardInterrupt may come: not between two statements whose order other ranks count on. Must not swallow
one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """
    A context in which SIGINT is only noted. It is delivered, to whatever handler is installed, when the context ends,
    or before that where `deliver` is called: at waits that leave everything in order. Contexts nest. In threads other
    than the main one, which Python never interrupts, it does nothing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._noted = False
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> DeferredInterrupts:
        if threading.current_thread() is threading.main_thread():
            self._depth += 1
            if self._depth == 1:
                self._noted = False
                handler = signal.getsignal(signal.SIGINT)
                self._handler = handler if callable(handler) else None
                if self._handler is not None:
                    signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0 and self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)
                if self._noted:
                    signal.raise_signal(signal.SIGINT)

    def deliver(self) -> None:
        """Lets an interrupt that came meanwhile happen here."""
        if self._noted and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._noted = False
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
