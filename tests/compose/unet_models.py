# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny UNets: every class that diffusers exports from `diffusers.models.unets` and that computes, with the arguments
its pipeline passes to one step. Must not compare anything.

A UNet calls its lists out of the order in which it registers them (down, middle, up, but `mid_block` comes last), its
blocks differ in size, and some are lists in lists.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    I2VGenXLUNet,
    Kandinsky3UNet,
    MotionAdapter,
    StableCascadeUNet,
    UNet1DModel,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
    UVit2DModel,
)
from diffusers.models.transformers import DualTransformer2DModel
from diffusers.models.unets import DreamLiteUNetModel
from torch import nn

from tests.drawing import integers, sampler, uniform
from tests.zoo import Tiny


def _sdxl(num_blocks: int) -> nn.Module:
    # The shape of SDXL: no attention in the first stage, `num_blocks` and more layers in each of the later ones,
    # linear projections, and sizes and a pooled prompt added to the time embedding.
    return UNet2DConditionModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 16, 24),
        layers_per_block=1,
        transformer_layers_per_block=(1, num_blocks, num_blocks + 1),
        attention_head_dim=(1, 2, 3),
        cross_attention_dim=20,
        use_linear_projection=True,
        norm_num_groups=4,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 12,
    )


def sdxl_inputs(seed: int) -> dict[str, Any]:
    """One guided step of SDXL: both prompts in one batch, with their pooled embeddings and their six sizes."""
    normal = sampler(seed)
    return {
        "sample": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0)[0],
        "encoder_hidden_states": normal(2, 5, 20),
        "added_cond_kwargs": {"text_embeds": normal(2, 12), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)},
        "return_dict": False,
    }


def _unet2d(num_blocks: int) -> nn.Module:
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=num_blocks,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def _unet2d_inputs(seed: int) -> dict[str, Any]:
    return {
        "sample": sampler(seed)(1, 3, 8, 8),
        "timestep": uniform(seed, 100.0, 900.0).long()[0],
        "return_dict": False,
    }


def _unet3d(num_blocks: int) -> nn.Module:
    return UNet3DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=num_blocks,
        norm_num_groups=4,
        cross_attention_dim=20,
        attention_head_dim=4,
    )


def _unet3d_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(2, 4, 3, 8, 8),
        "timestep": uniform(seed, 100.0, 900.0).long()[0],
        "encoder_hidden_states": normal(2, 5, 20),
        "return_dict": False,
    }


def _motion(num_blocks: int) -> nn.Module:
    # As AnimateDiff loads it: a UNet for pictures with the layers of a motion adapter between its own.
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=num_blocks,
        norm_num_groups=4,
        cross_attention_dim=20,
        attention_head_dim=2,
    )
    adapter = MotionAdapter(
        block_out_channels=(8, 16),
        motion_layers_per_block=1,
        motion_transformer_layers_per_block=num_blocks,
        motion_num_attention_heads=2,
        motion_norm_num_groups=4,
        motion_max_seq_length=4,
    )
    return UNetMotionModel.from_unet2d(unet, adapter)


def _motion_inputs(seed: int) -> dict[str, Any]:
    # The pipeline repeats the prompt for every frame.
    kwargs = _unet3d_inputs(seed)
    return {**kwargs, "encoder_hidden_states": kwargs["encoder_hidden_states"].repeat_interleave(3, dim=0)}


def _spatio_temporal(num_blocks: int) -> nn.Module:
    return UNetSpatioTemporalConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        layers_per_block=num_blocks,
        cross_attention_dim=20,
        num_attention_heads=(2, 4),
        num_frames=3,
    )


def _spatio_temporal_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(2, 3, 8, 8, 8),
        "timestep": uniform(seed, 0.1, 0.9)[0],
        "encoder_hidden_states": normal(2, 1, 20),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2),
        "return_dict": False,
    }


def _i2vgenxl(num_blocks: int) -> nn.Module:
    return I2VGenXLUNet(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=num_blocks,
        norm_num_groups=4,
        cross_attention_dim=20,
        attention_head_dim=4,
    )


def _i2vgenxl_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(2, 4, 3, 8, 8),
        "timestep": uniform(seed, 100.0, 900.0).long()[0],
        "fps": torch.tensor([16, 16]),
        "image_latents": normal(2, 4, 3, 8, 8),
        "image_embeddings": normal(2, 1, 20),
        "encoder_hidden_states": normal(2, 5, 20),
        "return_dict": False,
    }


def _kandinsky3(num_blocks: int) -> nn.Module:
    return Kandinsky3UNet(
        time_embedding_dim=24,
        groups=2,
        attention_head_dim=4,
        layers_per_block=num_blocks,
        block_out_channels=(8, 16, 24, 32),
        cross_attention_dim=20,
        encoder_hid_dim=12,
    )


