# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What the platform of `tests/schedules.py` is made of: memory that is poisoned, events, streams that are queues."""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


POISON = 0xA5
MODES = ("forced", "at once", "uniform", "newest", "starved", "ahead")
"""
Nothing runs until the host waits for it; everything runs at once; anything runs; what was submitted last runs first;
one stream stands still until the host waits for it; one runs as far as it can, and others only for it.
"""


class Memory:
    """Bytes of the host or the device that the platform has handed out, `freed` once nobody has them any more."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind = kind
        self.base = np.zeros(nbytes + 256, dtype=np.uint8)
        self.start = self.base.ctypes.data + -self.base.ctypes.data % 256
        self.nbytes = nbytes
        self.freed = False

    def hand_out(self, on_freed: Callable[[Memory], None]) -> torch.Tensor:
        skip = self.start - self.base.ctypes.data
        part = self.base[skip : skip + self.nbytes]
        weakref.finalize(part, on_freed, self).atexit = False
        with torch.inference_mode(False):
            return torch.from_numpy(part)

    def poison(self) -> None:
        ctypes.memset(self.start, POISON, self.nbytes)


class Mark:
    """
    An event. A wait is for the last `record` at the time of the call; one that was never recorded is passed at once.
    `clock` is what the stream that recorded it had come behind, by stream; `target` is what was copied to before it.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.reached = 0
        self.stream: Stream | None = None
        self.clock: dict[Stream, int] = {}
        self.what = ""
        self.target: Memory | None = None


class Entry(NamedTuple):
    """What a stream does next: waits for a mark that another stream records, or runs something."""

    what: str
    number: int
    run: Callable[[], None] | None = None
    mark: Mark | None = None
    generation: int = 0
    source: Stream | None = None
    may_run: Callable[[], bool] | None = None

    @property
    def runnable(self) -> bool:
        if self.may_run is not None:
            return self.may_run()
        return self.mark is None or self.mark.reached >= self.generation


class Stream:
    """A queue of entries. `clock` says how much of each stream everything queued from now on comes behind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Entry] = deque()
        self.clock: dict[Stream, int] = {self: 0}

    def __repr__(self) -> str:
        return f"{self.name}: {' | '.join(entry.what for entry in self.queue) or 'empty'}"


class Run(NamedTuple):
    """Bytes that go from one place to another, and the memory that each place is in, if the platform knows it."""

    target: int
    source: int
    nbytes: int
    target_memory: Memory | None
    source_memory: Memory | None


class Gather(NamedTuple):
    """A gather: `image` is filled from all ranks' shards, of which this rank's is `shard`."""

    image: torch.Tensor
    shard: torch.Tensor
    ranks: Any


class Notes(TorchDispatchMode):
    """Notes copies instead of making them, with the addresses they have when they are queued, as a device does."""

    def __init__(self, found: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.found[0].append((args[0], args[1]))
            return args[0]
        if func is torch.ops.aten._foreach_copy_.default:  # behind the copies that it reads
            self.found.append(list(zip(args[0], args[1])))
            return None
        return func(*args, **(kwargs or {}))


class Queues:
    """
    Streams, and what runs of them when. `trace` stands for all that has run, in its order; `called` counts how often
    the host has said something.
    """

    def __init__(self) -> None:
        self.compute = Stream("compute")
        self.streams = [self.compute]
        self.trace = self.called = 0
        self._numbers = 0
        self._running = False
        self.reseed(0, "uniform")

    def reseed(self, seed: int, mode: str) -> None:
        """What runs when is decided by `seed` from now on, in one of `MODES`."""
        self.random, self.mode = random.Random(seed), mode
        self.special = self.random.randrange(1 << 16)

    def push(self, stream: Stream, what: str, run: Callable[[], None] | None = None, **more: Any) -> None:
        self._numbers += 1
        stream.queue.append(Entry(what, self._numbers, run, **more))

    def _step(self) -> None:
        """The host has said something: what runs now?"""
        self.called += 1
        if self._running or self.mode == "forced":
            return
        count = 1 << 30 if self.mode in ("at once", "ahead") else self.random.randrange(6)
        special = self.streams[self.special % len(self.streams)]
        while count > 0:
            count -= 1
            able = [stream for stream in self.streams if stream.queue and stream.queue[0].runnable]
            if self.mode == "starved":
                able = [stream for stream in able if stream is not special]
            elif self.mode == "ahead":
                able = self._towards(special)
            if not able:
                return
            newest = self.mode == "newest"
            self._advance(max(able, key=lambda s: s.queue[0].number) if newest else self.random.choice(able))

    def _towards(self, stream: Stream) -> list[Stream]:
        """The stream that has to do something next, so that `stream` can."""
        seen = {stream}
        while stream.queue and not stream.queue[0].runnable:
            source = stream.queue[0].source
            if source is None or source in seen:
                return []
            stream = source
            seen.add(stream)
        return [stream] if stream.queue else []

    def run_one(self) -> None:
        """The device goes on by itself."""
        able = [stream for stream in self.streams if stream.queue and stream.queue[0].runnable]
        if able:
            self._advance(self.random.choice(able))

    def _advance(self, stream: Stream) -> None:
        entry = stream.queue.popleft()
        self.trace = hash((self.trace, entry.number))
        if entry.run is not None:
            self._running = True
            try:
                entry.run()
            finally:
                self._running = False

    def _drain(self, stream: Stream) -> None:
        """Runs what has to be, until a stream is empty, or has to wait for another rank."""
        while stream.queue:
            if stream.queue[0].may_run is not None and not stream.queue[0].runnable:
                return
            able = self._towards(stream)
            if not able:
                if any(s.queue and s.queue[0].may_run is not None for s in self.streams):
                    return
                raise AssertionError(f"a deadlock:\n{chr(10).join(map(repr, self.streams))}")
            if able[0].queue[0].may_run is not None and not able[0].queue[0].runnable:
                return
            self._advance(able[0])
