# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Image transformers: requests whose steps differ (with and without a reference image, with a cache of keys and values,
with a ControlNet), on ranks that do not do the same, and a model that reads weights without a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from tests import zoo
from tests.compose.image_models import MODELS
from tests.drawing import sampler
from tests.ranks import run_ranks


def build(name: str, num_blocks: int) -> nn.Module:
    return zoo.build(MODELS[name], num_blocks)


def test_weights_read_without_a_call_stay() -> None:
    """The pooling of Hunyuan-DiT hands the weights of its layers, here larger than a block, to a function."""
    torch.manual_seed(0)
    model = diffusers.HunyuanDiT2DModel(
        num_attention_heads=1,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=16,
        num_layers=2,
        mlp_ratio=1.0,
        cross_attention_dim=24,
        cross_attention_dim_t5=128,
        pooled_projection_dim=20,
        text_len=5,
        text_len_t5=6,
    ).eval()
    inputs = [MODELS["HunyuanDiT2DModel"].inputs(seed) for seed in range(2)]
    for given in inputs:
        given["encoder_hidden_states_t5"] = given["encoder_hidden_states_t5"].repeat(1, 1, 8)
    expected = [zoo.run(model, given) for given in inputs]
    pooler = model.time_extra_emb.pooler
    handle = apply_distributed_layerwise_offload(model)
    try:
        leaves = {leaf.name for leaf in handle.plan.components[0].leaves}
        assert {f"time_extra_emb.pooler.{name}_proj" for name in "qkv"} < leaves
        assert pooler.q_proj.weight.untyped_storage().nbytes() == 4, "not there before the first forward"
        for given, outputs in zip(inputs, expected):
            assert all(map(torch.equal, zoo.run(model, given), outputs))
        assert pooler.q_proj.weight.untyped_storage().nbytes() >= 128 * 128 * 4, "and there from then on"
        assert model.text_embedder.linear_1.weight.untyped_storage().nbytes() == 4, "unlike those that are called"
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------- requests of unequal steps


Inputs = dict[str, Any]
Outputs = list[torch.Tensor]


def _step(model: nn.Module, inputs: Inputs) -> Outputs:
    return zoo.run(model, inputs)


def _flux2(model: nn.Module, seed: int) -> Iterator[Outputs]:
    """A reference image of four tokens in front of the image, whose keys and values are computed once."""
    inputs = MODELS["Flux2Transformer2DModel"].inputs(seed)
    cache: Any = None
    for step in range(3):
        now = {**inputs, "kv_cache_mode": "cached", "kv_cache": cache}
        if step == 0:
            now.update(kv_cache_mode="extract", kv_cache=None, num_ref_tokens=4)
        else:
            now.update(hidden_states=inputs["hidden_states"][:, 4:], img_ids=inputs["img_ids"][:, 4:])
        with torch.no_grad():
            output = model(**now)
        yield [output[0].clone()]
        cache = output[1] if step == 0 else cache


def _flux3(model: nn.Module, seed: int) -> Iterator[Outputs]:
    """With a reference image, without one, and with one again: a stack that is called now and then."""
    inputs = MODELS["Flux3Transformer2DModel"].inputs(seed)
    without = {key: value for key, value in inputs.items() if "cond" not in key}
    for now in (inputs, without, without, inputs) if seed % 2 else (without, inputs, without):
        yield _step(model, now)


def _glm_image(model: nn.Module, seed: int) -> Iterator[Outputs]:
    """An image to edit is written to a cache of keys and values, and read where the prompt counts."""
    inputs = MODELS["GlmImageTransformer2DModel"].inputs(seed)
    cache = GlmImageKVCache(model.config.num_layers)
    cache.set_mode("write")
    prompt = inputs["encoder_hidden_states"]
    given = {**inputs, "encoder_hidden_states": torch.zeros_like(prompt)[:, :0], "timestep": torch.zeros(1)}
    yield _step(model, {**given, "kv_caches": cache})
    cache.next_sample()
    for mode in ("read", "skip", "read"):
        cache.set_mode(mode)
        yield _step(model, {**inputs, "kv_caches": cache})


