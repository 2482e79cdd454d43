# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Tiny real models for the bit-equality tests.

Every entry is the class that a pipeline loads, in a configuration small enough for a CPU (under a megabyte of
weights), with the arguments that the pipeline passes to one denoising step or to one prompt encoding. The sizes are
chosen to differ wherever the real checkpoints differ (attention wider than the residual stream, several text widths,
unequal blocks), so that a mixed-up weight is a shape error or a changed bit and never a lucky match.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3OmniTransformer
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Transformer3DModel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
)
from transformers.cache_utils import Cache

from tests.drawing import integers, sampler, uniform


@dataclass(frozen=True)
class Tiny:
    """One architecture: `build(num_blocks)` gives the fp32 model in eval mode, `inputs(seed)` its forward kwargs."""

    name: str
    build: Callable[[int], nn.Module]
    inputs: Callable[[int], dict[str, Any]]


# The arguments that pipelines hand over in the dtype of the weights. All other floating arguments (timesteps,
# guidance, rotary positions) stay in fp32 or fp64, since bf16 would merge neighbouring positions.
_IN_MODEL_DTYPE = frozenset(
    {
        "audio_hidden_states",
        "encoder_hidden_states",
        "hidden_states",
        "pixel_values",
        "pooled_projections",
        "sound_tokens",
        "vision_tokens",
    }
)


# ---------------------------------------------------------------------------------------------- diffusers transformers


def _cosmos3(num_blocks: int) -> nn.Module:
    # One stack. Grouped-query attention with 4 * 16 channels over a 32-channel residual stream. The sound head is on
    # because its modality embedding is a bare parameter of the root.
    return Cosmos3OmniTransformer(
        num_hidden_layers=num_blocks,
        hidden_size=32,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        latent_channel=4,
        latent_patch_size=2,
        patch_latent_dim=16,
        rope_axes_dim=(4, 2, 2),
        sound_gen=True,
        sound_dim=6,
        vocab_size=64,
    )


def _cosmos3_inputs(seed: int) -> dict[str, Any]:
    # Image-to-video with sound: text, then 3 latent frames of 2 x 3 patches of which frame 0 is the given image, then
    # 4 sound latents. Sound runs on the clock of the video, both a modality margin behind the text.
    normal = sampler(seed)
    text, frames, rows, cols, sound = 7, 3, 2, 3, 4
    per_frame = rows * cols
    vision = frames * per_frame
    start = float(text + 15_000)

    text_positions = torch.arange(text, dtype=torch.float32).expand(3, -1)
    # 16 fps against the 24 fps base; video latents hold 4 frames, sound latents come at 25 per second.
    frame_positions = start + torch.arange(frames) * (24 / 16)
    sound_positions = start + torch.arange(sound) * (24 / 25)
    vision_positions = torch.stack(
        [
            frame_positions.repeat_interleave(per_frame),
            torch.arange(rows).repeat_interleave(cols).repeat(frames).float(),
            torch.arange(cols).repeat(rows * frames).float(),
        ]
    )
    sound_positions = torch.stack([sound_positions, torch.zeros(sound), torch.zeros(sound)])

    timestep = uniform(seed, 100.0, 900.0).item()
    return {
        "input_ids": integers(seed, 0, 64, text),
        "text_indexes": torch.arange(text),
        "position_ids": torch.cat([text_positions, vision_positions, sound_positions], dim=1),
        "und_len": text,
        "sequence_length": text + vision + sound,
        "vision_tokens": [normal(1, 4, frames, 2 * rows, 2 * cols)],
        "vision_token_shapes": [(frames, rows, cols)],
        "vision_sequence_indexes": torch.arange(text, text + vision),
        "vision_mse_loss_indexes": torch.arange(text + per_frame, text + vision),
        "vision_timesteps": torch.full((vision - per_frame,), timestep),
        "vision_noisy_frame_indexes": [torch.arange(1, frames)],
        "sound_tokens": [normal(6, sound)],
        "sound_token_shapes": [(sound, 1, 1)],
        "sound_sequence_indexes": torch.arange(text + vision, text + vision + sound),
        "sound_mse_loss_indexes": torch.arange(text + vision, text + vision + sound),
        "sound_timesteps": torch.full((sound,), timestep),
        "sound_noisy_frame_indexes": [torch.arange(sound)],
        "return_dict": False,
    }


def _wan(num_blocks: int) -> nn.Module:
    # One stack; every block holds a bare `scale_shift_table` next to its submodules.
    return WanTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        freq_dim=32,
        ffn_dim=40,
        rope_max_seq_len=32,
    )


