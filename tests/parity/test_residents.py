# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Models of which a part stays on the device: right for every budget, and exactly what the budget says is copied."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from diffusers_dlo import api, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.residency import STAGING_BUFFERS
from tests import toys
from tests.parity.test_toys import CASES, ORDERS, alternate, check, check_exceptions, set_order
from tests.ranks import run_ranks
from tests.toys import feed, toy


FRACTIONS = (0.3, 0.6, 0.9, 1.0, 1.4, 10.0)
"""Of all shards: with 2 ranks, 1.4 keeps some blocks whole, and 10 all of them."""


def budget_of(model: torch.nn.Module, fraction: float, size: int) -> int:
    plan = plan_distributed_layerwise_offload(model, group_size=size)
    return int(fraction * sum(block.shard_nbytes(size) for block in plan.blocks))


@pytest.mark.parametrize("fraction", (0.3, 0.7, 1.0))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
@pytest.mark.parametrize("case", CASES)
def test_one_rank(case: str, transfer: str, fraction: float) -> None:
    budget = budget_of(CASES[case](), fraction, 1)
    check(CASES[case](), CASES[case](), 0, transfer=transfer, device_budget=budget)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
@pytest.mark.parametrize("order", [*ORDERS, "alternating"])
def test_orders_one_rank(order: str, transfer: str) -> None:
    change = alternate if order == "alternating" else set_order(ORDERS[order])
    for slots in (2, 3, 6):
        for fraction in (0.3, 0.7, 1.0):
            model = toy(toys.Stack, 5)
            budget = budget_of(model, fraction, 1)
            check(model, toy(toys.Stack, 5), 0, change, transfer=transfer, num_slots=slots, device_budget=budget)


@pytest.mark.parametrize("kind", (ZeroDivisionError, KeyboardInterrupt))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_exceptions_one_rank(kind: type[BaseException], transfer: str) -> None:
    for fraction in (0.5, 1.0):
        budget = budget_of(toy(toys.Failing, 5), fraction, 1)
        check_exceptions(0, kind, transfer=transfer, device_budget=budget)


def _on_ranks(rank: int, size: int, options: dict, fractions: tuple[float, ...]) -> None:
    for fraction in fractions:
        for case in CASES.values():
            check(case(), case(), rank, device_budget=budget_of(case(), fraction, size), **options)
        for order in (*map(set_order, ORDERS.values()), alternate):
            model = toy(toys.Stack, 5)
            check(model, toy(toys.Stack, 5), rank, order, device_budget=budget_of(model, fraction, size), **options)


VARIANTS = (
    {"gather": "collective"},
    {"gather": "collective", "num_slots": 2, "host": "pinned"},
    {"gather": "pull"},
    {"gather": "pull", "num_slots": 2, "host": "pinned"},
)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_on_ranks(options: dict) -> None:
    run_ranks(2, _on_ranks, options, (0.9, 1.4))


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_on_ranks_with_every_budget(size: int, options: dict) -> None:
    run_ranks(size, _on_ranks, options, FRACTIONS)


def _exceptions_on_ranks(rank: int, size: int) -> None:
    for gather in ("collective", "pull"):
        for fraction in (0.6, 1.0, 1.5):
            for kind in (ZeroDivisionError, KeyboardInterrupt):
                budget = budget_of(toy(toys.Failing, 5), fraction, size)
                check_exceptions(rank, kind, device_budget=budget, gather=gather)


@pytest.mark.parametrize("size", (2, 3))
def test_exceptions_on_ranks(size: int) -> None:
    run_ranks(size, _exceptions_on_ranks)


