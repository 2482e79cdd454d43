# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny configurations of diffusers' video transformers, by class name, with the arguments their pipelines pass.
Must not run anything. The Wan family is in `wan_models.py` and part of `MODELS` here.

Stacks have at least two blocks where the class allows, and differ in length where they differ in kind, so that a
mixed-up weight is a shape error or a changed bit.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn

from tests.compose import wan_models
from tests.drawing import sampler, uniform
from tests.zoo import Tiny


# Classes that cannot stream, and why.
REASONS: dict[str, str] = {}


def _allegro(num_blocks: int) -> nn.Module:
    return diffusers.AllegroTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=20,
        sample_height=4,
        sample_width=6,
        sample_frames=2,
    )


def _allegro_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols = 2, 2, 3
    # As the pipeline's rotary positions: cosines and sines of a third of the head per axis, and the grid.
    angles = [torch.outer(torch.arange(size).float(), torch.ones(2)).repeat(1, 2) for size in (frames, rows, cols)]
    freqs = tuple((angle.cos(), angle.sin()) for angle in angles)
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(cols)).T
    return {
        "hidden_states": normal(1, 4, frames, 4, 6).repeat(2, 1, 1, 1, 1),
        "encoder_hidden_states": normal(2, 1, 5, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "image_rotary_emb": (freqs, tuple(axis.reshape(1, -1) for axis in grid)),
        "return_dict": False,
    }


def _consisid(num_blocks: int) -> nn.Module:
    # Stacks in a list of lists that nobody calls, and a list of adapters called between the blocks, one per block.
    return diffusers.ConsisIDTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=8,
        out_channels=4,
        time_embed_dim=20,
        text_embed_dim=28,
        sample_width=6,
        sample_height=4,
        sample_frames=5,
        max_text_seq_length=5,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=1,
        cross_attn_dim_head=6,
        cross_attn_num_heads=2,
        LFE_id_dim=12,
        LFE_vit_dim=10,
        LFE_depth=4,
        LFE_dim_head=6,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=3,
        LFE_output_dim=16,
        LFE_ff_mult=1,
        LFE_num_scale=2,
    )


def _consisid_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    angles = normal(2 * 2 * 3, 8)
    return {
        "hidden_states": normal(2, 2, 8, 4, 6),
        "encoder_hidden_states": normal(2, 5, 28),
        "timestep": uniform(seed, 100.0, 900.0).long().expand(2),
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "id_cond": normal(2, 12),
        "id_vit_hidden": [normal(2, 4, 10) for _ in range(2)],
        "return_dict": False,
    }


def _cosmos(num_blocks: int) -> nn.Module:
    # The 2.5 flavour: a projected prompt, an image context in every block. No padding mask: it needs torchvision.
    return diffusers.CosmosTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=5,
        out_channels=4,
        mlp_ratio=1.5,
        text_embed_dim=20,
        adaln_lora_dim=12,
        max_size=(4, 8, 8),
        concat_padding_mask=False,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=28,
        encoder_hidden_states_channels=20,
        img_context_dim_in=10,
        img_context_num_tokens=3,
        img_context_dim_out=32,
    )


def _cosmos_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames = 2
    # Video-to-world: the first frame is given, so it is at time zero.
    timestep = torch.cat([torch.zeros(1), uniform(seed, 0.1, 0.9)]).view(1, 1, frames, 1, 1)
    return {
        "hidden_states": normal(1, 4, frames, 4, 6),
        "condition_mask": torch.tensor([1.0, 0.0]).view(1, 1, frames, 1, 1).expand(1, 1, frames, 4, 6),
        "timestep": timestep,
        "encoder_hidden_states": (normal(1, 6, 28), normal(1, 3, 10)),
        "return_dict": False,
    }


def _easyanimate(num_blocks: int) -> nn.Module:
    # Unequal blocks: the last has one stream instead of two.
    return diffusers.EasyAnimateTransformer3DModel(
        num_layers=num_blocks,
        mmdit_layers=max(1, num_blocks - 1),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8,
        out_channels=4,
        patch_size=2,
        sample_width=6,
        sample_height=4,
        time_embed_dim=12,
        add_norm_text_encoder=True,
        text_embed_dim=20,
    )


def _easyanimate_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, 2, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "encoder_hidden_states": normal(2, 5, 20),
        "control_latents": normal(2, 4, 2, 4, 6),
        "return_dict": False,
    }


def _helios(num_blocks: int) -> nn.Module:
    return diffusers.HeliosTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        freq_dim=32,
        ffn_dim=40,
        rope_dim=(4, 4, 4),
        is_amplify_history=True,
    )


