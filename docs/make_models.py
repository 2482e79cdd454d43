# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Writes `models.md` beside this file, from plans of models on the meta device: `python docs/make_models.py`, with
`--check` to compare only. What is listed are the classes that the installed diffusers exports, and the encoders of
`tests/compose`.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers.models import controlnets, unets
from diffusers.models import transformers as diffusers_transformers
from diffusers.models.modeling_utils import no_init_weights
from diffusers.utils import logging
from torch import nn


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from diffusers_dlo import plan_distributed_layerwise_offload
from diffusers_dlo.byte_size import format_bytes
from tests.compose.registries import COMMON, MODELS, OWN_ORDER, REASONS
from tests.zoo import Tiny


PAGE = Path(__file__).with_name("models.md")

# Configurations of published checkpoints, for classes whose default is none or a small one.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "UNet2DConditionModel": (
        "SDXL",
        {
            "sample_size": 128,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "ControlNetModel": (
        "SDXL",
        {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "HiDreamImageTransformer2DModel": (
        "HiDream-I1",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 16,
            "num_single_layers": 32,
            "attention_head_dim": 128,
            "num_attention_heads": 20,
            "caption_channels": [4096, 4096],
            "text_emb_dim": 2048,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (64, 32, 32),
            "max_resolution": (128, 128),
            "llama_layers": list(range(32)) + [31] * 16,
        },
    ),
    "T5EncoderModel": (
        "T5 v1.1 XXL",
        {
            "d_model": 4096,
            "d_ff": 10240,
            "d_kv": 64,
            "num_heads": 64,
            "num_layers": 24,
            "vocab_size": 32128,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "UMT5EncoderModel": (
        "UMT5 XXL",
        {
            "d_model": 4096,
            "d_ff": 10240,
            "d_kv": 64,
            "num_heads": 64,
            "num_layers": 24,
            "vocab_size": 256384,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "CLIPTextModelWithProjection": (
        "SDXL, `text_encoder_2`",
        {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 20,
            "projection_dim": 1280,
            "hidden_act": "gelu",
        },
    ),
}

HEAD = """\
# Models

<!-- Written by docs/make_models.py. Change that, and run it. -->

What streams of each model class, without a line of code for any of them: made by `python docs/make_models.py` with
diffusers {diffusers} and transformers {transformers}, from plans of models on the meta device.

- *Stacks*: the `ModuleList`s whose members stream, in the order in which they are registered; `*` stands for every
  index.
- *Largest block*, *streams*, *in all*: bytes in bf16. A slot holds the largest block; *streams* is what crosses the
  host link in a forward, without embeddings and linear layers that are fetched on demand; *in all* is all there is.
  The rest stays on the device.
- *Configuration*: the class's default, that of a published checkpoint, or, where the class cannot be built without
  arguments, the tiny one of the tests; then the sizes say nothing about a real model.
- *Own order*: the forward, of the tests' model at least, calls blocks in another order than they are registered in.
  The first pass brings some of them twice; the later ones follow the order that was seen.

Each class computes bit-equal to the model without offload, on one rank and on two with inputs of their own:
`tests/compose/test_zoo.py`, and for those marked † `tests/parity/test_zoo.py`. If other lists should stream, name them
with `blocks=`. A block is never divided: where the largest is a large part of the model, as in UNets whose class names
no blocks, little memory is saved.
"""


@dataclass(frozen=True)
class Row:
    """What the page says of one class."""

    name: str
    stacks: tuple[tuple[str, int], ...]
    largest: int
    streamed: int
    total: int
    configuration: str

    def __str__(self) -> str:
        stacks = "<br>".join(f"`{name}` × {count}" for name, count in self.stacks)
        sizes = [format_bytes(size) for size in (self.largest, self.streamed, self.total)]
        mark = " †" if self.name in COMMON else ""
        order = "own" if self.name in OWN_ORDER else ""
        blocks = str(sum(count for _, count in self.stacks))
        return "| " + " | ".join([f"`{self.name}`{mark}", stacks, blocks, *sizes, self.configuration, order]) + " |"


def exported(module: Any) -> list[str]:
    """The classes with weights that a package of diffusers exports, sorted by name."""
    return sorted(name for name, cls in vars(module).items() if inspect.isclass(cls) and issubclass(cls, nn.Module))


def sections() -> dict[str, list[str]]:
    """The classes of each section of the page."""
    known = exported(diffusers_transformers) + exported(unets) + exported(controlnets)
    return {
        "Transformers": exported(diffusers_transformers),
        "UNets": exported(unets),
        "ControlNets": exported(controlnets),
        "Text and image encoders": sorted(name for name in {**MODELS, **COMMON} if name not in known),
    }


def find_class(name: str) -> type[nn.Module]:
    """The class that is exported under `name`."""
    for module in (diffusers_transformers, unets, controlnets, transformers):
        cls = getattr(module, name, None)
        if cls is not None:
            return cls
    raise ValueError(f"'{name}' is exported by neither diffusers nor transformers.")


def build(name: str) -> tuple[nn.Module, str]:
    """A model on the meta device, in the best configuration there is, and what to call that."""
    cls = find_class(name)
    config = getattr(cls, "config_class", None)
    label, options = PUBLISHED.get(name, ("default", {}))
    try:
        return on_meta(lambda: cls(config(**options)) if config is not None else cls(**options)), label
    except (TypeError, ValueError, AssertionError):  # it has arguments without a usable default
        return on_meta(lambda: tiny(name).build(2)), "tiny"


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory, in bf16."""
    with no_init_weights(), torch.device("meta"):
        model = make()
    return nn.Module.to(model, torch.bfloat16)


def tiny(name: str) -> Tiny:
    """The tests' model of a class."""
    found = {**MODELS, **COMMON}.get(name)
    if found is None:
        raise ValueError(
            f"'{name}' is new in diffusers: add a tiny model of it to a registry in tests/compose (image_models.py, "
            "video_models.py, other_models.py, unet_models.py, controlnet_models.py), or to its REASONS why it cannot "
            "stream."
        )
    return found


def row(name: str) -> Row:
    """Plans one class."""
    tiny(name)  # what is listed has been tested
    model, configuration = build(name)
    (plan,) = plan_distributed_layerwise_offload(model).components
    return Row(
        name,
        tuple(stacks_of(block.name for block in plan.blocks).items()),
        plan.largest_block.nbytes,
        plan.streamed_nbytes,
        plan.streamed_nbytes + sum(leaf.nbytes for leaf in plan.leaves) + plan.placed_nbytes,
        configuration,
    )


def stacks_of(blocks: Iterable[str]) -> dict[str, int]:
    """How many blocks lie in each list; lists whose names differ in indices only are one."""
    counts: dict[str, int] = {}
    for block in blocks:
        stack = re.sub(r"\.\d+(?=\.|$)", ".*", block.rpartition(".")[0])
        counts[stack] = counts.get(stack, 0) + 1
    return counts


def render(chosen: Mapping[str, Iterable[str]]) -> str:
    """The page."""
    import diffusers

    parts = [HEAD.format(diffusers=diffusers.__version__, transformers=transformers.__version__)]
    for title, names in chosen.items():
        streaming = [name for name in names if name not in REASONS]
        parts += [
            f"\n## {title}\n",
            "| class | stacks | blocks | largest block | streams | in all | configuration | order |",
            "|---|---|---|---|---|---|---|---|",
            *(str(row(name)) for name in streaming),
        ]
    parts += ["\n## Not streamed\n", "| class | reason |", "|---|---|"]
    parts += [f"| `{name}` | {reason} |" for name, reason in sorted(REASONS.items())]
    return "\n".join(parts) + "\n"


def main() -> int:
    """Writes the page, or says whether it is up to date."""
    parser = argparse.ArgumentParser(description="Writes docs/models.md.")
    parser.add_argument("--check", action="store_true", help="compare only; exit status 1 if the page is not current")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    page = render(sections())
    if not arguments.check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != page:
        print(f"{PAGE} is not what `python docs/make_models.py` writes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
