# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The engine on streams that are threads: several things do happen at once, main threads and service threads among them.
What a missing wait does, and far more schedules, are in `test_schedules.py`.
"""

import threading
import time
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from diffusers_dlo import api, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from tests import toys
from tests.doubles import DelayedPlatform, Worker
from tests.ranks import run_ranks
from tests.toys import feed, toy


class LateBlock(toys.Block):
    """Computes on the double's compute stream: takes the addresses of its weights now, and reads them there, later."""

    stream: Worker | None = None

    def forward(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        weights = [p.detach() for p in (self.up.weight, self.up.bias, self.down.weight, self.down.bias)]
        result: list[torch.Tensor] = []

        def compute() -> None:
            up, up_bias, down, down_bias = weights
            half = functional.linear(torch.tanh(functional.linear(x[0], up, up_bias)), down, down_bias)
            time.sleep(0.001)
            again = functional.linear(torch.tanh(functional.linear(x[0], up, up_bias)), down, down_bias)
            result.append(x[0] + half + again)

        if LateBlock.stream is None:
            compute()
        else:
            LateBlock.stream.todo.put(compute)
        return result


class LateStack(nn.Module):
    """Late blocks, in any order; the host runs far ahead of them and waits at the end of a forward only."""

    def __init__(self, widths: Sequence[int] = (24, 40, 8, 24, 16)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LateBlock(16, width) for width in widths)
        self.order: Sequence[int] = range(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for index in self.order:
            values = self.blocks[index](values)
        if LateBlock.stream is not None:
            done = threading.Event()
            LateBlock.stream.todo.put(done.set)
            assert done.wait(30), "computing waits for something that never comes"
            assert not LateBlock.stream.errors, LateBlock.stream.errors
        return values[0]


def outputs(
    seed: int, rank: int = 0, widths: Sequence[int] = (24, 40, 8, 24, 16), **options
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What passes in varying order give with the double, and what they should give."""
    orders = [range(len(widths)), (0, 2, 2, 4), (4, 1, 3, 0), range(len(widths))]
    model, reference = toy(LateStack, widths), toy(LateStack, widths)
    platform = DelayedPlatform(torch.device("cpu"), seed)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, **options)
    got, expected = [], []
    try:
        with torch.no_grad():
            for step, order in enumerate(orders):
                model.order = reference.order = order
                LateBlock.stream = platform.compute
                got.append(model(feed(step + rank)))
                LateBlock.stream = None
                expected.append(reference(feed(step + rank)))
    finally:
        LateBlock.stream = None
        handle.remove()
    return got, expected


def _on_ranks(rank: int, size: int) -> None:
    for seed in range(8):
        got, expected = outputs(100 * rank + seed, rank=rank, num_slots=2 + seed % 2)
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), seed


@pytest.mark.parametrize("size", (2, 3))
def test_right_on_ranks(size: int) -> None:
    run_ranks(size, _on_ranks)


def _one_computes_one_joins(rank: int, size: int) -> None:
    """A rank that only does transfers may not overwrite its shard before the gather of a slower rank has read it."""
    for seed in range(4):
        model, reference = toy(LateStack), toy(LateStack)
        platform = DelayedPlatform(torch.device("cpu"), seed)
        with patch.object(api, "get_platform", lambda device, platform=platform: platform):
            handle = apply_distributed_layerwise_offload(model)
        with torch.no_grad():
            for step in range(4 if rank == seed % size else 0):
                LateBlock.stream = platform.compute
                got = model(feed(step))
                LateBlock.stream = None
                assert torch.equal(got, reference(feed(step))), (seed, step)
        handle.join()
        handle.remove()


@pytest.mark.parametrize("size", (2, 3))
def test_right_while_others_only_transfer(size: int) -> None:
    run_ranks(size, _one_computes_one_joins)


SEVEN = (24, 40, 8, 24, 16, 32, 24)
BUDGETS = {"three quarters, staged": (0.9, "collective"), "some whole": (1.5, "pull")}


def _with_residents(rank: int, size: int) -> None:
    for seed in range(4):
        for fraction, gather in BUDGETS.values():
            plan = plan_distributed_layerwise_offload(toy(LateStack, SEVEN), group_size=size)
            budget = int(fraction * sum(block.shard_nbytes(size) for block in plan.blocks))
            options = {"device_budget": budget, "gather": gather, "num_slots": 2 + seed % 2}
            got, expected = outputs(10 * seed + rank, rank=rank, widths=SEVEN, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, expected)), (seed, fraction, gather)


@pytest.mark.parametrize("size", (pytest.param(2, marks=pytest.mark.slow), 3))
def test_right_where_a_part_stays(size: int) -> None:
    run_ranks(size, _with_residents)


def _skipping_differently(rank: int, size: int) -> None:
    for seed in range(6):
        orders = [(0, 1, 2, 3, 4), (1, 4), (0, 3, 4), (2,)]
        model, reference = toy(LateStack), toy(LateStack)
        platform = DelayedPlatform(torch.device("cpu"), 10 * seed + rank)
        with patch.object(api, "get_platform", lambda device, platform=platform: platform):
            handle = apply_distributed_layerwise_offload(model, num_slots=2 + seed % 2)
        with torch.no_grad():
            for step in range(6):
                model.order = reference.order = orders[(step + rank) % 4]
                LateBlock.stream = platform.compute
                got = model(feed(step))
                LateBlock.stream = None
                assert torch.equal(got, reference(feed(step))), (seed, step)
        handle.join()
        handle.remove()


@pytest.mark.parametrize("size", (2, 3))
def test_right_while_ranks_skip_differently(size: int) -> None:
    run_ranks(size, _skipping_differently)
