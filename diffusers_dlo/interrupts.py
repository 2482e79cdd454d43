# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns when a KeyboardInterrupt may come: not between two statements whose order other ranks count on. Must not swallow
one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class DeferredInterrupts:
    """
    A context in which SIGINT is only noted. It is delivered, to whatever handler is installed, when the context ends,
    or before that where `deliver` is called: at waits that leave everything in order. Contexts nest. In threads other
    than the main one, which Python never interrupts, it does nothing.

    The handler is exchanged before anything is counted, and put back after, so that an interrupt of this very code
    leaves nothing half done.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._noted = 0
        self._handler: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> DeferredInterrupts:
        if threading.current_thread() is threading.main_thread():
            if self._depth == 0:
                self._install()
            self._depth += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0 and self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)
                if self._noted:
                    self._noted = 0
                    signal.raise_signal(signal.SIGINT)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside a context: SIGINT comes as it otherwise would, beginning with one that was noted."""
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            yield
            return
        depth, handler = self._depth, self._handler
        try:
            self._depth = 0
            if handler is not None:
                signal.signal(signal.SIGINT, handler)
                if self._noted:
                    self._noted = 0
                    signal.raise_signal(signal.SIGINT)
            yield
        finally:
            self._depth = depth
            self._install()

    @property
    def noted(self) -> bool:
        """Whether one came that has not been delivered yet."""
        return self._noted > 0

    def deliver(self, at_least: int = 1) -> None:
        """Lets an interrupt that came meanwhile happen here, if `at_least` so many did."""
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        if self._noted >= at_least:
            self._noted = 0
            self._handler(signal.SIGINT, None)

    def _install(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if handler == self._note:
            return
        self._noted = 0
        self._handler = handler if callable(handler) else None
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted += 1


interrupts = DeferredInterrupts()
"""Signals are the process's, and so is this."""
