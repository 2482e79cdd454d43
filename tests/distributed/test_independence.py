# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Ranks with unequal work: each computes what it computes alone, and none waits for what another does not do."""

import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.attachment import get_handle
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


pytestmark = pytest.mark.timeout(120)


def pair(count: int = 5, seed: int = 0, cls: type[nn.Module] = toys.Stack) -> tuple[nn.Module, nn.Module]:
    return toy(cls, count, seed=seed), toy(cls, count, seed=seed)


def run(model: nn.Module, reference: nn.Module, seed: int) -> None:
    """One forward, right, and not because the rank has gone on alone."""
    with torch.no_grad():
        assert torch.equal(model(feed(seed)), reference(feed(seed))), seed
    assert_together(model)


def assert_together(model: nn.Module) -> None:
    handle = get_handle(model)
    assert handle is None or handle.report().transfer == "all_gather"


def _three_against_two(rank: int, size: int) -> tuple[int, int, float]:
    model, reference = pair()
    handle = apply_distributed_layerwise_offload(model, grace=0.2)
    start = time.monotonic()
    for step in range(3 if rank == 0 else 2):
        run(model, reference, step + 10 * rank)
    taken = time.monotonic() - start
    dist.barrier()  # the user's own
    handle.join()
    report = handle.report()
    return report.passes, report.ghost_passes, taken


@pytest.mark.parametrize("size", (2, 3, 4))
def test_three_forwards_against_two_and_a_barrier_of_the_users(size: int) -> None:
    results = run_ranks(size, _three_against_two)
    assert [passes for passes, _, _ in results] == [3] + [2] * (size - 1)
    assert len({passes + ghosts for passes, ghosts, _ in results}) == 1


def _guidance_on_one_rank(rank: int, size: int) -> None:
    model, reference = pair()
    apply_distributed_layerwise_offload(model, grace=0.2)
    for step in range(4):
        for guided in range(1 + (rank == 0)):
            run(model, reference, 10 * step + guided)
    dist.barrier()


@pytest.mark.parametrize("size", (2, 3))
def test_guidance_on_one_rank_only(size: int) -> None:
    run_ranks(size, _guidance_on_one_rank)


def _uneven_prompts(rank: int, size: int) -> list[int]:
    model, reference = pair()
    apply_distributed_layerwise_offload(model, grace=0.2)
    state = PartialState(cpu=True)
    done = []
    with state.split_between_processes(list(range(5))) as prompts:
        for prompt in prompts:
            for step in range(3):
                run(model, reference, 100 * prompt + step)
            done.append(prompt)
    state.wait_for_everyone()
    return done


@pytest.mark.parametrize("size", (2, 3))
def test_five_prompts_split_between_processes(size: int) -> None:
    done = run_ranks(size, _uneven_prompts)
    assert sorted(sum(done, [])) == [0, 1, 2, 3, 4]


def _nothing_to_do(rank: int, size: int) -> tuple[int, int]:
    model, reference = pair()
    handle = apply_distributed_layerwise_offload(model, grace=0.2)
    if rank == 0:
        for step in range(4):
            run(model, reference, step)
    dist.barrier()
    handle.join()
    report = handle.report()
    handle.remove()
    run(model, reference, 9)
    return report.passes, report.ghost_passes


@pytest.mark.parametrize("size", (2, 4))
def test_ranks_with_nothing_to_do(size: int) -> None:
    assert run_ranks(size, _nothing_to_do) == [(4, 0)] + [(0, 4)] * (size - 1)


def _two_components(rank: int, size: int) -> None:
    high, low = pair(5, seed=1), pair(3, seed=2)
    for model, _ in (high, low):
        apply_distributed_layerwise_offload(model, grace=0.2)
    for step in range(6):
        run(*(high if rank == 0 else low), step)
    for step in range(6):
        run(*(high if (step + rank) % 3 else low), step)
    dist.barrier()


@pytest.mark.parametrize("size", (2, 3))
def test_one_rank_in_a_transformer_and_the_others_in_another(size: int) -> None:
    run_ranks(size, _two_components)


def _sleeper(rank: int, size: int) -> tuple[float, float]:
    """When a rank was done, and when it slept until."""
    model, reference = pair()
    apply_distributed_layerwise_offload(model, grace=0.2)
    woke = 0.0
    for step in range(6 if rank == 0 else 3):
        run(model, reference, step + rank)
        if rank == 1 and step == 1:
            time.sleep(3)
            woke = time.monotonic()  # one clock for all processes
    return time.monotonic(), woke


def test_a_rank_that_sleeps_between_steps_holds_nobody_up_beyond_its_grace() -> None:
    (done, _), (_, woke) = run_ranks(2, _sleeper)
    assert done < woke


def _exceptions(rank: int, size: int) -> None:
    model, reference = toy(toys.Failing, 4), toy(toys.Failing, 4)
    apply_distributed_layerwise_offload(model, grace=0.2)
    for position in range(5):
        if rank == 0:
            model.fail_at = position
            with torch.no_grad(), pytest.raises(ZeroDivisionError):
                model(feed(position))
            model.fail_at = None
        else:
            run(model, reference, position)
        run(model, reference, 10 + position + rank)
    dist.barrier()


