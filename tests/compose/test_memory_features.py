# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What saves memory in the rest of a pipeline, beside components that stream: each order of enabling, and refusals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import CpuOffload, remove_hook_from_module
from diffusers import DiffusionPipeline, FluxPipeline
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from diffusers.modular_pipelines.components_manager import custom_offload_with_hook

from tests.compose.models import build_unet
from tests.compose.pipelines import build, call, load, same
from tests.ranks import run_ranks


CPU = torch.device("cpu")
ALL = ["transformer", "text_encoder", "text_encoder_2", "vae"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("tiny"))["flux"]


@pytest.fixture(scope="module")
def plain(path: str) -> np.ndarray:
    """What the pipeline makes without anything."""
    return call(load(path))


# ------------------------------------------------------------------------------------------------ the VAE's own


TILED = {"height": 64, "width": 64, "num_images_per_prompt": 2}


def tile(pipe: DiffusionPipeline) -> None:
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()


@pytest.mark.parametrize("components", (None, ALL), ids=("placed", "streamed"))
def test_vae_tiling_and_slicing(components: list[str] | None, path: str) -> None:
    reference, early, late = load(path), load(path), load(path)
    whole = call(reference, **TILED)
    tile(reference)
    expected = call(reference, **TILED)
    assert reference.vae.tile_sample_min_size < TILED["height"] and not same(whole, expected), "no tile was used"
    tile(early)
    for pipe in (early, late):
        handle = pipe.enable_distributed_layerwise_offload(components=components)
        assert (components is None) == ("vae" in {name for name, _, _ in handle.plan.placed})
    tile(late)
    for pipe in (early, late):
        assert same(call(pipe, **TILED), expected)
        pipe.disable_distributed_layerwise_offload()


# ------------------------------------------------------------------------------- enable_model_cpu_offload


def test_model_offload_after_enabling(path: str, plain: np.ndarray) -> None:
    pipe = load(path)
    handle = pipe.enable_distributed_layerwise_offload(components=["transformer", "text_encoder_2"])
    pipe.enable_model_cpu_offload()
    pipe.enable_model_cpu_offload(device="cpu")
    hooks = {name: getattr(getattr(pipe, name), "_hf_hook", None) for name in ALL}
    assert all(isinstance(hook, CpuOffload) for hook in hooks.values())
    # None offloads a component that streams, but the last before it that does not.
    before = {name: hook.prev_module_hook and hook.prev_module_hook.model for name, hook in hooks.items()}
    assert before["text_encoder"] is None
    assert before["text_encoder_2"] is before["transformer"] is before["vae"] is pipe.text_encoder
    for _ in range(2):  # the pipeline takes its hooks off and puts them on again after each call
        assert same(call(pipe), plain)
    handle.remove()
    assert all(isinstance(getattr(pipe, name)._hf_hook, CpuOffload) for name in ALL)
    # Now each offloads the one before it, as without the offload.
    hooks = {name: getattr(pipe, name)._hf_hook.prev_module_hook for name in ALL}
    sequence = ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert hooks["text_encoder"] is None
    for name, following in zip(sequence, sequence[1:]):
        assert hooks[following].model is getattr(pipe, name)
    transformer = pipe.transformer
    assert "_old_forward" in vars(transformer) and transformer.forward is not transformer._old_forward
    assert transformer._old_forward.__func__ is type(transformer).forward
    assert same(call(pipe), plain)
    pipe.remove_all_hooks()
    assert transformer.forward.__func__ is type(transformer).forward
    assert same(call(pipe), plain)


def test_model_offload_to_another_device_is_refused(path: str, plain: np.ndarray) -> None:
    pipe = load(path)
    pipe.enable_distributed_layerwise_offload()
    with pytest.raises(ValueError, match="to 'meta' is refused: this pipeline streams to 'cpu'.*Leave 'device'"):
        pipe.enable_model_cpu_offload(device="meta")
    assert not any(hasattr(getattr(pipe, name), "_hf_hook") for name in ALL)
    assert same(call(pipe), plain)
    # A pipeline that does not know of the offload has it refused by the component.
    FluxPipeline.enable_model_cpu_offload(pipe, device="cpu")
    pipe.transformer._hf_hook.execution_device = torch.device("meta")
    with pytest.raises(ValueError, match="'transformer'.*CpuOffload is on it"):
        call(pipe)
    pipe.remove_all_hooks()
    assert same(call(pipe), plain)
    pipe.disable_distributed_layerwise_offload()


def test_model_offload_before_enabling_is_refused_in_favour_of_after(path: str, plain: np.ndarray) -> None:
    pipe = load(path)
    pipe.enable_model_cpu_offload(device="cpu")
    weights = [parameter.data_ptr() for name in ALL for parameter in getattr(pipe, name).parameters()]
    with pytest.raises(
        ValueError, match="'transformer'.*CpuOffload.*remove_all_hooks.*enable_model_cpu_offload.. may"
    ):
        pipe.enable_distributed_layerwise_offload()
    assert [parameter.data_ptr() for name in ALL for parameter in getattr(pipe, name).parameters()] == weights
    assert same(call(pipe), plain)
    pipe.remove_all_hooks()
    handle = pipe.enable_distributed_layerwise_offload()
    pipe.enable_model_cpu_offload(device="cpu")
    assert same(call(pipe), plain)
    pipe.remove_all_hooks()
    handle.remove()
    assert same(call(pipe), plain)


