# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how transfers of blocks, and computing's waits for them, are queued: named in profiles, timed where somebody asks,
by way of page-locked buffers where the device cannot read what is copied, and decoded where it is coded. Must not
decide what is transferred, nor in what order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from .device.decoder import Decoder
from .device.interface import Event, Platform, Stream
from .device.pinned_ring import PinnedRing
from .device.ring import Copies, realign
from .labels import label
from .timeline import COPY, DECODE
from .timing import Timing
from .units import Unit


Realigned = tuple[list[torch.Tensor], list[torch.Tensor]]
"""(targets, sources) of what is copied inside an image once it has arrived."""


@dataclass(frozen=True)
class _Arrival:
    """What `Transfers.copy` is asked for."""

    unit: Unit
    stream: Stream
    copies: Copies
    after: tuple[Event, ...]
    record: Event
    realigned: Realigned


class Transfers:
    """
    What a lane queues on its streams.

    Attributes:
        platform (`Platform`): of the onload device.
        timing (`Timing`, *optional*): what is told when transfers and computing begin and end, while somebody asks.
        for_others (`bool`): whether the pass is one that this rank does for others alone: it is not timed.
        wait_on_host (`Callable[[Event], None]`): how the host waits for a page-locked buffer ([Note: Pinned ring]).
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.timing: Timing | None = None
        self.for_others = False
        self.wait_on_host = platform.wait_on_host
        self._pinned: PinnedRing | None = None
        self._between: Event = None
        self._decoder: Decoder | None = None

    # Buffers that copies go through

    @property
    def decoder_nbytes(self) -> int:
        """Device bytes of the buffers that coded shards are decoded from."""
        return self._decoder.nbytes if self._decoder is not None else 0

    @property
    def pinned_nbytes(self) -> int:
        """Host bytes of the page-locked buffers that copies go through."""
        return self._pinned.nbytes if self._pinned is not None else 0

    def fit(self, units: Iterable[Unit]) -> None:
        """Makes buffers, if what is copied of `units` goes through such and those that there are do not do."""
        units = list(units)
        self._fit_decoder(units)
        if self.platform.has_host_link:
            self._fit_pinned(units)

    def _fit_decoder(self, units: Iterable[Unit]) -> None:
        coded = [unit for unit in units if unit.layout.coded is not None and unit.store.codec is not None]
        if not coded:
            return
        codec = coded[0].store.codec
        assert codec is not None
        scratch = max(unit.store.scratch_nbytes for unit in {id(unit.store): unit for unit in coded}.values())
        # Of other ranks' shards too: they are copied where whole blocks are, be it to time that.
        blocks = [unit.layout.coded for unit in coded if unit.layout.coded is not None]
        nbytes = max(shard.place.nbytes for block in blocks for shard in block.shards)
        former = self._decoder
        if former is None:
            self._decoder = Decoder(self.platform, codec, nbytes, scratch)
        elif not former.fits(codec, nbytes, scratch):
            self._drop_decoder()  # first: the device's memory may not do for both
            most = max(nbytes, former.coded_nbytes), max(scratch, former.scratch_nbytes)  # others use it still
            try:
                self._decoder = Decoder(self.platform, codec, *most)
            except BaseException:  # what streams goes on as it did
                self._decoder = Decoder(self.platform, former.codec, former.coded_nbytes, former.scratch_nbytes)
                raise

    def _drop_decoder(self) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None

    def _fit_pinned(self, units: Iterable[Unit]) -> None:
        copied = (unit.store.copied_bounds(unit.key) for unit in units if not unit.store.is_page_locked)
        nbytes = max((stop - start for start, stop in copied), default=0)
        if nbytes and (self._pinned is None or not self._pinned.fits(nbytes)):
            larger = PinnedRing(self.platform, nbytes)  # first: where there is no room, what streams goes on as it did
            self._drop_pinned()
            self._pinned, self._between = larger, self.platform.new_timing_event()

    def drop(self) -> None:
        """Gives all buffers back, once nothing is copied through them any more."""
        self._drop_decoder()
        self._drop_pinned()

    def _drop_pinned(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def needs_host(self, unit: Unit) -> bool:
        """Whether the host itself takes part in the copies of a unit."""
        return self._ring_for(unit) is not None

    def _ring_for(self, unit: Unit) -> PinnedRing | None:
        return None if unit.store.is_page_locked else self._pinned

    # What is queued

    def copy(
        self,
        unit: Unit,
        stream: Stream,
        copies: Copies,
        after: Sequence[Event],
        record: Event,
        realigned: Realigned = ([], []),
    ) -> None:
        """
        Queues `copies`, of a block's host memory, behind the events `after`; then its realignments, and then `record`.
        """
        arrival = _Arrival(unit, stream, copies, tuple(after), record, realigned)
        if copies and copies[0].coded is not None:
            self._copy_decoded(arrival)
            return
        if self._decoder is not None:
            arrival = replace(arrival, after=(*after, self._decoder.latest))
        pinned = self._ring_for(unit)
        if pinned is not None and copies:
            self._copy_through(pinned, arrival)
        else:
            self._copy_straight(arrival)

    def _copy_straight(self, arrival: _Arrival) -> None:
        """As `copy`, from memory that the device reads."""

        def work() -> None:
            _queue_copies(arrival.copies)
            realign(arrival.realigned)

        self.submit(COPY, arrival.unit, arrival.stream, work, after=arrival.after, record=arrival.record)

    def _copy_through(self, pinned: PinnedRing, arrival: _Arrival) -> None:
        """As `copy`, piece by piece: the first is behind `after`, and what is behind the last one records `record`."""
        submit, stream, after = self.platform.submit, arrival.stream, arrival.after
        with self._timed(COPY, arrival.unit) as span:
            timed = (span[0], self._between) if span is not None else None
            for piece in pinned.pieces(arrival.copies, self.wait_on_host):
                submit(stream, piece.queue, after=after, record=piece.copied, timed=timed)
                after, timed = (), None
            timed = (self._between, span[1]) if span is not None else None
            submit(stream, lambda: realign(arrival.realigned), after=after, record=arrival.record, timed=timed)

    def _copy_decoded(self, arrival: _Arrival) -> None:
        """As `copy`, of coded shards, which need no realigning ([Note: Decoding]); the last decoding is behind all."""
        decoder, submit, after = self._decoder, self.platform.submit, arrival.after
        assert decoder is not None
        for part, copy in enumerate(arrival.copies):
            taken = decoder.take(copy)
            with self._timed(COPY, arrival.unit, part) as timed:
                submit(arrival.stream, taken.copy, after=(taken.free,), record=taken.arrived, timed=timed)
            with self._timed(DECODE, arrival.unit, part) as timed:
                submit(decoder.stream, taken.decode, after=(taken.arrived, *after), record=taken.free, timed=timed)
            after = ()
        submit(decoder.stream, nothing, record=arrival.record)

    def copy_now(self, unit: Unit, copies: Copies) -> None:
        """Queues `copies`, of host memory of a leaf, on the current stream."""
        pinned = self._ring_for(unit)
        if pinned is None:
            _queue_copies(copies)
            return
        for piece in pinned.pieces(copies, self.wait_on_host):
            piece.queue()
            self.platform.compute_record(piece.copied)

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
        with self._timed(kind, unit) as span:
            self.platform.submit(stream, work, after=after, record=record, timed=span)

    @contextmanager
    def _timed(self, kind: str, unit: Unit, part: int = 0) -> Iterator[tuple[Event, Event] | None]:
        """
        What is queued inside is one transfer of a block, or a part of it: named, and timed by these two events where
        it is.
        """
        timing = None if self.for_others else self.timing
        span = timing.new_span() if timing is not None else None
        with label(kind, unit):
            yield span
        if timing is not None and span is not None:
            timing.transferred(kind, unit, span, part)

    def wait(self, unit: Unit, fence: Event) -> None:
        """`Platform.compute_wait` for a block."""
        timing = self.timing
        if timing is not None:
            timing.wait(unit)
        with label("wait for", unit):
            self.platform.compute_wait(fence)
        if timing is not None:
            timing.begin(unit)


def nothing() -> None:
    """What is queued where only an event is to be recorded."""


def _queue_copies(copies: Copies) -> None:
    for copy in copies:
        copy.target.copy_(copy.source, non_blocking=True)
