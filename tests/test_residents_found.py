# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Budgets and pulls where several offloads, interrupts, copies of models, and failures on one rank meet them."""

import copy
import gc
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.modules.module import _global_forward_pre_hooks

from diffusers_dlo import api, apply_distributed_layerwise_offload, pull_lane, resident_memory
from diffusers_dlo.device.platform import Platform
from diffusers_dlo.resident_agreement import Step
from tests import toys
from tests.ranks import run_ranks
from tests.test_resident_memory import (
    Decoder,
    Greedy,
    Pipeline,
    Roomy,
    enable,
    make_agreement,
    roomy,
    run,
    streamed_nbytes,
)
from tests.toys import feed, toy


def part_of(model: torch.nn.Module, fraction: float, size: int) -> int:
    return int(fraction * streamed_nbytes(model, size))


# Several offloads


def _a_larger_model_beside_staging(rank: int, size: int) -> None:
    first, first_reference = toy(toys.Stack, 8), toy(toys.Stack, 8)
    second = toy(toys.Stack, 4, toys.Block, 16, (400, 300))
    second_reference = toy(toys.Stack, 4, toys.Block, 16, (400, 300))
    handle = apply_distributed_layerwise_offload(
        first, device_budget=part_of(first, 0.9, size), gather="collective", num_slots=2, host="pinned"
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


# Pulls in passes, where the CPU waits on the host


class Slow(Platform):
    """Copies take a while to begin."""

    def submit(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        super().submit(*args, **kwargs)


def _more_slots_than_blocks(rank: int, size: int) -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    options = {"device_budget": part_of(model, 0.7, size), "gather": "pull", "num_slots": 6}
    platform = Slow(torch.device("cpu")) if rank == 1 else Platform(torch.device("cpu"))
    handle = enable(model, platform, transfer="all_gather", **options)
    assert handle.plan.residents.shards == {"model": frozenset({0, 2})}
    run(model, reference, range(3))
    handle.remove()


def test_a_shard_is_not_pulled_before_it_has_arrived() -> None:
    """A lap that fetches a block twice pulls it the second time, while its gather may still be under way."""
    run_ranks(2, _more_slots_than_blocks)


# Memory that runs out


class NoStaging(Roomy):
    """Has room for what stays, and none for staging buffers."""

    full = False

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.full and any(frame.name == "fit_staging" for frame in traceback.extract_stack()):
            raise torch.OutOfMemoryError("no room")
        return super().empty(nbytes)


def _no_room_for_staging(rank: int, size: int) -> int:
    model, reference = toy(toys.Stack, 8), toy(toys.Stack, 8)
    platform = roomy(part_of(model, 0.9, size), cls=NoStaging)
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


def _pipeline() -> tuple[Pipeline, toys.Stack, Decoder]:
    transformer, vae = toy(toys.Stack, 6), toy(Decoder)
    return Pipeline(transformer, vae), transformer, vae


_OPTIONS: dict[str, Any] = {"components": ["transformer"], "blocks": {"transformer": ["blocks"]}}


def _strict_ranks(rank: int, size: int) -> float:
    pipe, transformer, vae = _pipeline()
    reference = toy(toys.Stack, 6)
    with patch.object(api, "get_platform", lambda device: roomy(1 << 20)):
        handle = pipe.enable_distributed_layerwise_offload(
            **_OPTIONS, device_budget="auto", uneven="error", timeout=30.0
        )
    run(transformer, reference, range(4))
    start = time.monotonic()
    if rank == 0:
        vae.failures = 1
        vae.decode(feed(0))
    elapsed = time.monotonic() - start
    run(transformer, reference, range(4, 6))
    handle.remove()
    return elapsed


def test_strict_ranks_do_not_wait_for_a_return_that_never_comes() -> None:
    """With uneven="error" a rank answers only with a pass of its own: no round is made while one decodes."""
    elapsed = run_ranks(2, _strict_ranks_quickly)
    assert max(elapsed) < 2.0, f"decoding waited {max(elapsed):.1f} s for the others"


def _strict_ranks_quickly(rank: int, size: int) -> float:
    with patch.object(resident_memory, "_RETURN_SECONDS", 5.0):
        return _strict_ranks(rank, size)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_decoding_without_memory_after_the_transformer_is_gone(transfer: str) -> None:
    """A decoder outlives its pipeline: what it raises is still what it ran into."""
    pipe, transformer, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20, transfer=transfer)
    del pipe, transformer, handle
    gc.collect()
    vae.failures = 1
    with pytest.raises(torch.OutOfMemoryError):
        vae.decode(feed(0))


def _enable_without_room(rank: int, size: int) -> str:
    class Full(Platform):
        def empty(self, nbytes: int) -> torch.Tensor:
            if any(frame.name == "_allocate" for frame in traceback.extract_stack()):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return super().empty(nbytes)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        model = toy(toys.Stack, 4)
        enable(model, Full(torch.device("cpu")), device_budget=part_of(model, 1.0, size))
    return str(caught.value)


def test_a_budget_that_the_device_does_not_have_is_named() -> None:
    assert "device_budget" in _enable_without_room(0, 1)


# Decoders that are watched


def test_a_copy_of_a_watched_decoder_decodes_with_its_own_weights() -> None:
    """What is put on the module is bound to it, and copied as it is."""
    pipe, _, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)
    try:
        other = copy.deepcopy(vae)
        with torch.no_grad():
            other.weight.fill_(5.0)
            assert torch.equal(other.decode(feed(0)), feed(0).sum() * torch.full((3,), 5.0))
    finally:
        handle.remove()


