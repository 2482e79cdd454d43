# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tiny text and image encoders: the classes of transformers that diffusers' pipelines load and `tests/zoo.py` does
not have, with the arguments of a prompt or picture to encode. Must not compare anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ClapTextConfig,
    ClapTextModelWithProjection,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaConfig,
    GemmaModel,
    GlmConfig,
    GlmModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2Model,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5GemmaConfig,
    T5GemmaEncoderModel,
    UMT5Config,
    UMT5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests.drawing import integers, sampler
from tests.zoo import Tiny


_VOCABULARY = 64
_IMAGE, _VIDEO, _START, _END = 60, 61, 62, 63


def _prompt(seed: int) -> dict[str, Any]:
    """A padded prompt, of which the pipelines of large language models read a hidden state that is not the last."""
    ids = integers(seed, 3, 60, 1, 9)
    ids[:, 7:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "output_hidden_states": True}


def _plain_prompt(seed: int) -> dict[str, Any]:
    kwargs = _prompt(seed)
    del kwargs["output_hidden_states"]
    return kwargs


def _picture(seed: int) -> dict[str, Any]:
    return {"pixel_values": sampler(seed)(1, 3, 16, 16), "output_hidden_states": True}


# Grouped-query attention, wider than the residual stream.
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(cls: type[PreTrainedModel], config: type, **options: Any) -> Callable[[int], nn.Module]:
    return lambda num_blocks: cls(config(**_DECODER, **options, num_hidden_layers=num_blocks))


def _sliding(num_blocks: int) -> dict[str, Any]:
    # A window in every other layer, the first one among them.
    kinds = ["sliding_attention", "full_attention"] * num_blocks
    return {"num_hidden_layers": num_blocks, "sliding_window": 4, "layer_types": kinds[:num_blocks]}


def _umt5(num_blocks: int) -> nn.Module:
    # As T5, but every block has a relative attention bias of its own.
    return UMT5EncoderModel(
        UMT5Config(
            num_layers=num_blocks,
            d_model=32,
            d_kv=12,
            num_heads=4,
            d_ff=40,
            feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            vocab_size=_VOCABULARY,
        )
    )


def _clip_text(num_blocks: int) -> nn.Module:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            num_hidden_layers=num_blocks,
            hidden_size=32,
            intermediate_size=40,
            num_attention_heads=2,
            max_position_embeddings=9,
            vocab_size=_VOCABULARY,
            projection_dim=20,
            bos_token_id=62,
            eos_token_id=63,
            pad_token_id=63,
        )
    )


def _clip_text_inputs(seed: int) -> dict[str, Any]:
    ids = integers(seed, 0, 62, 1, 9)
    ids[:, 0] = 62
    ids[:, 7:] = 63
    return {"input_ids": ids, "output_hidden_states": True}


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def _vision(cls: type[PreTrainedModel], config: type, **options: Any) -> Callable[[int], nn.Module]:
    return lambda num_blocks: cls(config(**_VISION, **options, num_hidden_layers=num_blocks))


def _siglip_text(num_blocks: int) -> nn.Module:
    return SiglipTextModel(
        SiglipTextConfig(
            num_hidden_layers=num_blocks,
            hidden_size=32,
            intermediate_size=40,
            num_attention_heads=2,
            max_position_embeddings=9,
            vocab_size=_VOCABULARY,
            projection_size=20,
        )
    )


def _siglip2(num_blocks: int) -> nn.Module:
    return Siglip2VisionModel(
        Siglip2VisionConfig(
            num_hidden_layers=num_blocks,
            hidden_size=32,
            intermediate_size=40,
            num_attention_heads=2,
            patch_size=4,
            num_patches=16,
        )
    )


def _siglip2_inputs(seed: int) -> dict[str, Any]:
    # 3 x 4 patches and padding up to 16.
    return {
        "pixel_values": sampler(seed)(1, 16, 3 * 4 * 4),
        "pixel_attention_mask": (torch.arange(16) < 12).long()[None],
        "spatial_shapes": torch.tensor([[3, 4]]),
        "output_hidden_states": True,
    }


def _gemma3(num_blocks: int) -> nn.Module:
    # Two stacks: the layers of the language model, and those of the vision tower, which a prompt alone does not call.
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={**_DECODER, **_sliding(num_blocks), "query_pre_attn_scalar": 12},
            vision_config={**_VISION, "num_hidden_layers": 2, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_index=_IMAGE,
            boi_token_index=_START,
            eoi_token_index=_END,
        )
    )


def _t5gemma(num_blocks: int) -> nn.Module:
    config = T5GemmaConfig(
        encoder={**_DECODER, **_sliding(num_blocks), "query_pre_attn_scalar": 12},
        decoder={**_DECODER, **_sliding(1), "query_pre_attn_scalar": 12},
        is_encoder_decoder=False,
    )
    return T5GemmaEncoderModel(config)


def _with_picture(seed: int, count: int, pixel_values: torch.Tensor, **more: torch.Tensor) -> dict[str, Any]:
    prompt = integers(seed, 3, 60, 1, 8)
    picture = torch.tensor([[_START] + [_IMAGE] * count + [_END]])
    ids = torch.cat([prompt[:, :3], picture, prompt[:, 3:]], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixel_values,
        **more,
        "output_hidden_states": True,
    }


def _mistral3(num_blocks: int) -> nn.Module:
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config={**_DECODER, "num_hidden_layers": num_blocks, "model_type": "mistral"},
            vision_config={**_VISION, "num_hidden_layers": 2, "head_dim": 16, "model_type": "pixtral"},
            image_token_index=_IMAGE,
            spatial_merge_size=2,
        )
    )