class Even(toys.Stack):
    """Blocks of one size, so that bytes are multiples of it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.blocks = torch.nn.ModuleList(toys.Block(16, 24) for _ in range(count))


def counted(model: torch.nn.Module, passes: int, **options) -> tuple[dict[str, list[int]], object]:
    """What each of some passes copied from the host and from other ranks; and the handle, still enabled."""
    handle = apply_distributed_layerwise_offload(model, **options)
    seen: dict[str, list[int]] = {"h2d": [], "gather": []}
    before = handle.report()
    for step in range(passes):
        with torch.no_grad():
            model(feed(step))
        handle.join()
        report = handle.report()
        seen["h2d"].append(report.h2d_bytes - before.h2d_bytes)
        seen["gather"].append(report.gather_bytes - before.gather_bytes)
        before = report
    return seen, handle


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_what_stays_is_copied_once_one_rank(transfer: str) -> None:
    model = toy(Even, 6)
    (nbytes,) = {block.padded_nbytes(1) for block in plan_distributed_layerwise_offload(model).blocks}
    seen, handle = counted(model, 4, transfer=transfer, device_budget=3 * nbytes + 100)
    assert handle.plan.residents.count == 3
    assert handle.report().resident_bytes == 3 * nbytes
    # What is fetched ahead for the next pass belongs to the pass before: num_slots of the three that stream.
    assert sum(seen["h2d"][:1]) <= 6 * nbytes + 3 * nbytes and seen["h2d"][1:] in ([3 * nbytes] * 3, [0] * 3)
    assert seen["gather"] == [0] * 4
    handle.remove()


def _counters(rank: int, size: int) -> None:
    model = toy(Even, 12)
    (block,) = {
        block.padded_nbytes(size) for block in plan_distributed_layerwise_offload(model, group_size=size).blocks
    }
    shard = block // size
    # Half of the shards, three slots: no staging.
    seen, handle = counted(model, 4, device_budget=6 * shard, gather="collective")
    assert handle.report().resident_bytes == 6 * shard
    assert seen["h2d"][2:] == [6 * shard] * 2 and sum(seen["h2d"]) <= (12 + 3 * 6 + 2) * shard
    assert seen["gather"][2:] == [12 * (block - shard)] * 2
    handle.remove()
    # Three quarters, staging in the budget.
    seen, handle = counted(model, 4, device_budget=9 * shard, gather="collective")
    assert handle.plan.residents.count == 9 - STAGING_BUFFERS and handle.report().resident_bytes == 9 * shard
    assert seen["h2d"][2:] == [5 * shard] * 2
    assert seen["gather"][2:] == [12 * (block - shard)] * 2
    handle.remove()
    # All shards, gathered in passes: nothing comes from the host any more.
    seen, handle = counted(model, 3, device_budget=12 * shard, gather="collective")
    assert seen["h2d"][1:] == [0, 0] and seen["gather"][1:] == [12 * (block - shard)] * 2
    assert handle.report().passes == 3
    handle.remove()
    # All shards, pulled: they came when the offload was enabled, before anything is counted.
    seen, handle = counted(model, 3, device_budget=12 * shard)
    assert seen["h2d"] == [0] * 3 and sum(seen["gather"]) >= 3 * 12 * (block - shard)
    assert handle.report().resident_bytes == 12 * shard
    handle.remove()
    # Some blocks whole: those are neither copied nor gathered again.
    seen, handle = counted(model, 4, device_budget=12 * shard + 4 * (block - shard), gather="collective")
    assert {name: len(blocks) for name, blocks in handle.plan.residents.whole.items()} == {"model": 4}
    assert seen["h2d"][2:] == [0, 0] and seen["gather"][2:] == [8 * (block - shard)] * 2
    assert handle.report().resident_bytes == 8 * shard + 4 * block
    handle.remove()
    # All whole.
    seen, handle = counted(model, 3, device_budget=12 * block, gather="collective")
    assert seen["h2d"][1:] == [0, 0] and seen["gather"][1:] == [0, 0]
    handle.remove()
    assert handle.report().resident_bytes == 12 * block


@pytest.mark.parametrize("size", (2, 3))
def test_counters_on_ranks(size: int) -> None:
    run_ranks(size, _counters)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_an_embedding_stays_before_blocks_do(transfer: str) -> None:
    model, reference = toy(toys.Leafy), toy(toys.Leafy)
    embed = 400 * 16 * 4
    handle = apply_distributed_layerwise_offload(model, transfer=transfer, device_budget=embed + 100)
    assert handle.plan.residents.nbytes == embed and handle.plan.residents.count == 0
    assert handle.report().resident_bytes == 0  # until it is called
    with torch.no_grad():
        for step in range(4):
            assert torch.equal(model(feed(step)), reference(feed(step)))
    assert handle.report().on_demand_bytes == embed == handle.report().resident_bytes
    assert torch.equal(model.state_dict()["embed.weight"], reference.embed.weight)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(feed(9)), reference(feed(9)))
    handle = apply_distributed_layerwise_offload(model, transfer=transfer, device_budget=embed - 1)
    with torch.no_grad():
        for step in range(2):
            assert torch.equal(model(feed(step)), reference(feed(step)))
    assert handle.report().on_demand_bytes == 2 * embed and not handle.plan.residents.leaves
    handle.remove()


def _unequal_work(rank: int, size: int, gather: str, fraction: float) -> None:
    """Ranks with different numbers of forwards, in different orders of blocks, and a rank that leaves early."""
    model, reference = toy(toys.Stack, 7), toy(toys.Stack, 7)
    handle = apply_distributed_layerwise_offload(
        model, device_budget=budget_of(model, fraction, size), gather=gather, grace=0.05
    )
    orders: tuple[Callable, ...] = (set_order(range(7)), set_order((0, 3, 5)), set_order((6, 2, 2, 1)))
    with torch.no_grad():
        for step in range(2 + 3 * rank):
            for module in (model, reference):
                orders[(step + rank) % 3](module, step)
            assert torch.equal(model(feed(step)), reference(feed(step))), step
    handle.remove()


@pytest.mark.parametrize("fraction", (0.8, 1.0, 1.4))
@pytest.mark.parametrize("gather", ("collective", "pull"))
def test_unequal_work(gather: str, fraction: float) -> None:
    run_ranks(2, _unequal_work, gather, fraction)
    run_ranks(3, _unequal_work, gather, fraction)


def run(model: torch.nn.Module, reference: torch.nn.Module, steps: range) -> None:
    with torch.no_grad():
        for step in steps:
            assert torch.equal(model(feed(step)), reference(feed(step))), step


def _a_larger_model_beside_staging(rank: int, size: int) -> None:
    first, first_reference = toy(toys.Stack, 8), toy(toys.Stack, 8)
    second = toy(toys.Stack, 4, toys.Block, 16, (400, 300))
    second_reference = toy(toys.Stack, 4, toys.Block, 16, (400, 300))
    handle = apply_distributed_layerwise_offload(
        first, device_budget=budget_of(first, 0.9, size), gather="collective", num_slots=2, host="pinned"
    )
    assert handle.plan.residents.staging_nbytes
    other = apply_distributed_layerwise_offload(second)
    for step in range(3):
        run(first, first_reference, range(step, step + 1))
        run(second, second_reference, range(step, step + 1))
    other.remove()
    handle.remove()


def test_staging_of_one_offload_does_not_break_a_larger_model() -> None:
    """Staging buffers fit the offload that has them; blocks of another one may be larger. Pinned: nobody goes on."""
    run_ranks(2, _a_larger_model_beside_staging)


class Slow(Platform):
    """Copies take a while to begin."""

    def submit(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        super().submit(*args, **kwargs)


def _more_slots_than_blocks(rank: int, size: int) -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    options = {"device_budget": budget_of(model, 0.7, size), "gather": "pull", "num_slots": 6}
    platform = Slow(torch.device("cpu")) if rank == 1 else Platform(torch.device("cpu"))
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, transfer="all_gather", **options)
    assert handle.plan.residents.shards == {"model": frozenset({0, 2})}
    run(model, reference, range(3))
    handle.remove()


def test_a_shard_is_not_pulled_before_it_has_arrived() -> None:
    """A lap that fetches a block twice pulls it the second time, while its gather may still be under way."""
    run_ranks(2, _more_slots_than_blocks)
