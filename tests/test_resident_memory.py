# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Budgets that are measured, memory that is given back, and refusals of pulls."""

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from diffusers_dlo import api, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload, pull_lane
from diffusers_dlo.block_discovery import Selection
from diffusers_dlo.byte_size import format_bytes
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.resident_agreement import ResidentAgreement, Step
from diffusers_dlo.transfers import Transfers
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


GIB = 1 << 30
MARGIN = GIB


class Roomy(Platform):
    """The CPU, with as much device memory left as a test says, of which a forward takes some for a while."""

    left = 0
    forward = 0

    def memory_left(self) -> int:
        return MARGIN + self.left

    def peak_above_now(self) -> int:
        return self.forward


class Cramped(Roomy):
    """Says that there is room, and has none for what stays."""

    full = False

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError("no room")
        return super().empty(nbytes)


class Greedy(toys.Stack):
    """Runs out of memory when it is told to."""

    full = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.full:
            self.blocks[0](x)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().forward(x)


def enable(model: nn.Module, platform: Platform, **options):
    with patch.object(api, "get_platform", lambda device: platform):
        return apply_distributed_layerwise_offload(model, **options)


def roomy(left: int, forward: int = 0, cls: type[Roomy] = Roomy) -> Roomy:
    platform = cls(torch.device("cpu"))
    platform.left, platform.forward = left, forward
    return platform


def streamed_nbytes(model: nn.Module, size: int) -> int:
    return sum(block.shard_nbytes(size) for block in plan_distributed_layerwise_offload(model, group_size=size).blocks)


def run(model: nn.Module, reference: nn.Module, steps: range) -> None:
    with torch.no_grad():
        for step in steps:
            assert torch.equal(model(feed(step)), reference(feed(step))), step


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_the_first_pass_is_measured_and_what_it_leaves_is_kept(transfer: str) -> None:
    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    every = streamed_nbytes(model, 1)
    handle = enable(model, roomy(every + 5000, forward=5000), transfer=transfer, device_budget="auto")
    run(model, reference, range(1))
    assert handle.report().resident_bytes == 0
    first = handle.report().h2d_bytes
    assert every <= first
    run(model, reference, range(1, 3))
    assert handle.report().resident_bytes == every
    after = handle.report().h2d_bytes
    assert after - first == every  # each block came once more, to where it stays
    run(model, reference, range(3, 6))
    assert handle.report().h2d_bytes == after
    handle.remove()


def test_without_known_memory_nothing_stays() -> None:
    model, reference = toy(toys.Stack, 4), toy(toys.Stack, 4)
    handle = apply_distributed_layerwise_offload(model, device_budget="auto")
    run(model, reference, range(4))
    assert handle.report().resident_bytes == 0 and handle.config.slots == 3
    handle.remove()


def test_a_peak_that_leaves_nothing_keeps_nothing() -> None:
    model, reference = toy(toys.Stack, 4), toy(toys.Stack, 4)
    handle = enable(model, roomy(1 << 20, forward=1 << 21), device_budget="auto")
    run(model, reference, range(3))
    assert handle.report().resident_bytes == 0
    handle.remove()


