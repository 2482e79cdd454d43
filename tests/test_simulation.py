# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The simulation of a forward, against times that follow from sizes and rates, and against the engine's rules."""

import itertools

import pytest

from diffusers_dlo.residency import spread
from diffusers_dlo.simulation import Links, SimulatedBlock, Simulation, Streaming, simulate_forward


LINKS = Links(h2d=50e9, gather=250e9, gather_latency=0.0)
BYTES = 1_000_000_000
COUNT = 24
SHARD_COPY = BYTES / 2 / 50e9  # 10 ms
GATHER = BYTES / 2 / 250e9  # 2 ms


def blocks(seconds: float, resident: int = 0, stays: str = "shard", count: int = COUNT) -> list[SimulatedBlock]:
    kept = spread(count, resident)
    return [SimulatedBlock(BYTES, seconds, stays if i in kept else "") for i in range(count)]


def simulate(
    row: list[SimulatedBlock],
    num_slots: int = 2,
    staging: int = 0,
    *,
    ranks: int = 2,
    transfer: str = "all_gather",
    gather: str = "collective",
    links: Links = LINKS,
) -> Simulation:
    return simulate_forward(row, Streaming(transfer, ranks, num_slots, staging, gather), links)


@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_where_copying_takes_longest_the_link_sets_the_time(ranks: int) -> None:
    found = simulate(blocks(0.0002), ranks=ranks)
    expected = COUNT * BYTES / (ranks * LINKS.h2d)
    assert found.seconds == pytest.approx(expected, rel=0.01) and found.limit_seconds == pytest.approx(expected)
    assert found.link_idle < 0.01 and found.h2d_nbytes == COUNT * BYTES // ranks
    assert found.exposed_seconds == pytest.approx(found.seconds - COUNT * 0.0002)
    assert found.gather_nbytes == COUNT * BYTES * (ranks - 1) // ranks


@pytest.mark.parametrize("transfer,ranks", (("local", 1), ("all_gather", 2), ("local", 8)))
def test_where_computing_takes_longest_nothing_else_shows(transfer: str, ranks: int) -> None:
    found = simulate(blocks(0.05), transfer=transfer, ranks=ranks)
    assert found.seconds == pytest.approx(COUNT * 0.05) and found.exposed_seconds == pytest.approx(0, abs=1e-9)
    assert found.limit_seconds == pytest.approx(COUNT * 0.05)


def test_where_gathering_takes_longest_it_sets_the_time() -> None:
    found = simulate(blocks(0.0002), ranks=8)
    assert found.seconds == pytest.approx(COUNT * 7 / 8 * BYTES / LINKS.gather) == found.gather_seconds
    assert found.limit_seconds == pytest.approx(COUNT * BYTES / 8 / LINKS.h2d)


def test_local_ranks_copy_whole_blocks_whatever_their_number() -> None:
    for ranks in (1, 4):
        found = simulate(blocks(0.001), transfer="local", ranks=ranks)
        assert found.seconds == pytest.approx(COUNT * BYTES / LINKS.h2d, rel=0.01)
        assert (found.h2d_nbytes, found.gather_nbytes, found.gather_seconds) == (COUNT * BYTES, 0, 0)


def test_with_two_slots_a_copy_waits_for_computing_two_blocks_back() -> None:
    """Copy, gather and compute of a block, and a copy begins once the block before the last one is computed."""
    found = simulate(blocks(SHARD_COPY - GATHER / 2))  # computing and gathering together take longer than a copy
    period = (SHARD_COPY + GATHER + SHARD_COPY - GATHER / 2) / 2
    assert found.seconds == pytest.approx(COUNT * max(period, SHARD_COPY))
    assert simulate(blocks(SHARD_COPY - GATHER / 2), 3).seconds == pytest.approx(COUNT * SHARD_COPY)


