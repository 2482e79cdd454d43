# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Weights that stay on real devices: equal outputs for every budget, what a measured budget takes, and giving it back.
Two ranks share one device where there is no second one; their gathers then go through gloo.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from diffusers_dlo import apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from tests import toys
from tests.ranks import run_ranks


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(250)]


def wide(num_blocks: int = 8) -> toys.Stack:
    """Blocks of 64 MiB, so that copies and gathers take their time."""
    torch.manual_seed(0)
    return toys.Stack(num_blocks, dim=1024, widths=(8192,)).eval()


def shards_of(size: int, num_blocks: int = 8) -> int:
    plan = plan_distributed_layerwise_offload(wide(num_blocks), group_size=size)
    return sum(block.shard_nbytes(size) for block in plan.blocks)


def make_inputs(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rank)
    return [torch.randn(512, 1024, device="cuda", generator=generator) for _ in range(count)]


def check(rank: int, count: int, **options) -> tuple[int, int]:
    """Forwards that do not wait for each other; bytes that stay, and those that the last two copied from the host."""
    model, reference = wide(), wide().cuda()
    inputs = make_inputs(rank, count)
    with torch.inference_mode():
        expected = [reference(x) for x in inputs]
        handle = apply_distributed_layerwise_offload(model, **options)
        got = [model(x) for x in inputs[:-2]]
        handle.join()
        before = handle.report().h2d_bytes
        got += [model(x) for x in inputs[-2:]]
        torch.cuda.synchronize()
        handle.join()
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), options
        result = handle.report().resident_bytes, handle.report().h2d_bytes - before
        handle.remove()
    return result


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
@pytest.mark.parametrize("fraction", (0.3, 0.6, 0.9, 1.0))
def test_blocks_stay_on_one_rank(fraction: float, transfer: str) -> None:
    budget = int(fraction * shards_of(1))
    resident, copied = check(0, 8, transfer=transfer, device_budget=budget)
    assert budget - shards_of(1) // 8 < resident <= budget
    streamed = shards_of(1) - resident
    in_slots = transfer == "local" and streamed <= 3 * (shards_of(1) // 8)
    assert copied == (0 if in_slots else 2 * streamed)  # what the slots hold is not copied again


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_a_measured_budget_takes_what_is_free(transfer: str) -> None:
    resident, copied = check(0, 8, transfer=transfer, device_budget="auto")
    assert (resident, copied) == (shards_of(1), 0)


@pytest.fixture
def capped() -> Iterator[int]:
    """Memory of this process for a slot or two, a margin, and half of the blocks."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    margin = max(1 << 30, int(0.05 * total))
    reserved = torch.cuda.memory_reserved()
    cap = reserved + margin + (3 + 4) * (shards_of(1) // 8) + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(cap / total)
    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_measured_budget_keeps_to_the_cap_of_the_process(capped: int) -> None:
    model = wide()
    handle = apply_distributed_layerwise_offload(model, device_budget="auto")
    inputs = make_inputs(0, 4)
    with torch.inference_mode():
        for x in inputs:
            model(x)
    torch.cuda.synchronize()
    block = shards_of(1) // 8
    assert 3 * block <= handle.report().resident_bytes <= 5 * block
    assert torch.cuda.memory_reserved() <= capped
    handle.remove()


class Hungry(toys.Stack):
    """Takes all memory that there is, when it is told to."""

    wants = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants:
            torch.empty(self.wants, dtype=torch.uint8, device="cuda")
        return super().forward(x)


def test_out_of_memory_gives_back_what_stays() -> None:
    torch.manual_seed(0)
    model = Hungry(8, dim=1024, widths=(8192,)).eval()
    reference = wide().cuda()
    handle = apply_distributed_layerwise_offload(model, device_budget="auto")
    inputs = make_inputs(0, 6)
    with torch.inference_mode():
        for x in inputs[:3]:
            assert torch.equal(model(x), reference(x))
        assert handle.report().resident_bytes == shards_of(1)
        before = torch.cuda.memory_allocated()
        model.wants = 1 << 50
        with pytest.raises(torch.OutOfMemoryError, match="are given back"):
            model(inputs[3])
        assert torch.cuda.memory_allocated() <= before - shards_of(1)
        model.wants = 0
        for x in inputs[3:]:
            assert torch.equal(model(x), reference(x))
    assert handle.report().resident_bytes == 0
    handle.remove()


def _share_a_device() -> None:
    """Two ranks on one device, which NCCL refuses."""
    if torch.cuda.device_count() < 2:
        dist.Backend.default_device_backend_map["cuda"] = "gloo"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def _ranks() -> dict:
    return {"backend": "nccl" if torch.cuda.device_count() > 1 else "cpu:gloo,cuda:gloo", "timeout": 200}


def _on_two_ranks(rank: int, size: int) -> list[tuple]:
    _share_a_device()
    shards = shards_of(size)
    seen = []
    for gather in ("collective", "pull"):
        for fraction in (0.5, 0.9, 1.0, 1.5):
            options = {"transfer": "all_gather", "device_budget": int(fraction * shards), "gather": gather}
            resident, copied = check(rank, 7, **options)
            seen.append((gather, fraction, resident / shards, copied / shards))
    return seen


def test_two_ranks() -> None:
    first, second = run_ranks(2, _on_two_ranks, **_ranks())
    for (gather, fraction, resident, copied), other in zip(first, second):
        assert resident == other[2] <= fraction + 1e-6, (gather, fraction)
        if fraction >= 1:
            assert copied == 0, (gather, fraction)
        else:
            assert 0 < copied < 2 * (1 - resident) + 0.6, (gather, fraction)


def _peer_is_killed(rank: int, size: int) -> bool:
    _share_a_device()
    model, reference = wide(), wide().cuda()
    handle = apply_distributed_layerwise_offload(
        model, transfer="all_gather", device_budget=shards_of(size), gather="pull"
    )
    assert handle.report().resident_bytes == shards_of(size)
    inputs = make_inputs(rank, 12)
    with torch.inference_mode():
        if rank == 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(30)
        for x in inputs:
            assert torch.equal(model(x), reference(x))
            time.sleep(0.25)
    torch.cuda.synchronize()
    return True


def test_a_killed_rank_leaves_its_shards_to_the_others() -> None:
    results = run_ranks(2, _peer_is_killed, expect_death=(1,), **_ranks())
    assert results[0] is True