def test_a_decode_that_the_user_put_there_meanwhile_stays() -> None:
    pipe, _, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)

    def mine(x: torch.Tensor) -> str:
        return "mine"

    vae.decode = mine
    handle.remove()
    assert vars(vae).get("decode") is mine


def test_a_decoder_of_two_pipelines_is_watched_until_the_second_is_disabled() -> None:
    """Only the first of two offloads watches a decoder that both have."""
    vae = toy(Decoder)
    pipes = [Pipeline(toy(toys.Stack, 4), vae) for _ in range(2)]
    options = {**_OPTIONS, "device_budget": 1 << 20, "transfer": "local"}
    first = pipes[0].enable_distributed_layerwise_offload(**options)
    second = pipes[1].enable_distributed_layerwise_offload(**options)
    first.remove()
    vae.failures = 1
    try:
        vae.decode(feed(0))
    finally:
        second.remove()


# Failures while pulled shards are brought


def _filling_fails(rank: int, size: int) -> float:
    model = toy(toys.Stack, 6)
    start = time.monotonic()

    def fail(self: pull_lane.PullLane, block: Any) -> None:
        raise RuntimeError("the copy failed")

    original = pull_lane.PullLane._settle_home
    with patch.object(pull_lane.PullLane, "_settle_home", fail if rank == 1 else original):
        with pytest.raises(RuntimeError):
            apply_distributed_layerwise_offload(model, device_budget=part_of(model, 1.4, size), timeout=2.0)
    elapsed = time.monotonic() - start
    if rank == 1:
        time.sleep(5)  # it lives on, as a rank does that reports the error
    return elapsed


def test_a_rank_that_fails_while_filling_does_not_leave_the_others_in_a_gather() -> None:
    """The gather of a whole block in `fill` is waited for without a limit, and not with an eye on the other ranks."""
    elapsed = run_ranks(2, _filling_fails, timeout=60.0)
    assert max(elapsed) < 4.5, f"ranks waited {elapsed} s with a timeout of 2 s"


# Interrupts


class Interrupting:
    """Sends SIGINT at the `count`-th line that runs in some files, by default those of the engine."""

    FILES = ("/lane.py", "/local_lane.py", "/gather_lane.py", "/units.py", "/managed_tensor.py", "/ring.py")

    def __init__(self, count: int, files: tuple[str, ...] = FILES) -> None:
        self.left = count
        self._files = files

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.parametrize("fraction", (None, 0.5))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_an_interrupt_at_any_line_leaves_the_next_forward_right(transfer: str, fraction: float | None) -> None:
    model, reference = toy(toys.Stack, 4), toy(toys.Stack, 4)
    budget = part_of(model, fraction, 1) if fraction is not None else None
    handle = apply_distributed_layerwise_offload(model, transfer=transfer, device_budget=budget)
    run(model, reference, range(2))
    trace = sys.gettrace()
    for count in range(1, 2000):
        interrupting = Interrupting(count)
        try:
            sys.settrace(interrupting)
            with torch.no_grad():
                model(feed(0))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(trace)
        run(model, reference, range(count, count + 1))
        if interrupting.left > 0:
            break
    assert count > 100
    handle.remove()


def test_an_interrupt_where_the_first_forward_begins_leaves_nothing_behind() -> None:
    """Without any budget: the global hook and the guard of the first forward are put on and taken off in steps."""
    broken: list[str] = []
    for count in range(1, 130, 2):
        model, reference = toy(toys.Stack, 1), toy(toys.Stack, 1)
        handle = apply_distributed_layerwise_offload(model, transfer="local")
        try:
            sys.settrace(Interrupting(count, ("diffusers_dlo/hooks.py",)))
            with torch.no_grad():
                model(feed(0))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        try:
            handle.remove()
            run(model, reference, range(1))
        except Exception as error:
            broken.append(f"line {count}: {error!r}")
            handle.remove()  # the second time comes through
        finally:
            _global_forward_pre_hooks.clear()
    assert not broken
