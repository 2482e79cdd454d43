# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how transfers of blocks, and computing's waits for them, are queued: named in profiles, and timed where somebody
asks. Must not decide what is transferred, nor in what order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .device.interface import Event, Platform, Stream
from .labels import label
from .timing import Timing
from .units import Unit


class Transfers:
    """
    What a lane queues on its streams.

    Attributes:
        platform (`Platform`): of the onload device.
        timing (`Timing`, *optional*): what is told when transfers and computing begin and end, while somebody asks.
        for_others (`bool`): whether the pass is one that this rank does for others alone: it is not timed.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.timing: Timing | None = None
        self.for_others = False

    def submit(
        self,
        kind: str,
        unit: Unit,
        stream: Stream,
        work: Callable[[], None],
        after: Sequence[Event],
        record: Event,
    ) -> None:
        """`Platform.submit` for one transfer of a block; `kind` is `COPY` or `GATHER`."""
        timing = None if self.for_others else self.timing
        span = timing.new_span() if timing is not None else None
        with label(kind, unit):
            self.platform.submit(stream, work, after=after, record=record, timed=span)
        if timing is not None and span is not None:
            timing.transferred(kind, unit, span)

    def wait(self, unit: Unit, fence: Event) -> None:
        """`Platform.compute_wait` for a block."""
        timing = self.timing
        if timing is not None:
            timing.wait(unit)
        with label("wait for", unit):
            self.platform.compute_wait(fence)
        if timing is not None:
            timing.begin(unit)
