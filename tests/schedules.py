# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
A platform whose streams are queues, of which a seed decides what runs when. One thread, no clock: the same seed is the
same schedule. Nothing runs when it is submitted, copies are cut in pieces that arrive in any order, and memory is
filled with poison as soon as it may be overwritten, so that reading or writing too early always shows.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from diffusers_dlo.device import decoder
from diffusers_dlo.device.interface import Platform
from tests.queues import Gather, Mark, Memory, Notes, Queues, Run, Stream


class ScheduledPlatform(Queues, Platform):
    """
    Streams of which `reseed` decides what runs when. `faults` says what went wrong, `redundant` which waits the order
    of streams had already, and `slots_only` that its gathers want the same addresses every time.

    Args:
        drops (`Callable[[str, str, str], bool]`, *optional*): whether a wait is left out, asked with the stream that
            waits, what it waits before, and what it waits for. Also asked with `("compute", "record", "compute")`:
            whether that event is recorded before what it is to follow.
        drops_synchronize (`str`): the host does not wait in the function of this name.
    """

    def __init__(self, drops: Callable[[str, str, str], bool] | None = None, drops_synchronize: str = "") -> None:
        Platform.__init__(self, torch.device("cpu"))
        Queues.__init__(self)
        self.lock = threading.RLock()
        self.drops = drops
        self.drops_synchronize = drops_synchronize
        self.dropped = 0
        self._current = self.compute
        self.faults: list[str] = []
        self.waits = 0
        self.redundant: list[str] = []
        self.host_reads = False
        self._memories: dict[int, Memory] = {}
        self._gathers: list[Gather] = []
        self.slots_only = False

    # What the engine asks for

    @property
    def waits_on_host(self) -> bool:
        return False

    @property
    def gathers_from_slots_only(self) -> bool:
        return self.slots_only

    def new_stream(self, high_priority: bool = False) -> Stream:
        asks = sys._getframe(1).f_globals["__name__"]
        return self.add_stream("decode" if asks == decoder.__name__ else "comm" if high_priority else "copy")

    def add_stream(self, name: str) -> Stream:
        """A stream of the kind `name`."""
        with self.lock:
            self.streams.append(Stream(name))
            return self.streams[-1]

    def new_event(self) -> Mark:
        return Mark()

    def empty(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            memory = self._new_memory("device", nbytes)
            # It may be such that what is queued on the current stream has still to be done with.
            self.push(self._current, "others use new memory", memory.poison)
            return memory.hand_out(self._free)

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        return self._new_memory("host", nbytes).hand_out(self._free)

    def _new_memory(self, kind: str, nbytes: int) -> Memory:
        memory = Memory(kind, nbytes)
        self._memories[memory.start] = memory
        return memory

    def _free(self, memory: Memory) -> None:
        with self.lock:
            if memory.kind == "host":
                self._end(memory)
            else:  # the allocator hands it to what the stream does next
                self.push(self.compute, "others use freed memory", lambda: self._end(memory))

    def _end(self, memory: Memory) -> None:
        memory.freed = True
        memory.poison()

    def submit(
        self,
        stream: Stream,
        work: Callable[[], None],
        after: Sequence[Mark] = (),
        record: Mark | None = None,
        timed: Any = None,
    ) -> None:
        with self.lock:
            self._gathers = []
            found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
            with Notes(found):
                work()
            what = {"comm": "gather", "decode": "decode"}.get(stream.name, "copy") if found[0] else "only"
            what = "gather" if self._gathers else what
            for mark in after:
                is_ahead = any(
                    self.memory_of(g.image) is mark.target is not self.memory_of(g.shard) for g in self._gathers
                )
                self._wait(stream, mark, what, "copy ahead" if is_ahead and mark.what == "copy" else mark.what)
            if found[0]:
                runs = [self._run_of(*pair) for pair in found[0]]
                self.push(stream, f"{what} begins", lambda: self._begin(what, runs))
                for piece in self.pieces(runs):
                    self.push(stream, f"{what} of {piece.nbytes}", lambda piece=piece: self._move(what, piece))
            for gather in self._gathers:
                gather.ranks.queue(self, stream, gather)
            for pair in found[1:]:
                for run in [self._run_of(*parts) for parts in pair]:
                    self.push(stream, "realign", lambda run=run: self._move("realign", run))
            if record is not None:
                # What only follows a decoding says that the shard is there.
                self._record(stream, record, "decode" if what == "only" and stream.name == "decode" else what)
                record.target = self.memory_of(found[0][0][0]) if found[0] else None
            self._step()

    def note(self, gather: Gather) -> None:
        """Called by the work that is submitted."""
        self._gathers.append(gather)

    @property
    def current_stream(self) -> Stream:
        return self._current

    def compute_wait(self, event: Mark) -> None:
        with self.lock:
            self._wait(self._current, event, "compute", event.what)
            if self.host_reads:
                self._drain(self._current)
            self._step()

    def compute_record(self, event: Mark) -> None:
        with self.lock:
            # What nothing has used yet is memory that this stream may still use for something else.
            self._record(self._current, event, "compute" if event.generation else "new memory")
            self._step()

    def is_done(self, event: Mark) -> bool:
        with self.lock:
            if event.reached < event.generation:
                self.run_one()
            return event.reached >= event.generation

    def synchronize(self) -> None:
        if self.drops_synchronize == sys._getframe(1).f_code.co_name:
            self.dropped += 1
            return
        while True:
            with self.lock:
                for stream in self.streams:
                    self._drain(stream)
                if not any(stream.queue for stream in self.streams):
                    known = {stream: stream.clock[stream] for stream in self.streams}
                    for stream in self.streams:
                        stream.clock |= known
                    return
            time.sleep(1e-4)  # for other ranks

    def drain(self, stream: Stream) -> None:
        """The host waits for one stream."""
        while stream.queue:
            with self.lock:
                self._drain(stream)
            if stream.queue:
                time.sleep(1e-4)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """The device goes on while the host waits for other ranks, in which nobody calls the platform."""
        ended = threading.Event()

        def go_on() -> None:
            called = -1
            while not ended.wait(0.001):
                with self.lock:
                    if called == self.called:
                        self.run_one()
                    called = self.called

        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # What models ask for

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """`stream` is the current one."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def read(self, what: str, reads: Sequence[tuple[torch.Tensor, bytes]]) -> None:
        """Queues the computing of a block that has to find these bytes in these tensors, from beginning to end."""
        places = [(tensor.data_ptr(), expected) for tensor, expected in reads]

        def look(when: str) -> None:
            if any(ctypes.string_at(place, len(expected)) != expected for place, expected in places):
                self.faults.append(f"{what} computes with other bytes than its own, at its {when}")

        with self.lock:
            for when in ("beginning", "end"):
                self.push(self._current, f"{what} computes", lambda when=when: look(when))
            self._step()

    # Queues

    def _wait(self, stream: Stream, mark: Mark, what: str, awaited: str) -> None:
        if mark.generation == 0:
            return
        source = mark.stream
        assert source is not None
        if self.drops is not None and self.drops(stream.name, what, awaited):
            self.dropped += 1
            return
        self.waits += 1
        if stream.clock.get(source, 0) >= mark.clock[source]:
            self.redundant.append(f"{stream.name} waits before '{what}' for '{awaited}' on {source.name}")
        for other, count in mark.clock.items():
            stream.clock[other] = max(count, stream.clock.get(other, 0))
        self.push(stream, f"wait for {awaited}", mark=mark, generation=mark.generation, source=source)

    def _record(self, stream: Stream, mark: Mark, what: str) -> None:
        stream.clock[stream] += 1
        mark.stream, mark.clock, mark.what = stream, dict(stream.clock), what
        mark.generation += 1
        if self.drops is not None and self.drops(stream.name, "record", what):
            self.dropped += 1
            mark.reached = mark.generation
            return

        def reach(generation: int = mark.generation) -> None:
            mark.reached = max(mark.reached, generation)

        self.push(stream, f"record {what}", reach)

    # Bytes

    def _run_of(self, target: torch.Tensor, source: torch.Tensor) -> Run:
        assert target.is_contiguous() and source.is_contiguous() and target.nbytes == source.nbytes
        memories = [self.memory_of(tensor) for tensor in (target, source)]
        return Run(target.data_ptr(), source.data_ptr(), target.nbytes, *memories)

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """What was handed out as `tensor`, or as what it is a part of."""
        return self._memories.get(tensor.untyped_storage().data_ptr())

    def pieces(self, runs: Sequence[Run]) -> list[Run]:
        found = []
        for run in runs:
            cuts = sorted(
                {0, run.nbytes, *(self.random.randrange(run.nbytes) for _ in range(self.random.randrange(3)))}
            )
            for low, high in zip(cuts, cuts[1:]):
                found.append(run._replace(target=run.target + low, source=run.source + low, nbytes=high - low))
        self.random.shuffle(found)
        return found

    def _begin(self, what: str, runs: Sequence[Run]) -> None:
        """From now on, whatever the memory held that is written to may be gone."""
        for memory in {run.target_memory for run in runs}:
            if memory is not None and not memory.freed:
                memory.poison()

    def _move(self, what: str, run: Run) -> None:
        for memory, does in ((run.target_memory, "writes to"), (run.source_memory, "reads")):
            if memory is not None and memory.freed:
                self.faults.append(f"a {what} {does} {memory.kind} memory that was given back")
                return
        ctypes.memmove(run.target, run.source, run.nbytes)
