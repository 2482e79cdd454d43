# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the rates of the machine's links, measured in the run whose times they explain. Must not know of models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from variants import group_sizes


def measure_links(device: torch.device, rank: int, size: int, block_nbytes: int, interference: bool) -> dict[str, Any]:
    """
    Bytes per second, of this rank: `h2d_alone` (one rank copies at a time), `h2d_together` (all of them do), `gather`
    (a block of this size put together in place, all of it counted), and in `gather_in_groups` the same by the size of
    the groups that put one together, all of them at once; with `interference`, how much longer products of matrices
    take beside a copy and beside a gather. On the CPU, where no link is crossed, `h2d` is a copy in memory.
    """
    on_device = device.type != "cpu"
    nbytes = 1 << 30 if on_device else 16 << 20
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_device)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    host.fill_(1)

    def copy() -> None:
        target.copy_(host, non_blocking=True)

    found: dict[str, Any] = {}
    for turn in range(size):
        if turn == rank:
            found["h2d_alone"] = nbytes / _median_seconds(copy, device, 5)
        _barrier(size)
    found["h2d_together"] = nbytes / _median_seconds(copy, device, 20)
    _barrier(size)
    if size > 1:
        if not on_device:
            block_nbytes = min(block_nbytes, nbytes)
        image = torch.empty(block_nbytes // (256 * size) * 256 * size, dtype=torch.uint8, device=device)
        found["gather_in_groups"] = {}
        for group in group_sizes(size):
            gather = _gather_in_groups(image, rank, size, group)
            found["gather_in_groups"][group] = image.numel() / _median_seconds(gather, device, 10)
            _barrier(size)
        found["gather"] = found["gather_in_groups"][size]
    if interference and on_device:
        found |= _interference(device, copy, gather if size > 1 else None)
        _barrier(size)
    return found


def _gather_in_groups(image: torch.Tensor, rank: int, size: int, group: int) -> Callable[[], None]:
    """Puts an image together among this rank and its neighbours of a group."""
    mesh = init_device_mesh(image.device.type, (size // group, group))
    shard = image.numel() // group
    mine = image[rank % group * shard :][:shard]
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather_into(image, mine, group=mesh.get_group(1))


def _interference(
    device: torch.device, copy: Callable[[], None], gather: Callable[[], None] | None
) -> dict[str, float]:
    left, right = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    side = torch.get_device_module(device.type).Stream(device)

    def products(beside: Callable[[], None] | None = None, times: int = 0) -> None:
        with torch.get_device_module(device.type).stream(side):
            for _ in range(times):
                assert beside is not None
                beside()
        for _ in range(40):
            left @ right

    alone = _median_seconds(products, device, 5)
    found = {"gemm_beside_h2d": _median_seconds(lambda: products(copy, 2), device, 5) / alone}
    if gather is not None:
        found["gemm_beside_gather"] = _median_seconds(lambda: products(gather, 10), device, 5) / alone
    return found


def _median_seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    times = []
    for repeat in range(2 + repeats):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _barrier(size: int) -> None:
    if size > 1:
        dist.barrier()
