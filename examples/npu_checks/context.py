# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns what every check is given: the device, its platform, the ranks and the options. Must not check anything."""

from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from diffusers_dlo.device.interface import Platform
from diffusers_dlo.device.platform import get_platform
from diffusers_dlo.distributed.gather import ShardGather, new_gather_group

from .install import Installed
from .outcome import Failed
from .ranks import Ranks


@dataclass
class Context:
    """
    What checks are given.

    Attributes:
        device (`torch.device`), ranks (`Ranks`), installed (`Installed`): of this rank.
        limit (`float`): seconds that a row may take.
        block_mib (`int`), tokens (`int`): the size of the stack whose overlap is measured.
    """

    device: torch.device
    ranks: Ranks
    installed: Installed
    limit: float
    block_mib: int
    tokens: int

    @cached_property
    def platform(self) -> Platform:
        """How the package drives this device."""
        return get_platform(self.device)

    @cached_property
    def gather(self) -> ShardGather:
        """The package's gather, in a group of its own. Made by all ranks together."""
        return ShardGather(new_gather_group(range(self.ranks.size), self.platform.backend, self.limit))

    @property
    def has_streams(self) -> bool:
        """Whether the device has streams, and memory of its own."""
        return not self.platform.waits_on_host

    @property
    def device_name(self) -> str:
        """What the vendor calls it."""
        if self.device.type == "cpu":
            return "cpu"
        return str(torch.get_device_module(self.device).get_device_name(self.device.index))

    def close(self) -> None:
        """Leaves the other ranks."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    @cached_property
    def busy(self) -> Busy:
        """Work for the device that takes its time."""
        return Busy(self.device, self.platform)


def make_context(args: argparse.Namespace) -> Context:
    """This rank, on the device with its place on the host; one that is not there leaves row 3 to say so."""
    kind, ranks = args.installed.kind, Ranks()
    device = torch.device("cpu")
    if kind == "npu":
        importlib.import_module("torch_npu")
    if kind != "cpu":
        device = torch.device(kind, ranks.local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    block_mib, tokens = (1, 64) if kind == "cpu" else (64, 16384)
    return Context(device, ranks, args.installed, args.limit, args.block_mib or block_mib, args.tokens or tokens)


class Busy:
    """Work on the current stream that takes about as long as asked for."""

    def __init__(self, device: torch.device, platform: Platform) -> None:
        size, dtype = (256, torch.float32) if device.type == "cpu" else (4096, torch.float16)
        self._left = torch.full((size, size), 0.01, dtype=dtype, device=device)
        self._right = torch.full((size, size), 0.01, dtype=dtype, device=device)
        self._out = torch.empty_like(self._left)
        self._multiply(2)  # the first one loads kernels
        platform.synchronize()
        start = time.perf_counter()
        self._multiply(20)
        platform.synchronize()
        self._ms = (time.perf_counter() - start) * 1e3 / 20

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def work(self, ms: float) -> None:
        """Queues about this many milliseconds of work."""
        self._multiply(min(max(round(ms / self._ms), 1), 2000))


def demand(condition: bool, reason: str) -> None:
    """
    Raises:
        `Failed`: the condition does not hold.
    """
    if not condition:
        raise Failed(reason)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes on the host that differ from place to place and from seed to seed, `(nbytes,)` of `uint8`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
