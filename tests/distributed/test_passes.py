# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Passes of several ranks: unequal numbers of them, different components, orders, and a rank that raises."""

import pytest
import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


def _uneven(rank: int, size: int) -> tuple[int, int]:
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        for step in range(1 + 2 * rank):
            assert torch.equal(model(feed(step + rank)), reference(feed(step + rank)))
        handle.join()
        for step in range(3 - rank):
            assert torch.equal(model(feed(step)), reference(feed(step)))
    handle.join()
    handle.join()
    report = handle.report()
    handle.remove()
    return report.passes, report.ghost_passes


def test_uneven_counts_end_by_join() -> None:
    """Passes are those a rank computed; those it did for others complete the number, which is the same everywhere."""
    seen = run_ranks(3, _uneven)
    assert [passes for passes, _ in seen] == [1 + 3, 3 + 2, 5 + 1]
    assert {passes + ghosts for passes, ghosts in seen} == {5 + 3}


def _different_components(rank: int, size: int) -> None:
    models = [toy(toys.Stack, 3), toy(toys.Stack, 4, seed=1)]
    references = [toy(toys.Stack, 3), toy(toys.Stack, 4, seed=1)]
    handles = [apply_distributed_layerwise_offload(model, num_slots=3) for model in models]
    with torch.no_grad():
        for step in range(6):
            which = (step + rank) % 2 if step < 4 else step % 2
            assert torch.equal(models[which](feed(step)), references[which](feed(step))), step
    handles[0].remove()
    with torch.no_grad():
        assert torch.equal(models[1](feed(9)), references[1](feed(9)))
        assert torch.equal(models[0](feed(9)), references[0](feed(9)))
    handles[1].remove()


@pytest.mark.parametrize("size", (2, 3))
def test_ranks_in_different_components(size: int) -> None:
    run_ranks(size, _different_components)


def _own_orders(rank: int, size: int) -> None:
    """Each rank visits blocks in its own way: skipped, repeated, reversed; nobody's result suffers."""
    orders = [(0, 1, 2, 3, 4), (4, 2, 0), (1, 1, 3), (0, 1, 0, 1, 2)]
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        for step in range(8):
            model.order = reference.order = orders[(rank + step) % 4]
            assert torch.equal(model(feed(step)), reference(feed(step))), step
    handle.join()
    handle.remove()


@pytest.mark.parametrize("size", (2, 3))
def test_ranks_with_orders_of_their_own(size: int) -> None:
    run_ranks(size, _own_orders)


def _common_order(rank: int, size: int) -> list[int]:
    """Once all have seen the same unusual order, a pass moves each visited block once."""
    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    model.order = reference.order = (5, 3, 1, 0)
    handle = apply_distributed_layerwise_offload(model)
    passes = []
    with torch.no_grad():
        for step in range(5):
            before = handle.report().h2d_bytes
            assert torch.equal(model(feed(step)), reference(feed(step)))
            passes.append(handle.report().h2d_bytes - before)
        expected = sum(handle.plan.blocks[index].shard_nbytes(size) for index in model.order)
        assert passes[2:] == [expected] * 3, (passes, expected)
        model.order = reference.order = range(6)  # needs blocks that the order lacks
        for step in range(3):
            before = handle.report().h2d_bytes
            assert torch.equal(model(feed(step)), reference(feed(step)))
        everything = sum(block.shard_nbytes(size) for block in handle.plan.blocks)
        assert handle.report().h2d_bytes - before == everything
    handle.remove()
    return passes


def test_an_order_all_ranks_saw_is_adopted() -> None:
    run_ranks(2, _common_order)
    run_ranks(1, _common_order)


def _raises_alone(rank: int, size: int) -> None:
    """A rank whose block raises finishes its lap, so the others' outputs stand and the next pass works for all."""
    model, reference = toy(toys.Failing, 4), toy(toys.Failing, 4)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        for position in range(5):
            model.fail_at = position if rank == position % size else None
            if model.fail_at is not None:
                with pytest.raises(ZeroDivisionError):
                    model(feed(0))
                model.fail_at = None
            else:
                assert torch.equal(model(feed(position)), reference(feed(position)))
            assert torch.equal(model(feed(rank)), reference(feed(rank)))
    handle.join()
    handle.remove()


@pytest.mark.parametrize("size", (2, 3))
def test_an_exception_on_one_rank(size: int) -> None:
    run_ranks(size, _raises_alone)


def _another_of_the_same_name(rank: int, size: int) -> None:
    """What was copied ahead for one model is never taken for another's, though name and place are the same."""
    keeper, keeper_reference = toy(toys.Stack, 5, seed=7), toy(toys.Stack, 5, seed=7)
    kept = apply_distributed_layerwise_offload(keeper, transfer="all_gather")
    for seed in range(3):
        model, reference = toy(toys.Stack, 5, seed=seed), toy(toys.Stack, 5, seed=seed)
        handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
        with torch.no_grad():
            for step in range(2):
                assert torch.equal(model(feed(step)), reference(feed(step))), (seed, step)
            if seed == 1:
                assert torch.equal(keeper(feed(seed)), keeper_reference(feed(seed)))
        handle.remove()
    kept.remove()


def test_what_was_copied_ahead_belongs_to_one_model() -> None:
    run_ranks(2, _another_of_the_same_name)


def _copies_between_forwards(rank: int, size: int) -> None:
    """The next forward's first missing shard is copied when a forward has ended, and counts once."""
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    sizes = [block.shard_nbytes(size) for block in handle.plan.blocks]
    seen = []
    with torch.no_grad():
        for step in range(4):
            assert torch.equal(model(feed(step)), reference(feed(step)))
            seen.append(handle.report().h2d_bytes)
    # One slot holds the first block of the next pass, and the other its second block's shard.
    assert seen[0] == sum(sizes) + sizes[0] + sizes[1]
    assert [b - a for a, b in zip(seen, seen[1:])] == [sum(sizes)] * 3
    assert handle.report().gather_bytes == (size - 1) * (4 * sum(sizes) + sizes[0])
    handle.remove()


def test_the_link_goes_on_between_forwards() -> None:
    run_ranks(2, _copies_between_forwards)
