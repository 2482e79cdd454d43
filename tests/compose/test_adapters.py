# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""LoRA and other PEFT adapters: whatever is loaded, changed and taken out, before and after enabling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.compose.adapting import (
    ONE,
    TWO,
    adapter,
    assert_same_weights,
    equal,
    flux,
    flux_pipe,
    one,
    outputs,
    play,
    prefixed,
    two,
    wan_pipe,
)
from tests.ranks import run_ranks


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


def loaded_after(pipe: Any, rank: int) -> Iterator[str]:
    yield "enable"
    yield "base"
    pipe.load_lora_weights(one(), adapter_name="one")
    yield "new"
    pipe.load_lora_weights(two(), adapter_name="two")
    yield "new"
    pipe.set_adapters(["one", "two"], [0.3, 1.7])
    yield "new"
    pipe.set_adapters("two", 0.5)
    yield "new"
    pipe.disable_lora()
    yield "base"
    pipe.enable_lora()
    pipe.set_adapters(["one", "two"])
    pipe.delete_adapters("one")
    yield "new"
    pipe.unload_lora_weights()
    yield "base"
    pipe.load_lora_weights(one(), adapter_name="one")
    yield "old"
    yield "disable"
    yield "same"
    pipe.unload_lora_weights()
    yield "base"


def loaded_before(pipe: Any, rank: int) -> Iterator[str]:
    pipe.load_lora_weights(one(), adapter_name="one")
    pipe.load_lora_weights(two(), adapter_name="two")
    yield "enable"
    yield "new"
    pipe.set_adapters(["one", "two"], [0.25, 0.5])
    yield "new"
    pipe.delete_adapters("two")
    yield "new"
    pipe.unload_lora_weights()
    yield "base"
    yield "disable"
    yield "base"


def into_the_second_transformer(pipe: Any, rank: int) -> Iterator[str]:
    state = prefixed("transformer", adapter("wan", TWO, 5))
    pipe.load_lora_weights(dict(state), adapter_name="early", load_into_transformer_2=True)
    yield "enable"
    yield "new"
    pipe.load_lora_weights(dict(state), adapter_name="late")
    yield "new"
    pipe.load_lora_weights(prefixed("transformer", adapter("wan", ONE[:2], 8)), "more", load_into_transformer_2=True)
    pipe.transformer_2.set_adapters(["early", "more"], [0.5, 2.0])
    yield "new"
    yield "disable"
    yield "same"
    pipe.unload_lora_weights()
    yield "base"


def hotswapped(pipe: Any, rank: int) -> Iterator[str]:
    yield "enable"
    pipe.enable_lora_hotswap(target_rank=8)
    pipe.load_lora_weights(two(), adapter_name="two")
    yield "new"
    swapped = prefixed("transformer", adapter("flux", TWO, 9, r=8))
    pipe.load_lora_weights(swapped, adapter_name="two", hotswap=True)
    yield "new"
    yield "disable"
    yield "same"


def hotswapped_at_equal_rank(pipe: Any, rank: int) -> Iterator[str]:
    pipe.load_lora_weights(two(), adapter_name="two")
    yield "enable"
    yield "new"
    pipe.load_lora_weights(prefixed("transformer", adapter("flux", TWO, 9, r=2)), adapter_name="two", hotswap=True)
    yield "new"


def with_norms(pipe: Any, rank: int) -> Iterator[str]:
    """As Flux's control adapters: norms in blocks are overwritten, and unloading puts them back."""
    norms = {k: torch.full_like(v, 1.5) for k, v in pipe.transformer.state_dict().items() if "norm_q" in k}
    yield "enable"
    yield "base"
    pipe.load_lora_weights({**two(), **prefixed("transformer", norms)}, adapter_name="control")
    yield "new"
    pipe.unload_lora_weights()
    yield "base"
    yield "disable"
    yield "base"


def fused_before(pipe: Any, rank: int) -> Iterator[str]:
    pipe.load_lora_weights(one(), adapter_name="one")
    pipe.fuse_lora(components=["transformer", "text_encoder"])
    pipe.unload_lora_weights()
    yield "enable"
    yield "new"
    pipe.load_lora_weights(two(), adapter_name="two")
    yield "new"
    yield "disable"
    yield "same"


def after_a_forward_that_raised(pipe: Any, rank: int) -> Iterator[str]:
    yield "enable"
    for failing in (1, 0):
        block = pipe.transformer.transformer_blocks[failing]
        handle = block.ff.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outputs(pipe, 0)
        handle.remove()
        pipe.load_lora_weights(two() if failing else one(), adapter_name=f"after{failing}")
        yield "new"


