# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny configurations of diffusers' audio, molecule and building-block transformers, by class name, with the
arguments their pipelines pass. Must not run anything.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import nn

from tests.drawing import integers, sampler, uniform
from tests.zoo import Tiny


# Classes that cannot stream, and why.
REASONS: dict[str, str] = {}


def _acestep(num_blocks: int) -> nn.Module:
    # Grouped-query attention; every second layer attends to its neighbourhood only.
    return diffusers.AceStepTransformer1DModel(
        num_hidden_layers=num_blocks,
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        sliding_window=2,
        encoder_hidden_size=20,
    )


def _acestep_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    timestep = uniform(seed, 0.1, 0.9).expand(2)
    return {
        "hidden_states": normal(1, 9, 4).repeat(2, 1, 1),
        "timestep": timestep,
        "timestep_r": timestep,
        "encoder_hidden_states": normal(2, 6, 20),
        "context_latents": normal(1, 9, 8).repeat(2, 1, 1),
        "return_dict": False,
    }


def _longcataudio(num_blocks: int) -> nn.Module:
    # The text convolutions are a sequence outside the stack.
    return diffusers.LongCatAudioDiTTransformer(
        dit_depth=num_blocks, dit_dim=32, dit_heads=2, dit_text_dim=20, latent_dim=6, ff_mult=1.5
    )


def _longcataudio_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 8, 6),
        "encoder_hidden_states": normal(2, 5, 20),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool(),
        "timestep": uniform(seed, 0.1, 0.9)[0],
        "attention_mask": torch.arange(8) < torch.tensor([[8], [6]]),
        "latent_cond": normal(2, 8, 6),
        "return_dict": True,
    }


def _depthdecoder(num_blocks: int) -> nn.Module:
    # A second stack, of output heads, that forward does not call: the pipeline does, one after each forward.
    return diffusers.MiniMaxMusic3RVQDepthDecoder(
        num_layers=num_blocks,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=40,
        audio_vocab_size=24,
        num_codebooks=4,
        max_position_embeddings=8,
    )


def _depthdecoder_inputs(seed: int) -> dict[str, Any]:
    return {"inputs_embeds": sampler(seed)(2, 3, 32)}


def _minimaxmusic3(num_blocks: int) -> nn.Module:
    return diffusers.MiniMaxMusic3Transformer1DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=6,
        condition_dim=20,
        ff_inner_dim=40,
        rotary_dim=8,
        fourier_embedding_dim=12,
    )


def _minimaxmusic3_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 6, 7),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, 7, 20),
        "return_dict": False,
    }


def _proteina(num_blocks: int) -> nn.Module:
    # Two stacks called in turn, the second a dictionary that has an entry for every layer but the last.
    return diffusers.RFD4ProteinaTransformer(
        nlayers=num_blocks,
        token_dim=32,
        nheads=2,
        dim_cond=16,
        pair_repr_dim=12,
        latent_dim=4,
        token_type_emb_dim=6,
        cath_emb_dim=2,
        t_emb_dim=10,
        seq_sep_dim=8,
        xt_pair_dist_dim=6,
        update_pair_repr_every_n=1,
        tri_mult_c=10,
        num_sequence_classes=9,
        recycle_conditioning_dim=3,
    )


