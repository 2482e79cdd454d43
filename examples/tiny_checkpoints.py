# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Tiny checkpoints with random weights, so that the examples run anywhere, without a download and within seconds.

They are ordinary diffusers folders of the real classes: `model_index.json`, sharded safetensors, bfloat16. Only the
sizes are small, so `from_pretrained(path, dtype=torch.bfloat16)` and everything after it take the same way as a large
model does. What they generate is noise.
"""

import os
from pathlib import Path

from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from diffusers_dlo.serve.demo import build_checkpoint, build_tiny_cosmos3, byte_pairs, wan_vae, words


__all__ = ["build_tiny_cosmos3", "build_tiny_flux", "build_tiny_wan"]


def build_tiny_flux(path: str | os.PathLike) -> Path:
    """Write a tiny `FluxPipeline` (2 double-stream and 3 single-stream blocks, CLIP and T5) to `path`.

    Returns `path` at once if it already exists; delete the folder to have it built again.
    """

    def make() -> DiffusionPipeline:
        clip_tokenizer, t5_tokenizer = _clip_tokenizer(), _t5_tokenizer()
        clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip_tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                projection_dim=64,
                bos_token_id=clip_tokenizer.bos_token_id,
                eos_token_id=clip_tokenizer.eos_token_id,
                pad_token_id=clip_tokenizer.pad_token_id,
            )
        )
        t5 = T5EncoderModel(T5Config(**_t5_sizes(t5_tokenizer)))
        vae = AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[16, 16, 32, 32],
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=8,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        transformer = FluxTransformer2DModel(
            in_channels=vae.config.latent_channels * 4,
            num_layers=2,
            num_single_layers=3,
            num_attention_heads=4,
            attention_head_dim=32,
            axes_dims_rope=[8, 12, 12],
            joint_attention_dim=t5.config.d_model,
            pooled_projection_dim=clip.config.hidden_size,
            guidance_embeds=True,
        )
        return FluxPipeline(
            transformer=transformer,
            text_encoder=clip,
            text_encoder_2=t5,
            tokenizer=clip_tokenizer,
            tokenizer_2=t5_tokenizer,
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        )

    return build_checkpoint(Path(path), make)


def build_tiny_wan(path: str | os.PathLike) -> Path:
    """Write a tiny Wan 2.2 `WanPipeline` (two transformers, one for the noisy and one for the late steps) to `path`.

    Returns `path` at once if it already exists; delete the folder to have it built again.
    """

    def make() -> DiffusionPipeline:
        tokenizer = _t5_tokenizer()
        text_encoder = UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer)))
        vae = wan_vae(base_dim=8, scale_factor_spatial=8)

        def transformer() -> WanTransformer3DModel:
            return WanTransformer3DModel(
                in_channels=vae.config.z_dim,
                out_channels=vae.config.z_dim,
                num_layers=4,
                num_attention_heads=4,
                attention_head_dim=32,
                ffn_dim=256,
                text_dim=text_encoder.config.d_model,
            )

        return WanPipeline(
            transformer=transformer(),
            transformer_2=transformer(),
            boundary_ratio=0.875,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            vae=vae,
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
            ),
        )

    return build_checkpoint(Path(path), make)


def _t5_sizes(tokenizer: T5Tokenizer) -> dict[str, object]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_heads": 4,
        "num_layers": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    }


def _clip_tokenizer() -> CLIPTokenizer:
    vocab, merges = byte_pairs(end_of_word="</w>")
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocab[token] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def _t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer with the corpus's words, and single characters for the rest."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -1.0) for word in words()] + [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