def on_one_rank_only(pipe: Any, rank: int) -> Iterator[str]:
    yield "enable"
    yield "base"
    if rank == 0:
        pipe.load_lora_weights(one(), adapter_name="one")
    yield "base" if rank else "new"
    if rank == 1:
        pipe.load_lora_weights(two(), adapter_name="two")
    yield "new" if rank else "same"
    pipe.unload_lora_weights()
    yield "base"
    if rank == 0:
        pipe.load_lora_weights(two(), adapter_name="kept")
    yield "base" if rank else "new"
    yield "disable"
    yield "same"


def of_each_rank_its_own(pipe: Any, rank: int) -> Iterator[str]:
    """The same layers, but other weights and sizes: they are no part of what ranks share."""
    own = adapter("flux", TWO, 20 + rank, r=2 + 2 * rank)
    pipe.load_lora_weights(prefixed("transformer", own), adapter_name="own")
    yield "enable"
    yield "new"
    pipe.set_adapters("own", 0.5 + rank)
    yield "new"


def with_other_kinds(model: Any, rank: int) -> Iterator[str]:
    """DoRA reads weights of the layer it adapts, LoKr and OFT compute with them in their own ways."""
    dora = adapter("flux", TWO, 5, use_dora=True)
    yield "enable"
    yield "base"
    model.load_lora_adapter(dora, prefix=None, adapter_name="dora", low_cpu_mem_usage=True)
    yield "new"
    model.unload_lora()
    yield "base"
    for config, options in (
        (peft.LoKrConfig, {"init_weights": False}),
        (peft.LoHaConfig, {"init_weights": False}),
        (peft.OFTConfig, {"init_weights": False, "oft_block_size": 4, "r": 0}),
    ):
        torch.manual_seed(3)
        peft.inject_adapter_in_model(config(target_modules=TWO, **options), model, "x")
        yield "new"
        model.unload_lora()
        yield "base"


def of_another_dtype(model: Any, rank: int) -> Iterator[str]:
    yield "enable"
    model.add_adapter(peft.LoraConfig(r=2, target_modules=TWO), "x")
    yield "base"
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.manual_seed(len(name))
            parameter.data = torch.randn_like(parameter).double()
    yield "new"
    yield "disable"
    yield "same"


FLUX = (
    loaded_after,
    loaded_before,
    hotswapped,
    hotswapped_at_equal_rank,
    with_norms,
    fused_before,
    after_a_forward_that_raised,
)


@pytest.mark.parametrize("script", FLUX)
def test_flux(script: Any) -> None:
    assert play(script, flux_pipe) >= 2


def test_second_transformer() -> None:
    assert play(into_the_second_transformer, wan_pipe, transfer="local") == 5


@pytest.mark.parametrize("script", (with_other_kinds, of_another_dtype))
def test_single_model(script: Any) -> None:
    assert play(script, flux) >= 3


def test_large_leaf() -> None:
    """A leaf outside blocks that streams on demand is adapted like any other layer."""

    def script(model: Any, rank: int) -> Iterator[str]:
        yield "enable"
        yield "base"
        for name in ("first", "second"):
            torch.manual_seed(len(name))
            model.add_adapter(peft.LoraConfig(r=4, target_modules=["proj_out"], init_lora_weights=False), name)
            yield "new"
        model.unload_lora()
        yield "base"
        yield "disable"
        yield "base"

    def make() -> torch.nn.Module:
        model = flux()
        torch.manual_seed(0)
        model.proj_out = torch.nn.Linear(32, 20_000)
        return model

    assert play(script, make) == 5


CASES = (
    (loaded_after, flux_pipe, {}),
    (loaded_before, flux_pipe, {"device_budget": "200KB"}),
    (on_one_rank_only, flux_pipe, {"host": "pinned", "transfer": "all_gather"}),
    (of_each_rank_its_own, flux_pipe, {"transfer": "local"}),
    (into_the_second_transformer, wan_pipe, {}),
    (after_a_forward_that_raised, flux_pipe, {}),
)


def _on_ranks(rank: int, size: int) -> None:
    for script, make, options in CASES:
        assert play(script, make, rank, **options) >= 2
    with pytest.raises(RuntimeError, match="differ"):
        model = flux()
        if rank == 0:
            model.add_adapter(peft.LoraConfig(target_modules=TWO), "x")
        apply_distributed_layerwise_offload(model)


