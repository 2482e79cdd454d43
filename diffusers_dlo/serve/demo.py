# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the demo's checkpoint: a tiny Cosmos3 with random weights, built in less than a second, and the parts from which
the examples build other tiny ones. Must not be needed where a real model is served.

It is an ordinary diffusers folder of the real classes: `model_index.json`, sharded safetensors, bfloat16. Only the
sizes are small, so that everything takes the same way as a large model does. What it generates is noise.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    ModelMixin,
    UniPCMultistepScheduler,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer


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


def build_tiny_cosmos3(path: str | os.PathLike[str]) -> Path:
    """Writes a tiny `Cosmos3OmniPipeline` (text to video, no sound, no action, no guardrail) to `path`.

    Returns `path` at once if it already exists. Several processes may build it at a time.
    """

    def make() -> Any:
        tokenizer = _qwen_tokenizer()
        vae = wan_vae(base_dim=16, is_residual=True, patch_size=2, scale_factor_spatial=16)
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

    return build_checkpoint(Path(path), make)


def build_checkpoint(path: Path, make: Callable[[], Any]) -> Path:
    """Builds beside `path` under a temporary name and rename, so that whoever sees `path` sees it complete."""
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
    """Casts to the dtypes that `from_pretrained(dtype=torch.bfloat16)` gives back, so that loading casts nothing."""
    # transformers has the attribute too, but heeds it for float16 only.
    keep_in_fp32: Any = (model._keep_in_fp32_modules or ()) if isinstance(model, ModelMixin) else ()
    for name, parameter in model.named_parameters():
        if not set(keep_in_fp32).intersection(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)


def wan_vae(base_dim: int, **config: Any) -> Any:
    """A small VAE for videos."""
    channels = 3 * (config.get("patch_size") or 1) ** 2
    return AutoencoderKLWan(
        base_dim=base_dim,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        in_channels=channels,
        out_channels=channels,
        **config,
    )


def byte_pairs(start_of_word: str = "", end_of_word: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE: each word of the corpus is one token, any other byte is one.

    Written down, not trained: `BpeTrainer` breaks ties differently from run to run, and hosts would disagree.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys([*alphabet, *(byte + end_of_word for byte in alphabet)])
    merges: dict[tuple[str, str], None] = {}
    for word in words():
        letters = [*start_of_word, *word[:-1], word[-1] + end_of_word]
        piece = letters[0]
        for letter in letters[1:]:
            merges[piece, letter] = None
            piece += letter
            pieces[piece] = None
    return {piece: number for number, piece in enumerate(pieces)}, list(merges)


def words() -> list[str]:
    """The words that tokenizers know."""
    return sorted(set(re.findall("[a-z]+", " ".join(CORPUS).lower())))


def _qwen_tokenizer() -> Qwen2Tokenizer:
    vocab, merges = byte_pairs(start_of_word="Ġ")  # "Ġ" is the byte-level alphabet's space
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,  # type: ignore[arg-type]  # pairs, as the merges of a file are read
        eos_token="<|im_end|>",
        # The pipeline opens the generated part of the sequence with "<|vision_start|>".
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"],
        chat_template=CHATML_TEMPLATE,
        model_max_length=4096,
    )
