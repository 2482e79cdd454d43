# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the models that are measured and the requests they are measured with: sizes, token counts, inputs. Must not time
anything, nor know how weights are held.

All sizes are `Cosmos3OmniTransformer`, the class that diffusers has for Cosmos3.

`nano` is the class's default, Cosmos3-Nano: 36 layers of 772 MB (736 MiB).

`super` is Cosmos3-Super. Cosmos3 holds each layer twice, for text and for what is generated, and Super's two halves
have the shape of a Qwen3 32B: 64 layers, 5120 channels, 64 heads of 128, 8 of keys and values, 25,600 channels inside
the MLP. That makes layers of 1.95 GB (1860 MiB) and 124.8 GB in all. vLLM-Omni, which streams each half as a block of
its own, counts 128 blocks of 930 MB and 124 GB; Nano is 72 blocks of 368 MB there.

`200b` is a synthetic model of 200 blocks of 929 MB, 185.8 GB: Nano's attention with an MLP of 15,488 channels.

`tiny` is for the CPU, and `tiny16`, the same in bfloat16, which can be coded.

[Note: Tokens]
    Cosmos3's VAE makes one latent frame of the first frame and one of every four that follow, and one latent pixel of
    16 x 16; the transformer takes 2 x 2 latent pixels as a token, rounding up. So there is a token for each 32 x 32
    pixels of a latent frame:

        1024 x 1024, 1 frame:      1 latent frame   x 32 x 32 = 1,024 tokens
        832 x 480, 29 frames:      8 latent frames  x 15 x 26 = 3,120 tokens
        1280 x 720, 121 frames:   31 latent frames  x 23 x 40 = 28,520 tokens (720 is 22.5 x 32)

    Text comes on top: 256 tokens, which a layer passes through its other half. Older figures were taken with 26,000
    tokens for the last of these, a round number near it, and 2,730 for the second, which is one latent frame short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer

from diffusers_dlo import plan_distributed_layerwise_offload


TEMPORAL, SPATIAL = 4, 16
"""Frames and pixels of a side in a latent, as the VAE of Cosmos3 has them ([Note: Tokens])."""
BLOCKS = "layers"
"""The `ModuleList` of the transformer's layers."""


