# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What adapters would do with weights that are not there: refused, undone, or right; never another result."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.compose.adapting import (
    TWO,
    adapter,
    assert_same_weights,
    equal,
    flux,
    flux_pipe,
    one,
    outputs,
    prefixed,
    two,
)


def _dora(model: Any) -> None:
    model.add_adapter(peft.LoraConfig(target_modules=TWO, use_dora=True), "bad")


def _dora_from_a_file(model: Any) -> None:
    model.load_lora_adapter(adapter("flux", TWO, 5, use_dora=True), prefix=None, adapter_name="bad")


def _pissa(model: Any) -> None:
    model.add_adapter(peft.LoraConfig(target_modules=TWO, init_lora_weights="pissa"), "bad")


def _copied_module(model: Any) -> None:
    model.add_adapter(peft.LoraConfig(target_modules=TWO, modules_to_save=["norm1"]), "bad")


def _fused_layers(model: Any) -> None:
    """Diffusers fuses projections for a LoKr file that was made with fused ones."""
    other = flux()
    other.fuse_qkv_projections()
    peft.inject_adapter_in_model(peft.LoKrConfig(target_modules=["to_qkv"], init_weights=False), other, "x")
    state = peft.get_peft_model_state_dict(other, adapter_name="x")
    model.load_lora_adapter(state, prefix=None, adapter_name="bad")


@pytest.mark.parametrize("others", (False, True), ids=("alone", "beside-another"))
@pytest.mark.parametrize("add", (_dora, _dora_from_a_file, _pissa, _copied_module, _fused_layers))
def test_made_from_streamed_weights(add: Any, others: bool) -> None:
    """Refused, and taken out again, whether adapters were there before or not."""
    model = flux()
    base = outputs(model, 0)
    handle = apply_distributed_layerwise_offload(model)
    assert equal(outputs(model, 0), base)
    if others:
        model.load_lora_adapter(adapter("flux", TWO[:1], 6), prefix=None, adapter_name="good")
    before, names = outputs(model, 1), list(dict(model.named_parameters()))
    with pytest.raises(
        (RuntimeError, ValueError),
        match="Load it before enabling|(hold|fuse) placeholders|already loaded on the unfused",
    ):
        add(model)
    if not others:
        assert list(dict(model.named_parameters())) == names and not hasattr(model, "peft_config")
    assert equal(outputs(model, 1), before)
    model.load_lora_adapter(adapter("flux", TWO, 8), prefix=None, adapter_name="bad")  # the name is free again
    handle.remove()


def test_a_load_that_fails_leaves_other_adapters_as_they_were() -> None:
    """Whether it failed at its first layer or after its last: names, keys, and which adapters are active."""
    pipe, reference = flux_pipe(), flux_pipe()
    handle = pipe.enable_distributed_layerwise_offload(components=["transformer", "text_encoder"])
    for each in (pipe, reference):
        each.load_lora_weights(prefixed("transformer", adapter("flux", TWO[:1], 5)), adapter_name="one")
        each.load_lora_weights(prefixed("transformer", adapter("flux", TWO[:1], 6)), adapter_name="two")
        each.set_adapters(["one", "two"], [0.5, 1.5])
    model = pipe.transformer
    keys, wanted = list(model.state_dict()), outputs(reference, 0)
    broken = {k: torch.ones(3, 3) if "text_encoder" in k and "lora_A" in k else v for k, v in one().items()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Load it before enabling"):  # other layers than those that have one
            model.add_adapter(peft.LoraConfig(target_modules=["to_v"], use_dora=True), "bad")
        with pytest.raises(RuntimeError, match="mismatch"):  # the transformer's is there by then
            pipe.load_lora_weights(dict(broken), adapter_name="bad")
        assert list(model.state_dict()) == keys and list(model.peft_config) == ["one", "two"]
        assert model.active_adapters() == ["one", "two"] and equal(outputs(pipe, 0), wanted)
    handle.remove()
    assert_same_weights(pipe, reference)


def test_made_from_streamed_weights_by_peft_itself() -> None:
    model = flux()
    base = outputs(model, 0)
    handle = apply_distributed_layerwise_offload(model)
    assert equal(outputs(model, 0), base)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=TWO, use_dora=True), model, "bad")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="'transformer_blocks.0.attn.to_q' in 'model' is NaN.*before enabling"):
            outputs(model, 0)
    model.unload_lora()
    assert equal(outputs(model, 0), base)
    state = two()
    key = "transformer.transformer_blocks.1.attn.to_q.lora_A.weight"
    pipe = flux_pipe()
    pipe.transformer = model  # the model was enabled and not the pipeline, whose loaders are not guarded then
    pipe.load_lora_weights({**state, key: torch.ones(2, 64)}, adapter_name="wider")
    with pytest.raises(RuntimeError, match="'transformer_blocks.1.attn.to_q' in 'model' is NaN, or the layer is"):
        outputs(model, 0)
    handle.remove()


