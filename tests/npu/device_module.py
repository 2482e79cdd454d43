# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what `torch.npu` is on the simulated device: the calls of torch_npu's module of that name that packages make. Must
not have what an NPU has not: no host memory can be registered, and no memory of another device be mapped.
"""

from __future__ import annotations

from typing import Any

import torch


_ops = torch.ops.simulated_npu
Device = torch.device | str | int | None


class Stream(torch.Stream):
    """A stream of the device; priorities are taken and mean nothing."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("npu", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of the device that is current where it is recorded first."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="npu", enable_timing=enable_timing)


class device:
    """Makes a device the current one for a while."""

    def __init__(self, wanted: Device) -> None:
        self._index = _index(wanted)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def _index(device: Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Device) -> None:
    torch.accelerator.set_device_index(_index(device))
    _ops.use_in_this_thread()


def get_device_name(device: Device = None) -> str:
    return "Simulated"


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # torch's own is a context that makes itself the current one


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def empty_cache() -> None:
    """There is no cache."""


def memory_allocated(device: Device = None) -> int:
    return _ops.memory(_index(device))[0]


memory_reserved = memory_allocated


def max_memory_allocated(device: Device = None) -> int:
    return _ops.memory(_index(device))[1]


def reset_peak_memory_stats(device: Device = None) -> None:
    _ops.reset_peak(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    used, _, total = _ops.memory(_index(device))
    return total - used, total


def manual_seed(seed: int) -> None:
    """Random numbers are drawn on the CPU."""


manual_seed_all = manual_seed


def _is_in_bad_fork() -> bool:
    return False


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