def _wan_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 2, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0).long(),
        "encoder_hidden_states": normal(1, 6, 20),
        "return_dict": False,
    }


def _flux(num_blocks: int) -> nn.Module:
    # Two stacks: `num_blocks` double-stream blocks and one single-stream block behind them.
    return FluxTransformer2DModel(
        num_layers=num_blocks,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


def _flux_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    rows, cols, text = 3, 4, 5
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(cols)).float()
    return {
        "hidden_states": normal(1, rows * cols, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "guidance": torch.tensor([3.5]),
        "pooled_projections": normal(1, 20),
        "encoder_hidden_states": normal(1, text, 24),
        "txt_ids": torch.zeros(text, 3),
        "img_ids": torch.cat([torch.zeros(rows * cols, 1), grid], dim=1),
        "return_dict": False,
    }


def _sd3(num_blocks: int) -> nn.Module:
    # One stack of unequal blocks, as in SD 3.5: the first has a second attention, the last drops its text stream (with
    # one block, that block does both).
    return SD3Transformer2DModel(
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
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _sd3_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    # Batch 2: SD3 sends the unconditional and the conditional prompt through in one call.
    return {
        "hidden_states": normal(1, 4, 8, 6).repeat(2, 1, 1, 1),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "encoder_hidden_states": normal(2, 5, 24),
        "pooled_projections": normal(2, 20),
        "return_dict": False,
    }


def _qwenimage(num_blocks: int) -> nn.Module:
    # One stack of double-stream blocks.
    return QwenImageTransformer2DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        out_channels=4,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )


def _qwenimage_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 12, 16),
        "timestep": uniform(seed, 0.1, 0.9),
        "encoder_hidden_states": normal(1, 6, 24),
        # A padded prompt, because the mask takes another attention path than no mask.
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "img_shapes": [[(1, 3, 4)]],
        "return_dict": False,
    }


def _ltx(num_blocks: int) -> nn.Module:
    # One stack; like Wan, with a bare `scale_shift_table` in every block.
    return LTXVideoTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8,
        out_channels=8,
        cross_attention_dim=32,
        caption_channels=24,
    )


def _ltx_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    frames, rows, cols = 2, 3, 4
    return {
        "hidden_states": normal(2, frames * rows * cols, 8),
        "encoder_hidden_states": normal(2, 6, 24),
        "timestep": uniform(seed, 100.0, 900.0).expand(2),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]),
        "num_frames": frames,
        "height": rows,
        "width": cols,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }


def _hunyuanvideo(num_blocks: int) -> nn.Module:
    # Three stacks: `num_blocks` double-stream blocks, one single-stream block, and one refiner block nested inside
    # `context_embedder`.
    return HunyuanVideoTransformer3DModel(
        num_layers=num_blocks,
        num_single_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        mlp_ratio=2.0,
        text_embed_dim=24,
        pooled_projection_dim=20,
        rope_axes_dim=(4, 6, 6),
    )


def _hunyuanvideo_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(1, 4, 2, 4, 6),
        "timestep": uniform(seed, 100.0, 900.0),
        "encoder_hidden_states": normal(1, 6, 24),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]]),
        "pooled_projections": normal(1, 20),
        "guidance": torch.tensor([6000.0]),
        "return_dict": False,
    }


def _cogvideox(num_blocks: int) -> nn.Module:
    # One stack. The 2B flavour: sinusoidal positions in a non-persistent buffer of `patch_embed`. The sample sizes are
    # those of the inputs, so that forward reads that buffer and does not recompute it.
    return CogVideoXTransformer3DModel(
        num_layers=num_blocks,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=20,
        text_embed_dim=24,
        sample_width=6,
        sample_height=4,
        sample_frames=5,
        max_text_seq_length=6,
    )


def _cogvideox_inputs(seed: int) -> dict[str, Any]:
    normal = sampler(seed)
    return {
        "hidden_states": normal(2, 2, 4, 4, 6),
        "encoder_hidden_states": normal(2, 6, 24),
        "timestep": uniform(seed, 100.0, 900.0).long().expand(2),
        "return_dict": False,
    }


def _minimaxh3(num_blocks: int) -> nn.Module:
    # Two stacks: `num_blocks` blocks, and one refiner block nested inside `token_refiner`. 4 * 16 attention channels
    # over a 32-channel residual stream, 12 of the 16 channels of a head rotated.
    return MiniMaxH3Transformer3DModel(
        num_layers=num_blocks,
        num_refiner_layers=1,
        num_attention_heads=4,
        attention_head_dim=16,
        hidden_size=32,
        ffn_dim=48,
        in_channels=4,
        audio_in_channels=6,
        text_dim=24,
        freq_dim=32,
        time_embed_hidden_dim=28,
        time_embed_dim=20,
        rope_freq_dim=2,
    )