def test_ranks() -> None:
    run_ranks(2, _on_ranks)


def _mapped(rank: int, size: int, path: str) -> None:
    def load() -> Any:
        pipe = flux_pipe()
        pipe.transformer = FluxTransformer2DModel.from_pretrained(path).eval()
        return pipe

    def checked(pipe: Any, rank: int) -> Iterator[str]:
        for word in loaded_after(pipe, rank):
            if pipe.transformer.distributed_layerwise_offload is not None:
                assert "mapped" in pipe.transformer.distributed_layerwise_offload.report().host_kind
            yield word

    if size == 1:
        assert play(checked, load, rank) == 11
    assert play(fused_before, load, rank) == 3  # what was fused is in no file


def test_mapped_files(tmp_path: Any) -> None:
    flux().save_pretrained(tmp_path)
    _mapped(0, 1, str(tmp_path))
    run_ranks(2, _mapped, str(tmp_path))


def test_switched_between_the_steps_of_a_call(tmp_path: Any) -> None:
    """A whole pipeline: its callback loads, scales and takes out adapters while it runs."""
    path = tiny_checkpoints.build_tiny_flux(tmp_path / "flux")
    first = FluxTransformer2DModel.from_pretrained(path, subfolder="transformer", dtype=torch.bfloat16)
    torch.manual_seed(0)
    first.add_adapter(peft.LoraConfig(r=4, target_modules=TWO, init_lora_weights=False), "x")
    state = prefixed("transformer", peft.get_peft_model_state_dict(first, adapter_name="x"))

    def switch(pipe: Any, step: int, timestep: torch.Tensor, kwargs: dict) -> dict:
        if step == 0:
            pipe.load_lora_weights(dict(state), adapter_name="x")
        elif step == 1:
            pipe.set_adapters("x", 3.0)
        else:
            pipe.unload_lora_weights()
        return kwargs

    images = []
    for offloaded, callback in ((True, switch), (False, switch), (False, None)):
        pipe = FluxPipeline.from_pretrained(path, dtype=torch.bfloat16)
        pipe.set_progress_bar_config(disable=True)
        handle = pipe.enable_distributed_layerwise_offload() if offloaded else None
        options = {"height": 32, "width": 32, "num_inference_steps": 4, "output_type": "latent"}
        options |= {"callback_on_step_end": callback, "generator": torch.Generator().manual_seed(0)}
        images.append(pipe("a fox in the snow", **options).images)
        if handle is not None:
            handle.remove()
    assert torch.equal(images[0], images[1]) and not torch.equal(images[1], images[2])


def test_saving(tmp_path: Any) -> None:
    model, reference = flux(), flux()
    for each in (model, reference):
        if each is model:
            handle = apply_distributed_layerwise_offload(model)
        each.load_lora_adapter(adapter("flux", TWO, 6), prefix=None, adapter_name="x")
        each.load_lora_adapter(adapter("flux", ONE, 5), prefix=None, adapter_name="y")
    wanted = peft.get_peft_model_state_dict(reference, adapter_name="x")
    model.save_lora_adapter(tmp_path, "x")
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    for got in (saved, peft.get_peft_model_state_dict(model, adapter_name="x")):
        assert got.keys() == wanted.keys() and all(torch.equal(got[key], value) for key, value in wanted.items())
    handle.remove()
    assert_same_weights(model, reference)


def _shards_only(rank: int, size: int, path: str) -> None:
    model, reference = flux(), flux()
    handle = apply_distributed_layerwise_offload(model, host="pinned")
    for each in (model, reference):
        each.load_lora_adapter(adapter("flux", TWO, 6), prefix=None, adapter_name="x")
    model.save_lora_adapter(f"{path}/{rank}", "x")
    with pytest.raises(RuntimeError, match="not whole on any one rank.*packed"):
        peft.get_peft_model_state_dict(model, adapter_name="x")
    assert equal(outputs(model, rank), outputs(reference, rank))
    handle.remove()


def test_shards_on_each_rank_are_enough(tmp_path: Any) -> None:
    run_ranks(2, _shards_only, str(tmp_path))
    wanted = adapter("flux", TWO, 6)
    for rank in range(2):
        saved = load_file(next((tmp_path / str(rank)).glob("*.safetensors")))
        assert saved.keys() == wanted.keys() and all(torch.equal(saved[k], v) for k, v in wanted.items())
