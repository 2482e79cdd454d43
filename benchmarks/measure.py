# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is measured of one model on one rank: times and bits of forwards, device memory, host memory. Must not know
how the model's weights are held, nor compare ranks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


WARM_UP = 2
SLOW_SECONDS = 1.0
"""A forward that takes longer is warmed up once and repeated twice."""


def time_forwards(
    model: nn.Module,
    inputs: Mapping[str, Any],
    device: torch.device,
    repeats: int,
    size: int,
    copied: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """
    Warms up, then times `repeats` forwards, fewer if they are slow; the same number on all ranks. A single one is not
    warmed up for. `copied` counts the bytes that have crossed the link; what it rises by in a timed forward is `h2d`.
    """
    backend = _backend(device)
    warm_up = 0
    if repeats > 1:
        first = _agreed(_timed(model, inputs, device)[0], device, size)
        warm_up, repeats = (1, min(repeats, 2)) if first > SLOW_SECONDS else (WARM_UP, repeats)
    for _ in range(warm_up - 1):
        _timed(model, inputs, device)
    if size > 1:
        dist.barrier()
    if backend is not None:
        backend.reset_peak_memory_stats(device)
    seconds, digests, finite, before = [], [], True, copied()
    for _ in range(repeats):
        taken, output = _timed(model, inputs, device)
        seconds.append(taken)
        digests.append(digest(output))
        finite = finite and all(bool(tensor.isfinite().all()) for tensor in output)
    peak = backend.max_memory_allocated(device) if backend is not None else None
    return {
        "seconds": seconds,
        "digests": digests,
        "finite": finite,
        "device_peak_nbytes": peak,
        "h2d": (copied() - before) / repeats,
    }


def _timed(model: nn.Module, inputs: Mapping[str, Any], device: torch.device) -> tuple[float, list[torch.Tensor]]:
    synchronize(device)
    start = time.perf_counter()
    with torch.no_grad():
        output = model(**inputs)[0]
    synchronize(device)
    return time.perf_counter() - start, output


def _agreed(seconds: float, device: torch.device, size: int) -> float:
    """The slowest rank's time, so that all ranks decide alike."""
    if size == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def digest(output: list[torch.Tensor]) -> str:
    """A digest of the bytes of an output."""
    whole = hashlib.sha256()
    for tensor in output:
        whole.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def clock(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """How long a piece of work takes, and what it returns."""
    synchronize(device)
    start = time.perf_counter()
    value = work()
    synchronize(device)
    return time.perf_counter() - start, value


def synchronize(device: torch.device) -> None:
    """Waits for a device; nothing on the CPU."""
    backend = _backend(device)
    if backend is not None:
        backend.synchronize(device)


def device_memory(device: torch.device) -> dict[str, int | None]:
    """
    Bytes on the device now: `allocated` by tensors, and `used` by all of this machine's processes, libraries and
    caches included. None on the CPU.
    """
    backend = _backend(device)
    if backend is None:
        return {"allocated": None, "used": None}
    free, total = backend.mem_get_info(device)
    return {"allocated": backend.memory_allocated(device), "used": total - free}


def host_memory() -> dict[str, int]:
    """
    Bytes of host memory of this process, from the kernel. `pss`: what it shares with others counted by the part; in it
    `file` (page cache) and `shared_memory`. `uss`: mapped by no other process, page cache too, if only this one maps
    that part of a file. `private`: this process's own, so neither files nor shared memory, whoever maps them.
    """
    total = dict.fromkeys(("Pss", "Pss_File", "Pss_Shmem", "Private_Clean", "Private_Dirty"), 0)
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in total:
                total[name] = int(rest.split()[0]) * 1024
    private, mapping, is_file = 0, {}, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if " " in name:  # the first line of a mapping: its addresses and what it maps
                path = line.split(maxsplit=5)[5:]
                # Page-locked memory and the like are mappings of devices.
                is_file = bool(path) and path[0].startswith("/") and not path[0].startswith("/dev/")
                is_file = is_file or bool(path) and path[0].startswith("/dev/shm/")
                mapping = {}
            elif rest.endswith("kB\n"):
                mapping[name] = int(rest.split()[0]) * 1024
                if name == "Anonymous":  # comes after the others
                    alone = mapping["Private_Clean"] + mapping["Private_Dirty"]
                    private += min(alone, mapping["Anonymous"]) if is_file else alone
    return {
        "pss": total["Pss"],
        "file": total["Pss_File"],
        "shared_memory": total["Pss_Shmem"],
        "uss": total["Private_Clean"] + total["Private_Dirty"],
        "private": private,
    }


def _backend(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device.type)