def _helios_inputs(seed: int) -> dict[str, Any]:
    # A chunk of two frames behind a history of four long, two middle, and two short (the first frame and the last).
    normal = sampler(seed)
    prefix, long, middle, short, current = torch.arange(1 + 4 + 2 + 1 + 2).split([1, 4, 2, 1, 2])
    return {
        "hidden_states": normal(1, 4, 2, 4, 8),
        "timestep": uniform(seed, 100.0, 900.0).long(),
        "encoder_hidden_states": normal(1, 6, 20),
        "indices_hidden_states": current[None],
        "indices_latents_history_short": torch.cat([prefix, short])[None],
        "indices_latents_history_mid": middle[None],
        "indices_latents_history_long": long[None],
        "latents_history_short": normal(1, 4, 2, 4, 8),
        "latents_history_mid": normal(1, 4, 2, 4, 8),
        "latents_history_long": normal(1, 4, 4, 4, 8),
        "return_dict": False,
    }


def _hunyuanvideo15(num_blocks: int) -> nn.Module:
    return diffusers.HunyuanVideo15Transformer3DModel(
        num_layers=num_blocks,
        num_refiner_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=9,
        out_channels=4,
        mlp_ratio=2.0,
        text_embed_dim=24,
        text_embed_2_dim=12,
        image_embed_dim=10,
        rope_axes_dim=(4, 6, 6),
    )


def _hunyuanvideo15_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 9, 2, 3, 4),
        "timestep": uniform(seed, 100.0, 900.0),
        "encoder_hidden_states": normal(1, 6, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "encoder_hidden_states_2": normal(1, 3, 12),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 0]]),
        "image_embeds": normal(1, 2, 10),
        "return_dict": False,
    }


def _framepack(num_blocks: int) -> nn.Module:
    # Two stacks: `num_blocks` double-stream blocks, two single-stream ones; and two refiner blocks in the embedder.
    return diffusers.HunyuanVideoFramepackTransformer3DModel(
        num_layers=num_blocks,
        num_single_layers=2,
        num_refiner_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        mlp_ratio=2.0,
        text_embed_dim=24,
        pooled_projection_dim=20,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=12,
        has_clean_x_embedder=True,
    )


