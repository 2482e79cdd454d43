# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""A step cache with every way in which blocks reach a device: copied, gathered, pulled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.ranks import run_ranks
from tests.zoo import MODELS, build, run


pytestmark = pytest.mark.gpu
SEEDS = ((0, 0, 1, 1, 1, 0, 0), (0, 1, 1, 2, 2, 2, 0))


def steps(model: nn.Module, rank: int, device: torch.device) -> list[list[torch.Tensor]]:
    outputs = []
    with model.cache_context("cond"):
        for seed in SEEDS[rank % 2]:
            outputs.append(run(model, MODELS["flux"].inputs(seed), device=device))
    model._reset_stateful_cache()
    return outputs


def check(rank: int, **options: Any) -> int:
    """Equal to the same cache without offload, twice; how many blocks were skipped."""
    device = torch.device("cuda", torch.cuda.current_device())
    model, reference = build("flux", 5, dtype=torch.bfloat16), build("flux", 5, dtype=torch.bfloat16).to(device)
    reference.enable_cache(FirstBlockCacheConfig(threshold=0.05))
    expected = steps(reference, rank, device)
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        model.enable_cache(FirstBlockCacheConfig(threshold=0.05))
        for _ in range(2):
            for got, wanted in zip(steps(model, rank, device), expected):
                assert all(torch.equal(a, b) for a, b in zip(got, wanted)), options
        return handle.report().skipped_blocks
    finally:
        handle.remove()


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
@pytest.mark.parametrize("budget", (None, 100_000))
def test_one_gpu(transfer: str, budget: int | None) -> None:
    assert check(0, transfer=transfer, device_budget=budget) > 0


def _on_ranks(rank: int, size: int) -> list[int]:
    all_shards = 1 << 30
    return [
        check(rank, **options)
        for options in (
            {"transfer": "all_gather", "grace": 0.05},
            {"transfer": "local"},
            {"transfer": "all_gather", "gather": "pull", "device_budget": 200_000},
            {"transfer": "all_gather", "gather": "pull", "device_budget": all_shards},
        )
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_ranks_that_skip_differently() -> None:
    for skipped in run_ranks(2, _on_ranks, backend="nccl", timeout=200):
        assert len(set(skipped)) == 1 and skipped[0] > 0
