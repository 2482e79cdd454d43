# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Step caches: the outputs of the same cache without offload, and no more transferred than it computes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_dlo import OffloadHandle
from tests.compose.cached_models import CACHES, Counted, Denoising, assert_equal, enable, make
from tests.ranks import run_ranks


def blocks_of(model: nn.Module, handle: OffloadHandle) -> list[nn.Module]:
    return [model.get_submodule(layout.name) for layout in handle.plan.blocks if not layout.is_leaf]


def expect(denoising: Denoising, model: nn.Module) -> tuple[list[torch.Tensor], ...]:
    """What a model without offload gives: without the cache, with it, again after a reset, and without it again."""
    cache = denoising.cache
    plain = denoising.step(model, 0)
    cache.apply(model, denoising.config())
    cached = denoising.run(model)
    model._reset_stateful_cache()
    again = denoising.step(model, 0) + denoising.step(model, 1)
    cache.remove(model)
    return plain, cached, again, denoising.step(model, 0)


def check(denoising: Denoising, expected: tuple[list[torch.Tensor], ...], before: bool, **options: Any) -> int:
    """
    The same with offload: enabled before the cache, disabled after it, or the other way round. How many blocks the
    report says were skipped.
    """
    cache, model, (plain, cached, again, after) = denoising.cache, make(denoising.cache), expected
    what = f"{cache.name} {options} {'before' if before else 'after'}"
    if before:
        cache.apply(model, denoising.config())
    handle = enable(model, **options)
    try:
        if not before:
            assert_equal(denoising.step(model, 0), plain, f"{what}: without the cache")
            cache.apply(model, denoising.config())
        assert_equal(denoising.run(model), cached, what)
        skipped = handle.report().skipped_blocks
        model._reset_stateful_cache()
        if before:
            handle.remove()
        assert_equal(denoising.step(model, 0) + denoising.step(model, 1), again, f"{what}: after a reset")
        cache.remove(model)
        assert_equal(denoising.step(model, 0), after, f"{what}: without the cache again")
    finally:
        handle.remove()
    assert_equal(denoising.step(model, 0), after, f"{what}: without both")
    return skipped


@pytest.mark.parametrize("name", CACHES)
def test_one_rank(name: str) -> None:
    cache, denoising = CACHES[name], Denoising(CACHES[name])
    reference, counted = make(cache), make(cache)
    expected = expect(denoising, reference)
    handle = enable(make(cache))
    handle.remove()
    counts = Counted(counted, blocks_of(counted, handle))
    denoising.step(counted, 0)
    linears, blocks, steps = counts.linears, counts.blocks, len(denoising.seeds)
    cache.apply(counted, denoising.config())
    counts.linears = counts.blocks = 0
    assert_equal(denoising.run(counted), expected[1], "without offload")
    assert counts.linears < steps * linears, "the cache skipped nothing"
    assert (counts.blocks < steps * blocks) == cache.blocks
    cache.remove(counted)
    for before in (True, False):
        assert check(denoising, expected, before, transfer="local") == steps * blocks - counts.blocks


def _every_cache(rank: int, size: int) -> list[int]:
    """Ranks skip other steps than each other; the third run copies whole blocks beside the other rank."""
    skipped = []
    for cache in CACHES.values():
        denoising = Denoising(replace(cache, contexts=("cond",)), rank)
        expected = expect(denoising, make(cache))
        skipped.append(check(denoising, expected, True, transfer="all_gather", grace=0.05))
        assert check(denoising, expected, False, transfer="all_gather", grace=0.05) == skipped[-1]
        assert check(denoising, expected, False, transfer="local") == skipped[-1]
    return skipped


def test_two_ranks_that_skip_differently() -> None:
    skipped = run_ranks(2, _every_cache)
    differing = [name for name, a, b in zip(CACHES, *skipped) if a != b]
    assert {"mag", "sea", "sea_stack"} <= set(differing)


# What is transferred


@pytest.mark.parametrize(
    ("name", "num_slots"),
    [("first_block", 2), ("first_block_video", 2), ("first_block_video", 3), ("sea_stack", 2), ("cache_dit", 3)],
)
def test_skipped_blocks_are_not_copied(name: str, num_slots: int) -> None:
    if name not in CACHES:
        pytest.skip("cache-dit is not installed")
    cache = replace(CACHES[name], contexts=("cond",), num_blocks=4)
    denoising = Denoising(cache, pattern=(0, 0, 0, 0, 1, 1, 1))
    reference, model = make(cache), make(cache)
    handle = enable(model, transfer="local", num_slots=num_slots)
    counts = Counted(reference, blocks_of(reference, handle))

    def step(number: int) -> tuple[int, int]:
        """Bytes that a step moves, and how many blocks the model without offload computes in it."""
        counts.blocks, moved = 0, handle.report().h2d_bytes
        assert_equal(denoising.step(model, number), denoising.step(reference, number), f"step {number}")
        return handle.report().h2d_bytes - moved, counts.blocks

    step(0)
    lap, every = step(0)
    cache.apply(reference, denoising.config())
    cache.apply(model, denoising.config())
    moved, computed = zip(*(step(number) for number in range(len(denoising.seeds))))
    slot = handle.report().device_slot_bytes // num_slots
    handle.remove()
    cache.remove(reference)
    full = [number for number, count in enumerate(computed) if count == every]
    first = [number for number in range(1, 7) if computed[number] < every == computed[number - 1]]
    later = [number for number in range(1, 7) if max(computed[number - 1], computed[number]) < every]
    assert lap > every * slot / 2 and len(full) > 1 and first and later, f"computed {computed}"
    # What comes first is in the slots when a step begins. Where a cache computes more than the first block, the first
    # step that skips has fetched ahead of its last one before that is known.
    spare = 3 * slot if name in ("first_block_video", "cache_dit") else 0
    assert all(moved[number] == 0 for number in later)
    assert all(moved[number] <= spare for number in first)
    assert all(lap <= moved[number] <= lap + spare for number in full)