def _auto_on_ranks(rank: int, size: int) -> list[int]:
    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    shards = streamed_nbytes(model, size)
    seen = []
    # Ranks measure differently; the smallest counts. Room for everything, for all shards and a part, for two thirds.
    for budget in (size * shards, shards + shards // 3, 2 * shards // 3):
        handle = enable(model, roomy(budget + 10_000 * rank), transfer="all_gather", device_budget="auto")
        run(model, reference, range(2 + rank, 8))
        handle.join()
        assert handle.report().resident_bytes <= budget
        seen.append(handle.report().resident_bytes)
        before = handle.report()
        run(model, reference, range(9, 11))
        handle.join()
        if budget >= shards:
            assert handle.report().h2d_bytes == before.h2d_bytes
        if budget >= size * shards:
            assert handle.report().gather_bytes == before.gather_bytes
        handle.remove()
    return seen


@pytest.mark.parametrize("size", (2, 3))
def test_ranks_agree_on_the_smallest_budget(size: int) -> None:
    first, *others = run_ranks(size, _auto_on_ranks)
    assert all(seen == first for seen in others)
    assert first[0] > first[1] > first[2] > 0


def _one_has_no_room(rank: int, size: int) -> None:
    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    platform = roomy(1 << 24, cls=Cramped)
    handle = enable(model, platform, transfer="all_gather", device_budget="auto")
    platform.full = rank == size - 1
    run(model, reference, range(6))
    handle.join()
    assert handle.report().resident_bytes == 0
    handle.remove()


def test_a_rank_without_room_keeps_all_from_keeping() -> None:
    run_ranks(2, _one_has_no_room)


@pytest.mark.parametrize("budget", ("auto", 1 << 20))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_out_of_memory_gives_back_what_stays_and_says_so(transfer: str, budget: int | str) -> None:
    model, reference = toy(Greedy, 6), toy(toys.Stack, 6)
    handle = enable(model, roomy(1 << 20), transfer=transfer, device_budget=budget)
    run(model, reference, range(3))
    kept = handle.report().resident_bytes
    assert kept == streamed_nbytes(reference, 1)
    model.full = True
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate[^\0]*are given back \(\d"):
        model(feed(0))
    assert handle.report().resident_bytes == 0
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        model(feed(0))
    assert "given back" not in str(caught.value)  # there was nothing left
    model.full = False
    run(model, reference, range(3))
    assert handle.report().resident_bytes == 0
    handle.remove()


def _out_of_memory_on_one_rank(rank: int, size: int, fraction: float, budget: str) -> None:
    model, reference = toy(Greedy, 6), toy(toys.Stack, 6)
    room = int(fraction * streamed_nbytes(model, size))
    options = {"device_budget": "auto"} if budget == "auto" else {"device_budget": room, "gather": "collective"}
    handle = enable(model, roomy(room), transfer="all_gather", **options)
    run(model, reference, range(4))
    handle.join()
    assert handle.report().resident_bytes > 0
    if rank == 0:
        model.full = True
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="are given back"):
            model(feed(0))
        model.full = False
    run(model, reference, range(4, 7))
    handle.join()
    assert handle.report().resident_bytes == 0
    run(model, reference, range(7, 9))
    handle.remove()


@pytest.mark.parametrize("budget", ("auto", "fixed"))
@pytest.mark.parametrize("fraction", (0.8, 1.0, 1.5, 9.0))
def test_out_of_memory_on_one_rank_of_several(fraction: float, budget: str) -> None:
    run_ranks(2, _out_of_memory_on_one_rank, fraction, budget)


def test_a_budget_that_keeps_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with catching(caplog):
        handle = apply_distributed_layerwise_offload(toy(toys.Stack, 4), device_budget=100)
    assert "keeps nothing on the device" in caplog.text and "100 B" in caplog.text
    handle.remove()


class catching:
    """diffusers' loggers do not propagate; here they do."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __enter__(self) -> None:
        logging.getLogger("diffusers_dlo.resident_memory").addHandler(self._caplog.handler)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("diffusers_dlo.resident_memory").removeHandler(self._caplog.handler)


class Apart(Platform):
    """Devices that cannot read each other's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.device = torch.device("meta")  # only its type is looked at, by the arena

    def peer_memory(self, nbytes: int) -> torch.Tensor:
        raise RuntimeError("no peer access between these devices")


def _apart(rank: int, size: int) -> None:
    from diffusers_dlo import resident_memory
    from diffusers_dlo.arena import open_arena

    def on_devices_apart(group, platform, nbytes):
        return open_arena(group, Apart(platform.device), nbytes)

    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    every = streamed_nbytes(model, size)
    with patch.object(resident_memory, "open_arena", on_devices_apart):
        with pytest.raises(RuntimeError, match="no peer access between these devices"):
            apply_distributed_layerwise_offload(model, device_budget=every, gather="pull")
        assert all(not parameter.is_meta and parameter.numel() for parameter in model.parameters())
        handle = apply_distributed_layerwise_offload(model, device_budget=every)
    run(model, reference, range(3))
    handle.join()
    assert handle.report().passes == 3 and handle.report().resident_bytes == every
    handle.remove()


def test_pulls_need_devices_that_read_each_other() -> None:
    run_ranks(2, _apart)


@pytest.mark.parametrize(
    "said,step,called",
    (
        ([["measured", 7], ["measured", 5]], Step.ALLOCATED, [("allocate", 5)]),
        ([["measured", 7], ["measuring", 0]], Step.MEASURED, []),
        ([["measured", 7], None], Step.MEASURED, []),
        ([["measured", 7], ["returning", 0]], Step.OFF, [("drop",)]),
    ),
)
def test_what_is_heard_decides(said: list, step: Step, called: list) -> None:
    calls: list = []
    agreement = make_agreement(calls.append, Step.MEASURED)
    agreement.hear(said)
    assert (agreement.step, calls) == (step, called)


def make_agreement(note: Callable[[tuple], None], step: Step) -> ResidentAgreement:
    def allocate(nbytes: int) -> bool:
        note(("allocate", nbytes))
        return True

    return ResidentAgreement(
        Platform(torch.device("cpu")), allocate, lambda: note(("keep",)), lambda: note(("drop",)), step
    )


class NoStaging(Roomy):
    """Has room for what stays, and none for staging buffers."""

    full = False

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.full and any(frame.name == "fit_staging" for frame in traceback.extract_stack()):
            raise torch.OutOfMemoryError("no room")
        return super().empty(nbytes)


def _no_room_for_staging(rank: int, size: int) -> int:
    model, reference = toy(toys.Stack, 8), toy(toys.Stack, 8)
    platform = roomy(int(0.9 * streamed_nbytes(model, size)), cls=NoStaging)
    handle = enable(model, platform, transfer="all_gather", device_budget="auto", num_slots=2)
    platform.full = rank == 1
    run(model, reference, range(5))
    handle.join()
    before = handle.report().gather_bytes
    run(model, reference, range(5, 7))
    handle.join()
    gathered = handle.report().gather_bytes - before
    assert handle.report().resident_bytes == 0
    handle.remove()
    return gathered


def test_a_rank_without_room_for_staging_does_not_break_the_group() -> None:
    """`_keep` allocates staging, after all ranks have said that they could allocate."""
    assert all(gathered > 0 for gathered in run_ranks(2, _no_room_for_staging)), "the group was given up"


@pytest.mark.parametrize("step", (Step.MEASURED, Step.ALLOCATED))
def test_a_wish_to_give_back_survives_the_round_that_is_under_way(step: Step) -> None:
    """The main thread may run out of memory between what its rank says in a round and what it hears."""
    calls: list = []
    agreement = make_agreement(calls.append, step)
    said = [agreement.say(), agreement.say()]
    agreement.give_back()
    agreement.hear(said)
    said_next, _ = agreement.say()
    assert said_next in ("returning", "off"), f"it is '{said_next}', and the memory is taken"


def test_the_first_complete_forward_is_measured_after_one_that_ran_out_of_memory() -> None:
    """A first request that is too large says nothing about the next one."""
    model, reference = toy(Greedy, 4), toy(toys.Stack, 4)
    handle = enable(model, roomy(1 << 20), device_budget="auto")
    model.full = True
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(feed(0))
    model.full = False
    run(model, reference, range(3))
    kept = handle.report().resident_bytes
    handle.remove()
    assert kept == streamed_nbytes(reference, 1), "nothing stays, and nothing was said"


def _enable_without_room(rank: int, size: int) -> str:
    class Full(Platform):
        def empty(self, nbytes: int) -> torch.Tensor:
            if any(frame.name == "_allocate" for frame in traceback.extract_stack()):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return super().empty(nbytes)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        model = toy(toys.Stack, 4)
        enable(model, Full(torch.device("cpu")), device_budget=streamed_nbytes(model, 1))
    return str(caught.value)


def test_a_budget_that_the_device_does_not_have_is_named() -> None:
    said = _enable_without_room(0, 1)
    assert "Tried to allocate 2 GiB" in said and "device_budget=" in said and "smaller budget" in said


def _filling_fails(rank: int, size: int) -> float:
    model = toy(toys.Stack, 6)
    budget = int(1.4 * streamed_nbytes(model, size))
    start = time.monotonic()

    def fail(self: pull_lane.PullLane, block: Any) -> None:
        raise RuntimeError("the copy failed")

    original = pull_lane.PullLane._settle_home
    with patch.object(pull_lane.PullLane, "_settle_home", fail if rank == 1 else original):
        with pytest.raises(RuntimeError):
            apply_distributed_layerwise_offload(model, device_budget=budget, timeout=2.0)
    elapsed = time.monotonic() - start
    if rank == 1:
        time.sleep(3)  # it lives on, as a rank does that reports the error
    return elapsed


@pytest.mark.slow
def test_a_rank_that_fails_while_filling_does_not_leave_the_others_in_a_gather() -> None:
    """The gather of a whole block in `fill` is waited for without a limit, and not with an eye on the other ranks."""
    elapsed = run_ranks(2, _filling_fails, timeout=60.0)
    assert max(elapsed) < 4.5, f"ranks waited {elapsed} s with a timeout of 2 s"


def _copying_fails_while_filling(rank: int, size: int) -> None:
    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    budget = int(1.4 * streamed_nbytes(model, size))

    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("the copy failed")

    with patch.object(Transfers, "copy", fail if rank == 1 else Transfers.copy):
        with pytest.raises(ValueError, match="the copy failed" if rank == 1 else "rank 1 failed: the copy failed"):
            apply_distributed_layerwise_offload(model, device_budget=budget, timeout=30.0)
    handle = apply_distributed_layerwise_offload(model, device_budget=budget)  # the group is as it was
    run(model, reference, range(2))
    handle.remove()


def test_a_failed_copy_while_filling_leaves_the_group_as_it_was() -> None:
    run_ranks(2, _copying_fails_while_filling)


@pytest.mark.parametrize("peak", (0.0, 1.0))
def test_two_offloads_that_measure_before_either_allocates_share_what_is_left(peak: float) -> None:
    """Room for one and a half models, of which the first one's forward takes none, or one."""
    models = [toy(toys.Stack, 6) for _ in range(2)]
    every = streamed_nbytes(models[0], 1)
    platform = roomy(int(1.5 * every))
    handles = [enable(model, platform, device_budget="auto") for model in models]
    for model, platform.forward in zip(models, (int(peak * every), 0)):
        run(model, toy(toys.Stack, 6), range(1))
    for model in models:
        run(model, toy(toys.Stack, 6), range(1, 4))
    kept = handles[0].report().resident_bytes  # of all offloads of the process
    for handle in handles:
        handle.remove()
    assert (1.0 - 0.7 * peak) * every < kept <= (1.5 - peak) * every


def _little_budget_beside_an_encoder(rank: int, size: int) -> str:
    models = {"text_encoder": toy(toys.Stack, 3), "transformer": toy(toys.Stack, 5)}
    selection = Selection(models, frozenset({"text_encoder"}), {})
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("diffusers_dlo.resident_memory").addHandler(handler)
    handle = api.enable(lambda _: selection, None, {"device_budget": 100})
    blocks = handle.plan.components[1].blocks
    handle.remove()
    whole, half = (format_bytes(max(block.shard_nbytes(count) for block in blocks)) for count in (1, 2))
    assert whole != half
    return " ".join(records).replace(half, "half a block")


def test_what_a_rank_copies_beside_a_local_encoder_is_a_shard() -> None:
    assert "block takes half a block" in run_ranks(2, _little_budget_beside_an_encoder)[0]


def _pulled_without_memory(rank: int, size: int) -> None:
    for fraction, gather in ((1.0, "auto"), (0.7, "pull")):
        model, reference = toy(Greedy, 6), toy(toys.Stack, 6)
        budget = int(fraction * streamed_nbytes(model, size))
        handle = apply_distributed_layerwise_offload(model, device_budget=budget, gather=gather)
        run(model, reference, range(2))
        kept = handle.report().resident_bytes
        if rank == 0:
            model.full = True
            with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="the other ranks read them.*smaller"):
                model(feed(0))
            model.full = False
        run(model, reference, range(2))
        assert handle.report().resident_bytes == kept > 0
        handle.remove()


def test_what_other_ranks_read_cannot_be_given_back_and_that_is_said() -> None:
    run_ranks(2, _pulled_without_memory)