def _minimaxh3_inputs(seed: int) -> dict[str, Any]:
    # First-frame-to-video with sound, packed as text | keyframe | audio | video: 5 text rows, a 2 x 2 keyframe, stereo
    # audio of 3 latents a channel, and 2 frames of 2 x 2 rows. Three noise levels share the call.
    normal = sampler(seed)
    text, per_frame, frames, audio = 5, 4, 2, 3
    sizes = [text, per_frame, 2 * audio, frames * per_frame]
    length = sum(sizes)
    text_rows, key_rows, audio_rows, video_rows = torch.arange(length).split(sizes)
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(2)).double()

    position_ids = torch.zeros(length, 3, dtype=torch.float64)
    position_ids[text_rows, 0] = torch.arange(text).double()
    position_ids[key_rows, 0] = float(text)
    position_ids[key_rows, 1:] = grid
    position_ids[audio_rows, 0] = text + torch.arange(audio).double().repeat(2)
    position_ids[audio_rows, 2] = torch.tensor([0.0, 1.0], dtype=torch.float64).repeat_interleave(audio)
    position_ids[video_rows, 0] = text + (torch.arange(frames).double() * (5 / 3)).repeat_interleave(per_frame)
    position_ids[video_rows, 1:] = grid.repeat(frames, 1)

    token_tags = torch.zeros(length, dtype=torch.long)
    token_tags[text_rows] = 1
    token_tags[audio_rows] = 2
    # Text rows follow the video timestep; index 1 is the audio schedule and index 2 the keyframe's pinned level.
    timestep_indices = torch.zeros(length, dtype=torch.long)
    timestep_indices[audio_rows] = 1
    timestep_indices[key_rows] = 2
    return {
        "hidden_states": normal(1, per_frame * (1 + frames), 16),
        "audio_hidden_states": normal(1, 2 * audio, 6),
        "encoder_hidden_states": normal(1, text, 24),
        "timestep": torch.cat([uniform(seed, 0.1, 0.9, 2), torch.tensor([0.98])]),
        "timestep_indices": timestep_indices,
        "token_tags": token_tags,
        "position_ids": position_ids,
        "video_indices": torch.cat([key_rows, video_rows]),
        "audio_indices": audio_rows,
        "text_indices": text_rows,
        "return_dict": False,
    }


# ------------------------------------------------------------------------------------------ transformers text encoders


def _t5(num_blocks: int) -> nn.Module:
    # One stack of unequal blocks: the first alone owns the relative attention bias, and its result is handed on to all
    # later ones. `shared` and `encoder.embed_tokens` are one tied parameter.
    config = T5Config(
        num_layers=num_blocks,
        d_model=32,
        d_kv=12,
        num_heads=4,
        d_ff=40,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        vocab_size=64,
    )
    return T5EncoderModel(config)


def _t5_inputs(seed: int) -> dict[str, Any]:
    ids = integers(seed, 2, 64, 1, 9)
    ids[:, 6:] = torch.tensor([1, 0, 0])  # end of prompt, then padding
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _clip(num_blocks: int) -> nn.Module:
    # One stack.
    config = CLIPTextConfig(
        num_hidden_layers=num_blocks,
        hidden_size=32,
        intermediate_size=40,
        num_attention_heads=2,
        max_position_embeddings=9,
        vocab_size=64,
        bos_token_id=62,
        eos_token_id=63,
        pad_token_id=63,
    )
    return CLIPTextModel(config)


def _clip_inputs(seed: int) -> dict[str, Any]:
    ids = integers(seed, 0, 62, 1, 9)
    ids[:, 0] = 62
    ids[:, 7:] = 63
    # SD3 and SDXL read a hidden state that is not the last one.
    return {"input_ids": ids, "output_hidden_states": True}


_QWEN_IMAGE, _QWEN_VIDEO, _QWEN_START, _QWEN_END = 60, 61, 62, 63