def test_moves_away_leave_what_streams(path: str, plain: np.ndarray) -> None:
    """All of it, also its layers outside blocks; moves to the device bring what was added since."""
    pipe = load(path)
    pipe.enable_distributed_layerwise_offload()
    transformer = pipe.transformer
    for module in (transformer, transformer.transformer_blocks[0], transformer.transformer_blocks[0].attn.to_q):
        module.to("meta")
    assert {tensor.device.type for tensor in (*transformer.parameters(), *transformer.buffers())} == {"cpu"}
    assert same(call(pipe), plain)
    pipe.to("cpu").to(torch.bfloat16).to("cpu", torch.bfloat16)
    assert pipe.device.type == "cpu" and pipe._execution_device.type == "cpu" and pipe.dtype == torch.bfloat16
    assert same(call(pipe), plain)
    pipe.disable_distributed_layerwise_offload()


# ---------------------------------------------------------------------- other offloads of components that are placed


def group(module: torch.nn.Module) -> None:
    apply_group_offloading(module, onload_device=CPU, offload_type="leaf_level")


def sequential(module: torch.nn.Module) -> None:
    cpu_offload(module, CPU)


def casting(module: torch.nn.Module, skipped: tuple[str, ...] = ("norm", "embed")) -> None:
    apply_layerwise_casting(module, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=skipped)


def manager(module: torch.nn.Module) -> None:
    """What `ComponentsManager.enable_auto_cpu_offload` puts on each of its models."""
    custom_offload_with_hook("model", module, CPU)


REASONS = {group: "group offloading is active", casting: "layerwise casting is active"}


@pytest.mark.parametrize(
    "name,offload",
    (("vae", group), ("text_encoder_2", group), ("vae", sequential), ("vae", casting), ("text_encoder", manager)),
    ids=("vae-group", "text_encoder_2-group", "vae-sequential", "vae-casting", "text_encoder-manager"),
)
def test_another_offload_of_a_component_that_is_placed(name: str, offload: Callable, path: str) -> None:
    """Put on before, it is left to the other; after, the other moves what was placed. Casting moves nothing."""
    early, late = load(path), load(path)
    offload(getattr(early, name))
    expected = call(early)
    handles = [pipe.enable_distributed_layerwise_offload() for pipe in (early, late)]
    placed = [name in {placed for placed, _, _ in handle.plan.placed} for handle in handles]
    assert placed == [offload is casting, True]
    offload(getattr(late, name))
    for pipe, handle in zip((early, late), handles):
        assert same(call(pipe), expected)
        handle.remove()
        assert same(call(pipe), expected)


@pytest.mark.parametrize("offload", (group, sequential, manager, casting))
def test_another_offload_of_what_streams(offload: Callable, path: str, plain: np.ndarray) -> None:
    """By a function, which cannot be guarded: noticed by the next forward; and before enabling."""
    pipe = load(path)
    handle = pipe.enable_distributed_layerwise_offload()
    if offload is casting:  # which stops at the first layer that streams, and has cast others by then
        with pytest.raises(ValueError, match="'transformer' is under.*changing its dtype"):
            apply_layerwise_casting(
                pipe.transformer, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=("norm",)
            )
    else:
        offload(pipe.transformer)
    reason = REASONS.get(offload, "accelerate moves its weights")
    with pytest.raises(ValueError, match=f"'transformer.*{reason}"):
        call(pipe)
    if offload in (sequential, manager):
        remove_hook_from_module(pipe.transformer, recurse=True)
        assert same(call(pipe), plain)
    handle.remove()
    pipe = load(path)
    offload(pipe.transformer)
    expected = call(pipe)
    with pytest.raises(ValueError, match=f"'transformer.*{reason}"):
        pipe.enable_distributed_layerwise_offload()
    assert same(call(pipe), expected) and (offload is casting or same(expected, plain))


# ------------------------------------------------------------------------------------------------- several ranks


def _features_of_one_rank(rank: int, size: int, path: str) -> None:
    """What one rank does with its own pipeline is no business of the others."""
    reference, pipe = load(path), load(path)
    handle = pipe.enable_distributed_layerwise_offload(components=["transformer", "vae"], grace=0.05)
    assert {component.name: component.transfer for component in handle.plan.components} == {
        "transformer": "all_gather",
        "vae": "all_gather",
    }
    if rank == 1:
        for each in (reference, pipe):
            tile(each)
            each.transformer.set_attention_backend("_native_math")
        pipe.enable_model_cpu_offload(device="cpu")
    options = {"height": 64, "width": 32 + 32 * rank, "num_images_per_prompt": 1 + rank}
    assert same(call(pipe, rank, **options), call(reference, rank, **options))
    options = {"num_inference_steps": 4, "callback_on_step_end": _interrupt if rank == 0 else None}
    assert same(call(pipe, rank, **options), call(reference, rank, **options))
    if rank == 1:
        with pytest.raises(ValueError, match="changing its dtype would cast placeholders"):
            pipe.to(torch.float32)
        pipe.remove_all_hooks()
    assert same(call(pipe, rank), call(reference, rank))
    pipe.disable_distributed_layerwise_offload()
    # Weights in another memory format are another layout, on whichever rank.
    unet = build_unet()
    if rank == 1:
        unet.to(memory_format=torch.channels_last)
    strides = [parameter.stride() for parameter in unet.parameters()]
    with pytest.raises(RuntimeError, match="do not have the same model.*first difference is.*resnets.0"):
        unet.enable_distributed_layerwise_offload()
    assert [parameter.stride() for parameter in unet.parameters()] == strides


def _interrupt(pipe: DiffusionPipeline, step: int, timestep: torch.Tensor, kwargs: dict) -> dict:
    pipe._interrupt = step == 1
    return kwargs


def test_features_of_one_rank(path: str) -> None:
    run_ranks(2, _features_of_one_rank, path)
