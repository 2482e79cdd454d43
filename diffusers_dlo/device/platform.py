# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns every vendor's name: streams, events, page-locking and the collective backend, behind one
interface that the rest of the package uses for accelerators and the CPU alike. Must not know of blocks or passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from diffusers.utils import logging


logger = logging.get_logger(__name__)

Event = Any
"""A device event, opaque outside this file."""
Stream = Any
"""A device stream, opaque outside this file."""

_REGISTER_READ_ONLY = 0x08
"""`cudaHostRegisterReadOnly`."""
_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl", "cpu": "gloo"}
_CTAS_FOR_EACH_PEER = 8
"""
Thread blocks that a gather may occupy, for each other rank. While it waits for a slower rank it keeps them from the
computing, and by default there are about two dozen. With eight it still moves about twice what a host link brings.
"""


class _HostMoment:
    """A timing event where there is no device: when the host was there."""

    seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()


class Platform:
    """
    The CPU as a platform, and the interface of every other: work is submitted to streams that run in order, and events
    order streams. On the CPU a stream is the calling thread, so submitted work is done when `submit` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def registers_host_memory(self) -> bool:
        """Whether `register_host_memory` can work at all on this kind of device."""
        return True

    @property
    def has_host_link(self) -> bool:
        """Whether weights cross a link from the host's memory to the device's, so that how they do is worth timing."""
        return False

    @property
    def waits_on_host(self) -> bool:
        """Whether the host itself has to wait for a collective, there being no stream that would."""
        return True

    @property
    def queues_variable(self) -> str | None:
        """The environment variable that says how many hardware queues the streams of a process share, if any does."""
        return None

    @property
    def backend(self) -> str:
        """The name of the collective backend of this device."""
        if self.device.type not in _BACKENDS:
            raise NotImplementedError(
                f"No collective backend is known for '{self.device.type}' devices; use transfer=\"local\"."
            )
        return _BACKENDS[self.device.type]

    @property
    def known_backend(self) -> str | None:
        """`backend`, None if none is known."""
        return _BACKENDS.get(self.device.type)

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


class AcceleratorPlatform(Platform):
    """A device with streams, through `torch.get_device_module`: the same calls for every vendor that torch knows."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)
        self._warned = False

    @property
    def registers_host_memory(self) -> bool:
        return False

    @property
    def has_host_link(self) -> bool:
        return True

    @property
    def waits_on_host(self) -> bool:
        return False

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def use_in_this_thread(self) -> None:
        self._module.set_device(self.device)

    def new_stream(self, high_priority: bool = False) -> Stream:
        return self._module.Stream(device=self.device, priority=-1 if high_priority else 0)

    def new_event(self) -> Event:
        return self._module.Event()

    def new_timing_event(self) -> Event:
        return self._module.Event(enable_timing=True)

    def elapsed(self, start: Event, end: Event) -> float:
        return start.elapsed_time(end)

    def submit(
        self,
        stream: Stream,
        work: Callable[[], None],
        after: Sequence[Event] = (),
        record: Event = None,
        timed: tuple[Event, Event] | None = None,
    ) -> None:
        for event in after:
            stream.wait_event(event)
        if timed is not None:
            timed[0].record(stream)
        with self._module.stream(stream):
            work()
        if timed is not None:
            timed[1].record(stream)
        if record is not None:
            record.record(stream)

    @property
    def current_stream(self) -> Stream:
        return self._module.current_stream(self.device)

    def compute_wait(self, event: Event) -> None:
        self.current_stream.wait_event(event)

    def compute_record(self, event: Event) -> None:
        event.record(self.current_stream)

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def memory_left(self) -> int | None:
        used = self._module.memory_allocated(self.device)
        free, total = self._module.mem_get_info(self.device)
        left = free + self._module.memory_reserved(self.device) - used
        find_cap = getattr(self._module, "get_per_process_memory_fraction", None)
        cap = int(total * find_cap(self.device)) if find_cap is not None else total
        return max(min(left, cap - used), 0)

    @property
    def memory_total(self) -> int:
        return int(self._module.mem_get_info(self.device)[1])

    def watch_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def peak_above_now(self) -> int:
        return int(self._module.max_memory_allocated(self.device) - self._module.memory_allocated(self.device))

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            # Device allocators align to 512 bytes.
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    f"Page-locking {nbytes / 2**20:.0f} MiB of host memory failed ({str(error).splitlines()[0]}); the "
                    "weights stay pageable and copies will be slower. Look at `ulimit -l` and the container's limits."
                )
            return torch.empty(nbytes, dtype=torch.uint8)

    def register_host_memory(self, address: int, nbytes: int) -> None:
        raise RuntimeError(f"'{self.device.type}' devices cannot page-lock memory that is already allocated")


class CudaPlatform(AcceleratorPlatform):
    """NVIDIA devices: the only ones whose registration of foreign host memory is used here."""

    @property
    def registers_host_memory(self) -> bool:
        return True

    @property
    def queues_variable(self) -> str | None:
        return "CUDA_DEVICE_MAX_CONNECTIONS"

    def peer_memory(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self.device)

    def register_host_memory(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self.device):  # a registration belongs to the context that is current
            for flags in (_REGISTER_READ_ONLY, 0):
                code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))
                if code == 0:
                    return
                self._clear_error()
        raise RuntimeError(f"cudaHostRegister answered {code} for {nbytes / 2**20:.0f} MiB")

    def _clear_error(self) -> None:
        """
        The runtime remembers a refusal, and the next check of an unrelated kernel would report it: be that check.
        """
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            pass

    def unregister_host_memory(self, address: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(address)


def gather_options(backend: str, size: int, timeout: timedelta) -> Any:
    """Options of the backend for a group of `size` ranks that only gathers, beside computing; None for its own."""
    options_class = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)
    if backend != "nccl" or options_class is None:
        return None
    options = options_class(is_high_priority_stream=True)
    options._timeout = timeout
    if hasattr(options, "config"):
        options.config.max_ctas = min(_CTAS_FOR_EACH_PEER * (size - 1), 32)
    return options


def get_platform(device: torch.device) -> Platform:
    """The platform of `device`."""
    if device.type == "cpu":
        return Platform(device)
    if device.type == "cuda":
        return CudaPlatform(device)
    return AcceleratorPlatform(device)