def _qwen2_5_vl(num_blocks: int) -> nn.Module:
    # Two stacks: `num_blocks` language layers, and two vision blocks, of which the first attends within windows and
    # the second over the whole image.
    config = Qwen2_5_VLConfig(
        text_config={
            "num_hidden_layers": num_blocks,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "intermediate_size": 28,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=_QWEN_IMAGE,
        video_token_id=_QWEN_VIDEO,
        vision_start_token_id=_QWEN_START,
        vision_end_token_id=_QWEN_END,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen2_5_vl_inputs(seed: int) -> dict[str, Any]:
    # An edit prompt: one image of 4 x 8 patches, which the vision tower merges into 2 x 4 tokens (two windows).
    prompt = integers(seed, 2, 60, 1, 8)
    image = torch.tensor([[_QWEN_START] + [_QWEN_IMAGE] * 8 + [_QWEN_END]])
    ids = torch.cat([prompt[:, :3], image, prompt[:, 3:]], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": sampler(seed)(4 * 8, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 8]]),
        "output_hidden_states": True,
    }


MODELS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("cosmos3", _cosmos3, _cosmos3_inputs),
        Tiny("wan", _wan, _wan_inputs),
        Tiny("flux", _flux, _flux_inputs),
        Tiny("sd3", _sd3, _sd3_inputs),
        Tiny("qwenimage", _qwenimage, _qwenimage_inputs),
        Tiny("ltx", _ltx, _ltx_inputs),
        Tiny("hunyuanvideo", _hunyuanvideo, _hunyuanvideo_inputs),
        Tiny("cogvideox", _cogvideox, _cogvideox_inputs),
        Tiny("minimaxh3", _minimaxh3, _minimaxh3_inputs),
    )
}

TEXT_ENCODERS: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("t5", _t5, _t5_inputs),
        Tiny("clip", _clip, _clip_inputs),
        Tiny("qwen2_5_vl", _qwen2_5_vl, _qwen2_5_vl_inputs),
    )
}


# --------------------------------------------------------------------------------------------------------------- tools


def build(which: str | Tiny, num_blocks: int = 2, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Build a model, or that name of either registry, with random weights that all matter, wholly in `dtype`.

    `_keep_in_fp32_modules` plays no part here: load a saved copy with `from_pretrained(torch_dtype=...)` for that.
    """
    torch.manual_seed(seed)
    tiny = which if isinstance(which, Tiny) else MODELS.get(which) or TEXT_ENCODERS[which]
    model = tiny.build(num_blocks)
    with torch.no_grad():
        for param in model.parameters():
            # A norm or bias at its initial value is the same in every block, so swapping two blocks' copies, or
            # losing one to freshly zeroed memory, would go unseen.
            if (param == 0).all() or (param == 1).all():
                param.add_(0.02 * torch.randn_like(param))
    # Past the `to` of diffusers, which warns about every model with an fp32 list, even an empty one.
    return nn.Module.to(model, dtype).eval()


def place(
    kwargs: Mapping[str, Any], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Copy forward kwargs to `device`, the activations among them in `dtype`, as a pipeline would prepare them."""

    def copy(value: Any, to: torch.dtype | None) -> Any:
        if isinstance(value, torch.Tensor):
            # Always a copy: a model that wrote into its inputs must not spoil the second of two compared runs.
            return value.to(device=device, dtype=to if value.is_floating_point() else None, copy=True)
        if isinstance(value, list | tuple):
            return type(value)(copy(item, to) for item in value)
        return value

    return {key: copy(value, dtype if key in _IN_MODEL_DTYPE else None) for key, value in kwargs.items()}


def flat(output: Any) -> list[torch.Tensor]:
    """Every tensor inside a model's output, depth first, in the order of the fields, keys or items."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Cache):
        # The keys and values of a language model are outputs too; its other entries are bookkeeping.
        items = [(layer.keys, layer.values) for layer in output.layers]
    elif isinstance(output, Mapping):  # covers the ModelOutput of transformers and the BaseOutput of diffusers
        items = list(output.values())
    elif isinstance(output, list | tuple):
        items = list(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name) for field in dataclasses.fields(output)]
    else:
        items = []
    return [tensor for item in items for tensor in flat(item)]


def run(
    module: nn.Module,
    kwargs: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """One forward without gradients; every output tensor, cloned.

    The activations are cast to `dtype`, by default the commonest one among the parameters. That is a count of
    tensors, not of elements, so the answer stays the same while a block's weights are empty or meta placeholders, and
    also with a few modules kept in fp32.
    """
    if dtype is None:
        dtypes = [param.dtype for param in module.parameters() if param.is_floating_point()]
        dtype = max(dtypes, key=dtypes.count) if dtypes else None
    with torch.no_grad():
        # Cloned because an output may be a view into memory that the next forward overwrites.
        return [tensor.clone() for tensor in flat(module(**place(kwargs, dtype=dtype, device=device)))]
