# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Modular pipelines: enabled as others are, with guiders, and components loaded, exchanged and unloaded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig

import diffusers_dlo
from tests.compose.pipelines import build, call, load, quiet, same
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build(tmp_path_factory.mktemp("tiny"))


def load_modular(path: str) -> ModularPipeline:
    pipe = ModularPipeline.from_pretrained(path)
    pipe.load_components(dtype=torch.bfloat16)
    return quiet_all(pipe)


def quiet_all(pipe: ModularPipeline) -> ModularPipeline:
    quiet(pipe)
    for block in _all_blocks(pipe.blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    return pipe


def _all_blocks(blocks: Any) -> list[Any]:
    inner = list(getattr(blocks, "sub_blocks", {}).values())
    return [blocks, *(each for block in inner for each in _all_blocks(block))]


def call_modular(pipe: ModularPipeline, output: str, seed: int = 0, **options: Any) -> np.ndarray:
    common = {"prompt": "a fox in the snow", "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np"}
    generator = torch.Generator().manual_seed(seed)
    result = np.asarray(pipe(**{**common, "generator": generator, "output": output, **options}))
    assert np.isfinite(result).all() and result.std() > 0
    return result


def test_flux(paths: dict[str, str]) -> None:
    pipe = load_modular(paths["flux"])
    expected = call(load(paths["flux"]), max_sequence_length=512)
    assert same(call_modular(pipe, "images"), expected)
    plan = diffusers_dlo.plan_distributed_layerwise_offload(pipe)
    handle = pipe.enable_distributed_layerwise_offload()
    assert pipe.distributed_layerwise_offload is handle and pipe._execution_device == torch.device("cpu")
    assert [component.name for component in handle.plan.components] == ["transformer"]
    assert [component.name for component in plan.components] == ["transformer"]
    assert {name for name, _, _ in handle.plan.placed} == {"text_encoder", "text_encoder_2", "vae"}
    for _ in range(2):
        assert same(call_modular(pipe, "images"), expected)
    with pytest.raises(ValueError, match="'transformer' is under.*would cast placeholders"):
        pipe.to(torch.float32)
    assert pipe.text_encoder.dtype == pipe.vae.dtype == torch.bfloat16
    other = load_modular(paths["flux"]).transformer
    with torch.no_grad():
        other.transformer_blocks[0].attn.to_q.weight.mul_(1.5)
    streamed = pipe.transformer
    pipe.update_components(transformer=other)
    assert not same(call_modular(pipe, "images"), expected)
    pipe.update_components(transformer=streamed)
    assert same(call_modular(pipe, "images"), expected)
    pipe.disable_distributed_layerwise_offload()
    assert pipe.distributed_layerwise_offload is None
    assert same(call_modular(pipe, "images"), expected)


def test_unloading_what_streams(paths: dict[str, str]) -> None:
    pipe = load_modular(paths["flux"])
    expected = call_modular(pipe, "images")
    handle = pipe.enable_distributed_layerwise_offload()
    pipe.unload_components("transformer")
    assert pipe.distributed_layerwise_offload is handle
    pipe.load_components("transformer", dtype=torch.bfloat16)
    assert same(call_modular(pipe, "images"), expected)
    pipe.disable_distributed_layerwise_offload()
    handle = pipe.enable_distributed_layerwise_offload()
    assert same(call_modular(pipe, "images"), expected)
    handle.remove()


GUIDERS: dict[str, Callable[[], Any]] = {
    "guidance": lambda: ClassifierFreeGuidance(guidance_scale=4.0),
    "guidance at first": lambda: ClassifierFreeGuidance(guidance_scale=4.0, stop=0.5),
    "skipped layers": lambda: SkipLayerGuidance(
        guidance_scale=4.0,
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
        skip_layer_config=LayerSkipConfig(indices=[1, 2]),
    ),
}


def _guiders(rank: int, size: int, path: str) -> list[np.ndarray]:
    """Each rank goes through them in an order of its own: the number of forwards differs."""
    reference, pipe = load_modular(path), load_modular(path)
    handle = pipe.enable_distributed_layerwise_offload(grace=0.05)
    outputs = []
    for name in sorted(GUIDERS, reverse=rank == 1):
        for each in (reference, pipe):
            each.update_components(guider=GUIDERS[name](), guider_2=GUIDERS[name]())
        options = {"num_frames": 5, "num_inference_steps": 3}
        expected = call_modular(reference, "videos", rank, **options)
        assert same(call_modular(pipe, "videos", rank, **options), expected), name
        assert not any(same(expected, other) for other in outputs), f"'{name}' changes nothing"
        outputs.append(expected)
    handle.remove()
    return outputs


def test_guiders_on_ranks(paths: dict[str, str]) -> None:
    run_ranks(2, _guiders, paths["wan"])
