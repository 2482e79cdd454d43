# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns when each transfer and each block began and ended, on the device: its timing events, from their recording until
they have become figures. Must not make a device or the host wait before somebody asks for the figures.

[Note: Timing]
    A timed pass is a forward of a component, from `enter` to `leave`. Its record takes the blocks that are called in
    between, and the transfers of its component that are queued until the next forward of it begins: the service thread
    completes laps after the forward has ended. Passes that are done for other ranks alone are left out (the lane does
    not tell of them), and so is a forward that raised or was interrupted.

    Nothing waits while passes are recorded. When a forward begins, records that take nothing more, and whose events
    the device has all reached, become times and leave their events to the next ones. A lane may be used by the service
    thread while the main thread enters a forward, so records change under a lock.

    Where there are no streams, the host copies when a block is acquired, and waits for gathers there: computing
    arrives at its wait when the hook begins. On a device it does when the stream gets to the wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .device.platform import Event, Platform
from .device.ring import Stamp
from .timeline import COMPUTE, GATHER, WAIT, PassMeans, Span, TimedPass, Timeline
from .units import Component, Unit


_RECENT_SPANS = 32
"""So many transfers of earlier passes are remembered for the timeline: those that bring the first blocks of a pass."""


class _Visit:
    """One call of a block: where computing came to its wait, went on, and ended."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.arrived: Event | None = None
        self.begun: Event | None = None
        self.ended: Event | None = None

    @property
    def events(self) -> list[Event]:
        return [event for event in (self.arrived, self.begun, self.ended) if event is not None]


class _Record:
    """One forward while it is recorded, and until its events have become times."""

    def __init__(self, component: Component, origin: Event) -> None:
        self.component = component.name
        self.order = tuple(block.layout.name for block in component.blocks)
        self.origin = origin
        self.end: Event | None = None
        self.closed = False
        self.transfers: list[tuple[str, str, tuple[Event, Event]]] = []
        self.visits: list[_Visit] = []
        self.open: dict[str, _Visit] = {}
        self.hook_seconds = 0.0
        self.hooks = 0
        self.rank_seconds = 0.0

    @property
    def events(self) -> list[Event]:
        """All of its events but `origin`."""
        made = [event for *_, pair in self.transfers for event in pair]
        made += [event for visit in (*self.visits, *self.open.values()) for event in visit.events]
        return made if self.end is None else [*made, self.end]


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
        self._newest: dict[str, _Record] = {}
        self._waiting: deque[_Record] = deque()
        self._gathering: dict[tuple[str, int], Event] = {}
        self._arriving: _Visit | None = None
        self._hook_began = 0.0
        self._base: tuple[Event, float] | None = None
        "the beginning of the pass that became times last, and its own time"
        self._recent: deque[Span] = deque(maxlen=_RECENT_SPANS)
        self._means = PassMeans()
        self._last: tuple[TimedPass, list[Span]] | None = None
        "with transfers that were queued before it"

    # What the engine tells

    def enter(self, component: Component) -> None:
        """A forward begins."""
        with self._lock:
            self._supersede(component.name)
            self._fold()
            self._newest[component.name] = _Record(component, self._mark())

    def leave(self, component: Component, complete: bool) -> None:
        """A forward has ended, or raised."""
        with self._lock:
            record = self._newest.get(component.name)
            if record is not None and not record.closed:
                record.closed = True
                record.end = self._mark() if complete else None

    def arrive(self, unit: Unit) -> None:
        """A block is needed."""
        record = self._open_record(unit)
        self._arriving = None
        if record is not None:
            visit = self._arriving = record.open[unit.layout.name] = _Visit(unit.layout.name)
            if self._platform.waits_on_host:
                visit.arrived = self._mark()

    def begin(self, unit: Unit) -> None:
        """What is queued next computes with a block. If told twice, it has begun the first time."""
        visit = self._open_visit(unit)
        if visit is not None and visit.begun is None:
            visit.begun = self._mark()

    def end(self, unit: Unit) -> None:
        """A block has computed."""
        record, visit = self._open_record(unit), self._open_visit(unit)
        if record is not None and visit is not None:
            del record.open[visit.block]
            if visit.begun is not None:
                visit.ended = self._mark()
                record.visits.append(visit)
            else:
                self._pool += visit.events

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
        visit = self._open_visit(unit)
        if visit is not None and visit.arrived is None:
            visit.arrived = self._mark()

    def new_span(self) -> tuple[Event, Event]:
        """Two events, for a transfer that is about to be queued."""
        return self._event(), self._event()

    def transferred(self, kind: str, unit: Unit, span: tuple[Event, Event]) -> None:
        """A transfer of a block has been queued, between the events of `new_span`."""
        with self._lock:
            record = self._newest.get(unit.component)
            if record is None:
                self._pool += span
                return
            record.transfers.append((kind, unit.layout.name, span))
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
        """The means over the complete passes so far, and the timeline of the last one. Waits for the device."""
        with self._lock:
            for name in [name for name, record in self._newest.items() if record.closed]:
                self._supersede(name)
        self._platform.synchronize()
        with self._lock:
            self._fold()
            return self._means, Timeline.of(*self._last) if self._last is not None else None

    # Records

    def _open_record(self, unit: Unit) -> _Record | None:
        record = self._newest.get(unit.component)
        return record if record is not None and not record.closed else None

    def _open_visit(self, unit: Unit) -> _Visit | None:
        record = self._open_record(unit)
        return record.open.get(unit.layout.name) if record is not None else None

    def _event(self) -> Event:
        try:
            return self._pool.pop()
        except IndexError:
            return self._platform.new_timing_event()

    def _mark(self) -> Event:
        event = self._event()
        self._platform.compute_record(event)
        return event

    def _supersede(self, component: str) -> None:
        """The newest record of a component takes nothing more; one that is not complete is forgotten."""
        record = self._newest.pop(component, None)
        if record is None:
            return
        for block in range(len(record.order)):
            self._gathering.pop((component, block), None)
        if record.end is not None:
            self._waiting.append(record)
        else:
            self._pool += [record.origin, *record.events]

    def _fold(self) -> None:
        """Makes times of the records whose events have all been reached, in their order."""
        while self._waiting:
            events = self._waiting[0].events
            if not all(self._platform.is_done(event) for event in reversed(events)):
                return
            record = self._waiting.popleft()
            self._add(record)
            self._pool += events

    def _add(self, record: _Record) -> None:
        elapsed, origin = self._platform.elapsed, record.origin
        base = 0.0
        if self._base is not None:
            # Step by step: a device counts in single precision, which is coarse after a while.
            base = self._base[1] + elapsed(self._base[0], origin)
            self._pool.append(self._base[0])
        self._base = origin, base
        spans = [
            Span(kind, record.component, block, elapsed(origin, begin), elapsed(origin, end))
            for kind, block, (begin, end) in record.transfers
        ]
        earlier = [span.shifted(-base) for span in self._recent]
        self._recent.extend(span.shifted(base) for span in spans[-_RECENT_SPANS:])
        for visit in record.visits:
            begun, ended = elapsed(origin, visit.begun), elapsed(origin, visit.ended)
            arrived = elapsed(origin, visit.arrived) if visit.arrived is not None else begun
            spans.append(Span(WAIT, record.component, visit.block, arrived, begun))
            spans.append(Span(COMPUTE, record.component, visit.block, begun, ended))
        timed = TimedPass(
            component=record.component,
            order=record.order,
            pass_ms=elapsed(origin, record.end),
            spans=spans,
            hook_ms=record.hook_seconds * 1e3,
            hooks=record.hooks,
            rank_wait_ms=record.rank_seconds * 1e3,
        )
        self._means.add(timed)
        self._last = timed, earlier
