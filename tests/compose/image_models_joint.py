# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny configurations of the image transformers in which text and image are two streams, at least at first, and the
arguments that their pipelines pass to one denoising step. Must not run anything.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    CogView3PlusTransformer2DModel,
    CogView4Transformer2DModel,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    GlmImageTransformer2DModel,
    HiDreamImageTransformer2DModel,
    HunyuanImageTransformer2DModel,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    LongCatImageTransformer2DModel,
    OvisImageTransformer2DModel,
)
from torch import nn

from tests.drawing import grid, integers, sampler, uniform
from tests.zoo import Tiny


ROWS, COLS, TEXT = 3, 4, 5


def _aura_flow(num_blocks: int) -> nn.Module:
    # Two stacks. The feed-forward layers are as wide as they can be small: a multiple of 256.
    return AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=num_blocks,
        num_single_dit_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=16,
        pos_embed_max_size=16,
    )


def _aura_flow_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "timestep": uniform(seed, 0.1, 0.9, 2),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _bria(num_blocks: int) -> nn.Module:
    # Two stacks.
    return BriaTransformer2DModel(
        in_channels=16,
        num_layers=num_blocks,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=[4, 6, 6],
    )


def _bria_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, ROWS * COLS, 16),
        "timestep": uniform(seed, 100.0, 900.0, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "attention_kwargs": None,
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": grid(ROWS, COLS),
        "return_dict": False,
    }


# Seven blocks whatever their split, because a step passes one text layer for each.
_BRIA_FIBO_BLOCKS = 7


def _bria_fibo(num_blocks: int) -> nn.Module:
    # Two stacks, and a list of one projection a block that is not declared as blocks.
    return BriaFiboTransformer2DModel(
        in_channels=16,
        num_layers=num_blocks,
        num_single_layers=_BRIA_FIBO_BLOCKS - num_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=[4, 6, 6],
        text_encoder_dim=12,
    )


def _bria_fibo_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, ROWS * COLS, 16),
        "timestep": uniform(seed, 100.0, 900.0, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "text_encoder_layers": [normal(2, TEXT, 12) for _ in range(_BRIA_FIBO_BLOCKS)],
        "joint_attention_kwargs": None,
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": grid(ROWS, COLS),
        "return_dict": False,
    }


def _chroma(num_blocks: int) -> nn.Module:
    # Two stacks, modulated by slices of what one small network makes; its own layers are not declared as blocks.
    return ChromaTransformer2DModel(
        in_channels=16,
        num_layers=num_blocks,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=20,
        approximator_layers=2,
    )


def _chroma_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    # The prompt is padded, the image is not.
    mask = torch.ones(1, TEXT + ROWS * COLS)
    mask[:, TEXT - 2 : TEXT] = 0
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "txt_ids": torch.zeros(TEXT, 3),
        "img_ids": grid(ROWS, COLS),
        "attention_mask": mask,
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def _cogview3plus(num_blocks: int) -> nn.Module:
    # One stack. The positions are a buffer that is not saved.
    return CogView3PlusTransformer2DModel(
        in_channels=4,
        num_layers=num_blocks,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=24,
        time_embed_dim=20,
        condition_dim=8,
        pos_embed_max_size=8,
        sample_size=8,
    )


def _cogview3plus_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "timestep": uniform(seed, 100.0, 900.0, 2).long(),
        "original_size": torch.tensor([[64.0, 48.0]]).repeat(2, 1),
        "target_size": torch.tensor([[64.0, 48.0]]).repeat(2, 1),
        "crop_coords": torch.tensor([[0.0, 8.0]]).repeat(2, 1),
        "return_dict": False,
    }


def _cogview4(num_blocks: int) -> nn.Module:
    # One stack.
    return CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=num_blocks,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=24,
        time_embed_dim=20,
        condition_dim=8,
        pos_embed_max_size=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )


def _cogview4_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "timestep": uniform(seed, 100.0, 900.0),
        "original_size": torch.tensor([[64.0, 48.0]]),
        "target_size": torch.tensor([[64.0, 48.0]]),
        "crop_coords": torch.tensor([[0.0, 8.0]]),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _flux2(num_blocks: int) -> nn.Module:
    # Two stacks; modulation is made once for all blocks of a stack.
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=num_blocks,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_guidance_channels=20,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _flux2_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    text_ids = torch.zeros(1, TEXT, 4)
    text_ids[..., 3] = torch.arange(TEXT)
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "guidance": torch.tensor([4.0]),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "txt_ids": text_ids,
        "img_ids": grid(ROWS, COLS, axes=4)[None],
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


def _flux3(num_blocks: int) -> nn.Module:
    # Four stacks, of which the two of images are lists in a `ModuleDict`, registered before that of the text, which is
    # called first.
    return Flux3Transformer2DModel(
        in_channels=16,
        cond_in_channels=12,
        num_layers=num_blocks,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_channels=20,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _flux3_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    text_ids = torch.zeros(TEXT, 4)
    text_ids[:, 3] = torch.arange(TEXT)
    condition_ids = grid(2, 2, axes=4)
    condition_ids[:, 3] = -1
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "timestep": uniform(seed, 0.1, 0.9),
        "img_ids": grid(ROWS, COLS, axes=4),
        "txt_ids": text_ids,
        "image_cond_hidden_states": normal(1, 4, 12),
        "image_cond_ids": condition_ids,
        "return_dict": False,
    }


def _glm_image(num_blocks: int) -> nn.Module:
    # One stack. The vocabulary of prior tokens is larger than a block, and so a leaf.
    return GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=num_blocks,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=24,
        time_embed_dim=20,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=800,
    )


