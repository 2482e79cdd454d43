# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny ControlNets: every class that diffusers exports from `diffusers.models.controlnets` and that computes, with
the arguments its pipeline passes to one step. Must not compare anything.

Their outputs are lists of residuals, one for each block, which the layers of a second list (`controlnet_blocks`) make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    CosmosControlNetModel,
    FluxControlNetModel,
    FluxMultiControlNetModel,
    HunyuanDiT2DControlNetModel,
    HunyuanDiT2DMultiControlNetModel,
    MultiControlNetModel,
    QwenImageControlNetModel,
    QwenImageMultiControlNetModel,
    SanaControlNetModel,
    SD3ControlNetModel,
    SD3MultiControlNetModel,
    SparseControlNetModel,
    UNetControlNetXSModel,
    ZImageControlNetModel,
    ZImageTransformer2DModel,
)
from diffusers.models.controlnets import MultiControlNetUnionModel
from torch import nn

from tests.drawing import sampler, uniform
from tests.zoo import MODELS as TRANSFORMERS
from tests.zoo import Tiny

from .unet_models import sdxl_inputs


# How many nets stand side by side in the Multi forms.
_NETS = 2


def _multi(cls: type[nn.Module], one: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """Nets of the same configuration and other weights in one: its list of nets is a `ModuleList` of models."""
    return lambda num_blocks: cls([one(num_blocks) for _ in range(_NETS)])


def _listed(inputs: Callable[[int], dict[str, Any]], **options: Any) -> Callable[[int], dict[str, Any]]:
    """The picture and the scale of each net, and what else comes once for each."""

    def many(seed: int) -> dict[str, Any]:
        kwargs = inputs(seed)
        other = inputs(seed + 500)
        kwargs["controlnet_cond"] = [kwargs["controlnet_cond"], other["controlnet_cond"]]
        kwargs["conditioning_scale"] = [0.7, 0.4]
        return {**kwargs, **options}

    return many


_SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "block_out_channels": (8, 16),
    "cross_attention_dim": 20,
    "use_linear_projection": True,
    "norm_num_groups": 4,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 12,
    "conditioning_embedding_out_channels": (4, 6, 8),
}


def _sdxl(num_blocks: int) -> nn.Module:
    return ControlNetModel(
        **_SDXL, attention_head_dim=(1, 2), layers_per_block=1, transformer_layers_per_block=(1, num_blocks)
    )


def _sdxl_inputs(seed: int) -> dict[str, Any]:
    picture = sampler(seed + 7)(1, 3, 32, 32)
    return {**sdxl_inputs(seed), "controlnet_cond": picture.repeat(2, 1, 1, 1), "conditioning_scale": 0.7}


def _union(num_blocks: int) -> nn.Module:
    return ControlNetUnionModel(
        **_SDXL,
        attention_head_dim=(1, 2),
        layers_per_block=1,
        transformer_layers_per_block=(1, num_blocks),
        num_control_type=3,
        num_trans_channel=8,
        num_trans_head=2,
        num_trans_layer=num_blocks,
        num_proj_channel=8,
    )


def _union_inputs(seed: int) -> dict[str, Any]:
    kwargs = _sdxl_inputs(seed)
    pictures = [sampler(seed + 7 + kind)(1, 3, 32, 32).repeat(2, 1, 1, 1) for kind in range(2)]
    return {
        **kwargs,
        "controlnet_cond": pictures,
        "control_type": torch.tensor([[1.0, 0.0, 1.0]] * 2),
        "control_type_idx": [0, 2],
        "conditioning_scale": [0.7, 0.4],
    }


def _multi_union_inputs(seed: int) -> dict[str, Any]:
    kwargs = _sdxl_inputs(seed)
    pictures = [sampler(seed + 7 + kind)(1, 3, 32, 32).repeat(2, 1, 1, 1) for kind in range(2)]
    return {
        **kwargs,
        "controlnet_cond": [[pictures[0]], [pictures[1]]],
        "control_type": [torch.tensor([[1.0, 0.0, 0.0]] * 2), torch.tensor([[0.0, 0.0, 1.0]] * 2)],
        "control_type_idx": [[0], [2]],
        "conditioning_scale": [[0.7], [0.4]],
    }