def test_leaf_read_by_an_adapter() -> None:
    """DoRA reads a leaf's weight after its call: noticed in the next forward, also long after the first one."""
    torch.manual_seed(0)
    head = torch.nn.Linear(32, 20_000)
    model, reference = flux(), flux()
    model.proj_out, reference.proj_out = head, copy.deepcopy(head)
    handle = apply_distributed_layerwise_offload(model)
    assert equal(outputs(model, 0), outputs(reference, 0))
    for each in (model, reference):
        config = peft.LoraConfig(target_modules=["proj_out"], use_dora=True)
        peft.inject_adapter_in_model(config, each, "x", low_cpu_mem_usage=True)
        for name, parameter in each.named_parameters():
            if "lora_" in name:
                module = each.get_submodule(name.rpartition(".")[0])
                module.weight = torch.nn.Parameter(torch.ones(parameter.shape))
    wanted = outputs(reference, 0)
    try:
        got = outputs(model, 0)
    except RuntimeError as error:
        assert "'proj_out.weight' of 'model' was read outside its block's turn" in str(error)
    else:
        assert equal(got, wanted)
    for each in (model, reference):
        each.unload_lora()
    assert equal(outputs(model, 0), outputs(reference, 0))
    handle.remove()


def test_wider_layer_inside_a_block_is_refused() -> None:
    """Diffusers widens a layer for an adapter with more inputs, from its weight: outside blocks, not inside."""
    pipe, reference = flux_pipe(), flux_pipe()
    handle = pipe.enable_distributed_layerwise_offload(components=["transformer"])
    state = two()
    key = "transformer.transformer_blocks.1.attn.to_q.lora_A.weight"
    with pytest.raises(RuntimeError, match="'transformer_blocks.1.attn.to_q.weight'.*Load it before enabling"):
        pipe.load_lora_weights({**state, key: torch.ones(2, 64)}, adapter_name="x")
    assert equal(outputs(pipe, 0), outputs(reference, 0))
    wider = prefixed("transformer", adapter("flux", ["x_embedder"], 5))
    wider["transformer.x_embedder.lora_A.weight"] = torch.linspace(-1, 1, 128).reshape(4, 32)
    for each in (pipe, reference):
        each.load_lora_weights(dict(wider), adapter_name="x")
        assert each.transformer.config.in_channels == 32
        each.unload_lora_weights(reset_to_overwritten_params=True)
    assert equal(outputs(pipe, 0), outputs(reference, 0))
    handle.remove()
    assert_same_weights(pipe, reference)


@pytest.mark.parametrize("method", ("fuse_lora", "unfuse_lora"))
def test_fusing_is_refused(method: str) -> None:
    pipe, reference = flux_pipe(), flux_pipe()
    for each in (pipe, reference):
        if each is pipe:
            handle = pipe.enable_distributed_layerwise_offload(components=["transformer", "text_encoder"])
        each.load_lora_weights(one(), adapter_name="one")
    remedy = "Fuse before enabling" if method == "fuse_lora" else "weights that are not on the device"
    for owner in (pipe, pipe.transformer):
        with pytest.raises(ValueError, match=f"'{method}' is refused.*{remedy}"):
            getattr(owner, method)()
    layer = pipe.text_encoder.get_submodule("encoder.layers.0.self_attn.q_proj")
    for safe in (False, True):  # PEFT's own, on one layer
        with pytest.raises(ValueError, match="'merge' is refused.*Fuse before enabling"):
            layer.merge(safe_merge=safe)
    assert equal(outputs(pipe, 0), outputs(reference, 0))
    handle.remove()
    for each in (pipe, reference):
        each.fuse_lora(components=["transformer", "text_encoder"])
    assert equal(outputs(pipe, 0), outputs(reference, 0))
    assert_same_weights(pipe, reference)


@pytest.mark.parametrize("nbytes", (1 << 20, (1 << 20) + 4), ids=("small", "large"))
def test_loading_part_of_the_weights(nbytes: int) -> None:
    """What some adapters do: a few small weights stay on the device from then on, large ones are refused."""

    def make() -> torch.nn.Module:
        model = flux()
        model.transformer_blocks[1].extra = torch.nn.Parameter(torch.ones(nbytes // 4))
        return model

    model, reference = make(), make()
    handle = apply_distributed_layerwise_offload(model)
    part = {
        "transformer_blocks.1.extra": torch.zeros(nbytes // 4),
        "transformer_blocks.0.norm1.linear.bias": torch.ones(192),
    }
    for strict in (True, False):
        if strict or nbytes > 1 << 20:
            with pytest.raises(ValueError, match="'load_state_dict' is refused.*Disable first"):
                model.load_state_dict(part, strict=strict)
        else:
            for each in (model, reference):
                missing, unexpected = each.load_state_dict(part, strict=False)
                assert not unexpected and part.keys().isdisjoint(missing)
    assert equal(outputs(model, 0), outputs(reference, 0))
    handle.remove()
    assert_same_weights(model, reference)
