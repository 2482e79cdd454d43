# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Tiny checkpoints with random weights, so that the examples run anywhere, without a download and within seconds.

They are ordinary diffusers folders of the real classes: `model_index.json`, sharded safetensors, bfloat16. Only the
sizes are small, so `from_pretrained(path, dtype=torch.bfloat16)` and everything after it take the same way as a large
model does. What they generate is noise.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    ModelMixin,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)


# Small enough that each transformer is written as several files, as the large ones are.
MAX_SHARD_SIZE = "1MB"

# The tokenizers know the words of these lines; any other text falls back to single characters or bytes.
CORPUS = (
    "a red fox runs through fresh snow at sunrise, its breath visible in the cold air",
    "a paper boat drifts down a rainy street while people with umbrellas pass by",
    "an old lighthouse on a cliff, waves breaking below, seen from a slow flying drone",
    "a robot arm pours coffee into a blue cup on a wooden table next to the window",
    "The video is not long and is of FPS. This video is not of this resolution. This image is of resolution.",
    "You are a helpful assistant who will generate videos and images from a given prompt.",
)
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_cosmos3(path: str | os.PathLike) -> Path:
    """Write a tiny `Cosmos3OmniPipeline` (text to video, no sound, no action, no guardrail) to `path`.

    Returns `path` at once if it already exists; delete the folder to have it built again.
    """

    def make() -> DiffusionPipeline:
        tokenizer = _qwen_tokenizer()
        vae = _wan_vae(base_dim=16, is_residual=True, patch_size=2, scale_factor_spatial=16)
        patch = 2
        transformer = Cosmos3OmniTransformer(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rope_axes_dim=[6, 5, 5],
            latent_channel=vae.config.z_dim,
            latent_patch_size=patch,
            patch_latent_dim=vae.config.z_dim * patch**2,
            vocab_size=len(tokenizer),
        )
        return Cosmos3OmniPipeline(
            transformer=transformer,
            text_tokenizer=tokenizer,
            vae=vae,
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, final_sigmas_type="zero"
            ),
            # Recorded in `model_index.json`: otherwise loading would ask for the `cosmos_guardrail` package.
            enable_safety_checker=False,
        )

    return _build(Path(path), make)


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

    return _build(Path(path), make)


def build_tiny_wan(path: str | os.PathLike) -> Path:
    """Write a tiny Wan 2.2 `WanPipeline` (two transformers, one for the noisy and one for the late steps) to `path`.

    Returns `path` at once if it already exists; delete the folder to have it built again.
    """

    def make() -> DiffusionPipeline:
        tokenizer = _t5_tokenizer()
        text_encoder = UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer)))
        vae = _wan_vae(base_dim=8, scale_factor_spatial=8)

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

    return _build(Path(path), make)


def _build(path: Path, make: Callable[[], DiffusionPipeline]) -> Path:
    """Build beside `path` under a temporary name and rename, so that whoever sees `path` sees it complete."""
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        # Every host draws the same weights, also where each has its own disk; the caller's random state is kept.
        torch.manual_seed(0)
        pipe = make()
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            _to_bfloat16(component)

    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        pipe.save_pretrained(unfinished, max_shard_size=MAX_SHARD_SIZE)
        unfinished.chmod(0o755)  # `mkdtemp` makes it private
        os.rename(unfinished, path)
    except OSError:
        # A host that shares this disk may have been faster, and its checkpoint is the same.
        if not path.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def _to_bfloat16(model: torch.nn.Module) -> None:
    """Cast to the dtypes that `from_pretrained(dtype=torch.bfloat16)` gives back, so that loading casts nothing."""
    # transformers has the attribute too, but heeds it for float16 only.
    keep_in_fp32 = (model._keep_in_fp32_modules or ()) if isinstance(model, ModelMixin) else ()
    for name, parameter in model.named_parameters():
        if not set(keep_in_fp32).intersection(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)


def _wan_vae(base_dim: int, **config: object) -> AutoencoderKLWan:
    channels = 3 * (config.get("patch_size") or 1) ** 2
    return AutoencoderKLWan(
        base_dim=base_dim,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        in_channels=channels,
        out_channels=channels,
        **config,
    )


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


def _byte_pairs(start_of_word: str = "", end_of_word: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE: each word of the corpus is one token, any other byte is one.

    Written down, not trained: `BpeTrainer` breaks ties differently from run to run, and hosts would disagree.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*alphabet, *(byte + end_of_word for byte in alphabet)])
    merges = {}
    for word in _words():
        letters = [*start_of_word, *word[:-1], word[-1] + end_of_word]
        piece = letters[0]
        for letter in letters[1:]:
            merges[piece, letter] = None
            piece += letter
            pieces[piece] = None
    return {piece: number for number, piece in enumerate(pieces)}, list(merges)


def _words() -> list[str]:
    return sorted(set(re.findall("[a-z]+", " ".join(CORPUS).lower())))


def _qwen_tokenizer() -> Qwen2Tokenizer:
    vocab, merges = _byte_pairs(start_of_word="Ġ")  # "Ġ" is the byte-level alphabet's space
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        # The pipeline opens the generated part of the sequence with "<|vision_start|>".
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"],
        chat_template=CHATML_TEMPLATE,
        model_max_length=4096,
    )


def _clip_tokenizer() -> CLIPTokenizer:
    vocab, merges = _byte_pairs(end_of_word="</w>")
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocab[token] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def _t5_tokenizer() -> T5Tokenizer:
    """A unigram tokenizer with the corpus's words, and single characters for the rest."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -1.0) for word in _words()] + [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)
