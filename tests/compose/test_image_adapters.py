# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""IP-Adapters, ControlNets, T2I-Adapters and textual inversions beside streamed models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxMultiControlNetModel,
    FluxPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLAdapterPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from diffusers_dlo.process_engine import find_streamed
from tests.compose.adapting import adapter, assert_same_weights, equal, prefixed
from tests.drawing import sampler
from tests.ranks import run_ranks
from tests.zoo import MODELS, build, run


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


def drawn(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """With weights that all matter: ControlNets end in zeros."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def without(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


def flux_pipe() -> FluxPipeline:
    return FluxPipeline(
        transformer=build("flux", 3),
        **without("scheduler vae text_encoder tokenizer text_encoder_2 tokenizer_2"),
    )


def flux_ip_adapter(seed: int) -> dict:
    """As `load_ip_adapter` takes it: for the two streams of each double block, widths of the tiny model."""
    weights: dict[str, torch.Tensor] = {}
    for index in range(3):
        for name in ("to_k_ip", "to_v_ip"):
            weights[f"{index}.{name}.weight"] = 0.3 * sampler(seed + len(weights))(32, 24)
            weights[f"{index}.{name}.bias"] = 0.3 * sampler(seed + len(weights))(32)
    projection = {"proj.weight": sampler(seed)(96, 10), "proj.bias": sampler(seed)(96)}
    projection |= {"norm.weight": torch.ones(24), "norm.bias": torch.zeros(24)}
    return {"image_proj": projection, "ip_adapter": weights}


def flux_outputs(pipe: Any, seed: int) -> list[torch.Tensor]:
    inputs = dict(MODELS["flux"].inputs(seed))
    if getattr(pipe.transformer, "encoder_hid_proj", None) is not None:
        count = len(pipe.transformer.encoder_hid_proj.image_projection_layers)
        embeds = [sampler(seed + index)(1, 1, 10) for index in range(count)]
        inputs["joint_attention_kwargs"] = {"ip_adapter_image_embeds": embeds}
    return run(pipe.transformer, inputs)


def sdxl_unet() -> UNet2DConditionModel:
    return drawn(
        lambda: UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=68,
            cross_attention_dim=24,
            norm_num_groups=8,
        )
    )


def sdxl_pipe() -> StableDiffusionXLPipeline:
    rest = without("scheduler vae text_encoder tokenizer text_encoder_2 tokenizer_2")
    return StableDiffusionXLPipeline(unet=sdxl_unet(), **rest)


def sdxl_outputs(pipe: Any, seed: int) -> list[torch.Tensor]:
    conditions = {"text_embeds": sampler(seed)(1, 20), "time_ids": torch.arange(6.0)[None]}
    if pipe.unet.encoder_hid_proj is not None:
        count = len(pipe.unet.encoder_hid_proj.image_projection_layers)
        conditions["image_embeds"] = [sampler(seed + index)(1, 1, 10) for index in range(count)]
    inputs = {"sample": sampler(seed)(1, 4, 8, 8), "timestep": torch.tensor([500.0 + seed])}
    inputs |= {"encoder_hidden_states": sampler(seed)(1, 5, 24), "added_cond_kwargs": conditions}
    return run(pipe.unet, {**inputs, "return_dict": False})


def sdxl_ip_adapter(seed: int) -> dict:
    weights: dict[str, torch.Tensor] = {}
    crossing = [name for name in sdxl_unet().attn_processors if name.endswith("attn2.processor")]
    for index in range(len(crossing)):
        for name in ("to_k_ip", "to_v_ip"):
            weights[f"{2 * index + 1}.{name}.weight"] = 0.3 * sampler(seed + len(weights))(32, 24)
    projection = {"proj.weight": sampler(seed)(96, 10), "proj.bias": sampler(seed)(96)}
    projection |= {"norm.weight": torch.ones(24), "norm.bias": torch.zeros(24)}
    return {"image_proj": projection, "ip_adapter": weights}


IP = {
    "flux": (flux_pipe, flux_outputs, flux_ip_adapter),
    "sdxl": (sdxl_pipe, sdxl_outputs, sdxl_ip_adapter),
}


def load(pipe: Any, states: list[dict]) -> None:
    options = {"image_encoder_pretrained_model_name_or_path": None} if isinstance(pipe, FluxPipeline) else {}
    options |= {} if isinstance(pipe, FluxPipeline) else {"image_encoder_folder": None, "subfolder": ""}
    pipe.load_ip_adapter(states, weight_name=[""] * len(states), **options)


def check_ip_adapter(kind: str, early: bool, rank: int = 0, **options: Any) -> None:
    """Loaded, scaled, exchanged for two, taken out: each step as without offload, and each result another one."""
    make, outputs, state = IP[kind]
    subject, reference = make(), make()
    seen: list[list[torch.Tensor]] = [outputs(reference, rank)]

    def compare(new: bool) -> None:
        got, wanted = outputs(subject, rank), outputs(reference, rank)
        assert equal(got, wanted), (kind, early, rank, options, len(seen))
        assert any(equal(wanted, old) for old in seen) != new
        seen.append(wanted)

    handle = None if early else subject.enable_distributed_layerwise_offload(**options)
    for states in ([state(1)], [state(2), state(3)]):
        for pipe in (subject, reference):
            load(pipe, states)
        if handle is None:
            handle = subject.enable_distributed_layerwise_offload(**options)
        elif not (early and len(states) == 1):
            model = next(m for m in subject.components.values() if isinstance(m, nn.Module))
            assert all(find_streamed(p) is None for n, p in model.named_parameters() if "_ip." in n)
        compare(new=True)
        for pipe in (subject, reference):
            pipe.set_ip_adapter_scale(0.25 if isinstance(pipe, FluxPipeline) else [0.25] * len(states))
        compare(new=True)
    for pipe in (subject, reference):
        pipe.unload_ip_adapter()
    assert equal(outputs(subject, rank), seen[0])
    handle.remove()
    assert equal(outputs(subject, rank), seen[0])
    assert_same_weights(subject, reference)


@pytest.mark.parametrize("early", (True, False), ids=("before", "after"))
@pytest.mark.parametrize("kind", IP)
def test_ip_adapter(kind: str, early: bool) -> None:
    check_ip_adapter(kind, early)


def flux_controlnet(seed: int) -> FluxControlNetModel:
    def make() -> FluxControlNetModel:
        return FluxControlNetModel(
            num_layers=2,
            num_single_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=16,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            guidance_embeds=True,
            axes_dims_rope=[4, 6, 6],
            num_mode=3,
        )

    return drawn(make, seed)


def controlled(count: int) -> FluxControlNetPipeline:
    """Beside a transformer, one ControlNet or several."""
    nets = [flux_controlnet(seed) for seed in range(count)]
    rest = without("scheduler vae text_encoder tokenizer text_encoder_2 tokenizer_2")
    return FluxControlNetPipeline(transformer=build("flux", 3), controlnet=nets if count > 1 else nets[0], **rest)


def controlled_outputs(pipe: Any, seed: int) -> list[torch.Tensor]:
    """A step as the pipeline does it: what the ControlNets give goes into the transformer."""
    inputs = MODELS["flux"].inputs(seed)
    condition, mode, scale = sampler(seed)(1, 12, 16), torch.tensor([1]), 0.7
    if isinstance(pipe.controlnet, FluxMultiControlNetModel):
        count = len(pipe.controlnet.nets)
        extra = {"controlnet_cond": [condition + i for i in range(count)], "controlnet_mode": [mode] * count}
        extra["conditioning_scale"] = [scale] * count
    else:
        extra = {"controlnet_cond": condition, "controlnet_mode": mode[:, None], "conditioning_scale": scale}
    with torch.no_grad():
        blocks, single_blocks = pipe.controlnet(**{**inputs, **extra})
    given = {"controlnet_block_samples": blocks, "controlnet_single_block_samples": single_blocks}
    return run(pipe.transformer, {**inputs, **given})


def check_controlnet(count: int, rank: int = 0, **options: Any) -> None:
    """Bit-equal, with the slots of the larger model for both, and streamed layer by layer however many there are."""
    subject, reference = controlled(count), controlled(count)
    slots = []
    for names in (["transformer"], ["controlnet"], None):
        handle = subject.enable_distributed_layerwise_offload(components=names, **options)
        slots.append(handle.report().device_slot_bytes)
        plans = {component.name: component for component in handle.plan.components}
        assert set(plans) == set(names or ("transformer", "controlnet"))
        for seed in range(2):
            got = controlled_outputs(subject, 10 * rank + seed)
            assert equal(got, controlled_outputs(reference, 10 * rank + seed)), (count, rank, options, names)
        if "controlnet" in plans:
            prefixes = {name.rpartition(".")[0] for name in (b.name for b in plans["controlnet"].blocks)}
            lists = (
                "transformer_blocks",
                "single_transformer_blocks",
                "controlnet_blocks",
                "controlnet_single_blocks",
            )
            roots = [f"nets.{index}." for index in range(count)] if count > 1 else [""]
            assert prefixes == {root + name for root in roots for name in lists}
        handle.remove()
    assert slots[2] == max(slots[:2])
    assert not equal(controlled_outputs(reference, 0), run(reference.transformer, MODELS["flux"].inputs(0)))
    assert_same_weights(subject, reference)


@pytest.mark.parametrize("count", (1, 2))
def test_controlnet(count: int) -> None:
    check_controlnet(count)


def test_adapter_of_a_controlled_transformer() -> None:
    subject, reference = controlled(1), controlled(1)
    handle = subject.enable_distributed_layerwise_offload()
    base = controlled_outputs(reference, 0)
    for pipe in (subject, reference):
        pipe.load_lora_weights(prefixed("transformer", adapter("flux", ["to_q", "proj_out"], 5)), adapter_name="x")
    wanted = controlled_outputs(reference, 0)
    assert equal(controlled_outputs(subject, 0), wanted) and not equal(wanted, base)
    handle.remove()
    assert_same_weights(subject, reference)


def test_t2i_adapter_is_placed() -> None:
    def make() -> StableDiffusionXLAdapterPipeline:
        features = drawn(lambda: T2IAdapter(3, [16, 32], 1, 16, "full_adapter_xl"))
        rest = without("scheduler vae text_encoder tokenizer text_encoder_2 tokenizer_2")
        return StableDiffusionXLAdapterPipeline(unet=sdxl_unet(), adapter=features, **rest)

    def outputs(pipe: Any, seed: int) -> list[torch.Tensor]:
        with torch.no_grad():
            features = pipe.adapter(sampler(seed)(1, 3, 64, 64))
        conditions = {"text_embeds": sampler(seed)(1, 20), "time_ids": torch.arange(6.0)[None]}
        inputs = {"sample": sampler(seed)(1, 4, 8, 8), "timestep": torch.tensor([500.0])}
        inputs |= {"encoder_hidden_states": sampler(seed)(1, 5, 24), "added_cond_kwargs": conditions}
        return run(pipe.unet, {**inputs, "down_intrablock_additional_residuals": features, "return_dict": False})

    subject, reference = make(), make()
    handle = subject.enable_distributed_layerwise_offload()
    assert [name for name, _, _ in handle.plan.placed] == ["adapter"]
    assert all(find_streamed(parameter) is None for parameter in subject.adapter.parameters())
    for seed in range(2):
        assert equal(outputs(subject, seed), outputs(reference, seed))
    handle.remove()
    assert_same_weights(subject, reference)


def text_pipe(width: int) -> StableDiffusionPipeline:
    """A text encoder with a tokenizer; its vocabulary streams as a leaf where it is larger than a layer."""
    tokenizer = tiny_checkpoints._clip_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": width, "num_attention_heads": 2}
    torch.manual_seed(0)
    encoder = CLIPTextModel(CLIPTextConfig(**sizes, num_hidden_layers=3)).eval()
    rest = without("vae unet scheduler safety_checker feature_extractor")
    return StableDiffusionPipeline(text_encoder=encoder, tokenizer=tokenizer, **rest, requires_safety_checker=False)


def text_outputs(pipe: Any, text: str) -> list[torch.Tensor]:
    return run(pipe.text_encoder, {"input_ids": pipe.tokenizer(text, return_tensors="pt").input_ids})


CAT = "a <cat> in the snow"


def test_textual_inversion_beside_a_small_vocabulary() -> None:
    subject, reference = text_pipe(2000), text_pipe(2000)
    handle = subject.enable_distributed_layerwise_offload(components=["text_encoder"])
    assert not handle.plan.components[0].leaves
    base = text_outputs(reference, CAT)
    assert equal(text_outputs(subject, CAT), base)
    for pipe in (subject, reference):
        torch.manual_seed(3)  # new rows are drawn before they are filled
        pipe.load_textual_inversion({"<cat>": torch.linspace(-1, 1, 32)})
    wanted = text_outputs(reference, CAT)
    assert equal(text_outputs(subject, CAT), wanted) and not equal(wanted, base)
    for pipe in (subject, reference):
        pipe.unload_textual_inversion()
    assert equal(text_outputs(subject, CAT), text_outputs(reference, CAT))
    handle.remove()
    assert_same_weights(subject, reference)


def test_textual_inversion_and_a_streamed_vocabulary() -> None:
    subject, reference = text_pipe(40), text_pipe(40)
    known = len(subject.tokenizer)
    handle = subject.enable_distributed_layerwise_offload(components=["text_encoder"])
    assert [leaf.name for leaf in handle.plan.components[0].leaves] == ["embeddings.token_embedding"]
    cat = {"<cat>": torch.linspace(-1, 1, 32)}
    for call in (
        lambda: subject.load_textual_inversion(cat),
        lambda: subject.load_textual_inversion(cat, text_encoder=subject.text_encoder),
        lambda: subject.unload_textual_inversion("<cat>"),
        lambda: subject.text_encoder.resize_token_embeddings(known + 1),
        lambda: subject.text_encoder.set_input_embeddings(nn.Embedding(known, 32)),
    ):
        with pytest.raises(ValueError, match="is refused while 'text_encoder'.*vocabulary from placeholders.*before"):
            call()
    assert len(subject.tokenizer) == known
    assert equal(text_outputs(subject, CAT), text_outputs(reference, CAT))
    handle.remove()
    for pipe in (subject, reference):
        torch.manual_seed(3)
        pipe.load_textual_inversion(cat)
    handle = subject.enable_distributed_layerwise_offload(components=["text_encoder"])
    assert equal(text_outputs(subject, CAT), text_outputs(reference, CAT))
    handle.remove()
    assert_same_weights(subject, reference)


def _on_ranks(rank: int, size: int) -> None:
    check_ip_adapter("flux", early=True, rank=rank)
    check_ip_adapter("flux", early=False, rank=rank, host="pinned")
    check_ip_adapter("sdxl", early=False, rank=rank)
    check_controlnet(2, rank)


def test_ranks() -> None:
    run_ranks(2, _on_ranks)