def _glm_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    tokens = integers(seed, 0, 800, 1, 4 * 3)
    return {
        "hidden_states": normal(1, 4, 8, 6),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "prior_token_id": tokens,
        "prior_token_drop": tokens % 3 == 0,
        "timestep": uniform(seed, 100.0, 900.0) - 1,
        "target_size": torch.tensor([[64.0, 48.0]]),
        "crop_coords": torch.tensor([[0.0, 8.0]]),
        "attention_kwargs": None,
        "kv_caches": None,
        "return_dict": False,
    }


_LLAMA_LAYERS = 4


def _hidream_image(num_blocks: int) -> nn.Module:
    # Two stacks of blocks inside wrappers whose class is not the declared one, each with a mixture of experts, which
    # is a list inside the block; and one text projection a block.
    single = 2
    return HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=num_blocks,
        num_single_layers=single,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[24, 20],
        text_emb_dim=18,
        num_routed_experts=3,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 8),
        llama_layers=[block % _LLAMA_LAYERS for block in range(num_blocks + single)],
    )


def _hidream_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "timesteps": uniform(seed, 100.0, 900.0, 2),
        "encoder_hidden_states_t5": normal(2, TEXT, 24),
        "encoder_hidden_states_llama3": normal(_LLAMA_LAYERS, 2, TEXT, 20),
        "pooled_embeds": normal(2, 18),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _hunyuan_image(num_blocks: int) -> nn.Module:
    # Two stacks, and refiner blocks of an undeclared class in `context_embedder`. Distilled: guidance and mean flow.
    return HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=num_blocks,
        num_single_layers=3,
        num_refiner_layers=2,
        mlp_ratio=2.0,
        guidance_embeds=True,
        text_embed_dim=24,
        rope_axes_dim=(8, 8),
        use_meanflow=True,
    )


def _hunyuan_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    timestep = uniform(seed, 500.0, 900.0)
    return {
        "hidden_states": normal(1, 4, ROWS, COLS),
        "timestep": timestep,
        "timestep_r": timestep - 200,
        "guidance": torch.tensor([3500.0]),
        "attention_kwargs": None,
        "encoder_hidden_states": normal(1, TEXT, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "return_dict": False,
    }


def _joy_image(cls: type[nn.Module], num_blocks: int) -> nn.Module:
    # One stack.
    return cls(
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=24,
        mlp_width_ratio=2.0,
        num_layers=num_blocks,
        rope_dim_list=[4, 6, 6],
    )


def _joy_image_edit(num_blocks: int) -> nn.Module:
    return _joy_image(JoyImageEditTransformer3DModel, num_blocks)


def _joy_image_edit_inputs(seed: int) -> dict[str, Any]:
    # The image to edit, then the one to make.
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 2, 4, 1, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "return_dict": False,
    }


def _joy_image_edit_plus(num_blocks: int) -> nn.Module:
    return _joy_image(JoyImageEditPlusTransformer3DModel, num_blocks)


def _joy_image_edit_plus_inputs(seed: int) -> dict[str, Any]:
    # Two samples of images of several sizes: 4 + 6 patches, and 6 with padding.
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 10, 4, 1, 2, 2),
        "timestep": uniform(seed, 100.0, 900.0, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "shape_list": [[(1, 2, 2), (1, 2, 3)], [(1, 3, 2)]],
        "return_dict": False,
    }


def _longcat_image(num_blocks: int) -> nn.Module:
    # Two stacks.
    return LongCatImageTransformer2DModel(
        in_channels=16,
        num_layers=num_blocks,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=[4, 6, 6],
    )


def _longcat_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "guidance": None,
        "encoder_hidden_states": normal(1, TEXT, 24),
        "txt_ids": grid(1, TEXT),
        "img_ids": grid(ROWS, COLS, plane=1),
        "return_dict": False,
    }


def _ovis_image(num_blocks: int) -> nn.Module:
    # Two stacks, with gated feed-forward layers.
    return OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=num_blocks,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )


def _ovis_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "txt_ids": grid(1, TEXT),
        "img_ids": grid(ROWS, COLS),
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


JOINT: tuple[Tiny, ...] = (
    Tiny("AuraFlowTransformer2DModel", _aura_flow, _aura_flow_inputs),
    Tiny("BriaTransformer2DModel", _bria, _bria_inputs),
    Tiny("BriaFiboTransformer2DModel", _bria_fibo, _bria_fibo_inputs),
    Tiny("ChromaTransformer2DModel", _chroma, _chroma_inputs),
    Tiny("CogView3PlusTransformer2DModel", _cogview3plus, _cogview3plus_inputs),
    Tiny("CogView4Transformer2DModel", _cogview4, _cogview4_inputs),
    Tiny("Flux2Transformer2DModel", _flux2, _flux2_inputs),
    Tiny("Flux3Transformer2DModel", _flux3, _flux3_inputs),
    Tiny("GlmImageTransformer2DModel", _glm_image, _glm_image_inputs),
    Tiny("HiDreamImageTransformer2DModel", _hidream_image, _hidream_image_inputs),
    Tiny("HunyuanImageTransformer2DModel", _hunyuan_image, _hunyuan_image_inputs),
    Tiny("JoyImageEditTransformer3DModel", _joy_image_edit, _joy_image_edit_inputs),
    Tiny("JoyImageEditPlusTransformer3DModel", _joy_image_edit_plus, _joy_image_edit_plus_inputs),
    Tiny("LongCatImageTransformer2DModel", _longcat_image, _longcat_image_inputs),
    Tiny("OvisImageTransformer2DModel", _ovis_image, _ovis_image_inputs),
)
