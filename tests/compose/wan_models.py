# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny configurations of the video transformers that descend from Wan, by class name, with the arguments their
pipelines pass. Must not run anything.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import nn

from tests.drawing import sampler, uniform
from tests.zoo import Tiny


_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 20,
    "freq_dim": 32,
    "ffn_dim": 40,
    "rope_max_seq_len": 32,
}


def _anyflow(num_blocks: int) -> nn.Module:
    return diffusers.AnyFlowTransformer3DModel(num_layers=num_blocks, **_WAN)


def _anyflow_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames = 2
    timestep = uniform(seed, 500.0, 900.0).expand(1, frames)
    return {
        "hidden_states": normal(1, frames, 4, 4, 6),
        "timestep": timestep,
        "r_timestep": timestep - 200.0,
        "encoder_hidden_states": normal(1, 6, 20),
        "return_dict": False,
    }


_FAR_CHUNKS = (1, 2, 2)  # frames, of 4 x 8 latents: 8 tokens, and 2 once compressed


def _anyflowfar(num_blocks: int) -> nn.Module:
    return diffusers.AnyFlowFARTransformer3DModel(
        num_layers=num_blocks, full_chunk_limit=2, chunk_partition=_FAR_CHUNKS, **_WAN
    )


def anyflowfar_cache(num_blocks: int) -> dict[int, dict[str, torch.Tensor]]:
    """An empty cache of keys and values, as the pipeline makes it: full chunks apart from compressed ones."""
    longest = max(_FAR_CHUNKS)
    return {
        index: {
            "full_cache": torch.zeros(2, 1, 2, 2 * longest * 8, 12),
            "compressed_cache": torch.zeros(2, 1, 2, (len(_FAR_CHUNKS) - 2 + 1) * longest * 2, 12),
        }
        for index in range(num_blocks)
    }


def anyflowfar_step(
    latents: torch.Tensor, prompt: torch.Tensor, chunks: int, timestep: float, cache: dict, write: bool
) -> dict[str, Any]:
    """
    The arguments of one forward on the last of `chunks` chunks, or, to `write` the cache, on all of them at time zero.
    """
    frames = latents.shape[1]
    return {
        "hidden_states": latents,
        "timestep": torch.full((1, frames), timestep),
        "r_timestep": torch.full((1, frames), timestep / 2),
        "encoder_hidden_states": prompt,
        "chunk_partition": list(_FAR_CHUNKS[:chunks]),
        "kv_cache": cache,
        "kv_cache_flag": {"num_cached_chunks": chunks - 1, "is_cache_step": write},
        "return_dict": False,
    }


def _anyflowfar_inputs(seed: int) -> dict[str, Any]:
    # The first chunk, which is attended to by no cache. A cache longer than the model is one for any block count.
    normal = sampler(seed)
    time = uniform(seed, 500.0, 900.0).item()
    return anyflowfar_step(normal(1, _FAR_CHUNKS[0], 4, 4, 8), normal(1, 6, 20), 1, time, anyflowfar_cache(8), False)


def _chronoedit(num_blocks: int) -> nn.Module:
    return diffusers.ChronoEditTransformer3DModel(
        num_layers=num_blocks, image_dim=10, added_kv_proj_dim=24, rope_temporal_skip_len=8, **_WAN
    )


def _chronoedit_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    # Two frames, the picture and its edit: the model sets them eight steps apart.
    return {
        "hidden_states": normal(1, 4, 2, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0).long(),
        "encoder_hidden_states": normal(1, 6, 20),
        "encoder_hidden_states_image": normal(1, 3, 10),
        "return_dict": False,
    }


def _skyreels(num_blocks: int) -> nn.Module:
    return diffusers.SkyReelsV2Transformer3DModel(
        num_layers=num_blocks, inject_sample_info=True, num_frame_per_block=2, **_WAN
    )


def _skyreels_inputs(seed: int) -> dict[str, Any]:
    # Diffusion forcing: each frame has its own time, the two of a causal block the same.
    normal = sampler(seed)
    time = uniform(seed, 100.0, 400.0)
    return {
        "hidden_states": normal(1, 4, 4, 4, 6),
        "timestep": torch.stack([time, time, 2 * time, 2 * time], dim=1).long(),
        "encoder_hidden_states": normal(1, 6, 20),
        "enable_diffusion_forcing": True,
        "fps": [1],
        "return_dict": False,
    }