@dataclass(frozen=True)
class Workload:
    """One request: a picture, or a video of so many frames."""

    name: str
    width: int
    height: int
    frames: int
    text_tokens: int = 256

    @property
    def latent(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent."""
        return (self.frames - 1) // TEMPORAL + 1, self.height // SPATIAL, self.width // SPATIAL

    def grid(self, patch: int = 2) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens ([Note: Tokens])."""
        frames, rows, columns = self.latent
        return frames, -(-rows // patch), -(-columns // patch)

    @property
    def tokens(self) -> int:
        """Tokens of the picture or video."""
        frames, rows, columns = self.grid()
        return frames * rows * columns

    @property
    def title(self) -> str:
        """What it is, in words."""
        kind = "T2I" if self.frames == 1 else "T2V"
        frames = "" if self.frames == 1 else f" x {self.frames} frames"
        return f"{kind} {self.width} x {self.height}{frames}: {self.tokens:,} tokens and {self.text_tokens} of text"


VIDEO = (
    Workload("t2i-1024", 1024, 1024, 1),
    Workload("t2v-480p", 832, 480, 29),
    Workload("t2v-720p", 1280, 720, 121),
)
SMALL = (
    Workload("t2i-1024", 128, 128, 1, 8),
    Workload("t2v-480p", 160, 96, 5, 8),
    Workload("t2v-720p", 256, 160, 13, 8),
)
"""The same three, so small that a CPU does them."""


@dataclass(frozen=True)
class Size:
    """A transformer: its depth, and what of its configuration differs from the class's default."""

    name: str
    layers: int
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    workloads: tuple[Workload, ...] = VIDEO


SIZES = {
    size.name: size
    for size in (
        Size("nano", 36),
        Size("super", 64, {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64}),
        Size("200b", 200, {"intermediate_size": 15488}),
        Size(
            "tiny",
            6,
            {
                "hidden_size": 64,
                "head_dim": 16,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "intermediate_size": 192,
                "rope_axes_dim": (4, 2, 2),
                "vocab_size": 512,
            },
            torch.float32,
            SMALL,
        ),
    )
}
SIZES["tiny16"] = replace(SIZES["tiny"], name="tiny16", dtype=torch.bfloat16)


def make_config(size: Size, layers: int, vocabulary: int | None) -> dict[str, Any]:
    """The configuration of a size at a depth, and with another vocabulary where one is named."""
    config = {**size.config, "num_hidden_layers": layers}
    if vocabulary is not None:
        config["vocab_size"] = vocabulary
    return config


def make_meta_model(config: Mapping[str, Any], dtype: torch.dtype) -> Cosmos3OmniTransformer:
    """The transformer without weights, in the dtypes in which `from_pretrained` has them."""
    with torch.device("meta"):
        model = Cosmos3OmniTransformer(**config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name.startswith("time_embedder") else dtype)
    return model.eval()


@dataclass(frozen=True)
class ModelFacts:
    """
    What a model weighs: all of it, its layers, one of them; and its embedding, if that is so large that it is brought
    to the device for each forward rather than kept there (0 if not).
    """

    layers: int
    nbytes: int
    blocks_nbytes: int
    block_nbytes: int
    leaf_nbytes: int


def weigh(config: Mapping[str, Any], dtype: torch.dtype) -> ModelFacts:
    """The facts of a configuration, without making it: from its first layer and its depth."""
    layers = int(config["num_hidden_layers"])
    model = make_meta_model({**config, "num_hidden_layers": 1}, dtype)
    block = sum(p.nbytes for p in getattr(model, BLOCKS)[0].parameters())
    rest = sum(p.nbytes for p in model.parameters()) - block
    (planned,) = plan_distributed_layerwise_offload(model, group_size=1).components
    leaf = sum(leaf.nbytes for leaf in planned.leaves if "embed_tokens" in leaf.name)
    return ModelFacts(layers, rest + layers * block, layers * block, block, leaf)


def make_inputs(workload: Workload, model: Cosmos3OmniTransformer, device: torch.device) -> dict[str, Any]:
    """The arguments of one forward, as the pipeline packs them: text, then what is generated, every frame noisy."""
    config = model.config
    dtype = model.proj_in.weight.dtype
    frames, rows, columns = workload.grid(config.latent_patch_size)
    text, vision, per_frame = workload.text_tokens, frames * rows * columns, rows * columns
    generator = torch.Generator(device).manual_seed(7)

    def arange(*bounds: int) -> torch.Tensor:
        return torch.arange(*bounds, device=device)

    text_positions = arange(text).float().expand(3, -1)
    start = float(text + config.unified_3d_mrope_temporal_modality_margin)
    vision_positions = torch.stack(
        [
            start + arange(frames).float().repeat_interleave(per_frame),
            arange(rows).float().repeat_interleave(columns).repeat(frames),
            arange(columns).float().repeat(rows * frames),
        ]
    )
    shape = (1, config.latent_channel, *workload.latent)
    latents = torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
    return {
        "input_ids": torch.randint(0, config.vocab_size, (text,), device=device, generator=generator),
        "text_indexes": arange(text),
        "position_ids": torch.cat([text_positions, vision_positions], dim=1),
        "und_len": text,
        "sequence_length": text + vision,
        "vision_tokens": [latents],
        "vision_token_shapes": [(frames, rows, columns)],
        "vision_sequence_indexes": arange(text, text + vision),
        "vision_mse_loss_indexes": arange(text, text + vision),
        "vision_timesteps": torch.full((vision,), 500.0, device=device),
        "vision_noisy_frame_indexes": [arange(frames)],
        "return_dict": False,
    }