def _proteina_inputs(seed: int) -> dict[str, Any]:
    # Seven tokens, the last padding, the first two given, through the layers twice.
    normal = sampler(seed)
    tokens, atoms = 7, 37
    present = torch.arange(tokens)[None] < 6
    atom_mask = present[..., None] & (torch.arange(atoms) < 5)
    time = uniform(seed, 0.1, 0.9)
    conditioning = {
        "is_in_context_conditioning": torch.arange(tokens)[None] < 2,
        "supports_local_latent": present,
        "molecule_iid": torch.arange(tokens)[None] // 3,
        "molecule_entity_id": torch.arange(tokens)[None] % 2,
        "token_bond_path_length": (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()[None],
        "condition_index-group_1_token": torch.arange(tokens)[None] // 4,
    }
    for name in ("hbond", "pistack", "pication", "saltbridge", "hydrophobic", "metal-coord"):
        conditioning[f"condition_{name}_1_atom"] = integers(seed, 0, 4, 1, tokens, atoms)
    return {
        "bb_ca": normal(1, tokens, 3),
        "local_latents": normal(1, tokens, 4),
        "bb_ca_time": time,
        "local_latents_time": time / 2,
        "padding_mask": present,
        "token_type": integers(seed, 0, 7, 1, tokens),
        "atom37_mask": atom_mask,
        "conditioning": conditioning,
        "recycle_depth": 2,
    }


def _stableaudio(num_blocks: int) -> nn.Module:
    # Grouped-query attention over the prompt; a Fourier projection whose frequencies are a parameter.
    return diffusers.StableAudioDiTModel(
        num_layers=num_blocks,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        sample_size=8,
        in_channels=6,
        out_channels=6,
        cross_attention_dim=16,
        time_proj_dim=12,
        global_states_input_dim=20,
        cross_attention_input_dim=24,
    )


def _stableaudio_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    length = 8
    return {
        "hidden_states": normal(2, 6, length),
        "timestep": uniform(seed, 0.3, 500.0),
        "encoder_hidden_states": normal(2, 5, 24),
        "global_hidden_states": normal(2, 1, 20),
        "rotary_embedding": get_1d_rotary_pos_embed(4, length + 1, use_real=True, repeat_interleave_real=False),
        "return_dict": False,
    }


def _stableaudio3(num_blocks: int) -> nn.Module:
    return diffusers.StableAudio3DiTModel(
        depth=num_blocks,
        io_channels=6,
        embed_dim=32,
        num_heads=2,
        cond_token_dim=20,
        global_cond_dim=12,
        local_add_cond_dim=7,
        timestep_features_dim=10,
        ff_mult=1.5,
        num_memory_tokens=3,
    )


def _stableaudio3_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 6, 8),
        "timestep": uniform(seed, 0.1, 0.9).expand(2),
        "encoder_hidden_states": normal(2, 5, 20),
        "global_hidden_states": normal(2, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "local_add_cond": normal(2, 7, 8),
        "return_dict": False,
    }


def _t5film(num_blocks: int) -> nn.Module:
    return diffusers.T5FilmDecoder(
        num_layers=num_blocks, input_dims=6, targets_length=8, d_model=16, num_heads=2, d_kv=6, d_ff=20
    )


def _t5film_inputs(seed: int) -> dict[str, Any]:
    # Two encoders' outputs with their masks: the notes, and the sound so far.
    normal = sampler(seed)
    return {
        "encodings_and_masks": [
            (normal(1, 5, 16), torch.tensor([[1, 1, 1, 0, 0]])),
            (normal(1, 8, 16), torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])),
        ],
        "decoder_input_tokens": normal(1, 8, 6),
        "decoder_noise_time": uniform(seed, 0.1, 0.9),
    }


def _temporal(num_blocks: int) -> nn.Module:
    # A part of UNets that denoise video; models of their own in diffusers.
    return diffusers.TransformerTemporalModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        norm_num_groups=4,
        cross_attention_dim=20,
        double_self_attention=False,
    )


def _temporal_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols = 3, 2, 2
    return {
        "hidden_states": normal(frames, 16, rows, cols),
        "encoder_hidden_states": normal(rows * cols, 4, 20),
        "num_frames": frames,
        "return_dict": False,
    }


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("AceStepTransformer1DModel", _acestep, _acestep_inputs),
        Tiny("LongCatAudioDiTTransformer", _longcataudio, _longcataudio_inputs),
        Tiny("MiniMaxMusic3RVQDepthDecoder", _depthdecoder, _depthdecoder_inputs),
        Tiny("MiniMaxMusic3Transformer1DModel", _minimaxmusic3, _minimaxmusic3_inputs),
        Tiny("RFD4ProteinaTransformer", _proteina, _proteina_inputs),
        Tiny("StableAudio3DiTModel", _stableaudio3, _stableaudio3_inputs),
        Tiny("StableAudioDiTModel", _stableaudio, _stableaudio_inputs),
        Tiny("T5FilmDecoder", _t5film, _t5film_inputs),
        Tiny("TransformerTemporalModel", _temporal, _temporal_inputs),
    )
}
