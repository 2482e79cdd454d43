# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""A platform whose streams are threads with random delays: what a device may do, and the CPU never does by itself."""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from diffusers_dlo.device.interface import Platform


class Mark:
    """An event: the last `record` counts for whoever waits from then on, as on a device."""

    def __init__(self) -> None:
        self.recorded: threading.Event | None = None


class TimingMark(Mark):
    """A timing event."""

    seconds = 0.0

    def moment(self) -> Callable[[], None]:
        """Records it: what is returned is to be called when a stream is there."""
        done = self.recorded = threading.Event()

        def reach() -> None:
            if self.recorded is done:  # not recorded again meanwhile
                self.seconds = time.perf_counter()
            done.set()

        return reach


class Worker:
    """A stream: what is submitted runs in order, later, in a thread of its own."""

    def __init__(self) -> None:
        self.todo: queue.SimpleQueue = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self.todo.get()
            try:
                work()
            except BaseException as error:
                self.errors.append(error)


def _nothing() -> None:
    """What is called where nothing is timed."""


class DelayedPlatform(Platform):
    """
    The CPU with streams that lag behind, and computing that does too: what is put on `compute` runs later, as kernels
    do, with the addresses it had when it was put there. `drops` leaves out one kind of waiting, to show that a test
    would notice: `"free"` (a fetch does not wait for the block that last used its slot; a copy to staging not for the
    gather that read there), `"ready"` (computing does not wait for the fetch) or `"buffer"` (the host does not wait
    for the copy from a page-locked buffer before it writes there again). Each copy takes `copy_seconds` longer.
    """

    def __init__(self, device: torch.device, seed: int = 0, drops: str = "", copy_seconds: float = 0.0) -> None:
        super().__init__(device)
        self.copy_seconds = copy_seconds
        self.timing_events = 0
        self.random = random.Random(seed)
        self.drops = drops
        self.workers: list[Worker] = []
        self.compute = Worker()

    @property
    def waits_on_host(self) -> bool:
        return False

    def is_done(self, event: Mark) -> bool:
        return event.recorded is None or event.recorded.is_set()

    def wait_on_host(self, event: Mark) -> None:
        if event.recorded is not None and self.drops != "buffer":
            assert event.recorded.wait(30), "the host waits for something that never comes"

    def new_stream(self, high_priority: bool = False) -> Worker:
        self.workers.append(Worker())
        return self.workers[-1]

    def new_event(self) -> Mark:
        return Mark()

    def new_timing_event(self) -> TimingMark:
        self.timing_events += 1
        return TimingMark()

    def elapsed(self, start: TimingMark, end: TimingMark) -> float:
        assert all(mark.recorded is not None and mark.recorded.is_set() for mark in (start, end)), "not there yet"
        return (end.seconds - start.seconds) * 1e3

    def submit(
        self,
        stream: Worker,
        work: Callable[[], None],
        after: Sequence[Mark] = (),
        record: Mark | None = None,
        timed: tuple[TimingMark, TimingMark] | None = None,
    ) -> None:
        is_copy = stream is self.workers[0]
        dropped = is_copy and self.drops == "free"
        waits = [] if dropped else [mark.recorded for mark in after if mark.recorded is not None]
        before, between = self.random.random() * 0.003, self.random.random() * 0.002
        before += self.copy_seconds if is_copy else 0
        done = threading.Event()
        begin, end = (mark.moment() for mark in timed) if timed is not None else (_nothing, _nothing)

        def run() -> None:
            for wait in waits:
                wait.wait()
            begin()
            time.sleep(before)
            work()
            time.sleep(between)
            end()
            done.set()

        if record is not None:
            record.recorded = done
        stream.todo.put(run)

    @property
    def current_stream(self) -> Worker:
        return self.compute

    def compute_wait(self, event: Mark) -> None:
        if event.recorded is not None and self.drops != "ready":
            self.compute.todo.put(event.recorded.wait)

    def compute_record(self, event: Mark) -> None:
        if isinstance(event, TimingMark):
            self.compute.todo.put(event.moment())
            return
        event.recorded = threading.Event()
        self.compute.todo.put(event.recorded.set)

    def synchronize(self) -> None:
        for worker in (*self.workers, self.compute):
            idle = threading.Event()
            worker.todo.put(idle.set)
            assert idle.wait(30), "a stream waits for something that never comes"
            assert not worker.errors, worker.errors


class Unregistering(DelayedPlatform):
    """The double of a device behind a link that reads only the host memory which it allocated itself."""

    def __init__(self, device: torch.device, seed: int = 0, drops: str = "", copy_seconds: float = 0.0) -> None:
        super().__init__(device, seed, drops, copy_seconds)
        self.pinned: list[weakref.ref[torch.Tensor]] = []

    @property
    def registers_host_memory(self) -> bool:
        return False

    @property
    def has_host_link(self) -> bool:
        return True

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the page-locked memory that is still there."""
        return sum(memory.numel() for held in self.pinned if (memory := held()) is not None)

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        memory = super().pinned_empty(nbytes)
        self.pinned.append(weakref.ref(memory))
        return memory

    def register_host_memory(self, address: int, nbytes: int) -> None:
        raise AssertionError("a device that cannot page-lock memory was asked to")
