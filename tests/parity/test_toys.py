# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What no real model has all of: odd counts, dtypes, buffers, ties, calling orders and exceptions, on 1 to 3 ranks."""

from collections.abc import Callable

import pytest
import torch
from diffusers.utils.testing_utils import CaptureLogger
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload, hooks, plan_distributed_layerwise_offload, tensor_utils
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


CASES: dict[str, Callable[[], nn.Module]] = {
    **{f"plain{n}": (lambda n=n: toy(toys.Stack, n)) for n in (1, 2, 3, 5)},
    **{f"mixed{n}": (lambda n=n: toy(toys.Stack, n, toys.MixedBlock)) for n in (1, 3)},
    "counting": lambda: toy(toys.Stack, 3, toys.CountingBlock),
    "nested": lambda: toy(toys.Nested),
    "tied": lambda: toy(toys.Tied),
    "repeated": lambda: toy(toys.Repeated),
    "borrowing": lambda: toy(toys.Borrowing),
    "leafy": lambda: toy(toys.Leafy),
    "uncalled leaves": lambda: toy(toys.Uncalled),
    "training batch norm": lambda: toy(toys.Stack, 3, toys.NormingBlock).train(),
    "returning weights": lambda: toy(toys.Returning),
    "aliased": lambda: toy(toys.Aliased),
}
ORDERS = {
    "reverse": (4, 3, 2, 1, 0),
    "skip": (0, 3),
    "skip first": (2, 4),
    "none": (),
    "scattered": (3, 1, 4, 0, 2),
    "again later": (0, 1, 2, 0, 1, 2, 3, 4),
    "twice in a row": (0, 0, 1, 2, 2, 2, 3, 4, 4),
}


def check(model: nn.Module, reference: nn.Module, rank: int, change: Callable | None = None, **options) -> None:
    before = {**reference.state_dict(), **dict(reference.named_buffers())}
    before = {key: value.clone() for key, value in before.items()}
    parameters = dict(model.named_parameters())
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for step in range(4):
            for module in (model, reference):
                if change is not None:
                    change(module, step)
            with torch.inference_mode() if step % 2 else torch.no_grad():
                got, expected = model(feed(10 * rank + step)), reference(feed(10 * rank + step))
            assert torch.equal(got, expected) and not torch.isnan(got).any(), f"pass {step}"
        if handle.report().host_kind in ("packed", "coded"):
            assert_same(model.state_dict(), reference.state_dict())
    finally:
        handle.remove()
    assert dict(model.named_parameters()).keys() == parameters.keys()
    valued = {name: parameter for name, parameter in parameters.items() if not parameter.is_meta}
    assert all(valued.get(name, parameter) is parameter for name, parameter in model.named_parameters())
    assert_same(model.state_dict(), reference.state_dict())
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and got[key].stride() == value.stride(), key
        assert torch.equal(got[key], value), key


def set_order(order: tuple[int, ...]) -> Callable:
    def change(module: nn.Module, step: int) -> None:
        module.order = order

    return change


def alternate(module: nn.Module, step: int) -> None:
    module.order = (range(5), (4, 2, 0), range(5), (1, 3))[step]


