# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What stays on the device for a budget, against sums made here; and amounts of memory as people write them."""

import itertools

import pytest

from diffusers_dlo.block_layout import BlockLayout
from diffusers_dlo.byte_size import parse_bytes
from diffusers_dlo.residency import STAGING_BUFFERS, Candidate, plan_residents, spread


def blocks(*sizes: int, name: str = "transformer") -> list[Candidate]:
    return [Candidate(name, i, BlockLayout(f"blocks.{i}", nbytes, ())) for i, nbytes in enumerate(sizes)]


SIX = blocks(*[1024] * 6)


@pytest.mark.parametrize("total", range(1, 12))
def test_what_is_chosen_is_as_even_as_it_goes(total: int) -> None:
    for count in range(total + 1):
        chosen = spread(total, count)
        assert len(chosen) == count and all(0 <= i < total for i in chosen)
        if count > 0:
            places = sorted(chosen)
            gaps = [b - a for a, b in itertools.pairwise([*places, places[0] + total])]
            assert max(gaps) - min(gaps) <= 1 or count == 1


@pytest.mark.parametrize(
    "budget,count", ((0, 0), (1023, 0), (1024, 1), (3 * 1024 + 1000, 3), (6 * 1024, 6), (10**9, 6))
)
def test_a_rank_that_copies_for_itself_keeps_whole_blocks(budget: int, count: int) -> None:
    plan = plan_residents(SIX, 1, 3, budget)
    assert (plan.count, plan.nbytes, plan.staging_nbytes, dict(plan.shards)) == (count, count * 1024, 0, {})
    assert bool(plan) == (count > 0)


def test_half_of_the_shards_needs_no_staging_with_three_slots_and_does_with_two() -> None:
    shard = 512
    three = plan_residents(SIX, 2, 3, 3 * shard)
    assert three.shards == {"transformer": frozenset({1, 3, 5})} and not three.whole
    assert (three.nbytes, three.staging_nbytes) == (3 * shard, 0)
    two = plan_residents(SIX, 2, 2, 3 * shard)
    assert (two.count, two.staging_nbytes, two.nbytes) == (1, shard, (1 + STAGING_BUFFERS) * shard)


def test_staging_counts_in_the_budget() -> None:
    plan = plan_residents(blocks(*[1024] * 12), 2, 3, 9 * 512)
    assert (plan.count, plan.staging_nbytes, plan.nbytes) == (7, 512, 9 * 512)


def test_a_budget_for_staging_alone_keeps_nothing() -> None:
    assert not plan_residents(blocks(*[1024] * 3), 2, 2, 2 * 512)
    assert plan_residents(blocks(*[1024] * 3), 2, 2, 2 * 512).nbytes == 0


def test_blocks_stay_whole_once_all_shards_do() -> None:
    just = plan_residents(SIX, 2, 3, 6 * 512)
    assert just.count == 6 and not just.whole and just.staging_nbytes == 0
    more = plan_residents(SIX, 2, 3, 6 * 512 + 2 * 512 + 511)
    assert more.whole == {"transformer": frozenset({1, 4})} and more.shards == {"transformer": frozenset({0, 2, 3, 5})}
    assert more.nbytes == 8 * 512
    assert plan_residents(SIX, 2, 3, 6 * 1024).whole == {"transformer": frozenset(range(6))}


def test_leaves_come_first_as_far_as_they_fit() -> None:
    leaves = blocks(3000, 700, name="transformer")
    plan = plan_residents(SIX, 2, 3, 6 * 512 + 3072 + 768, leaves=leaves)
    assert plan.leaves == {"transformer": frozenset({0, 1})} and plan.count == 6 and plan.nbytes == 6 * 512 + 3840
    plan = plan_residents(SIX, 2, 3, 3071, leaves=blocks(2560))
    assert plan.leaves == {"transformer": frozenset({0})} and plan.count == 0 and plan.nbytes == 2560
    plan = plan_residents(SIX, 2, 3, 3072, leaves=blocks(2560))  # all shards stay, and the leaf does not
    assert not plan.leaves and plan.count == 6 and plan.nbytes == 3072
    plan = plan_residents(SIX, 1, 3, 6144, leaves=blocks(2560))  # a rank of its own copies the less, either way
    assert plan.leaves == {"transformer": frozenset({0})} and plan.count == 3
    plan = plan_residents(SIX, 2, 3, 1000, leaves=leaves)
    assert plan.leaves == {"transformer": frozenset({1})} and plan.count == 0 and bool(plan) and plan.nbytes == 768


@pytest.mark.parametrize("shards", (1, 2, 3))
def test_no_plan_takes_more_than_its_budget(shards: int) -> None:
    uneven = blocks(300, 5000, 256, 1, 9000, 700) + blocks(2000, 2000, name="transformer_2")
    for budget in range(0, 30000, 97):
        plan = plan_residents(uneven, shards, 3, budget)
        held = {"shards": 0, "whole": 0}
        for name, index, layout in uneven:
            held["shards"] += layout.shard_nbytes(shards) * (index in plan.shards.get(name, ()))
            held["whole"] += layout.padded_nbytes(shards) * (index in plan.whole.get(name, ()))
            assert not (index in plan.shards.get(name, ()) and index in plan.whole.get(name, ()))
        staging = STAGING_BUFFERS * plan.staging_nbytes
        assert held["shards"] + held["whole"] + staging == plan.nbytes <= budget


@pytest.mark.parametrize(
    "text,nbytes",
    (
        ("40GiB", 40 * 2**30),
        ("40 gib", 40 * 2**30),
        ("1.5KiB", 1536),
        ("2GB", 2 * 10**9),
        ("3kB", 3000),
        ("7", 7),
        ("7B", 7),
        (12, 12),
        (0, 0),
    ),
)
def test_amounts_of_memory(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text, "device_budget") == nbytes