def _mistral3_inputs(seed: int) -> dict[str, Any]:
    # 4 x 4 patches, merged into 2 x 2 tokens.
    return _with_picture(seed, 4, sampler(seed)(1, 3, 16, 16), image_sizes=torch.tensor([[16, 16]]))


def _llava(num_blocks: int) -> nn.Module:
    # As HunyuanVideo loads it for image to video: a hidden state of the picture that is not the last, without its
    # class token.
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config={**_DECODER, "num_hidden_layers": num_blocks, "model_type": "llama"},
            vision_config={**_VISION, "num_hidden_layers": 3, "model_type": "clip_vision_model"},
            image_token_index=_IMAGE,
        )
    )


def _llava_inputs(seed: int) -> dict[str, Any]:
    return _with_picture(seed, 16, sampler(seed)(1, 3, 16, 16))


def _qwen2_vl(num_blocks: int) -> nn.Module:
    text = {key: value for key, value in _DECODER.items() if key != "head_dim"}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={**text, "num_hidden_layers": num_blocks, "rope_parameters": rope},
            vision_config={"depth": 2, "embed_dim": 24, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
            image_token_id=_IMAGE,
            video_token_id=_VIDEO,
            vision_start_token_id=_START,
            vision_end_token_id=_END,
        )
    )


def _qwen3_vl(num_blocks: int) -> nn.Module:
    # Hidden states of the vision tower are added to those of the first language layers.
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**_DECODER, "num_hidden_layers": num_blocks, "rope_parameters": rope},
            vision_config={
                "depth": 2,
                "hidden_size": 24,
                "intermediate_size": 28,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 32,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=_IMAGE,
            video_token_id=_VIDEO,
            vision_start_token_id=_START,
            vision_end_token_id=_END,
        )
    )


def _qwen_vl_inputs(seed: int) -> dict[str, Any]:
    # One picture of 4 x 8 patches, which the vision tower merges into 2 x 4 tokens.
    grid = torch.tensor([[1, 4, 8]])
    kwargs = _with_picture(seed, 8, sampler(seed)(4 * 8, 3 * 2 * 4 * 4), image_grid_thw=grid)
    return {**kwargs, "mm_token_type_ids": (kwargs["input_ids"] == _IMAGE).int()}


_BERT = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


def _bert(cls: type[PreTrainedModel], config: type, **options: Any) -> Callable[[int], nn.Module]:
    return lambda num_blocks: cls(config(**_BERT, **options, num_hidden_layers=num_blocks))


def _gpt2(num_blocks: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=num_blocks, n_embd=32, n_head=2, n_positions=16, vocab_size=_VOCABULARY))


def _gpt2_inputs(seed: int) -> dict[str, Any]:
    # AudioLDM 2 gives it embeddings, not tokens.
    return {
        "inputs_embeds": sampler(seed)(1, 9, 32),
        "attention_mask": torch.tensor([[1] * 7 + [0] * 2]),
        "output_hidden_states": True,
    }


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("UMT5EncoderModel", _umt5, _plain_prompt),
        Tiny("CLIPTextModelWithProjection", _clip_text, _clip_text_inputs),
        Tiny("CLIPVisionModel", _vision(CLIPVisionModel, CLIPVisionConfig), _picture),
        Tiny(
            "CLIPVisionModelWithProjection",
            _vision(CLIPVisionModelWithProjection, CLIPVisionConfig, projection_dim=20),
            _picture,
        ),
        Tiny("SiglipTextModel", _siglip_text, _plain_prompt),
        Tiny("SiglipVisionModel", _vision(SiglipVisionModel, SiglipVisionConfig), _picture),
        Tiny("Siglip2VisionModel", _siglip2, _siglip2_inputs),
        Tiny("Qwen2Model", _decoder(Qwen2Model, Qwen2Config), _prompt),
        Tiny("Qwen3Model", _decoder(Qwen3Model, Qwen3Config), _prompt),
        Tiny("Qwen3ForCausalLM", _decoder(Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True), _prompt),
        Tiny("Qwen2VLForConditionalGeneration", _qwen2_vl, _qwen_vl_inputs),
        Tiny("Qwen3VLForConditionalGeneration", _qwen3_vl, _qwen_vl_inputs),
        Tiny("LlamaModel", _decoder(LlamaModel, LlamaConfig), _prompt),
        Tiny("LlamaForCausalLM", _decoder(LlamaForCausalLM, LlamaConfig), _prompt),
        Tiny("LlavaForConditionalGeneration", _llava, _llava_inputs),
        Tiny("MistralModel", _decoder(MistralModel, MistralConfig, sliding_window=4), _prompt),
        Tiny("Mistral3ForConditionalGeneration", _mistral3, _mistral3_inputs),
        Tiny("GemmaModel", _decoder(GemmaModel, GemmaConfig), _prompt),
        Tiny("Gemma2Model", lambda count: Gemma2Model(Gemma2Config(**_DECODER, **_sliding(count))), _prompt),
        Tiny("Gemma3ForConditionalGeneration", _gemma3, _prompt),
        Tiny("T5GemmaEncoderModel", _t5gemma, _plain_prompt),
        Tiny("GlmModel", _decoder(GlmModel, GlmConfig), _prompt),
        Tiny("BertModel", _bert(BertModel, BertConfig), _plain_prompt),
        Tiny("XLMRobertaModel", _bert(XLMRobertaModel, XLMRobertaConfig, type_vocab_size=1), _prompt),
        Tiny(
            "ClapTextModelWithProjection",
            _bert(ClapTextModelWithProjection, ClapTextConfig, projection_dim=20),
            _plain_prompt,
        ),
        Tiny("GPT2LMHeadModel", _gpt2, _gpt2_inputs),
    )
}