@pytest.mark.parametrize("size", (2, 3))
def test_an_exception_in_each_block_of_one_rank(size: int) -> None:
    run_ranks(size, _exceptions)


def _raises_to_the_end(rank: int, size: int) -> int:
    model, reference = pair()
    handle = apply_distributed_layerwise_offload(model, grace=0.2)
    run(model, reference, rank)
    if rank == 1:
        raise SystemExit  # as at the end of a script: nothing is joined or disabled
    for step in range(5):
        run(model, reference, step)
    report = handle.report()
    return report.passes + report.ghost_passes


def test_a_rank_that_ends_serves_the_others_until_they_are_done() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1\n.*SystemExit") as caught:
        run_ranks(2, _raises_to_the_end)
    assert "rank 0\n" not in str(caught.value)


def _equal_work(rank: int, size: int) -> tuple[int, int]:
    model, reference = pair()
    handle = apply_distributed_layerwise_offload(model, grace=30.0)
    for step in range(20):
        run(model, reference, step + rank)
    report = handle.report()
    handle.remove()
    return report.passes, report.ghost_passes


@pytest.mark.parametrize("size", (2, 4))
def test_with_equal_work_no_pass_is_ghosted(size: int) -> None:
    assert run_ranks(size, _equal_work) == [(20, 0)] * size


def _uneven_error(rank: int, size: int, what: str) -> str:
    first, second = pair(4, seed=1), pair(3, seed=2)
    for model, _ in (first, second):
        apply_distributed_layerwise_offload(model, grace=0.0, uneven="error")
    handle = get_handle(first[0])
    for step in range(3):
        run(*first, step)
        time.sleep(0.3 * rank)  # longer than any grace: it is waited for
    assert handle.report().ghost_passes == 0
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        if what == "joined" and rank == 1:
            handle.join()
        elif what == "other component" and rank == 1:
            second[0](feed(0))
        else:
            first[0](feed(0))
    return str(caught.value)


@pytest.mark.parametrize("what", ("joined", "other component"))
def test_uneven_work_can_be_an_error_on_every_rank(what: str) -> None:
    texts = run_ranks(2, _uneven_error, what)
    assert all('uneven="error"' in text for text in texts)
    assert all(("rank 1 has no more work" if what == "joined" else "different components") in text for text in texts)


def random_schedule(model: nn.Module, reference: nn.Module, rng: random.Random) -> None:
    """One piece of work of a rank, drawn at random; outputs are compared with the un-offloaded model."""
    kind = rng.choices(("run", "skip", "repeat", "reverse", "raise", "sleep", "busy"), (6, 2, 2, 1, 2, 2, 1))[0]
    count = len(model.blocks)
    order = list(range(count))
    if kind == "sleep":
        time.sleep(rng.random() * 0.06)
        return
    if kind == "busy":
        until = time.monotonic() + rng.random() * 0.03
        while time.monotonic() < until:
            pass
        return
    if kind == "skip":
        order = [index for index in order if rng.random() < 0.6]
    elif kind == "repeat":
        order = [index for index in order for _ in range(rng.choice((1, 1, 2)))]
    elif kind == "reverse":
        order.reverse()
    model.order = reference.order = order
    model.fail_at = rng.randrange(count + 1) if kind == "raise" else None
    seed = rng.randrange(1000)
    with torch.no_grad():
        if model.fail_at is not None:
            with pytest.raises(ZeroDivisionError):
                model(feed(seed))
        else:
            assert torch.equal(model(feed(seed)), reference(feed(seed)))
    model.fail_at = None
    assert_together(model)


def _schedules(rank: int, size: int, first: int, count: int) -> int:
    compared = 0
    for seed in range(first, first + count):
        common = random.Random(seed)
        slots, counts = common.choice((2, 2, 3, 4)), [common.choice((1, 2, 3, 5)) for _ in range(2)]
        pairs = [pair(counts[index], seed=index, cls=toys.Failing) for index in range(2)]
        handles = [
            apply_distributed_layerwise_offload(model, num_slots=slots, grace=0.02, timeout=60.0) for model, _ in pairs
        ]
        rng = random.Random(1000 * seed + rank)
        for _ in range(rng.choice((0, 1, 3, 5))):
            random_schedule(*pairs[rng.randrange(2)], rng)
            compared += 1
        if common.random() < 0.4:
            dist.barrier()
            for _ in range(rng.choice((0, 2))):
                random_schedule(*pairs[rng.randrange(2)], rng)
        for handle in handles if common.random() < 0.5 else handles[::-1]:
            handle.remove()
    assert [thread.name for thread in threading.enumerate() if "diffusers_dlo" in thread.name] == []
    return compared


@pytest.mark.parametrize(
    "size,first",
    (
        pytest.param(2, 0, marks=pytest.mark.slow),
        pytest.param(2, 50, marks=pytest.mark.slow),
        (3, 100),
        pytest.param(4, 150, marks=pytest.mark.slow),
    ),
)
def test_random_schedules(size: int, first: int) -> None:
    """Two hundred in all, each with two models, slots, orders, exceptions, pauses and barriers drawn from its seed."""
    assert sum(run_ranks(size, _schedules, first, 50)) > 50
