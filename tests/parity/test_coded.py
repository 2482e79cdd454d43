# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Models whose blocks lie in coded shards: the same bits as without, whatever is called in which order, and stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from tests import toys
from tests.coded import code_as_it_is
from tests.parity.test_residents import budget_of
from tests.parity.test_toys import CASES, ORDERS, alternate, check, set_order
from tests.ranks import run_ranks
from tests.toys import toy


def coded(case: Callable[[], nn.Module], path: Path, ranks: int, some: bool = False) -> nn.Module:
    model = case()
    code_as_it_is(model, path, ranks, lambda block: not some or block % 2 == 0)
    return model


@pytest.mark.parametrize(
    "options", ({}, {"num_slots": 3}, {"host": "packed"}), ids=("as_it_is", "three_slots", "packed")
)
def test_one_rank(options: dict, tmp_path: Path) -> None:
    for index, (name, case) in enumerate(CASES.items()):
        model = coded(case, tmp_path / f"{name}.safetensors", ranks=1 + index % 3, some=bool(index % 2))
        check(model, case(), 0, transfer="local", **options)


@pytest.mark.parametrize("fraction", (0, 0.7))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_orders_and_budgets_one_rank(transfer: str, fraction: float, tmp_path: Path) -> None:
    for number, order in enumerate((*map(set_order, ORDERS.values()), alternate)):
        some = bool(number % 2)
        model = coded(lambda: toy(toys.Stack, 5), tmp_path / f"{some}.safetensors", 1, some)
        budget = budget_of(toy(toys.Stack, 5), fraction, 1) or None
        check(model, toy(toys.Stack, 5), 0, order, transfer=transfer, device_budget=budget)


def _on_ranks(rank: int, size: int, folder: str) -> None:
    for number, (name, case) in enumerate(CASES.items()):
        shards = size + (number % 3 == 1)  # with another number, each rank decodes whole blocks
        path = Path(folder) / f"{name}.safetensors"
        check(coded(case, path, shards, some=number % 3 == 0), case(), rank)
    for fraction, gather in ((0.6, "collective"), (1.0, "pull"), (1.4, "collective")):
        for order in (set_order(ORDERS["skip"]), set_order(ORDERS["again later"]), alternate):
            model = coded(lambda: toy(toys.Stack, 5), Path(folder) / "orders.safetensors", size)
            budget = budget_of(toy(toys.Stack, 5), fraction, size)
            check(model, toy(toys.Stack, 5), rank, order, device_budget=budget, gather=gather)


@pytest.mark.parametrize("size", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_on_ranks(size: int, tmp_path: Path) -> None:
    run_ranks(size, _on_ranks, str(tmp_path))


def test_values_are_read_while_it_streams(tmp_path: Path) -> None:
    reference = toy(toys.Stack, 3)
    model = coded(lambda: toy(toys.Stack, 3), tmp_path / "a.safetensors", 2)
    handle = apply_distributed_layerwise_offload(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
    handle.remove()
