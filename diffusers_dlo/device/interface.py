# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the package asks of a device: streams, events, memory, page-locking and codecs, and how a host without
streams answers. Must not know of a vendor (`platform.py` does), nor of blocks or passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..coding.codec import ON_HOST, Codec
from ..coding.zstd import ZstdCodec


Event = Any
"""A device event, opaque outside the platform room."""
Stream = Any
"""A device stream, opaque outside the platform room."""


class _HostMoment:
    """A timing event where there is no device: when the host was there."""

    seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()


class Platform:
    """
    Work is submitted to streams that run in order, and events order streams. Here a stream is the calling thread, so
    submitted work is done when `submit` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def registers_host_memory(self) -> bool:
        """Whether `register_host_memory` can work at all on this kind of device."""
        return True

    @property
    def gathers_from_slots_only(self) -> bool:
        """Whether the input of a gather has to lie in its output, at the same address for a slot every time."""
        return False

    @property
    def has_host_link(self) -> bool:
        """Whether weights cross a link from the host's memory to the device's, so that how they do is worth timing."""
        return False

    @property
    def waits_on_host(self) -> bool:
        """Whether the host itself has to wait for a collective, there being no stream that would."""
        return True

    @property
    def codecs(self) -> tuple[str, ...]:
        """The names of the codecs that decode in this device's memory."""
        return (ON_HOST,)

    def open_codec(self, name: str) -> Codec:
        """
        One of `codecs`, or that of the host, which works beside any device.

        Raises:
            `RuntimeError`: this kind of device has no such codec, or its library is missing; with the remedy.
        """
        if name == ON_HOST:
            return ZstdCodec()
        raise RuntimeError(
            f"'{self.device.type}' devices have no codec '{name}'. Where it works, `diffusers-dlo pack --decode` "
            "makes an ordinary checkpoint of a coded one; `pack --codec zstd` makes one that is read everywhere."
        )

    @property
    def queues_variable(self) -> str | None:
        """The environment variable that says how many hardware queues the streams of a process share, if any does."""
        return None

    @property
    def backend(self) -> str:
        """
        The name of the collective backend of this device.

        Raises:
            `NotImplementedError`: none is known.
        """
        if self.known_backend is None:
            raise NotImplementedError(
                f"No collective backend is known for '{self.device.type}' devices; use transfer=\"local\"."
            )
        return self.known_backend

    @property
    def known_backend(self) -> str | None:
        """`backend`, None if none is known."""
        return dist.Backend.default_device_backend_map.get(self.device.type)

    def abort(self, group: dist.ProcessGroup) -> None:
        """Ends the collectives of a group that other ranks will never take part in."""
        dist.distributed_c10d._abort_process_group(group)

    def new_stream(self, high_priority: bool = False) -> Stream:
        """A stream of its own; of high priority where the device has priorities."""
        return None

    def new_event(self) -> Event:
        """An event that nothing has recorded: waiting for it returns at once."""
        return None

    def new_timing_event(self) -> Event:
        """An event that also keeps when it was reached: for the `timed` of `submit`, `compute_record`, `elapsed`."""
        return _HostMoment()

    def elapsed(self, start: Event, end: Event) -> float:
        """
        Milliseconds from one timing event to another, on the device's clock; negative where `end` was reached first.
        Both have been recorded and are done (`is_done`).
        """
        return (end.seconds - start.seconds) * 1e3

    def submit(
        self,
        stream: Stream,
        work: Callable[[], None],
        after: Sequence[Event] = (),
        record: Event = None,
        timed: tuple[Event, Event] | None = None,
    ) -> None:
        """
        Queues `work` on `stream` behind the events `after`, and then `record`. The timing events `timed` are recorded
        where the stream begins with `work`, and where it ends.
        """
        if timed is not None:
            timed[0].record()
        work()
        if timed is not None:
            timed[1].record()

    def is_done(self, event: Event) -> bool:
        """Whether all that was queued before `event` was last recorded has been done."""
        return True

    def wait_on_host(self, event: Event) -> None:
        """Waits on the host for what was queued before `event` was last recorded."""

    def use_in_this_thread(self) -> None:
        """Makes the device the current one of a thread that is not the main one."""

    @property
    def current_stream(self) -> Stream:
        """The stream that the calling thread computes on."""
        return None

    def compute_wait(self, event: Event) -> None:
        """Makes what is queued next on the current stream wait for `event`; the host goes on."""

    def compute_record(self, event: Event) -> None:
        """Records `event` behind what is queued on the current stream."""
        if event is not None:
            event.record()

    def synchronize(self) -> None:
        """Waits on the host until the device is idle."""

    def memory_left(self) -> int | None:
        """Device bytes that this process can still have, those its allocator keeps included; None if not known."""
        return None

    @property
    def memory_total(self) -> int:
        """Device bytes that there are; 0 if not known."""
        return 0

    def watch_peak(self) -> None:
        """The peak of memory in use is looked for anew."""

    def peak_above_now(self) -> int:
        """By how many bytes the peak since `watch_peak` lies above what is in use now."""
        return 0

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory, `(nbytes,)` of `uint8`, 256-byte aligned, never an inference tensor."""
        with torch.inference_mode(False):
            memory = torch.empty(nbytes + 256, dtype=torch.uint8, device=self.device)
            # The CPU's allocator aligns to 64 bytes only, and alignment is part of exactness (kernels' tails).
            skip = -memory.data_ptr() % 256
            return memory[skip : skip + nbytes]

    def peer_memory(self, nbytes: int) -> torch.Tensor:
        """
        Device memory that the devices of other ranks can map; `(nbytes,)` of `uint8`.

        Raises:
            `RuntimeError`: this kind of device has none.
        """
        raise RuntimeError(f"'{self.device.type}' devices cannot map each other's memory")

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised host memory that the device can read by DMA; `(nbytes,)` of `uint8`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def register_host_memory(self, address: int, nbytes: int) -> None:
        """
        Page-locks host memory that something else allocated.

        Raises:
            `RuntimeError`: the device's driver cannot, or refused.
        """

    def unregister_host_memory(self, address: int) -> None:
        """Takes back `register_host_memory`."""
