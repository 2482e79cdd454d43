# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Step caches: the outputs of the same cache without offload, and no more transferred than it computes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from diffusers.hooks import (
    FirstBlockCacheConfig,
    HookRegistry,
    LayerSkipConfig,
    ModelHook,
    apply_first_block_cache,
    apply_layer_skip,
)
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from diffusers_dlo.marker import MARKER
from tests.compose.cached_models import CACHES, Counted, Denoising, make
from tests.ranks import run_ranks


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected)):
        assert torch.equal(a, b) and not torch.isnan(a).any(), f"{what}: output {index} differs"


def enable(model: nn.Module, **options: Any) -> OffloadHandle:
    return apply_distributed_layerwise_offload(model, **options)


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


# Hooks of others, exceptions, and what is taken off while the other is on


class Scaling(ModelHook):
    """A user's hook that reads a weight of its block."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        kwargs["hidden_states"] = kwargs["hidden_states"] * (1 + module.attn.to_q.weight.mean())
        return args, kwargs


def _register(block: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(block).register_hook(Scaling(), "scaling")


def _register_torch_hook(block: nn.Module) -> None:
    def scale(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * (1 + module.attn.to_q.weight.mean())}

    block.register_forward_pre_hook(scale, with_kwargs=True)


def _exchange_forward(block: nn.Module) -> None:
    forward = block.forward

    def scaled(**kwargs: Any) -> Any:
        return forward(**{**kwargs, "hidden_states": kwargs["hidden_states"] * (1 + block.attn.to_q.weight.mean())})

    block.forward = scaled


def _drop_chain(block: nn.Module) -> None:
    del block.forward  # as where a hook of another library puts back the forward that it found


@pytest.mark.parametrize("change", (_register, _register_torch_hook, _exchange_forward, _drop_chain))
def test_whatever_else_is_on_a_block_finds_its_weights(change: Callable[[nn.Module], None]) -> None:
    denoising = Denoising(CACHES["first_block"])
    reference, model = make(denoising.cache), make(denoising.cache)
    handle = enable(model, transfer="local")
    for each in (reference, model):
        denoising.cache.apply(each, denoising.config())
    assert_equal(denoising.step(model, 0), denoising.step(reference, 0), "before")
    for each in (reference, model):
        change(each.transformer_blocks[1])
    for step in range(len(denoising.seeds)):
        assert_equal(denoising.step(model, step), denoising.step(reference, step), f"step {step}")
    handle.remove()
    assert_equal(denoising.step(model, 0), denoising.step(reference, 0), "disabled")


def test_chains_stay_intact_whatever_is_removed_first() -> None:
    """Also where diffusers itself leaves out a hook: one over another that was removed."""
    denoising = Denoising(replace(CACHES["first_block"], model="cogvideox", contexts=("cond",)))
    reference, model = make(denoising.cache), make(denoising.cache)
    handle = enable(model, transfer="local")
    skip = LayerSkipConfig(indices=[1], fqn="transformer_blocks")
    for each in (reference, model):
        apply_first_block_cache(each, FirstBlockCacheConfig(threshold=0.05))  # without the model's own method
        apply_layer_skip(each, skip)
    assert_equal(denoising.run(model), denoising.run(reference), "both")
    for name in ("fbc_leader_block_hook", "fbc_block_hook"):
        for each in (reference, model):
            HookRegistry.check_if_exists_or_initialize(each).remove_hook(name)
    assert_equal(denoising.run(model), denoising.run(reference), "the one under the other removed")
    for each in (reference, model):
        apply_first_block_cache(each, FirstBlockCacheConfig(threshold=0.05))
    assert_equal(denoising.run(model), denoising.run(reference), "put on again, over the other")
    handle.remove()
    assert_equal(denoising.run(model), denoising.run(reference), "disabled")
    for block in model.transformer_blocks:
        registry = block._diffusers_hook
        for name, reference_of in zip(registry._hook_order, registry._fn_refs):
            assert registry.hooks[name].fn_ref is reference_of


@pytest.mark.parametrize("name", ("faster", "text_kv", "cache_dit"))
@pytest.mark.parametrize("by_marker", (False, True), ids=("by handle", "by marker"))
def test_a_cache_on_the_root_outlives_the_offload(name: str, by_marker: bool) -> None:
    if name not in CACHES or (name == "cache_dit" and by_marker):
        pytest.skip("cache-dit is not installed, or no hook of the registry that is removed by name")
    denoising = Denoising(CACHES[name])
    reference, model = make(denoising.cache), make(denoising.cache)
    denoising.cache.apply(reference, denoising.config())
    expected = denoising.run(reference)
    handle = enable(model, transfer="local")
    denoising.cache.apply(model, denoising.config())
    got = denoising.step(model, 0)
    if by_marker:
        HookRegistry.check_if_exists_or_initialize(model).remove_hook(MARKER, recurse=False)
    else:
        handle.remove()
    assert not handle.enabled
    for step in range(1, len(denoising.seeds)):
        got += denoising.step(model, step)
    assert_equal(got, expected, name)
    for each in (reference, model):
        denoising.cache.remove(each)
    assert_equal(denoising.step(model, 0), denoising.step(reference, 0), "without it")


def test_two_calls_of_a_pipeline() -> None:
    """A pipeline resets its caches at the end of a call; the offload stays."""
    denoising = Denoising(replace(CACHES["first_block"], contexts=("cond",)))
    pipes = []
    for _ in range(2):
        model = make(denoising.cache)
        others = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
        pipes.append(FluxPipeline(transformer=model, **dict.fromkeys(others)))
    reference, pipe = pipes
    handle = pipe.enable_distributed_layerwise_offload(transfer="local")
    outputs = []
    for each in pipes:
        denoising.cache.apply(each.transformer, denoising.config())
        outputs.append([])
        for _ in range(2):
            outputs[-1] += denoising.run(each.transformer)
            each.maybe_free_model_hooks()
    assert_equal(outputs[1], outputs[0], "two calls")
    assert handle.report().skipped_blocks == 2 * 4 * 3
    pipe.disable_distributed_layerwise_offload()


def test_an_exception_in_a_block_that_a_hook_decided_about() -> None:
    denoising = Denoising(CACHES["mag"])
    reference, model = make(denoising.cache), make(denoising.cache)
    for each in (reference, model):
        denoising.cache.apply(each, denoising.config())
    handle = enable(model, transfer="local")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    failing = [each.transformer_blocks[1].attn.register_forward_pre_hook(fail) for each in (reference, model)]
    for each in (reference, model):
        with pytest.raises(ZeroDivisionError):
            denoising.step(each, 0)
        each._reset_stateful_cache()
    assert not any(unit.held for unit in handle._parts[0].component.units)
    for each_handle in failing:
        each_handle.remove()
    assert_equal(denoising.run(model), denoising.run(reference), "after it")
    handle.remove()


@pytest.mark.parametrize("name", ("layer_skip", "first_block"))
def test_compiled_blocks_are_acquired_for_their_whole_call(name: str) -> None:
    """
    With a stand-in in its graph, a block that skips itself would not compile with fullgraph, which it does without us.
    """
    cache = replace(CACHES[name], model="wan", contexts=("cond",), num_blocks=2)
    if name == "layer_skip":
        cache = replace(cache, config=lambda clock, rank: LayerSkipConfig(indices=[1], fqn="blocks"))
    denoising = Denoising(cache)
    reference, model = make(cache), make(cache)
    handle = enable(model, transfer="local")
    for each in (reference, model):
        cache.apply(each, denoising.config())
    for step in (0, 1):
        assert_equal(denoising.step(model, step), denoising.step(reference, step), "not compiled")
    skipped = handle.report().skipped_blocks
    assert skipped > 0
    for each in (reference, model):
        each.compile_repeated_blocks(backend="eager", fullgraph=name == "layer_skip")
    for step in (2, 3):
        assert_equal(denoising.step(model, step), denoising.step(reference, step), f"step {step}")
    assert handle.report().skipped_blocks == skipped
    handle.remove()
    torch._dynamo.reset()