def _hidream_image(model: nn.Module, seed: int) -> Iterator[Outputs]:
    """An oblong image, which is padded and masked, and a square one, which is not."""
    inputs = MODELS["HiDreamImageTransformer2DModel"].inputs(seed)
    yield _step(model, inputs)
    yield _step(model, {**inputs, "hidden_states": inputs["hidden_states"][:, :, :6]})


def _omni_gen(model: nn.Module, seed: int) -> Iterator[Outputs]:
    """With a prompt and without one: the vocabulary is not called."""
    inputs = MODELS["OmniGenTransformer2DModel"].inputs(seed)
    without = {
        **inputs,
        "input_ids": None,
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": None,
        "position_ids": inputs["position_ids"][:, :7],
    }
    for now in (without, inputs, without):
        yield _step(model, now)


def _qwen_image21(model: nn.Module, seed: int) -> Iterator[Outputs]:
    """The keys and values of prompt and reference image are computed in the first step."""
    inputs = MODELS["QwenImage21Transformer2DModel"].inputs(seed)
    cache = QwenImage21KVCache(model.config.num_layers)
    for mode in ("extract", "cached", "cached"):
        yield _step(model, {**inputs, "kv_cache": cache, "kv_cache_mode": mode})


def _controlled(name: str) -> Callable[[nn.Module, int], Iterator[Outputs]]:
    """The additions of a ControlNet, in the middle step only."""

    def request(model: nn.Module, seed: int) -> Iterator[Outputs]:
        inputs = MODELS[name].inputs(seed)
        batch, tokens = inputs["hidden_states"].shape[:2]
        for control in (None, [sampler(seed)(batch, tokens, 32)], None):
            yield _step(model, {**inputs, "controlnet_block_samples": control})

    return request


REQUESTS: dict[str, Callable[[nn.Module, int], Iterator[Outputs]]] = {
    "BriaTransformer2DModel": _controlled("BriaTransformer2DModel"),
    "ChromaTransformer2DModel": _controlled("ChromaTransformer2DModel"),
    "Flux2Transformer2DModel": _flux2,
    "Flux3Transformer2DModel": _flux3,
    "GlmImageTransformer2DModel": _glm_image,
    "HiDreamImageTransformer2DModel": _hidream_image,
    "OmniGenTransformer2DModel": _omni_gen,
    "QwenImage21Transformer2DModel": _qwen_image21,
}


def _unequal(rank: int, size: int) -> int:
    cases = [(name, "all_gather") for name in REQUESTS]
    cases += [("Flux3Transformer2DModel", "local"), ("OmniGenTransformer2DModel", "local")]
    for name, transfer in cases:
        request = REQUESTS[name]
        reference, model = build(name, 3), build(name, 3)
        seeds = (0,) if rank == 0 else (1, 2)  # the number of requests, and of steps, is each rank's own
        expected = [list(request(reference, seed)) for seed in seeds]
        flat = [output for outputs in expected for step in outputs for output in step]
        assert not any(torch.isnan(output).any() for output in flat)
        assert len({output.sum().item() for output in flat}) > len(seeds), "the steps differ"
        handle = apply_distributed_layerwise_offload(model, transfer=transfer, grace=0.1)
        try:
            for seed, outputs in zip(seeds, expected):
                for step, got in enumerate(request(model, seed)):
                    assert all(map(torch.equal, got, outputs[step])), f"{name}, {transfer}, seed {seed}, step {step}"
        finally:
            handle.remove()
    return len(cases)


def test_requests_of_unequal_steps() -> None:
    assert run_ranks(2, _unequal) == [len(REQUESTS) + 2] * 2
