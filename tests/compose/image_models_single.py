# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny configurations of the image transformers with one stream, which text enters by cross-attention, in front of
the image or not at all, and the arguments that their pipelines pass to one denoising step. Must not run anything.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    BriaFibo2Transformer2DModel,
    DiTTransformer2DModel,
    DreamLiteTransformer2DModel,
    ErnieImageTransformer2DModel,
    HunyuanDiT2DModel,
    Ideogram4Transformer2DModel,
    Krea2Transformer2DModel,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    NucleusMoEImageTransformer2DModel,
    OmniGenTransformer2DModel,
    PixArtTransformer2DModel,
    PriorTransformer,
    PRXTransformer2DModel,
    QwenImage21Transformer2DModel,
    SanaTransformer2DModel,
    Transformer2DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_2d_rotary_pos_embed_lumina
from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0
from torch import nn

from tests.drawing import grid, integers, sampler, uniform
from tests.zoo import Tiny


ROWS, COLS, TEXT = 3, 4, 5


def _bria_fibo2(num_blocks: int) -> nn.Module:
    # Three stacks, one of them in `perceiver`. Every second main block reads the text, and is larger. The first layer
    # of the timestep embedding is 1024 wide whatever is configured.
    return BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=num_blocks,
        n_refiner_layers=2,
        n_heads=2,
        cap_feat_dim=24,
        injection_layer_ids=tuple(range(1, num_blocks, 2)),
        perceiver_num_layers=2,
        min_num_gist_tokens=2,
        max_num_gist_tokens=6,
        gist_step=2,
        gist_min_text_len=1,
        gist_max_text_len=9,
        axes_dims=(4, 6, 6),
        axes_lens=(16, 8, 8),
    )


def _bria_fibo2_inputs(seed: int) -> dict[str, Any]:
    # Two prompts of unequal length, each with the features of three layers of the text encoder, and an image to edit.
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, 4, 6),
        "timestep": uniform(seed, 0.1, 0.9, 2),
        "encoder_hidden_states": normal(2, 3, TEXT, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool),
        "context_latents": [normal(2, 4, 4, 4)],
        "return_dict": False,
    }


def _dit(num_blocks: int) -> nn.Module:
    # One stack of a class that is not declared. The last layer calls the embedding inside the first block's norm.
    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        out_channels=8,
        num_layers=num_blocks,
        sample_size=8,
        num_embeds_ada_norm=10,
    )


def _dit_inputs(seed: int) -> dict[str, Any]:
    # A class, and none: 10 is the null class.
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 8).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0, 2).long(),
        "class_labels": torch.tensor([integers(seed, 0, 10, 1).item(), 10]),
    }


def _dream_lite(num_blocks: int) -> nn.Module:
    # One stack, without self-attention. Its U-Net gives it the processor that knows of grouped queries.
    model = DreamLiteTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=16,
        num_layers=num_blocks,
        norm_num_groups=4,
        cross_attention_dim=24,
        use_linear_projection=True,
        use_self_attention=False,
        qk_norm="rms_norm",
        num_kv_heads=2,
        ff_mult=2,
    )
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(DreamLiteAttnProcessor2_0())
    return model


def _dream_lite_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 16, 4, 6),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "return_dict": False,
    }


def _ernie_image(num_blocks: int) -> nn.Module:
    # One stack, with one modulation for all blocks.
    return ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=num_blocks,
        ffn_hidden_size=40,
        in_channels=8,
        out_channels=8,
        text_in_dim=24,
        rope_axes_dim=(4, 6, 6),
    )


def _ernie_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 8, ROWS, COLS).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0, 2),
        "text_bth": normal(2, TEXT, 24),
        "text_lens": torch.tensor([TEXT, 2]),
        "return_dict": False,
    }


