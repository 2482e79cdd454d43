# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the time that a row may take: a thread that looks at the main one, which a hanging collective may hold for ever.
Must not know what is checked.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .outcome import FAILED
from .ranks import Ranks


_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
"""For so long a row goes on after it has failed on another rank."""
_OURS = ("npu_checks", "diffusers_dlo")


class Watch:
    """
    Ends the script where a row does not end.

    Args:
        ranks (`Ranks`): of which one may have failed, and so never come.
        limit (`float`): seconds that a row may take.
        end (`Callable[[int, str], None]`): called with a row and what happened, in a thread of its own, while the main
            one hangs; ends the process.
    """

    def __init__(self, ranks: Ranks, limit: float, end: Callable[[int, str], None]) -> None:
        self._ranks = ranks
        self._limit = limit
        self._end = end
        self._lock = threading.Lock()
        self._row: int | None = None
        self._since = 0.0
        self._is_over = False
        self._main = threading.get_ident()
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()

    @contextmanager
    def watching(self, row: int) -> Iterator[None]:
        """The time in which a row is looked at. Never returns if the row was given up."""
        with self._lock:
            self._row, self._since = row, time.monotonic()
        try:
            yield
        finally:
            while True:
                with self._lock:
                    if not self._is_over:
                        self._row = None
                        break
                time.sleep(1)  # the process is about to end

    def _run(self) -> None:
        failed_since: float | None = None
        while not self._closed.wait(_POLL_SECONDS):
            with self._lock:
                row, taken = self._row, time.monotonic() - self._since
            if row is None:
                failed_since = None
                continue
            posted = self._ranks.posted(row, watching=True)
            failed = [rank for rank, result in posted.items() if result["status"] == FAILED]
            failed_since = None if not failed else failed_since or time.monotonic()
            gone_on = failed_since is not None and time.monotonic() - failed_since > _GRACE_SECONDS
            if taken <= self._limit and not gone_on:
                continue
            with self._lock:
                if self._row != row:
                    continue
                self._is_over = True
            where = self._where()
            if gone_on:
                self._end(row, f"waits for rank {failed[0]}, which failed; at {where}")
            else:
                self._end(row, f"did not end within {self._limit:.0f} s; at {where}")
            return

    def _where(self) -> str:
        """The innermost function of ours that the main thread is in, and where it waits in there."""
        frame = sys._current_frames().get(self._main)
        innermost = frame
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if any(name in path.parts for name in _OURS):
                inside = "" if frame is innermost or innermost is None else f", in {innermost.f_code.co_name}"
                return f"{path.stem}.{frame.f_code.co_name} line {frame.f_lineno}{inside}"
            frame = frame.f_back
        return "an unknown place"
