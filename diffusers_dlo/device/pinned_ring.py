# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns page-locked buffers through which memory is copied that the device cannot read by DMA. Must not queue anything on
a stream, nor know whose memory it is.

[Note: Pinned ring]
    Where a device reads only host memory that it allocated itself, weights in shared memory go to it in chunks: the
    host copies a chunk to a page-locked buffer, and a copy from there is queued, which an event of the buffer's own
    follows. The buffers are used by turns, and the host waits for one thing only: that the copy which read a buffer
    last is done, before it writes there again. None is given back, either, before the copies from it are done.

    That copy was queued earlier, behind the fence of its fetch ([Note: Slot reuse]): behind computing that was queued
    before it and needs nothing more of this host, or behind an earlier gather, which needs the other ranks. All ranks
    queue their gathers in one order. Take the first that some rank has not queued: if its host waits for a buffer,
    then for what is behind earlier gathers alone, and those all ranks have queued. So the wait ends, and that rank
    queues its gather too. A rank that is lost never will: where there are others, the wait looks at them, as every
    wait for them does (`CollectiveWait`).

    The host copies with threads of its own: one alone is a fraction of a link, and launchers give each rank one thread
    to compute with. Where blocks are copied whole, the next one is fetched when the computing of a block has been
    queued and not before (`Lane.release`), so that the device computes while the host copies. Where blocks are
    gathered, it is fetched before: the other ranks wait for this one's shard. The threads are there from the start, so
    that none is missing in the middle of a fetch, and until the ring is closed, be it after the interpreter has begun
    to end: that is when a rank serves others which are not done yet, and executors take no work any more.

    Every lane has a ring of its own, and so have the leaves. Whoever may fetch in a lane uses its ring, be it the
    service thread, and nobody else does at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool

import torch

from .interface import Event, Platform
from .ring import Copies


BUFFERS = 3
"""One is written to while another is read, and one more evens out their pace."""
MOST_NBYTES = 32 << 20
"""Of a buffer: long enough for a link's full rate, and a power of two, to which pinned allocators round up."""
_MOST_THREADS = 8
"""That copy on the host."""
_PART_NBYTES = 1 << 20
"""What is not worth more threads."""


@dataclass
class _Buffer:
    """Page-locked memory; `copied` follows the last copy from it."""

    memory: torch.Tensor
    copied: Event


@dataclass(frozen=True)
class Piece:
    """One chunk on its way: `queue` queues its copy, and `copied` has to be recorded behind that."""

    target: torch.Tensor
    source: torch.Tensor
    copied: Event

    def queue(self) -> None:
        """Queues the copy to the device on the current stream."""
        self.target.copy_(self.source, non_blocking=True)


class PinnedRing:
    """
    Page-locked buffers, used by turns ([Note: Pinned ring]).

    Args:
        platform (`Platform`): allocates them.
        nbytes (`int`): the most that one copy brings; no buffer is larger.
    """

    def __init__(self, platform: Platform, nbytes: int) -> None:
        self._platform = platform
        self.buffer_nbytes = min(nbytes, MOST_NBYTES)
        with torch.inference_mode(False):
            memories = [platform.pinned_empty(self.buffer_nbytes) for _ in range(BUFFERS)]
        self._buffers = [_Buffer(memory, platform.new_event()) for memory in memories]
        self._turn = 0
        self._num_threads = min(_MOST_THREADS, _num_processors(), -(-self.buffer_nbytes // _PART_NBYTES))
        self._threads = ThreadPool(self._num_threads)

    @property
    def nbytes(self) -> int:
        """Host bytes of all buffers."""
        return len(self._buffers) * self.buffer_nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether the buffers are as large as is of use for copies of `nbytes`."""
        return self.buffer_nbytes >= min(nbytes, MOST_NBYTES)

    def pieces(self, copies: Copies, wait: Callable[[Event], None]) -> Iterator[Piece]:
        """
        The chunks of `copies` in their order, each copied to a buffer on the host, once `wait` has waited for the last
        copy from that. Whoever asks for the next one has queued the one before.
        """
        for copy in copies:
            source = copy.source
            for start in range(0, source.numel(), self.buffer_nbytes):
                chunk = source[start : start + self.buffer_nbytes]
                buffer = self._buffers[self._turn % len(self._buffers)]
                self._turn += 1
                wait(buffer.copied)
                filled = buffer.memory[: chunk.numel()]
                self._copy(filled, chunk)
                yield Piece(copy.target[start : start + chunk.numel()], filled, buffer.copied)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the host, by all threads; memory that the device reads afterwards."""
        part = max(-(-target.numel() // self._num_threads), _PART_NBYTES)
        if part >= target.numel():
            target.copy_(source)
            return
        self._threads.starmap(torch.Tensor.copy_, zip(target.split(part), source.split(part)), chunksize=1)

    def close(self) -> None:
        """Waits for all copies from the buffers and gives them back. Idempotent."""
        self._threads.close()
        self._threads.join()
        while self._buffers:
            self._platform.wait_on_host(self._buffers[-1].copied)
            self._buffers.pop()


def _num_processors() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