def _hunyuan_dit(num_blocks: int) -> nn.Module:
    # One stack of a class that is not declared: the later blocks have a skip connection and are larger. Their number
    # has to be even.
    return HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=32,
        num_layers=num_blocks + num_blocks % 2,
        mlp_ratio=2.0,
        cross_attention_dim=24,
        cross_attention_dim_t5=16,
        pooled_projection_dim=20,
        text_len=TEXT,
        text_len_t5=6,
    )


def _hunyuan_dit_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "text_embedding_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "encoder_hidden_states_t5": normal(2, 6, 16),
        "text_embedding_mask_t5": torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]]),
        "image_meta_size": torch.tensor([[64.0, 48.0, 64.0, 48.0, 0.0, 8.0]]).repeat(2, 1),
        "style": torch.zeros(2, dtype=torch.long),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (4, 3)), (4, 3), output_type="pt"),
        "return_dict": False,
    }


def _ideogram4(num_blocks: int) -> nn.Module:
    # One stack.
    return Ideogram4Transformer2DModel(
        in_channels=8,
        num_layers=num_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=40,
        adaln_dim=20,
        llm_features_dim=24,
        mrope_section=(4, 2, 2),
    )


def _ideogram4_inputs(seed: int) -> dict[str, Any]:
    # Two packed sequences: padding, text and the image, each at its own positions. What is no image has no latents.
    normal = sampler(seed)
    image = ROWS * COLS
    length = TEXT + image
    indicator = torch.tensor([[3] * TEXT + [2] * image, [-1] * 2 + [3] * (TEXT - 2) + [2] * image])
    positions = torch.zeros(2, length, 3, dtype=torch.long)
    positions[:, :TEXT] = torch.arange(TEXT)[:, None]
    positions[:, TEXT:] = 65536 + grid(ROWS, COLS).long()
    return {
        "hidden_states": normal(2, length, 8) * (indicator == 2)[..., None],
        "timestep": uniform(seed, 0.1, 0.9, 2),
        "encoder_hidden_states": normal(2, length, 24) * (indicator == 3)[..., None],
        "position_ids": positions,
        "segment_ids": torch.where(indicator == -1, -1, 1),
        "indicator": indicator,
        "attention_kwargs": None,
        "return_dict": False,
    }


def _krea2(num_blocks: int) -> nn.Module:
    # Three stacks: two of another class and width in `text_fusion`, one of which attends over layers of the encoder.
    return Krea2Transformer2DModel(
        in_channels=16,
        num_layers=num_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=40,
        timestep_embed_dim=20,
        text_hidden_dim=24,
        num_text_layers=3,
        text_num_attention_heads=3,
        text_num_key_value_heads=3,
        text_intermediate_size=28,
        num_layerwise_text_blocks=2,
        num_refiner_text_blocks=2,
        axes_dims_rope=(4, 6, 6),
    )


def _krea2_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "encoder_hidden_states": normal(1, TEXT, 3, 24),
        "timestep": uniform(seed, 0.1, 0.9),
        "position_ids": torch.cat([torch.zeros(TEXT, 3), grid(ROWS, COLS)]),
        "encoder_attention_mask": torch.tensor([[True, True, True, False, False]]),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _lumina2(num_blocks: int) -> nn.Module:
    # Three stacks of one class; the blocks of the text are smaller. Two of the stacks are called in the other order
    # than they are registered.
    return Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=num_blocks,
        num_refiner_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(32, 8, 8),
        cap_feat_dim=24,
    )


def _lumina2_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, 4, 6),
        "timestep": uniform(seed, 0.1, 0.9, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _lumina_next(num_blocks: int) -> nn.Module:
    # One stack of a class that is not declared.
    model = LuminaNextDiT2DModel(
        sample_size=8,
        hidden_size=32,
        num_layers=num_blocks,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=24,
    )
    nn.init.normal_(model.pad_token)  # is memory as it was found, and read by nobody
    return model


def _lumina_next_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 0.1, 0.9, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "encoder_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 8, 8, linear_factor=1.0, ntk_factor=2.0),
        "cross_attention_kwargs": {},
        "return_dict": False,
    }


