# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Pipelines that share components, exchange them, drop them, or are stopped in the middle."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline, FluxImg2ImgPipeline, FluxPipeline

from diffusers_dlo import process_engine
from tests.compose.pipelines import build, call, load, same


ALL = ["transformer", "text_encoder", "text_encoder_2", "vae"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def path(paths: dict[str, str]) -> str:
    return paths["flux"]


@pytest.fixture(scope="module")
def plain(path: str) -> np.ndarray:
    """What the pipeline makes without anything."""
    return call(load(path))


@pytest.fixture(scope="module")
def from_image(path: str) -> np.ndarray:
    """What the image pipeline with the same components does."""
    return call(FluxImg2ImgPipeline(**load(path).components), **image())


def image() -> dict[str, torch.Tensor]:
    return {"image": torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}


def dtypes(pipe: DiffusionPipeline) -> list[torch.dtype]:
    return [parameter.dtype for name in ALL for parameter in getattr(pipe, name).parameters()]


# ------------------------------------------------------------------------------------------------- from_pipe


@pytest.mark.parametrize("how,first", (("from_pipe", "enabled"), ("auto", "from_pipe")))
def test_from_pipe(how: str, first: str, path: str, plain: np.ndarray, from_image: np.ndarray) -> None:
    pipe = load(path)
    handle = pipe.enable_distributed_layerwise_offload() if first == "enabled" else None
    if how == "auto":
        other = AutoPipelineForImage2Image.from_pipe(pipe)
    else:
        other = FluxImg2ImgPipeline.from_pipe(pipe, dtype=torch.bfloat16)
    if handle is None:
        handle = other.enable_distributed_layerwise_offload()
    assert pipe.distributed_layerwise_offload is other.distributed_layerwise_offload is handle
    for second in (pipe, other):
        with pytest.raises(ValueError, match="'transformer' is under distributed layerwise offload already"):
            second.enable_distributed_layerwise_offload()
    assert same(call(pipe), plain) and same(call(other, **image()), from_image) and same(call(pipe), plain)
    (pipe if first == "from_pipe" else other).disable_distributed_layerwise_offload()
    assert pipe.distributed_layerwise_offload is other.distributed_layerwise_offload is None and not handle.enabled
    assert same(call(pipe), plain) and same(call(other, **image()), from_image)


@pytest.mark.parametrize(
    "cast",
    (
        lambda pipe: FluxImg2ImgPipeline.from_pipe(pipe),
        lambda pipe: pipe.to("cpu", torch.float16),
    ),
    ids=("from_pipe", "to"),
)
def test_a_cast_of_the_pipeline_is_refused_as_a_whole(cast: Callable, path: str, plain: np.ndarray) -> None:
    """Components come in some order, and those before the one that streams must not have been cast."""
    pipe = load(path)
    pipe.enable_distributed_layerwise_offload()
    before = dtypes(pipe)
    with pytest.raises(ValueError, match="'transformer' is.*cast placeholders.*from_pipe casts to float32"):
        cast(pipe)
    assert dtypes(pipe) == before and set(before) == {torch.bfloat16}
    assert same(call(pipe), plain)
    # One that does not stream may be cast by itself, and back.
    pipe.vae.to(torch.float32)
    assert pipe.vae.dtype == torch.float32
    pipe.vae.to(torch.bfloat16)
    assert same(call(pipe), plain)
    pipe.disable_distributed_layerwise_offload()
    cast(pipe)
    assert set(dtypes(pipe)) != {torch.bfloat16}


def test_copies_of_a_placed_component_are_their_own(path: str, plain: np.ndarray) -> None:
    pipe = load(path)
    pipe.enable_distributed_layerwise_offload()
    for copied in (copy.deepcopy(pipe.vae), pickle.loads(pickle.dumps(pipe.vae))):
        copied.to(torch.float32)
        assert copied.dtype == torch.float32 and pipe.vae.dtype == torch.bfloat16
    assert same(call(pipe), plain)
    pipe.disable_distributed_layerwise_offload()
    assert "_apply" not in vars(pipe.vae)


def test_two_pipelines_with_the_same_transformer(path: str, plain: np.ndarray, from_image: np.ndarray) -> None:
    pipe = load(path)
    other = FluxImg2ImgPipeline(**{**load(path).components, "transformer": pipe.transformer})
    first = pipe.enable_distributed_layerwise_offload()
    with pytest.raises(ValueError, match="'transformer' is under distributed layerwise offload already"):
        other.enable_distributed_layerwise_offload(components=["text_encoder_2"])
    assert other.distributed_layerwise_offload is first
    assert same(call(pipe), plain) and same(call(other, **image()), from_image)
    other.disable_distributed_layerwise_offload()
    assert not first.enabled
    assert same(call(pipe), plain) and same(call(other, **image()), from_image)


def test_two_pipelines_at_once(paths: dict[str, str], path: str, plain: np.ndarray) -> None:
    pipes = [load(path), load(path), load(paths["wan"])]
    moving = call(load(paths["wan"]))
    with torch.no_grad():
        for block in pipes[1].transformer.transformer_blocks:
            block.attn.to_q.weight.mul_(1.5)
    expected = [plain, call(pipes[1]), moving]
    assert not same(expected[0], expected[1])
    handles = [pipe.enable_distributed_layerwise_offload() for pipe in pipes]
    assert all(same(call(pipe), want) for pipe, want in zip(pipes, expected))
    handles[1].remove()
    assert all(same(call(pipe), want) for pipe, want in zip(pipes, expected))
    handles[0].remove()
    handles[2].remove()


def test_one_component_under_two_names(paths: dict[str, str]) -> None:
    reference, pipe = load(paths["wan"]), load(paths["wan"])
    for each in (reference, pipe):
        each.transformer_2 = each.transformer
    expected = call(reference, num_inference_steps=3)
    handle = pipe.enable_distributed_layerwise_offload()
    assert [component.name for component in handle.plan.components if "transformer" in component.name] == [
        "transformer"
    ]
    assert same(call(pipe, num_inference_steps=3), expected)
    handle.remove()
    assert same(call(pipe, num_inference_steps=3), expected)


# ------------------------------------------------------------------------------------- components come and go


def test_another_transformer_after_enabling(path: str, plain: np.ndarray) -> None:
    """It does not stream, and is used; the one that did is whole again when the offload is taken off."""
    pipe, reference = load(path), load(path)
    other = reference.transformer
    with torch.no_grad():
        other.transformer_blocks[0].attn.to_q.weight.mul_(1.5)
    expected = call(reference)
    handle = pipe.enable_distributed_layerwise_offload()
    streamed, vae = pipe.transformer, pipe.vae
    pipe.transformer, pipe.vae = other, reference.vae
    assert other.distributed_layerwise_offload is None and streamed.distributed_layerwise_offload is handle
    assert same(call(pipe), expected) and not same(expected, plain)
    pipe.register_modules(transformer=streamed)
    assert same(call(pipe), plain)
    pipe.register_modules(transformer=other)
    pipe.disable_distributed_layerwise_offload()
    assert not handle.enabled and streamed.distributed_layerwise_offload is None
    assert "_apply" not in vars(vae)
    assert same(call(pipe), expected)
    pipe.transformer = streamed
    assert same(call(pipe), plain)


@pytest.mark.parametrize("budget", (None, "auto"), ids=("plain", "budget"))
def test_text_encoders_may_be_dropped(budget: str | None, path: str, plain: np.ndarray) -> None:
    """After the prompts are encoded; the memory of one that was placed is given back at once."""
    pipe = load(path)
    handle = pipe.enable_distributed_layerwise_offload(device_budget=budget)
    with torch.no_grad():
        embeds, pooled, _ = pipe.encode_prompt("a fox in the snow", None, max_sequence_length=16)
    memory = [weakref.ref(parameter) for parameter in pipe.text_encoder_2.parameters()]
    pipe.text_encoder = pipe.text_encoder_2 = None
    gc.collect()
    assert memory and all(find() is None for find in memory)
    assert same(call(pipe, prompt_embeds=embeds, pooled_prompt_embeds=pooled), plain)
    handle.remove()
    assert same(call(pipe, prompt_embeds=embeds, pooled_prompt_embeds=pooled), plain)


def test_a_pipeline_that_is_dropped(path: str) -> None:
    pipe = load(path)
    pipe.enable_distributed_layerwise_offload(components=ALL)
    call(pipe)
    other = FluxImg2ImgPipeline.from_pipe(pipe, dtype=torch.bfloat16)
    del pipe
    gc.collect()
    assert other.distributed_layerwise_offload is not None and process_engine._engine is not None
    assert len(process_engine._engine.names) == len(ALL)
    del other
    gc.collect()
    assert process_engine._engine.idle


# ------------------------------------------------------------------------------------------- calls of a pipeline


def test_what_pipelines_do_with_hooks_and_devices(path: str, plain: np.ndarray) -> None:
    pipe = load(path)
    handle = pipe.enable_distributed_layerwise_offload()
    for act in (pipe.remove_all_hooks, pipe.maybe_free_model_hooks, pipe.reset_device_map):
        act()
        assert pipe.distributed_layerwise_offload is handle and same(call(pipe), plain)
    rebuilt = FluxPipeline(**pipe.components)
    assert rebuilt.distributed_layerwise_offload is handle and same(call(rebuilt), plain)
    assert rebuilt.device == pipe.device == torch.device("cpu") and rebuilt.dtype == torch.bfloat16
    handle.remove()


def _stop(pipe: DiffusionPipeline, step: int, timestep: torch.Tensor, kwargs: dict) -> dict:
    pipe._interrupt = step == 1
    return kwargs


def _change(pipe: DiffusionPipeline, step: int, timestep: torch.Tensor, kwargs: dict) -> dict:
    return {"latents": kwargs["latents"] * 0.5}


CALLS: dict[str, dict[str, Any]] = {
    "interrupt": {"num_inference_steps": 4, "callback_on_step_end": _stop},
    "latents_changed": {"callback_on_step_end": _change, "callback_on_step_end_tensor_inputs": ["latents"]},
    "several_images": {"num_images_per_prompt": 3, "generator": [torch.Generator() for _ in range(3)]},
    "true_guidance": {"true_cfg_scale": 3.0, "negative_prompt": "rain"},
}


def test_calls(path: str, plain: np.ndarray) -> None:
    """One pipeline, one call after another, in every mode of torch."""
    reference, pipe = load(path), load(path)
    pipe.enable_distributed_layerwise_offload()
    for options in CALLS.values():
        outputs = []
        for each in (pipe, reference):
            for seed, generator in enumerate(options.get("generator", ())):
                generator.manual_seed(seed)
            outputs.append(call(each, **options))
        assert same(*outputs) and not same(outputs[0], plain)
    for mode in (torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)):
        with mode():
            assert same(call(pipe), call(reference))
    assert same(call(pipe), plain)
    pipe.disable_distributed_layerwise_offload()


def test_enabled_in_inference_mode(path: str, plain: np.ndarray) -> None:
    pipe = load(path)
    with torch.inference_mode():
        handle = pipe.enable_distributed_layerwise_offload()
        assert same(call(pipe), plain)
    assert same(call(pipe), plain)
    with torch.inference_mode():
        handle.remove()
    assert same(call(pipe), plain)