def _sparse(num_blocks: int) -> nn.Module:
    return SparseControlNetModel(
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        layers_per_block=num_blocks,
        norm_num_groups=4,
        cross_attention_dim=20,
        attention_head_dim=2,
        motion_max_seq_length=4,
        motion_num_attention_heads=2,
    )


def _sparse_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(2, 4, 3, 8, 8),
        "timestep": uniform(seed, 100.0, 900.0).long()[0],
        "encoder_hidden_states": normal(2, 5, 20).repeat_interleave(3, dim=0),
        "controlnet_cond": normal(2, 4, 3, 8, 8),
        # The first frame alone is given.
        "conditioning_mask": torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1, 1).expand(2, 1, 3, 8, 8),
        "conditioning_scale": 0.7,
        "return_dict": False,
    }


def _xs(num_blocks: int) -> nn.Module:
    # A UNet and a narrow net beside it, block by block in one model: each block holds layers of both.
    return UNetControlNetXSModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
        cross_attention_dim=20,
        transformer_layers_per_block=(1, num_blocks),
        num_attention_heads=2,
        ctrl_conditioning_embedding_out_channels=(4, 6, 8),
        ctrl_block_out_channels=(4, 8),
        ctrl_num_attention_heads=2,
        ctrl_max_norm_num_groups=4,
    )


def _xs_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0)[0],
        "encoder_hidden_states": normal(2, 5, 20),
        "controlnet_cond": normal(1, 3, 32, 32).repeat(2, 1, 1, 1),
        "conditioning_scale": 0.7,
        "return_dict": False,
    }


def _flux(num_blocks: int) -> nn.Module:
    # The union net: its mode is embedded before the prompt.
    return FluxControlNetModel(
        num_layers=num_blocks,
        num_single_layers=num_blocks - 1,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=True,
        axes_dims_rope=[4, 6, 6],
        num_mode=3,
    )


def _flux_inputs(seed: int) -> dict[str, Any]:
    return {
        **TRANSFORMERS["flux"].inputs(seed),
        "controlnet_cond": sampler(seed + 7)(1, 12, 16),
        "controlnet_mode": torch.tensor([[seed % 3]]),
        "conditioning_scale": 0.7,
    }


def _sd3(num_blocks: int) -> nn.Module:
    return SD3ControlNetModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        sample_size=8,
        pos_embed_max_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        extra_conditioning_channels=1,
    )


def _sd3_inputs(seed: int) -> dict[str, Any]:
    picture = sampler(seed + 7)(1, 5, 8, 6)
    return {
        **TRANSFORMERS["sd3"].inputs(seed),
        "controlnet_cond": picture.repeat(2, 1, 1, 1),
        "conditioning_scale": 0.7,
    }


def _qwenimage(num_blocks: int) -> nn.Module:
    return QwenImageControlNetModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        out_channels=4,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        extra_condition_channels=4,
    )


def _qwenimage_inputs(seed: int) -> dict[str, Any]:
    return {
        **TRANSFORMERS["qwenimage"].inputs(seed),
        "controlnet_cond": sampler(seed + 7)(1, 12, 20),
        "conditioning_scale": 0.7,
    }


def _sana(num_blocks: int) -> nn.Module:
    return SanaControlNetModel(
        in_channels=4,
        out_channels=4,
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        num_cross_attention_heads=3,
        cross_attention_head_dim=8,
        cross_attention_dim=24,
        caption_channels=20,
        sample_size=8,
    )


def _sana_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "encoder_hidden_states": normal(2, 5, 20),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "controlnet_cond": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "conditioning_scale": 0.7,
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
        "return_dict": False,
    }


def _hunyuandit(num_blocks: int) -> nn.Module:
    # Half as many blocks as the transformer it is made for, rounded down and one less.
    return HunyuanDiT2DControlNetModel(
        conditioning_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=32,
        transformer_num_layers=2 * num_blocks + 2,
        mlp_ratio=2.0,
        cross_attention_dim=24,
        cross_attention_dim_t5=16,
        pooled_projection_dim=12,
        text_len=4,
        text_len_t5=6,
    )


