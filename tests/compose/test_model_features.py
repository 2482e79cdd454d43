# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What users set on a model that streams: attention, processors, memory formats, FreeU. Before enabling and after."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry, attention_backend
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.compose.models import build_unet, run_unet
from tests.zoo import MODELS, build, run


KINDS = {
    "unet": (build_unet, run_unet),
    "flux": (lambda: build("flux", 3), lambda model, seed=0: run(model, MODELS["flux"].inputs(seed))),
    "wan": (lambda: build("wan", 3), lambda model, seed=0: run(model, MODELS["wan"].inputs(seed))),
}


class Weighted(nn.Module):
    """An attention processor with a parameter of its own, as adapters have."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((3,), factor))
        self.processor = AttnProcessor2_0()

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.processor(*args, **kwargs) * self.factor.mean()


def set_weighted(unet: nn.Module) -> None:
    unet.set_attn_processor({name: Weighted(0.5 + index) for index, name in enumerate(unet.attn_processors)})


FEATURES: dict[str, tuple[str, Callable[[nn.Module], object], bool]] = {
    # name: the model, what is done to it, whether its output becomes another
    "math": ("flux", lambda m: m.set_attention_backend("_native_math"), True),
    "native": ("wan", lambda m: m.set_attention_backend("native"), False),
    "flex": ("flux", lambda m: m.set_attention_backend("flex"), True),
    "processor": ("flux", lambda m: m.set_attn_processor(FluxAttnProcessor()), False),
    "older processor": ("unet", lambda m: m.set_attn_processor(AttnProcessor()), True),
    "weighted processors": ("unet", set_weighted, True),
    "attention slicing": ("unet", lambda m: m.set_attention_slice(1), True),
    "freeu": ("unet", lambda m: m.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4), True),
    "gradient checkpointing": ("flux", lambda m: m.enable_gradient_checkpointing(), False),
    "channels_last_3d outside blocks": ("wan", lambda m: m.to(memory_format=torch.channels_last_3d), False),
}


@pytest.fixture(autouse=True)
def default_backend() -> Iterator[None]:
    """A model's backend becomes that of every model which has none."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry.set_active_backend(before)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda name: name.replace(" ", "_"))
def test_before_and_after_enabling(feature: str) -> None:
    kind, change, alters = FEATURES[feature]
    make, forward = KINDS[kind]
    reference, early, late = make(), make(), make()
    plain = forward(reference)
    change(reference)
    expected = forward(reference)
    assert alters == (not all(torch.equal(a, b) for a, b in zip(plain, expected)))
    change(early)
    for model in (early, late):
        apply_distributed_layerwise_offload(model)
    change(late)
    for model in (early, late):
        assert all(torch.equal(a, b) for a, b in zip(forward(model), expected))
        model.disable_distributed_layerwise_offload()
        assert all(torch.equal(a, b) for a, b in zip(forward(model), expected))


def test_attention_backend_as_a_context() -> None:
    model, reference = build("flux", 3), build("flux", 3)
    handle = apply_distributed_layerwise_offload(model)
    outputs = []
    for each in (model, reference):
        with attention_backend("_native_math"):
            outputs.append(run(each, MODELS["flux"].inputs(0)))
    assert all(torch.equal(a, b) for a, b in zip(*outputs))
    assert not torch.equal(outputs[0][0], run(model, MODELS["flux"].inputs(0))[0])
    handle.remove()


@pytest.mark.parametrize("kind", ("flux", "unet"))
def test_fused_projections(kind: str) -> None:
    """Before enabling; after, it is refused, and so is taking it back."""
    make, forward = KINDS[kind]
    model, reference = make(), make()
    for each in (model, reference):
        each.fuse_qkv_projections()
    handle = apply_distributed_layerwise_offload(model)
    assert any(".to_qkv." in tensor.name for block in handle.plan.blocks for tensor in block.tensors)
    assert all(torch.equal(a, b) for a, b in zip(forward(model), forward(reference)))
    with pytest.raises(ValueError, match="'unfuse_qkv_projections' is refused.*Disable first"):
        model.unfuse_qkv_projections()
    handle.remove()
    for each in (model, reference):
        each.unfuse_qkv_projections()
    assert all(torch.equal(a, b) for a, b in zip(forward(model), forward(reference)))


def test_channels_last_before_enabling() -> None:
    model, reference = build_unet(), build_unet()
    for each in (model, reference):
        each.to(memory_format=torch.channels_last)
    strides = {name: parameter.stride() for name, parameter in reference.named_parameters()}
    handle = apply_distributed_layerwise_offload(model)
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda module, args, name=f"{name}.weight": seen.update({name: module.weight.stride()})
            )
    for seed in range(2):
        assert torch.equal(run_unet(model, seed)[0], run_unet(reference, seed)[0])
    assert seen and all(strides[name] == stride for name, stride in seen.items())
    model.to(memory_format=torch.channels_last)  # as it is
    with pytest.raises(ValueError, match="changing the memory format of its weights.*before enabling"):
        model.to(memory_format=torch.contiguous_format)
    assert torch.equal(run_unet(model)[0], run_unet(reference)[0])
    handle.remove()
    assert {name: parameter.stride() for name, parameter in model.named_parameters()} == strides
    assert torch.equal(run_unet(model)[0], run_unet(reference)[0])


def test_channels_last_after_enabling_is_refused() -> None:
    model, reference = build_unet(), build_unet()
    handle = apply_distributed_layerwise_offload(model)
    strides = {name: parameter.stride() for name, parameter in model.named_parameters()}
    for part in (model, model.down_blocks[0].resnets[0], model.down_blocks[0].resnets[0].conv1):
        with pytest.raises(ValueError, match="'model' is under.*changing the memory format.*Do it before enabling"):
            part.to(memory_format=torch.channels_last)
    assert {name: parameter.stride() for name, parameter in model.named_parameters()} == strides
    assert torch.equal(run_unet(model)[0], run_unet(reference)[0])
    handle.remove()


@pytest.mark.skipif(importlib.util.find_spec("xformers") is not None, reason="says what happens without xformers")
def test_xformers_that_are_not_there_change_nothing() -> None:
    model, reference = build_unet(), build_unet()
    handle = apply_distributed_layerwise_offload(model)
    for each in (model, reference):
        with pytest.raises(ModuleNotFoundError, match="xformers"):
            each.enable_xformers_memory_efficient_attention()
    assert torch.equal(run_unet(model)[0], run_unet(reference)[0])
    handle.remove()
