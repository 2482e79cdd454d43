# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns when each transfer and each block began and ended, on the device: its timing events, from their recording until
they have become figures. Must not make a device or the host wait before somebody asks for the figures.

[Note: Timing]
    A timed pass is a forward of a component, from `enter` to `leave`. Its record takes the blocks that are called in
    between, and the transfers of its component that are queued until the next forward of it begins: the service thread
    completes laps after the forward has ended. Passes that are done for other ranks alone are left out (the lane does
    not tell of them), and so is a forward that raised or was interrupted.

    While passes are recorded, nothing waits and no event is asked for its time: between two forwards the host link
    idles, and asking takes a device longer than recording. The records of a component's last passes are kept as they
    are; the one that is pushed out leaves its events to the next, and an event that is recorded anew has forgotten
    what it was before.

    Figures are made of what is kept when they are asked for. A device counts in single precision, which is coarse
    after a while, so each record is read from an origin of its own. A lane may be used by the service thread while the
    main thread enters a forward, so records change under a lock.

    Where there are no streams, the host copies when a block is acquired, and waits for gathers there: computing
    arrives at its wait when the hook begins. On a device it does when the stream gets to the wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .device.interface import Event, Platform
from .device.ring import Stamp
from .timeline import COMPUTE, GATHER, WAIT, PassMeans, Span, TimedPass, Timeline
from .units import Component, Unit


MOST_PASSES = 16
"""So many passes of a component are kept, the last ones. With 200 blocks they have 22,400 events."""
_RECENT_SPANS = 32
"""So many transfers of earlier passes are looked at for the timeline: those that bring the first blocks of a pass."""