def _nucleus_moe_image(num_blocks: int) -> nn.Module:
    # One stack: the first block is dense, the others have experts in two bare parameters.
    model = NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=num_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        mlp_ratio=6.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=20,
        capacity_factors=2.0,
    )
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)  # is memory as it was found
    return model


def _nucleus_moe_image_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, ROWS * COLS, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, TEXT, 24),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "img_shapes": [(1, ROWS, COLS)],
        "attention_kwargs": {},
        "return_dict": False,
    }


def _omni_gen(num_blocks: int) -> nn.Module:
    # One stack, and a vocabulary that is larger than a block, and so a leaf; what it returns is written to. Forward
    # assigns a buffer of its rotary positions.
    return OmniGenTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=40,
        num_layers=num_blocks,
        pad_token_id=0,
        vocab_size=400,
        max_position_embeddings=128,
        original_max_position_embeddings=64,
        rope_scaling={"short_factor": [1.0] * 8, "long_factor": [1.0 + i / 4 for i in range(8)]},
        pos_embed_max_size=8,
        time_step_dim=20,
    )


def _omni_gen_inputs(seed: int) -> dict[str, Any]:
    # A prompt with the place of a given image of 2 x 2 patches in it, then the timestep, then the image to make.
    normal = sampler(seed)
    given, image = 4, 2 * 3
    prompt = 3 + given + 2
    length = prompt + 1 + image
    ids = integers(seed, 0, 400, 1, prompt)
    ids[:, 3 : 3 + given] = 0
    mask = torch.ones(length, length).tril()
    mask[prompt + 1 :] = 1
    return {
        "hidden_states": normal(1, 4, 4, 6),
        "timestep": uniform(seed, 0.1, 0.9),
        "input_ids": ids,
        "input_img_latents": [normal(1, 4, 4, 4)],
        "input_image_sizes": {0: [[3, 3 + given]]},
        "attention_mask": mask[None],
        "position_ids": torch.arange(length)[None],
        "return_dict": False,
    }


def _prx(num_blocks: int) -> nn.Module:
    # One stack of a class that is not declared.
    return PRXTransformer2DModel(
        in_channels=4,
        context_in_dim=24,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=num_blocks,
        axes_dim=[8, 8],
        bottleneck_size=12,
        resolution_embeds=True,
    )


def _prx_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 0.1, 0.9, 2),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool),
        "return_dict": False,
    }


def _pixart(num_blocks: int) -> nn.Module:
    # One stack, with the conditions on size of PixArt-alpha at 1024 pixels.
    return PixArtTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        num_layers=num_blocks,
        cross_attention_dim=48,
        sample_size=8,
        use_additional_conditions=True,
        caption_channels=24,
    )


def _pixart_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "timestep": uniform(seed, 100.0, 900.0, 2).long(),
        "added_cond_kwargs": {
            "resolution": torch.tensor([[64.0, 48.0]]).repeat(2, 1),
            "aspect_ratio": torch.tensor([[64 / 48]]).repeat(2, 1),
        },
        "return_dict": False,
    }


def _prior(num_blocks: int) -> nn.Module:
    # One stack of a class that is not declared. Statistics of embeddings are parameters that forward does not read.
    return PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=num_blocks,
        embedding_dim=24,
        num_embeddings=TEXT,
    )


def _prior_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 24).repeat(2, 1),
        "timestep": uniform(seed, 100.0, 900.0).long()[0],
        "proj_embedding": normal(2, 24),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool),
    }


def _qwen_image21(num_blocks: int) -> nn.Module:
    # One stack, with one modulation for all blocks.
    return QwenImage21Transformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=num_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=24,
        mlp_ratio=2,
        axes_dims_rope=(4, 6, 6),
    )


