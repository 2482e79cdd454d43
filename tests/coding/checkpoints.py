# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Small models whose blocks are worth coding, and coded checkpoints to damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin, WanTransformer3DModel
from diffusers.configuration_utils import register_to_config
from torch import nn

from diffusers_dlo.checkpoint.safetensors_file import peek_header, read_metadata
from diffusers_dlo.coding.coded_file import DIGEST_KEY, METADATA_KEY, header_digest


WEIGHTS = "diffusion_pytorch_model.safetensors"


def wan(blocks: int = 2, heads: int = 2) -> WanTransformer3DModel:
    """With modules that are kept in float32, in blocks too."""
    torch.manual_seed(blocks)
    return WanTransformer3DModel(
        num_layers=blocks,
        num_attention_heads=heads,
        attention_head_dim=48,
        in_channels=4,
        out_channels=4,
        text_dim=20,
        freq_dim=32,
        ffn_dim=444,
        rope_max_seq_len=32,
    ).eval()


def wan_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(1, 4, 2, 4, 6, generator=generator).bfloat16(),
        "timestep": torch.tensor([321]),
        "encoder_hidden_states": torch.randn(1, 6, 20, generator=generator).bfloat16(),
        "return_dict": False,
    }


class OddBlock(nn.Module):
    """One module under two names, odd sizes, an integer parameter, a scalar, a large buffer and a small one."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.one = nn.Linear(37 + index, 997)
        self.same = self.one
        self.codes = nn.Parameter(torch.arange(7001, dtype=torch.int32), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.randn(1 << 19 | 3))
        self.register_buffer("count", torch.tensor([index]))
        self.register_buffer("steps", torch.arange(5.0), persistent=False)


class Odd(ModelMixin, ConfigMixin):
    """Three blocks: odd ones, and one that has a large buffer in no checkpoint, which therefore cannot be coded."""

    @register_to_config
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.proj_in = nn.Linear(3, 37)
        self.blocks = nn.ModuleList(OddBlock(index) for index in range(num_layers))
        self.blocks[-1].register_buffer("noise", torch.ones(1 << 19 | 1), persistent=False)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], sealed: bool = True) -> None:
    """Changes the header of a file in its place, with a digest that fits it unless it is not to be `sealed`."""
    data = path.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + nbytes])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= nbytes
    path.write_bytes(data[:8] + text.ljust(nbytes) + data[8 + nbytes :])
    if sealed and DIGEST_KEY in header["__metadata__"]:
        digest = header_digest(peek_header(str(path)), read_metadata(str(path)))
        if header["__metadata__"][DIGEST_KEY] != digest:
            rewrite(path, lambda header: header["__metadata__"].update({DIGEST_KEY: digest}))


def redescribe(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what a coded file says of itself, as one who knows how could."""

    def changed(header: dict[str, Any]) -> None:
        described = json.loads(header["__metadata__"][METADATA_KEY])
        change(described)
        header["__metadata__"][METADATA_KEY] = json.dumps(described, separators=(",", ":"))

    rewrite(path, changed)


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Changes bits of one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
