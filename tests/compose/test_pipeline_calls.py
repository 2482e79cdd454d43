# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Models called as their pipelines call them over several steps: with caches of keys and values that grow, with a block
left out, and with members called outside forward. Compared, step by step, with the same model without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.compose import other_models, video_models, wan_models
from tests.drawing import sampler
from tests.ranks import run_ranks
from tests.zoo import Tiny, flat, run


def _autoregressive_video(model: nn.Module, seed: int) -> Iterator[Any]:
    """Three chunks, each denoised once and put into the cache; the first is compressed when the third begins."""
    normal = sampler(seed)
    cache, prompt = wan_models.anyflowfar_cache(3), normal(1, 6, 20)
    clean = normal(1, 5, 4, 4, 8)
    for chunks, frames in ((1, 1), (2, 3), (3, 5)):
        noisy = normal(1, 1 if chunks == 1 else 2, 4, 4, 8)
        yield model(**wan_models.anyflowfar_step(noisy, prompt, chunks, 700.0, cache, False))[0]
        yield model(**wan_models.anyflowfar_step(clean[:, :frames], prompt, chunks, 0.0, cache, True))[1]


def _refiner(model: nn.Module, seed: int) -> Iterator[Any]:
    """A sink is captured, then two windows are refined against it and what came before."""
    normal = sampler(seed)
    cache, prompt = SanaWMRefinerKVCache(3), normal(1, 6, 24)

    def step(frames: list[int], mode: str) -> torch.Tensor:
        tokens = len(frames) * 12
        return model(
            hidden_states=normal(1, tokens, 8),
            encoder_hidden_states=prompt,
            timestep=torch.full((1, tokens), 300.0 if mode == "inject" else 0.0),
            video_rotary_emb=model.build_rotary_emb_for_absolute_positions(1, frames, 3, 4, prompt.device, 25.0),
            kv_cache=cache,
            kv_cache_mode=mode,
            return_dict=False,
        )[0]

    yield step([0], "capture_pre_rope")
    for layer in range(3):
        cache.get(layer).store_sink(*cache.get(layer).get_captured_pre_rope())
    for frames in ([1, 2], [3]):
        cache.sink_pe = model.build_rotary_emb_for_absolute_positions(1, [0], 3, 4, prompt.device, 25.0)
        yield step(frames, "inject")
        yield step(frames, "inject_and_capture_post_rope")
        for layer in range(3):
            captured, history = cache.get(layer).get_captured_post_rope(), cache.get(layer).get_history()
            pairs = zip(history, captured) if history is not None else ((new[:, :0], new) for new in captured)
            cache.get(layer).store_history(*(torch.cat(pair, dim=1) for pair in pairs))
            yield cache.get(layer).get_history()


def _animation(model: nn.Module, seed: int) -> Iterator[Any]:
    """The driving video fills the cache; two steps attend to it, the unconditional one without the tenth block."""
    cache = WanAnimate2KVCache(11)
    normal = sampler(seed)
    yield model(**wan_models.wananimate2_step(normal(4, 2, 4, 6), seed, torch.tensor([700.0]), cache, "extract"))[0]
    # As the model would make it, but not compiled. 5 frames are 2 of latents, of 6 tokens each.
    model.block_masks[2, 6] = create_block_mask(_any_token, None, None, 128, 256, device="cpu")
    for is_unconditional in (False, True):
        step = wan_models.wananimate2_step(normal(4, 3, 4, 6), seed, torch.tensor([700.0]), cache, "cached")
        yield model(**step, is_uncondtion=is_unconditional)[0]
    yield [cache.get(layer).get() for layer in range(11)]


