# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the all-gather of a block's bytes, in place. Must not know which block it gathers, nor on which stream.
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


class InPlaceGather:
    """
    Rebuilds a block from its equal shards: the input is this rank's part of the output. Bytes, not dtypes: one
    collective a block, whatever it holds, on backends that know no float8.

    Args:
        group (`torch.distributed.ProcessGroup`): the ranks, in the order of their shards.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def __call__(self, image: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills `image`, `(size x n,)` of `uint8`, from the `shard`, `(n,)`, that each rank has in it."""
        _all_gather(image, shard, group=self._group)

    def start(self, image: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """As calling it, for devices without streams: what is returned says when `image` is filled."""
        work = _all_gather(image, shard, group=self._group, async_op=True)
        assert work is not None
        return work

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

    def abort(self) -> None:
        """Ends collectives that other ranks will never take part in. What they were to fill is garbage after."""
        dist.distributed_c10d._abort_process_group(self._group)

    def is_right(self, platform: Platform, timeout: float) -> bool:
        """
        Opens the communicator, and says whether gathering in place brings the right bytes on this backend.

        Raises:
            `RuntimeError`: it cannot be opened, or another rank does not take part within `timeout` seconds.
        """
        count = 256
        image = torch.zeros(count * self.size, dtype=torch.uint8, device=platform.device)
        shard = image[count * self.rank : count * (self.rank + 1)]
        shard.fill_(self.rank + 1)
        if platform.waits_on_host:
            self.start(image, shard).wait(timedelta(seconds=timeout))
        else:
            self(image, shard)
        expected = torch.arange(1, self.size + 1, dtype=torch.uint8).repeat_interleave(count)
        return torch.equal(image.cpu(), expected)
