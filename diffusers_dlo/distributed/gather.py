# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the all-gather of a block's bytes, in place or not. Must not know which block it gathers, nor on which stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from ..device.interface import Platform
from ..device.platform import HOST_BACKEND, gather_options


# torch 2.13 renames the collective and warns at each call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_MARGIN_SECONDS = 30.0
"""By so much a device's own limit is longer than the timeout, after which ranks are lost by name."""
_TESTED_NBYTES = 256
"""What each rank contributes to the gather that tries a backend."""


def new_gather_group(ranks: Sequence[int], backend: str, timeout: float) -> dist.ProcessGroup:
    """
    A group for gathers alone. Made by all ranks of the world together, which torch's naming of groups wants where
    users have made groups of their own.
    """
    limit = timedelta(seconds=timeout + _MARGIN_SECONDS)
    options = gather_options(backend, len(ranks), limit)
    group = dist.new_group(list(ranks), backend=backend, timeout=limit, pg_options=options)
    if backend == HOST_BACKEND and group is not dist.GroupMember.NON_GROUP_MEMBER:
        # Waits are bounded elsewhere, where the rank that is late has a name.
        dist.distributed_c10d._set_pg_timeout(timedelta(days=7), group)
    return group


class ShardGather:
    """
    Rebuilds a block from its equal shards. Bytes, not dtypes: one collective a block, whatever it holds, on backends
    that know no float8. The input may be this rank's part of the output, which takes no more memory, and which is not
    right on every backend.

    Args:
        group (`torch.distributed.ProcessGroup`): the ranks, in the order of their shards.

    Attributes:
        in_place (`bool`): whether inputs that are part of the output are given to the backend as they are.
        asked (`bool` or `str`): the option that this was chosen for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.in_place = True
        self.asked: bool | str = True
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def __call__(self, image: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills `image`, `(size x n,)` of `uint8`, from the `shard`, `(n,)`, of each rank, in it or elsewhere."""
        _all_gather(image, self._input(image, shard), group=self._group)

    def start(self, image: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """As calling it, for devices without streams: what is returned says when `image` is filled."""
        work = _all_gather(image, self._input(image, shard), group=self._group, async_op=True)
        assert work is not None
        return work

    def _input(self, image: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        is_part = image.data_ptr() <= shard.data_ptr() < image.data_ptr() + image.numel()
        return shard if self.in_place or not is_part else shard.clone()

    def map_peers(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """
        The memory that each rank passes in, `(n,)` of `uint8` from `Platform.peer_memory`, by rank, as this one can
        read it. A collective.

        Raises:
            `RuntimeError`: the devices cannot read each other's memory.
        """
        handle = symmetric_memory.rendezvous(memory, self._group.group_name)
        with torch.inference_mode(False):
            return [
                memory if rank == self.rank else handle.get_buffer(rank, tuple(memory.shape), torch.uint8)
                for rank in range(self.size)
            ]

    def abort(self, platform: Platform) -> None:
        """Ends collectives that other ranks will never take part in. What they were to fill is garbage after."""
        platform.abort(self._group)

    def open(self, platform: Platform, timeout: float, in_place: bool | str) -> bool:
        """
        Opens the communicator, and chooses how to gather: as `in_place` says, and with `"auto"` in place if that
        brings the right bytes on all ranks. A collective. False, on all ranks then, where what was asked for brings
        wrong bytes.

        Raises:
            `RuntimeError`: it cannot be opened, or another rank does not take part within `timeout` seconds.
        """
        self.asked = in_place
        for way in (True, False) if in_place == "auto" else (bool(in_place),):
            self.in_place = way
            if self._is_right(platform, timeout):
                return True
        return False

    def _is_right(self, platform: Platform, timeout: float) -> bool:
        """Whether all ranks got the right bytes: each tells the others what it got, with an input of its own."""
        got = self._run(platform, timeout, torch.full((_TESTED_NBYTES,), self.rank + 1, dtype=torch.uint8))
        expected = torch.arange(1, self.size + 1, dtype=torch.uint8).repeat_interleave(_TESTED_NBYTES)
        in_place, self.in_place = self.in_place, False
        try:
            told = self._run(platform, timeout, torch.full((1,), torch.equal(got, expected), dtype=torch.uint8))
        finally:
            self.in_place = in_place
        return bool(told.eq(1).all())

    def _run(self, platform: Platform, timeout: float, mine: torch.Tensor) -> torch.Tensor:
        """A gather of `mine`, `(n,)` on the CPU, whose input is part of its output unless that is avoided."""
        image = torch.zeros(mine.numel() * self.size, dtype=torch.uint8, device=platform.device)
        shard = image.split(mine.numel())[self.rank]
        shard.copy_(mine)
        if platform.waits_on_host:
            self.start(image, shard).wait(timedelta(seconds=timeout))
        else:
            self(image, shard)
        return image.cpu()