def _wanvace(num_blocks: int) -> nn.Module:
    # Two stacks of unequal blocks: control blocks for the first and the last layer, all called before the layers.
    return diffusers.WanVACETransformer3DModel(
        num_layers=num_blocks, vace_layers=sorted({0, num_blocks - 1}), vace_in_channels=6, **_WAN
    )


def _wanvace_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 3, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0).long(),
        "encoder_hidden_states": normal(1, 6, 20),
        "control_hidden_states": normal(1, 6, 2, 4, 6),
        "return_dict": False,
    }


def _wananimate(num_blocks: int) -> nn.Module:
    # Besides the blocks: residual blocks in the motion encoder, called once per batch of faces, and face adapters,
    # one behind each block.
    config = {**_WAN, "in_channels": 12, "latent_channels": 4}
    return diffusers.WanAnimateTransformer3DModel(
        num_layers=num_blocks,
        image_dim=10,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 12, "8": 10, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=12,
        motion_dim=5,
        motion_encoder_dim=14,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=1,
        motion_encoder_batch_size=3,
        **config,
    )


def _wananimate_inputs(seed: int) -> dict[str, Any]:
    # Three latent frames, the first of the character, and five frames of its face in batches of three and two.
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 12, 3, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0).long(),
        "encoder_hidden_states": normal(1, 6, 20),
        "encoder_hidden_states_image": normal(1, 3, 10),
        "pose_hidden_states": normal(1, 4, 2, 4, 6),
        "face_pixel_values": normal(1, 3, 5, 16, 16),
        "motion_encode_batch_size": 3,
        "return_dict": False,
    }


def _wananimate2(num_blocks: int) -> nn.Module:
    return diffusers.WanAnimate2Transformer3DModel(
        num_layers=num_blocks,
        text_len=6,
        in_dim=8,
        dim=24,
        ffn_dim=40,
        freq_dim=32,
        text_dim=20,
        out_dim=4,
        num_heads=2,
    )


def wananimate2_step(
    latents: torch.Tensor, seed: int, timestep: torch.Tensor, cache: WanAnimate2KVCache, mode: str
) -> dict[str, Any]:
    """
    The arguments of one forward: over the frames of the driving video, whose keys and values it puts into the cache
    (`mode` is `"extract"`), or over those that are made, which attend to it (`"cached"`).
    """
    normal = sampler(seed)
    grid = torch.tensor([[latents.shape[1], latents.shape[2] // 2, latents.shape[3] // 2]])
    reference = {"offset_grid_sizes": grid}
    if mode == "cached":
        reference = {"reference_grid_sizes": grid - torch.tensor([[1, 0, 0]])}
        reference |= {"origin_len": 5, "origin_area": [32, 48]}
    return {
        "hidden_states": [latents],
        "timestep": timestep,
        "encoder_hidden_states": [normal(4, 20)],
        "encoder_hidden_states_image": normal(1, 3, 1280),
        "condition_latents": [normal(4, *latents.shape[1:])],
        "kv_cache": cache,
        "kv_cache_mode": mode,
        "seq_len": int(grid.prod()),
        **reference,
    }


def _wananimate2_inputs(seed: int) -> dict[str, Any]:
    latents = sampler(seed + 1)(4, 2, 4, 6)
    return wananimate2_step(latents, seed, uniform(seed, 100.0, 900.0), WanAnimate2KVCache(8), "extract")


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("AnyFlowFARTransformer3DModel", _anyflowfar, _anyflowfar_inputs),
        Tiny("AnyFlowTransformer3DModel", _anyflow, _anyflow_inputs),
        Tiny("ChronoEditTransformer3DModel", _chronoedit, _chronoedit_inputs),
        Tiny("SkyReelsV2Transformer3DModel", _skyreels, _skyreels_inputs),
        Tiny("WanAnimate2Transformer3DModel", _wananimate2, _wananimate2_inputs),
        Tiny("WanAnimateTransformer3DModel", _wananimate, _wananimate_inputs),
        Tiny("WanVACETransformer3DModel", _wanvace, _wanvace_inputs),
    )
}