def _any_token(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < 18


def _codebooks(model: nn.Module, seed: int) -> Iterator[Any]:
    """Two frames of sound: each code is read off its own head, and its embedding makes the next step's input."""
    normal = sampler(seed)
    for _ in range(2):
        sequence = [model.projection(normal(2, 32)).unsqueeze(1), model.projection(normal(2, 32)).unsqueeze(1)]
        codes = []
        for index in range(1, 4):
            hidden = model(torch.cat(sequence, dim=1))[:, -1]
            logits = model.audio_heads[index - 1](hidden)
            codes.append(logits.argmax(dim=-1))
            yield hidden, logits
            sequence.append(model.projection(model.audio_embeddings(codes[-1] + (index - 1) * 24)).unsqueeze(1))
        yield model.audio_embeddings(torch.stack(codes, dim=1) + torch.arange(3) * 24).sum(dim=1)


CASES: dict[str, tuple[Tiny, int, Callable[[nn.Module, int], Iterator[Any]]]] = {
    "autoregressive_video": (video_models.MODELS["AnyFlowFARTransformer3DModel"], 3, _autoregressive_video),
    "refiner": (video_models.MODELS["SanaWMLTX2RefinerTransformer3DModel"], 3, _refiner),
    "animation": (video_models.MODELS["WanAnimate2Transformer3DModel"], 11, _animation),
    "codebooks": (other_models.MODELS["MiniMaxMusic3RVQDepthDecoder"], 3, _codebooks),
}


def _steps(model: nn.Module, calls: Callable[[nn.Module, int], Iterator[Any]], seed: int) -> list[list[torch.Tensor]]:
    with torch.no_grad():
        return [[tensor.clone() for tensor in flat(output)] for output in calls(model, seed)]


def _compare(rank: int, size: int, transfer: str) -> list[int]:
    counts = []
    for name, (tiny, num_blocks, calls) in CASES.items():
        torch.manual_seed(0)
        reference = tiny.build(num_blocks).eval()
        torch.manual_seed(0)
        model = tiny.build(num_blocks).eval()
        handle = apply_distributed_layerwise_offload(model, transfer=transfer)
        try:
            for seed in (rank, 10 + rank):
                expected, got = _steps(reference, calls, seed), _steps(model, calls, seed)
                assert [len(step) for step in got] == [len(step) for step in expected]
                for step, (ours, theirs) in enumerate(zip(got, expected)):
                    for a, b in zip(ours, theirs):
                        assert torch.equal(a, b) and not a.isnan().any(), f"{name}, {transfer}: step {step} differs"
        finally:
            handle.remove()
        counts.append(len(expected))
    return counts


# Passes of one forward, once the first has found the order: stacks that are called in turn, an encoder that is called
# in a loop, over batches of faces, and a model that goes through its layers twice.
PASSES = {
    "ConsisIDTransformer3DModel": 1,
    "LatteTransformer3DModel": 1,
    "WanVACETransformer3DModel": 1,
    "WanAnimateTransformer3DModel": 1,
    "RFD4ProteinaTransformer": 2,
}


def _passes(rank: int, size: int) -> dict[str, list[int]]:
    """Of two forwards after the first of each model."""
    counts: dict[str, list[int]] = {}
    for name in PASSES:
        tiny = {**video_models.MODELS, **other_models.MODELS}[name]
        handle = apply_distributed_layerwise_offload(model := tiny.build(3).eval(), transfer="all_gather")
        try:
            done = []
            for seed in range(3):
                run(model, tiny.inputs(seed))
                done.append(handle.report().passes)
            counts[name] = [done[1] - done[0], done[2] - done[1]]
        finally:
            handle.remove()
    return counts


def _together(rank: int, size: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    steps = {transfer: _compare(rank, size, transfer) for transfer in ("all_gather", "local")}
    return steps, _passes(rank, size)


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, list[int]], dict[str, list[int]]]]:
    """What two ranks found, each with requests of its own."""
    return run_ranks(2, _together)


@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_over_several_steps(found: list[tuple[dict, dict]], transfer: str) -> None:
    assert [steps[transfer] for steps, _ in found] == [[6, 11, 4, 8]] * 2


@pytest.mark.parametrize("name", PASSES)
def test_passes_of_a_forward(found: list[tuple[dict, dict]], name: str) -> None:
    assert [passes[name] for _, passes in found] == [[PASSES[name]] * 2] * 2
