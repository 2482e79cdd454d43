# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Step caches beside other hooks, exceptions and compilation, and what is taken off while the other is on."""

from __future__ import annotations

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

from diffusers_dlo.marker import MARKER
from tests.compose.cached_models import CACHES, Denoising, assert_equal, enable, make


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


@pytest.mark.parametrize(
    "name,by_marker",
    (("faster", False), ("faster", True), ("text_kv", False), ("text_kv", True), ("cache_dit", False)),
)
def test_a_cache_on_the_root_outlives_the_offload(name: str, by_marker: bool) -> None:
    if name not in CACHES:
        pytest.skip("cache-dit is not installed")
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
