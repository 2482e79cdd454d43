# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The other ranks of a group on the platform of `tests/schedules.py`: absent ones, and real ones."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diffusers_dlo import OffloadHandle
from diffusers_dlo.distributed.gather import ShardGather
from diffusers_dlo.host.store import copy_range
from tests.queues import Gather, Run, Stream
from tests.schedules import ScheduledPlatform


class AbsentRanks:
    """
    The gather of a group of which this process is the only rank that is there. What the others send arrives in pieces
    and in any order, and they may read this rank's shard until the gather has ended.
    """

    def __init__(self, platform: ScheduledPlatform, size: int) -> None:
        self.platform = platform
        self.size, self.rank = size, 0
        self.in_place, self.asked = True, "auto"
        self.images: dict[bytes, torch.Tensor] = {}

    def add(self, handle: OffloadHandle, modules: Mapping[str, nn.Module]) -> None:
        """What all ranks together have of the blocks of an offload."""
        for component in handle.plan.components:
            for layout, block in zip(component.blocks, modules[component.name].blocks):
                image = torch.zeros(layout.padded_nbytes(self.size), dtype=torch.uint8)
                by_name = {
                    name: torch.frombuffer(bytearray(data), dtype=torch.float32)
                    for (name, _), data in zip(block.named_parameters(), block.expected)
                }
                tensors = [by_name[tensor.name.removeprefix(f"{layout.name}.")] for tensor in layout.tensors]
                copy_range(layout, tensors, 0, image[: layout.nbytes])
                shard = image[: layout.shard_nbytes(self.size)]
                self.images[shard.numpy().tobytes()] = image

    def __call__(self, image: torch.Tensor, shard: torch.Tensor) -> None:
        self.platform.note(Gather(image, shard, self))

    def queue(self, platform: ScheduledPlatform, stream: Stream, gather: Gather) -> None:
        """Puts what a gather does on `stream`."""
        image, shard = gather.image, gather.shard
        place, own, nbytes = image.data_ptr(), shard.data_ptr(), shard.nbytes
        target = platform.memory_of(image)
        sent: list[bytes] = []

        def begin() -> None:
            sent.append(ctypes.string_at(own, nbytes))
            if target is not None:
                target.poison()
            if own == place:
                ctypes.memmove(own, sent[0], nbytes)
            if sent[0] not in self.images:
                platform.faults.append("a gather reads a shard that has not arrived")

        def receive(piece: Run) -> None:
            if ctypes.string_at(own, nbytes) != sent[0]:
                platform.faults.append("a shard is overwritten while other ranks still read it")
            whole = self.images.get(sent[0])
            if whole is not None:
                ctypes.memmove(place + piece.target, whole.data_ptr() + piece.target, piece.nbytes)

        parts = [Run(nbytes * rank, 0, nbytes, None, None) for rank in range(self.size) if rank or own != place]
        platform.push(stream, "gather begins", begin)
        for piece in platform.pieces(parts):
            platform.push(stream, f"gather of {piece.nbytes}", lambda piece=piece: receive(piece))
        platform.push(stream, "gather ends", lambda: receive(parts[-1]._replace(nbytes=0)))


class Echo:
    """What a group agrees on whose other ranks say what this one says."""

    usable = True
    timeout = 0.0

    def __init__(self, size: int) -> None:
        self.size = size

    def exchange(self, kind: str, **said: Any) -> list[dict[str, Any]]:
        return [{"kind": kind, **said}] * self.size

    def check(self) -> None:
        """No rank is lost."""

    def send_file(self, fd: int) -> None:
        """Nobody else needs it."""

    def close(self) -> None:
        """There is nothing to close."""


class PresentRanks(ShardGather):
    """The gather of a real group on a platform's streams: begun and waited for when their turn comes."""

    def __init__(self, platform: ScheduledPlatform, gather: ShardGather) -> None:
        self.__dict__.update(vars(gather))
        self.platform = platform

    def __call__(self, image: torch.Tensor, shard: torch.Tensor) -> None:
        self.platform.note(Gather(image, shard, self))

    def queue(self, platform: ScheduledPlatform, stream: Stream, gather: Gather) -> None:
        """Puts what a gather does on `stream`."""
        image, shard = gather.image, gather.shard
        target = platform.memory_of(image)
        begun: list[dist.Work] = []

        def begin() -> None:
            own = shard.clone()
            if target is not None and not target.freed:
                target.poison()
            if target is platform.memory_of(shard):
                shard.copy_(own)
            begun.append(self.start(image, shard))

        platform.push(stream, "gather begins", begin)
        platform.push(stream, "gather ends", may_run=lambda: begun[0].is_completed())