def _framepack_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    prefix, history_4x, history_2x, history_1x, current = torch.arange(1 + 4 + 2 + 1 + 2).split([1, 4, 2, 1, 2])
    return {
        "hidden_states": normal(1, 4, 2, 8, 8),
        "timestep": uniform(seed, 100.0, 900.0),
        "encoder_hidden_states": normal(1, 6, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "pooled_projections": normal(1, 20),
        "image_embeds": normal(1, 3, 12),
        "indices_latents": current,
        "guidance": torch.tensor([6000.0]),
        "latents_clean": normal(1, 4, 2, 8, 8),
        "indices_latents_clean": torch.cat([prefix, history_1x]),
        "latents_history_2x": normal(1, 4, 2, 8, 8),
        "indices_latents_history_2x": history_2x,
        "latents_history_4x": normal(1, 4, 4, 8, 8),
        "indices_latents_history_4x": history_4x,
        "return_dict": False,
    }


def _kandinsky5(num_blocks: int) -> nn.Module:
    # Two stacks: two text blocks, and `num_blocks` visual ones with a second attention.
    return diffusers.Kandinsky5Transformer3DModel(
        num_text_blocks=2,
        num_visual_blocks=num_blocks,
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=20,
        in_text_dim2=12,
        time_dim=24,
        model_dim=32,
        ff_dim=40,
        axes_dims=(4, 6, 6),
        visual_cond=True,
    )


def _kandinsky5_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols, text = 2, 4, 6, 5
    return {
        "hidden_states": normal(1, frames, rows, cols, 9),
        "encoder_hidden_states": normal(1, text, 20),
        "pooled_projections": normal(1, 12),
        "timestep": uniform(seed, 100.0, 900.0),
        "visual_rope_pos": [torch.arange(frames), torch.arange(rows // 2), torch.arange(cols // 2)],
        "text_rope_pos": torch.arange(text),
        "scale_factor": (1.0, 2.0, 2.0),
        "return_dict": True,
    }


def _kandinsky6sr(num_blocks: int) -> nn.Module:
    return diffusers.Kandinsky6SRTransformer3DModel(
        num_visual_blocks=num_blocks,
        in_visual_dim=4,
        out_visual_dim=6,
        time_dim=24,
        model_dim=32,
        ff_dim=40,
        axes_dims=(4, 6, 6),
        nabla_window=(1, 1, 1),
    )


def _kandinsky6sr_inputs(seed: int) -> dict[str, Any]:
    # 16 x 8 tokens: two of the tiles that attend to each other by their statistics.
    return {
        "hidden_states": sampler(seed)(1, 1, 16, 8, 9),
        "timestep": uniform(seed, 100.0, 900.0),
        "return_dict": False,
    }


def _kandinsky6(num_blocks: int) -> nn.Module:
    # Three stacks: two text blocks for each modality, registered apart, and `num_blocks` blocks of both modalities.
    return diffusers.Kandinsky6Transformer3DModel(
        num_text_blocks=2,
        num_visual_blocks=num_blocks,
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=20,
        in_text_dim2=12,
        time_dim=24,
        model_dim=32,
        ff_dim=40,
        axes_dims=(4, 6, 6),
        in_audio_dim=6,
        out_audio_dim=6,
        model_dim_a=48,
        time_dim_a=20,
        ff_dim_a=28,
        axes_dims_a=(4, 4, 8),
        ca_rope=True,
        cross_gates=True,
        fix_modulation=True,
        visual_token_type_num_embeddings=3,
    )


def _kandinsky6_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols = 2, 4, 6
    return {
        "hidden_states": normal(1, frames, rows, cols, 9),
        "audio_hidden_states": normal(1, 4, 6),
        "encoder_hidden_states": normal(1, 5, 20),
        "pooled_projections": normal(1, 12),
        "timestep": uniform(seed, 100.0, 900.0),
        "visual_rope_pos": (torch.arange(frames), torch.arange(rows // 2), torch.arange(cols // 2)),
        "visual_token_type_ids": torch.tensor([[2, 0]]),
        "return_dict": False,
    }


def _latte(num_blocks: int) -> nn.Module:
    # Two stacks called in turn: spatial, temporal, spatial, ...
    return diffusers.LatteTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=24,
        caption_channels=20,
        sample_size=4,
        patch_size=2,
        activation_fn="gelu-approximate",
        attention_bias=True,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        video_length=3,
    )


def _latte_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, 3, 4, 4),
        "timestep": uniform(seed, 100.0, 900.0).long().expand(2),
        "encoder_hidden_states": normal(2, 5, 20),
        "enable_temporal_attentions": True,
        "return_dict": False,
    }


_LTX2 = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "gated_attn": True,
    "audio_gated_attn": True,
    "caption_channels": 24,
    "rope_double_precision": False,
    "rope_type": "split",
}


def _ltx2(num_blocks: int) -> nn.Module:
    # The 2.3 flavour: video and audio in one block, with gates and modulated prompts.
    return diffusers.LTX2VideoTransformer3DModel(
        num_layers=num_blocks, cross_attn_mod=True, audio_cross_attn_mod=True, perturbed_attn=True, **_LTX2
    )


def _ltx2_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols, audio = 2, 3, 4, 5
    timestep = uniform(seed, 100.0, 900.0).expand(2)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    return {
        "hidden_states": normal(2, frames * rows * cols, 8),
        "audio_hidden_states": normal(2, audio, 6),
        "encoder_hidden_states": normal(2, 6, 24),
        "audio_encoder_hidden_states": normal(2, 6, 24),
        "timestep": timestep,
        "sigma": timestep,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": rows,
        "width": cols,
        "fps": 25.0,
        "audio_num_frames": audio,
        "spatio_temporal_guidance_blocks": [0],
        "use_cross_timestep": True,
        "return_dict": False,
    }


def _mochi(num_blocks: int) -> nn.Module:
    # Unequal blocks: the last drops its text stream.
    return diffusers.MochiTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=24,
        time_embed_dim=8,
    )


def _mochi_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, 2, 4, 6),
        "encoder_hidden_states": normal(2, 6, 24),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool(),
        "return_dict": False,
    }


def _motifvideo(num_blocks: int) -> nn.Module:
    # Two stacks, the second of unequal blocks: its last block is a decoder, called over other states.
    return diffusers.MotifVideoTransformer3DModel(
        num_layers=num_blocks,
        num_single_layers=3,
        num_decoder_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=9,
        out_channels=4,
        mlp_ratio=2.0,
        text_embed_dim=24,
        image_embed_dim=10,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )


def _motifvideo_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 9, 2, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0),
        "encoder_hidden_states": normal(1, 6, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "image_embeds": normal(1, 2, 10),
        "return_dict": False,
    }