def _hunyuandit_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    angles = torch.outer(torch.arange(16.0), torch.arange(1.0, 9.0)).repeat_interleave(2, dim=1)
    return {
        "hidden_states": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "controlnet_cond": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "conditioning_scale": 0.7,
        "encoder_hidden_states": normal(2, 4, 24),
        "text_embedding_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]),
        "encoder_hidden_states_t5": normal(2, 6, 16),
        "text_embedding_mask_t5": torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]),
        "image_meta_size": torch.tensor([[64.0, 64, 64, 64, 0, 0]] * 2),
        "style": torch.tensor([0, 0]),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "return_dict": False,
    }


def _cosmos(num_blocks: int) -> nn.Module:
    return CosmosControlNetModel(
        n_controlnet_blocks=num_blocks,
        in_channels=6,
        latent_channels=6,
        model_channels=32,
        num_attention_heads=2,
        attention_head_dim=16,
        mlp_ratio=2.0,
        text_embed_dim=24,
        adaln_lora_dim=8,
        max_size=(4, 8, 8),
        encoder_hidden_states_channels=24,
    )


def _cosmos_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "controls_latents": normal(1, 4, 2, 8, 8),
        "latents": normal(1, 4, 2, 8, 8),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, 5, 24),
        "condition_mask": torch.zeros(1, 1, 2, 8, 8),
        "conditioning_scale": 0.7,
        "padding_mask": torch.zeros(1, 1, 8, 8),
        "fps": 16,
        "return_dict": False,
    }


def _zimage(num_blocks: int) -> nn.Module:
    # Its embedders and refiners are the transformer's own modules.
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=num_blocks,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=24,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 16, 16],
    )
    net = ZImageControlNetModel(
        control_layers_places=list(range(num_blocks)),
        control_refiner_layers_places=[0, 1],
        control_in_dim=5,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
    )
    return ZImageControlNetModel.from_transformer(net, transformer)


def _zimage_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "x": [normal(4, 1, 8, 8)],
        "t": uniform(seed, 0.1, 0.9),
        "cap_feats": [normal(6, 24)],
        "control_context": [normal(5, 1, 8, 8)],
        "conditioning_scale": 0.7,
    }


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("ControlNetModel", _sdxl, _sdxl_inputs),
        Tiny("ControlNetUnionModel", _union, _union_inputs),
        Tiny("CosmosControlNetModel", _cosmos, _cosmos_inputs),
        Tiny("FluxControlNetModel", _flux, _flux_inputs),
        Tiny("HunyuanDiT2DControlNetModel", _hunyuandit, _hunyuandit_inputs),
        Tiny("QwenImageControlNetModel", _qwenimage, _qwenimage_inputs),
        Tiny("SanaControlNetModel", _sana, _sana_inputs),
        Tiny("SD3ControlNetModel", _sd3, _sd3_inputs),
        Tiny("SparseControlNetModel", _sparse, _sparse_inputs),
        Tiny("UNetControlNetXSModel", _xs, _xs_inputs),
        Tiny("ZImageControlNetModel", _zimage, _zimage_inputs),
        Tiny("MultiControlNetModel", _multi(MultiControlNetModel, _sdxl), _listed(_sdxl_inputs)),
        Tiny("MultiControlNetUnionModel", _multi(MultiControlNetUnionModel, _union), _multi_union_inputs),
        Tiny(
            "FluxMultiControlNetModel",
            _multi(FluxMultiControlNetModel, _flux),
            _listed(_flux_inputs, controlnet_mode=[torch.tensor([0]), torch.tensor([2])]),
        ),
        Tiny(
            "HunyuanDiT2DMultiControlNetModel",
            _multi(HunyuanDiT2DMultiControlNetModel, _hunyuandit),
            _listed(_hunyuandit_inputs),
        ),
        # Of a single net, asked for several pictures.
        Tiny(
            "QwenImageMultiControlNetModel",
            lambda num_blocks: QwenImageMultiControlNetModel([_qwenimage(num_blocks)]),
            _listed(_qwenimage_inputs),
        ),
        Tiny("SD3MultiControlNetModel", _multi(SD3MultiControlNetModel, _sd3), _listed(_sd3_inputs)),
    )
}

REASONS: dict[str, str] = {
    "ControlNetXSAdapter": "never called: its layers become those of a `UNetControlNetXSModel`, which streams",
    "SparseControlNetConditioningEmbedding": "a few convolutions inside `SparseControlNetModel`, which streams",
}
