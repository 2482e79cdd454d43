# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns every vendor's name, but for that of a codec's library: what devices of each can do, how their backend for torch
is loaded, and the options of their collectives. Must not know of blocks or passes, and is the only file that may ask
which vendor a device is of.

[Note: Vendors]
    Torch's own device-agnostic calls do most (`AcceleratorPlatform`), for whatever vendor torch knows. What differs:

    - NVIDIA: host memory that something else allocated can be page-locked, and devices map each other's memory.
    - Ascend: neither; what lies in memory that it did not allocate is copied through a ring ([Note: Pinned ring]). Its
      backend for torch is a package of its own, `torch_npu`, whose version follows torch's, on top of libraries that
      no package index has (CANN). Its collectives keep what they prepared for an address, so each slot is gathered at
      the same addresses every time, from the shard in it or beside it: nothing is gathered from staging buffers, and a
      shard that stays is copied there first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from diffusers.utils import logging

from ..coding.codec import Codec
from .ans_codec import ANS, AnsCodec
from .backend_package import describe_mismatch, first_line, is_importable, name_version
from .interface import Event, Platform, Stream


logger = logging.get_logger(__name__)

HOST_BACKEND = "gloo"
"""The collective backend between processes of hosts."""
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables that name the network interface of a backend."""
GRAPHS = "CUDA graphs"
"""Recorded launches, which replay at fixed addresses, as users know them."""
GRAPHS_OPTION = "triton.cudagraphs"
"""The option of torch's compiler that has it record them."""
GRAPHS_BACKENDS = ("cudagraphs", "npugraphs", "npugraph_ex")
"""The backends of torch's compiler that do nothing else, or may."""

_REGISTER_READ_ONLY = 0x08
"""`cudaHostRegisterReadOnly`."""
_CTAS_FOR_EACH_PEER = 8
"""
Thread blocks that a gather may occupy, for each other rank. While it waits for a slower rank it keeps them from the
computing, and by default there are about two dozen. With eight it still moves about twice what a host link brings.
"""
_BACKEND_PACKAGES = {"npu": "torch_npu"}
"""Packages outside torch that make it know a kind of device."""
_DEVICE_FILES = {"npu": ("/dev", "davinci[0-9]*")}
"""Where a driver shows its devices: directory and pattern."""


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
    def codecs(self) -> tuple[str, ...]:
        return ()

    @property
    def has_host_link(self) -> bool:
        return True

    @property
    def waits_on_host(self) -> bool:
        return False

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def wait_on_host(self, event: Event) -> None:
        event.synchronize()

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
    def codecs(self) -> tuple[str, ...]:
        return (ANS,)

    def open_codec(self, name: str) -> Codec:
        return AnsCodec(self.device) if name == ANS else super().open_codec(name)

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


class NpuPlatform(AcceleratorPlatform):
    """Ascend devices ([Note: Vendors])."""

    @property
    def gathers_from_slots_only(self) -> bool:
        return True

    def abort(self, group: dist.ProcessGroup) -> None:
        # Torch's own way forgets the group, and ends nothing: the backend does not override what torch calls.
        backend: Any = group._get_backend(self.device)
        backend.abort_hccl_comm("a rank is lost")
        super().abort(group)


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
    if device.type == "npu":
        return NpuPlatform(device)
    return AcceleratorPlatform(device)


# Backends that are packages of their own


def load_device_backends() -> None:
    """
    Loads what is installed of such backends; diffusers will, and not say what is wrong with one.

    Raises:
        `RuntimeError`: one of them cannot be loaded, as `load_device_backend` says it.
    """
    for device_type, package in _BACKEND_PACKAGES.items():
        if is_importable(package):
            load_device_backend(device_type)


def present_device_types() -> list[str]:
    """Kinds of devices that this machine shows, and that torch knows by packages of their own only."""
    return [kind for kind, (directory, pattern) in _DEVICE_FILES.items() if any(Path(directory).glob(pattern))]


def load_device_backend(device_type: str) -> None:
    """
    Has torch know a kind of device. Does nothing where torch does so by itself.

    Raises:
        `RuntimeError`: the package that it needs is missing, was made for another torch, or does not find its
        libraries; with both versions and what to do.
    """
    package = _BACKEND_PACKAGES.get(device_type)
    if package is None or hasattr(torch, device_type):
        return
    found, series = name_version(package), ".".join(torch.__version__.split(".")[:2])
    if not is_importable(package):
        raise RuntimeError(
            f"'{device_type}' devices need the package '{package}', which is not installed. Install the release made "
            f'for torch {torch.__version__}: pip install "{package}=={series}.*".'
        )
    mismatch = describe_mismatch(package)
    if mismatch is not None:
        raise RuntimeError(mismatch)
    try:
        importlib.import_module(package)
    except (Exception, SystemExit) as error:  # a missing library is an ImportError, an unprepared one may be any
        reason = first_line(error)
        raise RuntimeError(
            f"'{package}' {found} cannot be loaded into torch {torch.__version__} ({reason}). It needs a CPU build of "
            "torch, the driver and the CANN libraries of its release: in the shell that starts Python, run 'source "
            "set_env.sh' of the CANN installation. docs/npu.md says which versions go together. To do without such "
            "devices, uninstall it: diffusers imports it too."
        ) from error