def _qwen_image21_inputs(seed: int) -> dict[str, Any]:
    # A prompt with the slot of a given image of 2 x 2 tokens in it, and the two slots of the 2 x 4 to make behind it.
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4 + 8, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, 6, 24),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]),
        "img_shapes": [[(1, 2, 2), (1, 2, 4)]],
        "img_mask": torch.tensor([[False, False, True, False, False, False, True, True]]),
        "attention_kwargs": None,
        "kv_cache": None,
        "kv_cache_mode": None,
        "return_dict": False,
    }


def _sana(num_blocks: int) -> nn.Module:
    # One stack; the guidance embedding of Sana-Sprint.
    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=num_blocks,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=24,
        mlp_ratio=2.0,
        sample_size=8,
        guidance_embeds=True,
        qk_norm="rms_norm_across_heads",
    )


def _sana_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 4, ROWS, COLS),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]),
        "guidance": torch.tensor([0.45, 0.45]),
        "timestep": uniform(seed, 0.1, 1.5, 2),
        "attention_kwargs": None,
        "return_dict": False,
    }


def _transformer_2d(num_blocks: int) -> nn.Module:
    # One stack. Of the three kinds of input this class takes, codes of a vector quantizer: image patches are DiT's,
    # and feature maps are those of UNets.
    return Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=num_blocks,
        cross_attention_dim=24,
        attention_bias=True,
        sample_size=4,
        num_vector_embeds=40,
        num_embeds_ada_norm=12,
        norm_type="ada_norm",
    )


def _transformer_2d_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": integers(seed, 0, 40, 2, 16),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "timestep": integers(seed, 0, 12, 1)[0],
        "return_dict": False,
    }


def _z_image(num_blocks: int) -> nn.Module:
    # Three stacks of one class; the blocks of the text have no modulation. The first layer of the timestep embedding
    # is 1024 wide whatever is configured.
    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=num_blocks,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=24,
        axes_dims=[4, 6, 6],
        axes_lens=[64, 8, 8],
    )


def _z_image_inputs(seed: int) -> dict[str, Any]:
    # A list of images and one of prompts, of unequal length.
    normal = sampler(seed)
    return {
        "x": [normal(4, 1, 4, 6), normal(4, 1, 4, 6)],
        "t": uniform(seed, 0.1, 0.9, 2),
        "cap_feats": [normal(TEXT, 24), normal(2, 24)],
        "joint_attention_kwargs": None,
        "return_dict": False,
    }


SINGLE: tuple[Tiny, ...] = (
    Tiny("BriaFibo2Transformer2DModel", _bria_fibo2, _bria_fibo2_inputs),
    Tiny("DiTTransformer2DModel", _dit, _dit_inputs),
    Tiny("DreamLiteTransformer2DModel", _dream_lite, _dream_lite_inputs),
    Tiny("ErnieImageTransformer2DModel", _ernie_image, _ernie_image_inputs),
    Tiny("HunyuanDiT2DModel", _hunyuan_dit, _hunyuan_dit_inputs),
    Tiny("Ideogram4Transformer2DModel", _ideogram4, _ideogram4_inputs),
    Tiny("Krea2Transformer2DModel", _krea2, _krea2_inputs),
    Tiny("Lumina2Transformer2DModel", _lumina2, _lumina2_inputs),
    Tiny("LuminaNextDiT2DModel", _lumina_next, _lumina_next_inputs),
    Tiny("NucleusMoEImageTransformer2DModel", _nucleus_moe_image, _nucleus_moe_image_inputs),
    Tiny("OmniGenTransformer2DModel", _omni_gen, _omni_gen_inputs),
    Tiny("PRXTransformer2DModel", _prx, _prx_inputs),
    Tiny("PixArtTransformer2DModel", _pixart, _pixart_inputs),
    Tiny("PriorTransformer", _prior, _prior_inputs),
    Tiny("QwenImage21Transformer2DModel", _qwen_image21, _qwen_image21_inputs),
    Tiny("SanaTransformer2DModel", _sana, _sana_inputs),
    Tiny("Transformer2DModel", _transformer_2d, _transformer_2d_inputs),
    Tiny("ZImageTransformer2DModel", _z_image, _z_image_inputs),
)