def _kandinsky3_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0).long()[0],
        "encoder_hidden_states": normal(2, 5, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
        "return_dict": False,
    }


def _stable_cascade(num_blocks: int) -> nn.Module:
    # Stage C. The layers of a stage are a list in a list, and the repeat mappers a list that is mostly empty.
    return StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        timestep_ratio_embedding_dim=8,
        conditioning_dim=24,
        block_out_channels=(16, 24),
        num_attention_heads=(2, 3),
        down_num_layers_per_block=(1, num_blocks),
        up_num_layers_per_block=(num_blocks, 1),
        clip_text_in_channels=12,
        clip_text_pooled_in_channels=12,
        clip_image_in_channels=10,
        clip_seq=2,
        switch_level=(False,),
    )


def _stable_cascade_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep_ratio": uniform(seed, 0.1, 0.9).expand(2),
        "clip_text_pooled": normal(2, 1, 12),
        "clip_text": normal(2, 5, 12),
        "clip_img": normal(2, 1, 10),
        "return_dict": False,
    }


def _uvit(num_blocks: int) -> nn.Module:
    return UVit2DModel(
        hidden_size=24,
        cond_embed_dim=12,
        micro_cond_encode_dim=4,
        micro_cond_embed_dim=20,
        encoder_hidden_size=10,
        vocab_size=40,
        codebook_size=32,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=num_blocks,
        block_num_heads=2,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        intermediate_size=28,
        sample_size=4,
    )


def _uvit_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "input_ids": integers(seed, 0, 40, 2, 4, 4),
        "encoder_hidden_states": normal(2, 5, 10),
        "pooled_text_emb": normal(2, 12),
        "micro_conds": torch.tensor([[32.0, 32, 0, 0, 6]] * 2),
    }


def _dreamlite(num_blocks: int) -> nn.Module:
    return DreamLiteUNetModel(
        sample_size=8,
        block_out_channels=(8, 16, 24),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=20,
        transformer_layers_per_block=num_blocks,
        attention_head_dim=(2, 4, 6),
        ff_mult=2,
    )


def _picture_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "sample": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0)[0],
        "encoder_hidden_states": normal(2, 5, 20),
        "return_dict": False,
    }


def _dual(num_blocks: int) -> nn.Module:
    # The attention of a UNet that attends to two conditions: a list of two models, each with blocks of its own.
    return DualTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=16,
        num_layers=num_blocks,
        norm_num_groups=4,
        cross_attention_dim=20,
    )


def _dual_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    # The lengths of the two conditions are fixed by the class: 77 and 257 tokens.
    return {
        "hidden_states": normal(1, 16, 4, 4),
        "encoder_hidden_states": normal(1, 77 + 257, 20),
        "return_dict": False,
    }


def _unet1d(num_blocks: int) -> nn.Module:
    # Dance Diffusion; its depth is that of its list of stages.
    return UNet1DModel(
        sample_size=64,
        extra_in_channels=64,
        down_block_types=("DownBlock1DNoSkip",) + ("DownBlock1D",) * (num_blocks - 1) + ("AttnDownBlock1D",),
        up_block_types=("AttnUpBlock1D",) + ("UpBlock1D",) * (num_blocks - 1) + ("UpBlock1DNoSkip",),
        block_out_channels=(32,) * num_blocks + (64,),
    )


def _unet1d_inputs(seed: int) -> dict[str, Any]:
    return {"sample": sampler(seed)(1, 2, 64), "timestep": uniform(seed, 0.1, 0.9)[0], "return_dict": False}


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("UNet1DModel", _unet1d, _unet1d_inputs),
        Tiny("UNet2DConditionModel", _sdxl, sdxl_inputs),
        Tiny("UNet2DModel", _unet2d, _unet2d_inputs),
        Tiny("UNet3DConditionModel", _unet3d, _unet3d_inputs),
        Tiny("DualTransformer2DModel", _dual, _dual_inputs),
        Tiny("DreamLiteUNetModel", _dreamlite, _picture_inputs),
        Tiny("I2VGenXLUNet", _i2vgenxl, _i2vgenxl_inputs),
        Tiny("Kandinsky3UNet", _kandinsky3, _kandinsky3_inputs),
        Tiny("UNetMotionModel", _motion, _motion_inputs),
        Tiny("UNetSpatioTemporalConditionModel", _spatio_temporal, _spatio_temporal_inputs),
        Tiny("StableCascadeUNet", _stable_cascade, _stable_cascade_inputs),
        Tiny("UVit2DModel", _uvit, _uvit_inputs),
    )
}

REASONS: dict[str, str] = {
    "MotionAdapter": "never called: its layers become those of a `UNetMotionModel`, which streams",
}