@pytest.mark.parametrize("options", ({}, {"num_slots": 3}, {"num_slots": 9}, {"host": "pinned"}), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_one_rank(case: str, options: dict) -> None:
    check(CASES[case](), CASES[case](), 0, **options)


@pytest.mark.parametrize("options", ({}, {"num_slots": 3}, {"host": "pinned"}, {"transfer": "all_gather"}), ids=str)
@pytest.mark.parametrize("case", ("mixed1", "mixed3", "counting"))
def test_buffers_that_are_large_enough_to_stream(case: str, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_utils, "SMALL_BUFFER_NBYTES", 0)
    model = CASES[case]()
    plan = plan_distributed_layerwise_offload(model)
    assert sum("buffer" in tensor.kind for block in plan.blocks for tensor in block.tensors) >= 2
    check(model, CASES[case](), 0, **options)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
@pytest.mark.parametrize("order", [*ORDERS, "alternating"])
def test_orders_one_rank(order: str, transfer: str) -> None:
    change = alternate if order == "alternating" else set_order(ORDERS[order])
    for slots in (2, 3, 6):
        check(toy(toys.Stack, 5), toy(toys.Stack, 5), 0, change, transfer=transfer, num_slots=slots)


def _on_ranks(rank: int, size: int) -> int:
    done = 0
    for options in ({}, {"num_slots": 4}, {"host": "pinned"}, {"transfer": "local"}):
        for case in CASES.values():
            check(case(), case(), rank, **options)
            done += 1
        for order in (*map(set_order, ORDERS.values()), alternate):
            check(toy(toys.Stack, 5), toy(toys.Stack, 5), rank, order, **options)
            done += 1
    return done


@pytest.mark.parametrize("size", (pytest.param(2, marks=pytest.mark.slow), 3))
def test_on_ranks(size: int) -> None:
    assert run_ranks(size, _on_ranks) == [4 * (len(CASES) + len(ORDERS) + 1)] * size


def check_exceptions(rank: int, kind: type[BaseException], **options) -> None:
    """An exception in each position, on every rank, then a pass that is right."""
    model, reference = toy(toys.Failing, 5), toy(toys.Failing, 5)
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for position in range(6):
            model.fail_at, model.fail_with = position, kind
            with torch.no_grad(), pytest.raises(kind):
                model(feed(0))
            model.fail_at = None
            with torch.no_grad():
                assert torch.equal(model(feed(rank + position)), reference(feed(rank + position))), position
    finally:
        handle.remove()


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_an_interrupt_in_one_model_does_not_touch_another(transfer: str) -> None:
    first, second, reference = toy(toys.Failing, 4), toy(toys.Stack, 5), toy(toys.Stack, 5)
    handles = [apply_distributed_layerwise_offload(module, transfer=transfer) for module in (first, second)]
    first.fail_at, first.fail_with = 2, KeyboardInterrupt
    with torch.no_grad():
        for step in range(3):
            with pytest.raises(KeyboardInterrupt):
                first(feed(0))
            torch.randn(2)
            assert first.state_dict().keys() == toy(toys.Failing, 4).state_dict().keys()
            assert torch.equal(second(feed(step)), reference(feed(step)))
    for handle in handles:
        handle.remove()
    first.fail_at = None
    with torch.no_grad():
        assert torch.equal(first(feed(1)), toy(toys.Failing, 4)(feed(1)))


def test_disabling_right_after_an_interrupted_first_forward() -> None:
    model = toy(toys.Failing, 4)
    handle = apply_distributed_layerwise_offload(model)
    model.fail_at, model.fail_with = 4, KeyboardInterrupt  # between blocks, where the checks are active
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(feed(0))
    handle.remove()
    model.fail_at = None
    with torch.no_grad():
        assert torch.equal(model(feed(0)), toy(toys.Failing, 4)(feed(0)))


@pytest.mark.parametrize("kind", (ZeroDivisionError, KeyboardInterrupt))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_exceptions_one_rank(kind: type[BaseException], transfer: str) -> None:
    check_exceptions(0, kind, transfer=transfer)


def _exceptions_on_ranks(rank: int, size: int) -> None:
    for kind in (ZeroDivisionError, KeyboardInterrupt):
        for slots in (2, 4):
            check_exceptions(rank, kind, num_slots=slots)


@pytest.mark.parametrize("size", (2, 3))
def test_exceptions_on_ranks(size: int) -> None:
    run_ranks(size, _exceptions_on_ranks)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_weight_read_outside_its_turn_is_named(transfer: str) -> None:
    model = toy(toys.Peeking)
    handle = apply_distributed_layerwise_offload(model, transfer=transfer)
    try:
        with torch.no_grad(), pytest.raises(RuntimeError, match="'blocks.1.up.weight' of 'model' was read outside"):
            model(feed(0))
    finally:
        handle.remove()
    with torch.no_grad():
        assert torch.equal(model(feed(0)), toy(toys.Peeking)(feed(0)))


def test_large_leaves_come_on_demand_and_unused_ones_never() -> None:
    model = toy(toys.Leafy)
    handle = apply_distributed_layerwise_offload(model)
    try:
        leaves = {leaf.name: leaf.nbytes for leaf in handle.plan.components[0].leaves}
        assert set(leaves) == {"embed", "lm_head"}
        with torch.no_grad():
            model(feed(0))
            model(feed(1))
        embed = 400 * 16 * 4
        assert handle.report().on_demand_bytes == 2 * embed
        assert model.lm_head.weight.untyped_storage().nbytes() == 4
        assert model.embed.weight.untyped_storage().nbytes() == 4
    finally:
        handle.remove()


def test_leaves_whose_weights_are_read_without_a_call_stay() -> None:
    model, reference = toy(toys.Uncalled), toy(toys.Uncalled)
    handle = apply_distributed_layerwise_offload(model)
    try:
        sizes = {leaf.name: leaf.padded_nbytes(1) for leaf in handle.plan.components[0].leaves}
        with CaptureLogger(hooks.logger) as log, torch.inference_mode():
            model(feed(0))
        lines = [f"'{name}' of 'model' is used without being called, so its" for name in ("lm_head", "embed")]
        assert [line.partition(" its ")[0] + " its" for line in log.out.splitlines()] == lines
        # The embedding was called before it was read, and so came twice.
        fetched = sizes["lm_head"] + 2 * sizes["embed"]
        assert handle.report().on_demand_bytes == fetched
        pointers = [model.lm_head.weight.data_ptr(), model.embed.weight.data_ptr()]
        with CaptureLogger(hooks.logger) as log, torch.no_grad():
            for seed in range(3):
                assert torch.equal(model(feed(seed)), reference(feed(seed)))
        assert log.out == "" and handle.report().on_demand_bytes == fetched
        assert [model.lm_head.weight.data_ptr(), model.embed.weight.data_ptr()] == pointers
        assert_same(model.state_dict(), reference.state_dict())
    finally:
        handle.remove()
    assert_same(model.state_dict(), reference.state_dict())
    assert not any(parameter.is_inference() for parameter in model.parameters())
