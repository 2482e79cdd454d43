# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Whole pipelines from safetensors on disk: the user's call, generator, callbacks and outputs, with and without offload.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Cosmos3OmniPipeline, DiffusionPipeline, FluxPipeline, WanPipeline

import diffusers_dlo
from diffusers_dlo import DistributedLayerwiseOffloadMixin
from tests.ranks import run_ranks


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tiny_checkpoints


KINDS = {
    "cosmos": (Cosmos3OmniPipeline, "build_tiny_cosmos3", {"height": 64, "width": 64, "num_frames": 5}),
    "flux": (FluxPipeline, "build_tiny_flux", {"height": 32, "width": 32}),
    "wan": (WanPipeline, "build_tiny_wan", {"height": 32, "width": 32, "num_frames": 5}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: str(getattr(tiny_checkpoints, make)(folder / name)) for name, (_, make, _) in KINDS.items()}


def load(name: str, path: str) -> DiffusionPipeline:
    pipe = KINDS[name][0].from_pretrained(path, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(name: str, pipe: DiffusionPipeline, seed: int) -> tuple[np.ndarray, list[int]]:
    """The output as numbers, and the steps that the user's callback saw."""
    steps: list[int] = []

    def callback(pipe: DiffusionPipeline, step: int, timestep: torch.Tensor, kwargs: dict) -> dict:
        steps.append(step)
        return kwargs

    generator = torch.Generator().manual_seed(seed)
    options = {**KINDS[name][2], "num_inference_steps": 3, "output_type": "np", "generator": generator}
    result = pipe("a fox in the snow", callback_on_step_end=callback, **options)
    output = next(iter(result.values()))
    return np.asarray(output), steps


@pytest.mark.parametrize("name", KINDS)
def test_one_rank(name: str, checkpoints: dict[str, str]) -> None:
    reference, pipe = load(name, checkpoints[name]), load(name, checkpoints[name])
    handle = pipe.enable_distributed_layerwise_offload()
    try:
        assert pipe.distributed_layerwise_offload is handle
        assert pipe.transformer.distributed_layerwise_offload is handle
        streamed = {component.name for component in handle.plan.components}
        assert "transformer" in streamed and ("transformer_2" in streamed) == (name == "wan")
        for seed in (0, 1):
            (got, steps), (expected, expected_steps) = call(name, pipe, seed), call(name, reference, seed)
            assert np.isfinite(got).all() and got.std() > 0
            assert np.array_equal(got, expected) and steps == expected_steps and len(steps) == 3
    finally:
        pipe.disable_distributed_layerwise_offload()
    assert pipe.distributed_layerwise_offload is None
    pipe.disable_distributed_layerwise_offload()
    assert np.array_equal(call(name, pipe, 2)[0], call(name, reference, 2)[0])
    for component in ("transformer", "transformer_2", "text_encoder", "vae"):
        module = getattr(pipe, component, None)
        if module is not None:
            for key, value in getattr(reference, component).state_dict().items():
                assert torch.equal(module.state_dict()[key], value), (component, key)


def _on_ranks(rank: int, size: int, paths: dict[str, str]) -> None:
    for name, path in paths.items():
        reference, pipe = load(name, path), load(name, path)
        handle = pipe.enable_distributed_layerwise_offload(num_slots=2 + (name == "wan"))
        for component in handle.plan.components:
            wanted = "local" if component.name.startswith("text_encoder") else "all_gather"
            assert component.transfer == wanted and component.transient == (wanted == "local")
        slots = handle.report().device_slot_bytes
        for seed in range(2):
            assert np.array_equal(call(name, pipe, seed + rank)[0], call(name, reference, seed + rank)[0])
        assert handle.report().device_slot_bytes == slots, "the slots of a text encoder outlive it"
        pipe.disable_distributed_layerwise_offload()
        assert np.array_equal(call(name, pipe, rank)[0], call(name, reference, rank)[0])


@pytest.mark.parametrize("size", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_ranks_with_prompts_of_their_own(size: int, checkpoints: dict[str, str]) -> None:
    run_ranks(size, _on_ranks, checkpoints, timeout=240)


def test_text_encoders_stream_if_they_are_large(checkpoints: dict[str, str]) -> None:
    pipe = load("flux", checkpoints["flux"])
    plan = diffusers_dlo.plan_distributed_layerwise_offload(pipe, group_size=2)
    sizes = {n: sum(p.numel() * 2 for p in getattr(pipe, n).parameters()) for n in ("text_encoder", "text_encoder_2")}
    largest = next(c.largest_block.nbytes for c in plan.components if c.name == "transformer")
    for name, nbytes in sizes.items():
        assert (name in {c.name for c in plan.components}) == (nbytes > largest)
    assert {name for name, _, _ in plan.placed} | {c.name for c in plan.components} == {
        "transformer",
        "text_encoder",
        "text_encoder_2",
        "vae",
    }
    assert "transformer" in str(plan) and "vae" in str(plan)


def test_choosing_components(checkpoints: dict[str, str]) -> None:
    pipe, reference = load("wan", checkpoints["wan"]), load("wan", checkpoints["wan"])
    options = {"components": ["transformer_2"], "blocks": {"transformer_2": ["blocks"]}}
    handle = pipe.enable_distributed_layerwise_offload(**options)
    assert [component.name for component in handle.plan.components] == ["transformer_2"]
    assert np.array_equal(call("wan", pipe, 0)[0], call("wan", reference, 0)[0])
    handle.remove()
    for options, text in (
        ({"components": ["transformer_3"]}, "'transformer_3' is not a component"),
        ({"components": ["scheduler"]}, "'scheduler' is not a component"),
        ({"blocks": {"transformer": ["layers"]}}, "'layers' is not a ModuleList of 'WanTransformer3DModel'"),
        ({"blocks": {"vae": ["blocks"]}}, "'blocks' names 'vae', which does not stream"),
        ({"blocks": ["blocks"]}, "pass a mapping"),
    ):
        with pytest.raises(ValueError, match=text):
            pipe.enable_distributed_layerwise_offload(**options)
    assert np.array_equal(call("wan", pipe, 1)[0], call("wan", reference, 1)[0])


@pytest.mark.parametrize(
    "method,args",
    (
        ("enable_sequential_cpu_offload", ("cpu",)),
        ("enable_group_offload", (torch.device("cpu"),)),
        ("fuse_lora", ()),
    ),
)
def test_pipeline_methods_refused_while_enabled(method: str, args: tuple, checkpoints: dict[str, str]) -> None:
    pipe = load("flux", checkpoints["flux"])
    original = getattr(pipe, method)
    pipe.enable_distributed_layerwise_offload()
    with pytest.raises(ValueError, match=f"'{method}' is refused"):
        getattr(pipe, method)(*args)
    pipe.disable_distributed_layerwise_offload()
    assert getattr(pipe, method) == original


def test_enabling_twice_is_refused_and_changes_nothing(checkpoints: dict[str, str]) -> None:
    pipe, reference = load("wan", checkpoints["wan"]), load("wan", checkpoints["wan"])
    handle = pipe.enable_distributed_layerwise_offload()
    with pytest.raises(ValueError, match="'transformer' is under distributed layerwise offload already"):
        pipe.enable_distributed_layerwise_offload(num_slots=4)
    assert pipe.distributed_layerwise_offload is handle
    assert np.array_equal(call("wan", pipe, 0)[0], call("wan", reference, 0)[0])
    handle.remove()


def test_an_own_pipeline_class_may_inherit_the_methods() -> None:
    assert DiffusionPipeline.enable_distributed_layerwise_offload is (
        DistributedLayerwiseOffloadMixin.enable_distributed_layerwise_offload
    )

    class Own(DistributedLayerwiseOffloadMixin):
        components = {}

    with pytest.raises(ValueError, match="no transformer to stream"):
        Own().enable_distributed_layerwise_offload()


@pytest.mark.parametrize("damage", ("missing", "truncated"))
def test_a_damaged_checkpoint_is_named(damage: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "damaged"
    shutil.copytree(checkpoints["wan"], folder)
    index = json.loads(next((folder / "transformer").glob("*.index.json")).read_text())
    victim = folder / "transformer" / sorted(set(index["weight_map"].values()))[0]
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises((OSError, ValueError)) as caught:
        WanPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    assert victim.name in str(caught.value), str(caught.value)