def _sanavideo(num_blocks: int) -> nn.Module:
    return diffusers.SanaVideoTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_cross_attention_heads=3,
        cross_attention_head_dim=8,
        cross_attention_dim=24,
        caption_channels=20,
        mlp_ratio=1.5,
        rope_max_seq_len=32,
    )


def _sanavideo_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, 2, 4, 6),
        "encoder_hidden_states": normal(2, 5, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "return_dict": False,
    }


def _sanawm(num_blocks: int) -> nn.Module:
    # Unequal blocks: every second attends by softmax, the others by a gated delta rule, and the last is without rays.
    return diffusers.SanaWMTransformer3DModel(
        num_layers=num_blocks,
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        linear_head_dim=16,
        softmax_every_n=2,
        chunk_plucker_channels=6,
        chunk_plucker_post_attn_blocks=max(1, num_blocks - 1),
        caption_channels=20,
        mlp_ratio=1.5,
    )


def _sanawm_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols = 3, 3, 4
    # Per frame: the camera's 4 x 4 pose, its two focal lengths and its centre. The camera moves along a line.
    pose = torch.eye(4).repeat(1, frames, 1, 1)
    pose[0, :, :3, 3] = torch.arange(frames)[:, None] * normal(3)
    lens = torch.tensor([4.0, 4.0, cols / 2, rows / 2]).expand(1, frames, 4)
    timestep = torch.cat([torch.zeros(1), uniform(seed, 100.0, 900.0).expand(frames - 1)])
    return {
        "hidden_states": normal(1, 4, frames, rows, cols),
        "timestep": timestep[None, None],
        "encoder_hidden_states": normal(1, 1, 5, 20),
        "mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "data_info": {"img_hw": torch.tensor([[96.0, 128.0]])},
        "camera_conditions": torch.cat([pose.flatten(2), lens], dim=-1),
        "chunk_plucker": normal(1, 6, frames, rows, cols),
        "return_dict": False,
    }


def _sanawmrefiner(num_blocks: int) -> nn.Module:
    return diffusers.SanaWMLTX2RefinerTransformer3DModel(num_layers=num_blocks, **_LTX2)


def _sanawmrefiner_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols = [3, 4], 3, 4
    tokens = len(frames) * rows * cols
    # The pipeline asks the model for the positions of its frames; they are the same whatever its weights.
    positions = _sanawmrefiner(1).build_rotary_emb_for_absolute_positions
    return {
        "hidden_states": normal(1, tokens, 8),
        "encoder_hidden_states": normal(1, 6, 24),
        "timestep": uniform(seed, 100.0, 900.0).expand(1, tokens),
        "video_rotary_emb": positions(1, frames, rows, cols, torch.device("cpu"), 25.0),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "return_dict": False,
    }


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("AllegroTransformer3DModel", _allegro, _allegro_inputs),
        Tiny("ConsisIDTransformer3DModel", _consisid, _consisid_inputs),
        Tiny("CosmosTransformer3DModel", _cosmos, _cosmos_inputs),
        Tiny("EasyAnimateTransformer3DModel", _easyanimate, _easyanimate_inputs),
        Tiny("HeliosTransformer3DModel", _helios, _helios_inputs),
        Tiny("HunyuanVideo15Transformer3DModel", _hunyuanvideo15, _hunyuanvideo15_inputs),
        Tiny("HunyuanVideoFramepackTransformer3DModel", _framepack, _framepack_inputs),
        Tiny("Kandinsky5Transformer3DModel", _kandinsky5, _kandinsky5_inputs),
        Tiny("Kandinsky6SRTransformer3DModel", _kandinsky6sr, _kandinsky6sr_inputs),
        Tiny("Kandinsky6Transformer3DModel", _kandinsky6, _kandinsky6_inputs),
        Tiny("LTX2VideoTransformer3DModel", _ltx2, _ltx2_inputs),
        Tiny("LatteTransformer3DModel", _latte, _latte_inputs),
        Tiny("MochiTransformer3DModel", _mochi, _mochi_inputs),
        Tiny("MotifVideoTransformer3DModel", _motifvideo, _motifvideo_inputs),
        Tiny("SanaVideoTransformer3DModel", _sanavideo, _sanavideo_inputs),
        Tiny("SanaWMLTX2RefinerTransformer3DModel", _sanawmrefiner, _sanawmrefiner_inputs),
        Tiny("SanaWMTransformer3DModel", _sanawm, _sanawm_inputs),
        *wan_models.MODELS.values(),
    )
}
