# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Packed weights through page-locked buffers on a real device that is taken for one which cannot page-lock memory."""

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from diffusers_dlo import OffloadHandle, api, apply_distributed_layerwise_offload
from diffusers_dlo.device.pinned_ring import BUFFERS, MOST_NBYTES
from diffusers_dlo.device.platform import CudaPlatform
from tests import toys
from tests.ranks import run_ranks


pytestmark = pytest.mark.gpu
PASSES = 4


class Unregistering(CudaPlatform):
    """As a device whose driver knows only memory that it allocated."""

    @property
    def registers_host_memory(self) -> bool:
        return False

    def register_host_memory(self, address: int, nbytes: int) -> None:
        raise AssertionError("asked to page-lock memory")


class WithLeaf(toys.Stack):
    """Blocks of 192, 66 and 110 MiB, which take more buffers than there are, beside a larger vocabulary."""

    def __init__(self) -> None:
        super().__init__(5, dim=2048, widths=(12289, 4211, 7001))
        self.vocabulary = nn.Embedding(30_011, 2048)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(self.vocabulary(tokens))


def model() -> nn.Module:
    torch.manual_seed(0)
    return WithLeaf().eval()


def enable(module: nn.Module, platform: CudaPlatform, **options: Any) -> OffloadHandle:
    with patch.object(api, "get_platform", lambda device: platform):
        return apply_distributed_layerwise_offload(module, host="packed", **options)


def check(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reference = model().to(device)
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, 30_011, (64,), generator=generator).to(device) for _ in range(PASSES)]
    torch.cuda.synchronize()
    with torch.no_grad():
        expected = [reference(each) for each in tokens]
    half = sum(p.nbytes for block in reference.blocks for p in block.parameters()) // (2 * size)
    for options in (
        {"transfer": "local"},
        {"transfer": "all_gather", "num_slots": 3},
        {"transfer": "all_gather", "device_budget": half},
        {},
    ):
        streamed = model()
        handle = enable(streamed, Unregistering(device), **options)
        report = handle.report()
        assert report.host_kind == "packed" and 0 < report.host_private_bytes <= 2 * BUFFERS * MOST_NBYTES
        with torch.no_grad():
            got = [streamed(each) for each in tokens]
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), options
        handle.remove()
        for name, value in reference.state_dict().items():
            assert torch.equal(value.cpu(), streamed.state_dict()[name].cpu()), name


def test_one_gpu() -> None:
    check(0, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus() -> None:
    run_ranks(2, check, backend="nccl", timeout=280)


def test_its_rate_beside_that_of_registered_memory() -> None:
    """Printed, not judged: `pytest -s` shows it."""
    device = torch.device("cuda", torch.cuda.current_device())
    tokens = torch.zeros(8, dtype=torch.int64, device=device)
    outputs = []
    for name, platform in (("registered", CudaPlatform(device)), ("through the ring", Unregistering(device))):
        streamed = model()
        handle = enable(streamed, platform, transfer="local")
        with torch.no_grad():
            outputs.append(streamed(tokens))
            torch.cuda.synchronize()
            before, start = handle.report(), time.perf_counter()
            for _ in range(PASSES):
                streamed(tokens)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        after = handle.report()
        copied = after.h2d_bytes - before.h2d_bytes + after.on_demand_bytes - before.on_demand_bytes
        print(f"{name}: {copied / seconds / 1e9:.1f} GB/s")
        handle.remove()
    assert torch.equal(*outputs)