def test_half_of_the_shards_resident_needs_a_third_slot() -> None:
    half = blocks(0.0024, COUNT // 2)
    limit = COUNT / 2 * SHARD_COPY
    assert simulate(half, 3).seconds == pytest.approx(limit, rel=0.01)
    # With two, a copy waits until the block that streamed before it is computed: the three steps follow each other.
    assert simulate(half, 2).seconds == pytest.approx(COUNT / 2 * (SHARD_COPY + GATHER + 0.0024))


def test_three_quarters_need_staging() -> None:
    row = blocks(0.0024, 3 * COUNT // 4)
    limit = COUNT / 4 * SHARD_COPY
    staged, direct = simulate(row, 3, staging=2), simulate(row, 3)
    assert staged.limit_seconds == pytest.approx(limit)
    assert staged.seconds <= 1.05 * limit < 1.4 * limit <= direct.seconds
    assert staged.h2d_nbytes == direct.h2d_nbytes == COUNT // 4 * BYTES // 2
    one = simulate(row, 3, staging=1)  # a copy then waits for the gather of the one before
    assert staged.seconds < one.seconds <= direct.seconds


def test_all_shards_resident_are_bound_by_computing_or_gathering() -> None:
    assert simulate(blocks(0.003, COUNT)).seconds == pytest.approx(COUNT * 0.003)
    fast = simulate(blocks(0.0005, COUNT))
    assert fast.seconds == pytest.approx(COUNT * GATHER) and fast.h2d_nbytes == 0 and fast.link_idle == 1


def test_a_collective_slows_computing_and_a_pull_does_not() -> None:
    slow = Links(50e9, 250e9, 0.0, gather_slowdown=1.0)
    row = blocks(0.004, COUNT)
    collective = simulate(row, links=slow).seconds
    # While a gather of 2 ms runs, half of the work is done: each block takes 1 ms longer.
    assert collective == pytest.approx(COUNT * (0.004 + GATHER / 2))
    assert simulate(row, gather="pull", links=slow).seconds == pytest.approx(COUNT * 0.004)
    streamed = simulate(blocks(0.04), gather="pull", links=slow)  # what the host sends is gathered collectively
    assert streamed.seconds == pytest.approx(COUNT * (0.04 + GATHER / 2))


def test_blocks_that_stay_whole_need_no_slot() -> None:
    none = simulate(blocks(0.003, COUNT, "whole"))
    assert none.seconds == pytest.approx(COUNT * 0.003) and not none.gather_nbytes
    assert {span.stream for span in none.spans} == {"compute"}
    half = simulate(blocks(0.0024, COUNT // 2, "whole"), 2)
    assert half.seconds == pytest.approx(COUNT / 2 * SHARD_COPY, rel=0.01)
    local = simulate(blocks(0.0024, COUNT // 2, "whole"), 2, transfer="local")
    assert local.seconds == pytest.approx(COUNT / 2 * BYTES / LINKS.h2d, rel=0.01)


def test_unequal_blocks_gain_from_a_third_slot() -> None:
    row = [SimulatedBlock(BYTES * (1 + 2 * (i % 2)), 0.001 + 0.02 * ((i // 2) % 2)) for i in range(COUNT)]
    two, three = simulate(row, 2), simulate(row, 3)
    assert three.seconds < two.seconds and three.seconds >= three.limit_seconds
    assert three.limit_seconds == pytest.approx(max(COUNT * 0.011, COUNT * 2 * SHARD_COPY))


def test_few_blocks_and_many_slots() -> None:
    for count, num_slots in itertools.product((1, 2, 3), (2, 3, 5)):
        found = simulate(blocks(0.001, count=count), num_slots)
        assert found.seconds == pytest.approx(count * SHARD_COPY, rel=0.35)
        assert found.seconds >= found.limit_seconds * (1 - 1e-9)


def test_the_timeline_keeps_the_rules() -> None:
    for stays, resident, staging in (("shard", 0, 0), ("shard", 12, 0), ("shard", 18, 2), ("whole", 6, 0)):
        found = simulate(blocks(0.0024, resident, stays), 3, staging)
        lanes = {name: [s for s in found.spans if s.stream == name] for name in ("copy", "gather", "compute")}
        for lane in lanes.values():
            assert all(a.stop <= b.start + 1e-12 for a, b in itertools.pairwise(lane))
        assert [span.block for span in lanes["compute"]] == list(range(COUNT))
        assert lanes["compute"][-1].stop == pytest.approx(found.seconds)
        for gather in lanes["gather"]:
            copies = [copy for copy in lanes["copy"] if copy.block == gather.block and copy.start < gather.start]
            assert all(copy.stop <= gather.start + 1e-12 for copy in copies)
            computes = [span for span in lanes["compute"] if span.block == gather.block and span.start > gather.start]
            assert all(gather.stop <= span.start + 1e-12 for span in computes)


def test_it_is_deterministic_and_repeats_itself() -> None:
    row = [SimulatedBlock(BYTES + 7919 * i, 0.001 * (1 + i % 5), "shard" if i % 3 else "") for i in range(31)]
    one, other = simulate(row, 3, 2), simulate(row, 3, 2)
    assert one == other
    assert simulate(row * 4, 3, 2).seconds == pytest.approx(4 * one.seconds, rel=1e-6)


def test_the_first_forward_finds_the_slots_empty() -> None:
    found = simulate(blocks(0.0002))
    assert found.first_seconds == pytest.approx(COUNT * SHARD_COPY + GATHER + 0.0002)


# Coded blocks


CODED = BYTES * 2 // 3
DECODING = Links(50e9, 250e9, 0.0, decode=1e12)
DECODE = BYTES / 2 / 1e12  # 0.5 ms


def coded(seconds: float, shards: tuple[int, ...] = (CODED // 2,), resident: int = 0) -> list[SimulatedBlock]:
    return [block._replace(coded=shards) for block in blocks(seconds, resident)]


def test_fewer_bytes_where_the_link_sets_the_time() -> None:
    found = simulate(coded(0.0002), links=DECODING)
    assert found.seconds == pytest.approx(COUNT * CODED / 2 / 50e9) == found.limit_seconds
    assert found.h2d_nbytes == COUNT * (CODED // 2) and found.link_idle == pytest.approx(0, abs=1e-9)
    assert found.decode_seconds == pytest.approx(COUNT * DECODE)
    assert found.first_seconds == pytest.approx(COUNT * CODED / 2 / 50e9 + DECODE + GATHER + 0.0002)
    plain = simulate(blocks(0.0002), links=DECODING)
    assert plain.decode_seconds == 0 and not [span for span in plain.spans if span.stream == "decode"]


def test_decoding_costs_where_computing_sets_the_time() -> None:
    found = simulate(coded(0.05), links=DECODING)
    assert found.seconds == pytest.approx(COUNT * (0.05 + DECODE)) == found.limit_seconds
    assert found.exposed_seconds == pytest.approx(0, abs=1e-9)
    slow = Links(50e9, 250e9, 0.0, gather_slowdown=1.0, decode=1e12)  # neither counts twice, nor is left out
    assert simulate(coded(0.05), links=slow).seconds == pytest.approx(COUNT * (0.05 + DECODE + GATHER / 2))


def test_slow_decoding_sets_the_time() -> None:
    slow = Links(50e9, 250e9, 0.0, decode=40e9)  # 12.5 ms for half a block
    found = simulate(coded(0.0002), links=slow)
    assert found.seconds == pytest.approx(COUNT * (0.0125 + 0.0002))
    assert found.limit_seconds == pytest.approx(COUNT * (0.0125 + 0.0002))


def test_copies_wait_for_one_of_two_buffers_and_not_for_a_slot() -> None:
    """The row of `test_with_two_slots_a_copy_waits_for_computing_two_blocks_back`, with decoding in no time."""
    fast = Links(50e9, 250e9, 0.0, decode=1e18)
    seconds = SHARD_COPY - GATHER / 2
    assert simulate(blocks(seconds), links=fast).seconds > COUNT * SHARD_COPY * 1.05
    found = simulate(coded(seconds, (BYTES // 2,)), links=fast)
    assert found.seconds == pytest.approx(COUNT * SHARD_COPY)
    busy = simulate(coded(0.05), links=DECODING)
    copies, decodes = ([s for s in busy.spans if s.stream == name] for name in ("copy", "decode"))
    for decode in decodes:
        later = [copy for copy in copies if copy.start >= decode.stop - 1e-12]
        if len(later) > 1 and later[0].start < copies[-1].start:
            assert later[0].start == pytest.approx(decode.stop), "as soon as its buffer is free"
            assert (later[0].block - decode.block) % COUNT == 2
    assert len(decodes) >= COUNT


def test_whole_blocks_arrive_shard_by_shard() -> None:
    """Of two shards, one is decoded while the other arrives: only the last one's decoding shows at first."""
    links = Links(50e9, decode=100e9)  # 5 ms for half a block, less than 6.67 for its copy
    for shards in (1, 2, 4):
        found = simulate(coded(0.0, (CODED // shards,) * shards), transfer="local", ranks=2, links=links)
        assert found.seconds == pytest.approx(COUNT * CODED / 50e9, rel=1e-6)
        assert found.first_seconds == pytest.approx(COUNT * CODED / 50e9 + BYTES / shards / 100e9, rel=1e-6)
        assert found.h2d_nbytes == CODED // shards * shards * COUNT and not found.gather_nbytes


def test_what_stays_or_is_not_coded_is_not_decoded() -> None:
    half = simulate(coded(0.0024, resident=COUNT // 2), 3, links=DECODING)
    assert half.decode_seconds == pytest.approx(COUNT / 2 * DECODE)
    assert half.h2d_nbytes == COUNT // 2 * (CODED // 2)
    assert half.seconds == pytest.approx(COUNT / 2 * CODED / 2 / 50e9, rel=0.02)
    row = [block if i % 2 else block._replace(coded=()) for i, block in enumerate(coded(0.0002))]
    mixed = simulate(row, links=DECODING)
    assert mixed.h2d_nbytes == COUNT // 2 * (CODED // 2 + BYTES // 2)
    # What is not coded is copied behind what was decoded before it.
    assert mixed.seconds == pytest.approx(COUNT / 2 * (CODED / 2 / 50e9 + SHARD_COPY + DECODE), rel=0.01)


def test_coded_blocks_keep_the_rules_with_staging_too() -> None:
    for row, num_slots, staging in (
        (coded(0.0024), 2, 0),
        (coded(0.0024, resident=18), 3, 2),
        (coded(0.012, resident=6), 3, 2),
    ):
        found = simulate(row, num_slots, staging, links=DECODING)
        assert found.seconds >= found.limit_seconds * (1 - 1e-9)
        lanes = {
            name: [s for s in found.spans if s.stream == name] for name in ("copy", "decode", "gather", "compute")
        }
        for lane in lanes.values():
            assert all(a.stop <= b.start + 1e-12 for a, b in itertools.pairwise(lane))
        for decode in lanes["decode"]:
            before = [copy for copy in lanes["copy"] if copy.block == decode.block and copy.start < decode.start]
            after = [
                gather for gather in lanes["gather"] if gather.block == decode.block and gather.start > decode.start
            ]
            assert all(copy.stop <= decode.start + 1e-12 for copy in before)
            assert all(decode.stop <= gather.start + 1e-12 for gather in after)
        still = sum(
            max(0.0, min(decode.stop, compute.stop) - max(decode.start, compute.start))
            for decode in lanes["decode"]
            for compute in lanes["compute"]
        )
        computing = sum(span.stop - span.start for span in lanes["compute"] if span.stop > 0 and span.start >= -1e-12)
        assert computing == pytest.approx(found.compute_seconds + still, rel=1e-6), "computing stands still meanwhile"
    limit = COUNT * 0.0024 + COUNT // 4 * DECODE
    for staging in (2, 0):  # the two buffers run ahead of the slots as staging does
        assert simulate(coded(0.0024, resident=18), 3, staging, links=DECODING).seconds == pytest.approx(limit)


@pytest.mark.parametrize(
    "make,named",
    (
        (lambda: Links(h2d=0), "h2d"),
        (lambda: Links(gather=-1), "gather"),
        (lambda: Links(gather_slowdown=-1), "gather_slowdown"),
        (lambda: Links(decode=0), "decode"),
        (lambda: Streaming(num_slots=1), "num_slots"),
        (lambda: Streaming(transfer="post"), "post"),
        (lambda: simulate_forward([], Streaming(), Links()), "no blocks"),
    ),
)
def test_what_makes_no_sense_is_refused(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]