def _lap_bytes(rank: int, size: int) -> list[tuple[int, int, int, int]]:
    """What each step moved: passes, copied from the host, gathered, and how many blocks it skipped."""
    denoising = Denoising(replace(CACHES["first_block"], contexts=("cond",)))  # the same steps on both ranks
    model = make(denoising.cache)
    handle = enable(model)
    denoising.cache.apply(model, denoising.config())
    moved = []
    for step in range(len(denoising.seeds)):
        before = handle.report()
        denoising.step(model, step)
        handle.join()  # the lap is complete
        after = handle.report()
        fields = ("passes", "h2d_bytes", "gather_bytes", "skipped_blocks")
        moved.append(tuple(getattr(after, name) - getattr(before, name) for name in fields))
    handle.remove()
    return moved


def _in_lockstep(rank: int, size: int) -> tuple[int, int]:
    """With uneven="error" a step that one rank skips is a pass all the same."""
    denoising = Denoising(replace(CACHES["mag"], contexts=("cond",)), rank)
    reference, model = make(denoising.cache), make(denoising.cache)
    for each in (reference, model):
        denoising.cache.apply(each, denoising.config())
    handle = enable(model, uneven="error")
    assert_equal(denoising.run(model), denoising.run(reference), "lockstep")
    report = handle.report()
    handle.remove()
    return report.passes, report.skipped_blocks


def _with_residents(rank: int, size: int) -> list[int]:
    """Blocks and shards that stay on the device, and ranks that skip other steps."""
    skipped = []
    for name in ("first_block", "mag"):
        denoising = Denoising(replace(CACHES[name], contexts=("cond",)), rank)
        expected = expect(denoising, make(denoising.cache))
        for before, options in ((True, {"num_slots": 2}), (False, {"num_slots": 3, "host": "pinned"})):
            budget = 500_000
            skipped.append(check(denoising, expected, before, device_budget=budget, grace=0.05, **options))
    return skipped


def _two_ranks(rank: int, size: int) -> tuple[Any, ...]:
    return _lap_bytes(rank, size), _in_lockstep(rank, size), _with_residents(rank, size)


def test_laps_run_in_full_while_blocks_are_skipped() -> None:
    (first, lockstep, residents), (second, other_lockstep, other_residents) = run_ranks(2, _two_ranks)
    skipping, full = first[1], first[2]
    assert skipping[3] > 0 == full[3], "the second step is skipped but for its first block, the third is not"
    assert second == first and skipping[0] == full[0] == 1
    lap = full[2]  # on two ranks, half of each block is copied, and the other half gathered
    assert lap > 0 and skipping[2] == lap
    # A step whose lap is complete copies the next block ahead, which the next step then does not.
    assert skipping[1] + full[1] == 2 * lap and skipping[1] > lap / 2
    assert lockstep[0] == other_lockstep[0] == 7 and lockstep[1] == 0 == other_lockstep[1]
    assert min(residents + other_residents) > 0 and residents != other_residents


def test_the_report_shows_skipped_blocks_and_a_skipping_forward_teaches_no_order() -> None:
    denoising = Denoising(replace(CACHES["first_block"], contexts=("cond",)))
    reference, model = make(denoising.cache), make(denoising.cache)
    for each in (reference, model):
        denoising.cache.apply(each, denoising.config())
        denoising.step(each, 0)
    handle = enable(model, transfer="local")  # in the middle of a run: the first forward skips
    assert_equal(denoising.step(model, 1), denoising.step(reference, 1), "skipped")
    assert handle.report().skipped_blocks == 3
    assert re.search(r"\n skipped blocks +3\n", str(handle.report()))
    component = handle._parts[0].component
    assert component.proposal is None and not component.settled
    for step in (2, 3):
        assert_equal(denoising.step(model, step), denoising.step(reference, step), f"step {step}")
    assert component.order == (0, 1, 2, 3) and handle.report().skipped_blocks == 6
    handle.remove()