class _Visit:
    """One call of a block: where computing came to its wait, went on, and ended."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.arrived: Event | None = None
        self.begun: Event | None = None
        self.ended: Event | None = None


class _Record:
    """One forward, in events; `number` counts forwards of all components."""

    def __init__(self, component: Component, number: int) -> None:
        self.component = component.name
        self.order = tuple(block.layout.name for block in component.blocks)
        self.number = number
        self.events: list[Event] = []
        "all of its events; none any more once it has been dropped"
        self.origin: Event | None = None
        self.end: Event | None = None
        self.closed = False
        self.transfers: list[tuple[str, str, int, tuple[Event, Event]]] = []
        self.visits: list[_Visit] = []
        self.open: dict[str, _Visit] = {}
        self.hook_seconds = 0.0
        self.hooks = 0
        self.rank_seconds = 0.0


class Timing:
    """
    Records passes ([Note: Timing]). Lanes, the engine and hooks tell it what they do while it is theirs.

    Args:
        platform (`Platform`): makes events, and reads them.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._lock = threading.RLock()
        self._pool: list[Event] = []
        self._entered = 0
        self._newest: dict[str, _Record] = {}
        self._kept: dict[str, deque[_Record]] = {}
        "the last complete passes of each component"
        self._timed: dict[str, int] = {}
        "how many there were of each"
        self._gathering: dict[tuple[str, int], Event] = {}
        self._arriving: _Visit | None = None
        self._hook_began = 0.0

    # What the engine tells

    def enter(self, component: Component) -> None:
        """A forward begins."""
        with self._lock:
            self._supersede(component.name)
            self._entered += 1
            record = self._newest[component.name] = _Record(component, self._entered)
            record.origin = self._mark(record)

    def leave(self, component: Component, complete: bool) -> None:
        """A forward has ended, or raised."""
        with self._lock:
            record = self._newest.get(component.name)
            if record is not None and not record.closed:
                record.closed = True
                record.end = self._mark(record) if complete else None

    def arrive(self, unit: Unit) -> None:
        """A block is needed."""
        record = self._open_record(unit)
        self._arriving = None
        if record is not None:
            visit = self._arriving = record.open[unit.layout.name] = _Visit(unit.layout.name)
            if self._platform.waits_on_host:
                visit.arrived = self._mark(record)

    def begin(self, unit: Unit) -> None:
        """What is queued next computes with a block. If told twice, it has begun the first time."""
        record, visit = self._open_visit(unit)
        if record is not None and visit is not None and visit.begun is None:
            visit.begun = self._mark(record)

    def end(self, unit: Unit) -> None:
        """A block has computed."""
        record, visit = self._open_visit(unit)
        if record is not None and visit is not None:
            del record.open[visit.block]
            if visit.begun is not None:
                visit.ended = self._mark(record)
                record.visits.append(visit)

    # What hooks tell

    def hook_begins(self) -> None:
        """The host is in a hook now."""
        self._hook_began = time.perf_counter()

    def hook_ends(self, unit: Unit) -> None:
        """The host leaves the hook of a block; those of leaves copy, and do not count."""
        record = self._open_record(unit)
        if record is not None and not unit.layout.is_leaf:
            record.hook_seconds += time.perf_counter() - self._hook_began
            record.hooks += 1

    # What lanes tell

    def wait(self, unit: Unit) -> None:
        """What is queued next is the wait of computing for a block."""
        record, visit = self._open_visit(unit)
        if record is not None and visit is not None and visit.arrived is None:
            visit.arrived = self._mark(record)

    def new_span(self) -> tuple[Event, Event]:
        """Two events, for a transfer that is about to be queued."""
        return self._event(), self._event()

    def transferred(self, kind: str, unit: Unit, span: tuple[Event, Event], part: int = 0) -> None:
        """A transfer of a block, or one of its parts, has been queued, between the events of `new_span`."""
        with self._lock:
            record = self._newest.get(unit.component)
            if record is None:
                self._pool += span
                return
            record.events += span
            record.transfers.append((kind, unit.layout.name, part, span))
            if kind == GATHER and self._platform.waits_on_host:
                self._gathering[unit.component, unit.index] = span[1]

    def gathered(self, stamp: Stamp) -> None:
        """Where the host waits for gathers: that of a block is seen to have ended."""
        event = self._gathering.pop((stamp.component, stamp.block), None)
        if event is not None:
            self._platform.compute_record(event)

    @contextmanager
    def waiting_for_ranks(self, component: Component) -> Iterator[None]:
        """The context in which a hook waits for other ranks: neither Python nor a transfer takes this time."""
        began = time.perf_counter()
        yield
        waited = time.perf_counter() - began
        self._hook_began += waited
        record = self._newest.get(component.name)
        if record is not None and not record.closed:
            record.rank_seconds += waited
            if self._arriving is not None and self._arriving.arrived is not None:
                self._platform.compute_record(self._arriving.arrived)

    # What is asked of it

    def figures(self) -> tuple[PassMeans, Timeline | None]:
        """
        The means over the last complete passes of each component (`MOST_PASSES`), and the timeline of the last of
        all. Waits for the device.
        """
        with self._lock:
            for name in [name for name, record in self._newest.items() if record.closed]:
                self._supersede(name)
            records = [record for kept in self._kept.values() for record in kept]
            means = PassMeans(dict(self._timed))
        self._platform.synchronize()  # not under the lock, which what it waits for may need
        with self._lock:
            records = [record for record in records if record.events]  # not dropped meanwhile
            made = [self._convert(record) for record in records]
            for timed in made:
                means.add(timed)
            if not made:
                return means, None
            last = max(range(len(made)), key=lambda index: records[index].number)
            return means, Timeline.of(made[last], self._earlier(records, records[last]))

    # Records

    def _open_record(self, unit: Unit) -> _Record | None:
        record = self._newest.get(unit.component)
        return record if record is not None and not record.closed else None

    def _open_visit(self, unit: Unit) -> tuple[_Record | None, _Visit | None]:
        record = self._open_record(unit)
        return record, record.open.get(unit.layout.name) if record is not None else None

    def _event(self) -> Event:
        try:
            return self._pool.pop()
        except IndexError:
            return self._platform.new_timing_event()

    def _mark(self, record: _Record) -> Event:
        event = self._event()
        record.events.append(event)
        self._platform.compute_record(event)
        return event

    def _supersede(self, component: str) -> None:
        """The newest record of a component takes nothing more; one that is not complete is forgotten."""
        record = self._newest.pop(component, None)
        if record is None:
            return
        if self._gathering:
            for block in range(len(record.order)):
                self._gathering.pop((component, block), None)
        if record.end is None:
            self._drop(record)
            return
        self._timed[component] = self._timed.get(component, 0) + 1
        kept = self._kept.setdefault(component, deque())
        kept.append(record)
        if len(kept) > MOST_PASSES:
            self._drop(kept.popleft())

    def _drop(self, record: _Record) -> None:
        self._pool += record.events
        record.events = []

    # Times

    def _convert(self, record: _Record) -> TimedPass:
        elapsed, origin = self._platform.elapsed, record.origin
        spans = [self._span(record, transfer, origin) for transfer in record.transfers]
        for visit in record.visits:
            begun, ended = elapsed(origin, visit.begun), elapsed(origin, visit.ended)
            arrived = elapsed(origin, visit.arrived) if visit.arrived is not None else begun
            spans.append(Span(WAIT, record.component, visit.block, arrived, begun))
            spans.append(Span(COMPUTE, record.component, visit.block, begun, ended))
        return TimedPass(
            component=record.component,
            order=record.order,
            pass_ms=elapsed(origin, record.end),
            spans=spans,
            hook_ms=record.hook_seconds * 1e3,
            hooks=record.hooks,
            rank_wait_ms=record.rank_seconds * 1e3,
        )

    def _earlier(self, records: Sequence[_Record], last: _Record) -> list[Span]:
        """What was transferred shortly before `last`, or in it for an earlier pass, in its time."""
        before = sorted((record for record in records if record.number < last.number), key=lambda it: it.number)
        queued = [(record, transfer) for record in before for transfer in record.transfers]
        return [self._span(record, transfer, last.origin) for record, transfer in queued[-_RECENT_SPANS:]]

    def _span(self, record: _Record, transfer: tuple[str, str, int, tuple[Event, Event]], origin: Event) -> Span:
        kind, block, part, (begin, end) = transfer
        elapsed = self._platform.elapsed
        return Span(kind, record.component, block, elapsed(origin, begin), elapsed(origin, end), part)
