# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns estimates of what a block computes, and of the device memory that its activations take, from the names and shapes
of its weights. Pure. Must not claim to be a measurement: pass one where there is one.

[Note: Compute estimate]
    A linear layer does 2 x in x out operations for each token that it sees, attention 4 x tokens x tokens x width.
    Which tokens a layer sees is read off its name, as diffusers' models name their layers: a block may have layers of
    its own for the text (`add_q_proj`, `ff_context`, `txt_mlp`; in Cosmos3 it is the image's that are called so,
    beside `mlp_moe_gen`), attend to the text (`attn2`), or see both in one row. A modulation layer sees one vector for
    each sample. Convolutions, norms and experts (weights of more than two dimensions) are not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .block_layout import BlockLayout


LIVE_COPIES = 4
"""How many tensors of the widest layer's output, and as many of the block's own width, an allowance counts as alive at
once: a gated MLP holds the gate, its activation, the other half and their product, beside the residual, its normed
copy and what is added to it."""

_ONE_VECTOR = re.compile(r"norm|adaln|modulation|(^|_)mod\d*$|temb|time_|scale_shift")
_TEXT = re.compile(r"(^|_)(txt|text|context|und)($|_|\d)|^add_|^to_add")
_TEXT_BLOCKS = re.compile(r"context_|token_refiner|text_|txt_")
_OTHER_TOWER = re.compile(r"_gen$|^add_|^to_add")
_CROSS = re.compile(r"^(attn2|cross_attn\d*|cross_attention\d*)$")
_KEYS_VALUES = re.compile(r"(^|_)(k|v|kv)($|_)")
_QUERY = re.compile(r"^(to_q|q_proj|q|wq|query|add_q_proj|to_add_q)$")
_FUSED = re.compile(r"^(to_|to_added_)?qkv(_proj)?$")
_FUSED_WITH_MLP = re.compile(r"^to_qkv_mlp")
_NO_LAYER = re.compile(r"embed|bias")


class Tokens(NamedTuple):
    """Tokens of a forward, all samples together: of the image or video, and of the text beside it."""

    image: int
    text: int


class _Layer(NamedTuple):
    """A linear layer: the parts of its name inside the block, its widths, the tokens it sees, and bytes of each."""

    path: tuple[str, ...]
    width_in: int
    width_out: int
    tokens: int
    itemsize: int

    @property
    def attends(self) -> int:
        """The width of the queries that it makes; 0 if it makes none."""
        if _QUERY.search(self.path[-1]):
            return self.width_out
        if _FUSED.search(self.path[-1]):
            return self.width_out // 3
        return self.width_in if _FUSED_WITH_MLP.search(self.path[-1]) else 0


def block_flops(block: BlockLayout, tokens: Tokens) -> int:
    """Operations of one block in a forward ([Note: Compute estimate])."""
    kind = _kind_of(block)
    total = 0
    for layer in _layers(block, tokens):
        total += 2 * layer.width_in * layer.width_out * layer.tokens
        total += 4 * layer.attends * layer.tokens * _attended(layer, kind, tokens)
    return total


def activation_nbytes(block: BlockLayout, tokens: Tokens) -> int:
    """An allowance for the activations of one block while it computes (`LIVE_COPIES`)."""
    layers = [layer for layer in _layers(block, tokens) if not _is_one_vector(layer.path)]
    if not layers:
        return 0
    widest = max(layer.width_out for layer in layers)
    own = Counter(layer.width_in for layer in layers).most_common(1)[0][0]
    itemsize = max(layer.itemsize for layer in layers)
    return LIVE_COPIES * (widest + own) * itemsize * (tokens.image + tokens.text)


def _layers(block: BlockLayout, tokens: Tokens) -> Iterator[_Layer]:
    kind = _kind_of(block)
    for path, shape, itemsize in _weights(block):
        yield _Layer(path, shape[1], shape[0], _tokens_of(path, kind, tokens), itemsize)


def _weights(block: BlockLayout) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], int]]:
    for tensor in block.tensors:
        *path, last = tensor.name.removeprefix(f"{block.name}.").lower().split(".")
        if len(tensor.shape) == 2 and last == "weight" and path:
            while path[-1].isdigit() and len(path) > 1:  # `to_out.0`, `img_mod.1`
                path.pop()
            if not _NO_LAYER.search(path[-1]):
                yield tuple(path), tensor.shape, getattr(torch, tensor.dtype).itemsize


def _kind_of(block: BlockLayout) -> str:
    """How a block sees the text: `text` alone, in a `tower` of its own, by `cross` attention, or in the same row."""
    if _TEXT_BLOCKS.search(block.name.lower()):
        return "text"
    paths = [path for path, _, _ in _weights(block)]
    if any(part.endswith("_gen") for path in paths for part in path):
        return "image tower"
    plain = [path for path in paths if not any(_CROSS.search(part) for part in path)]
    if any(_TEXT.search(part) for path in plain for part in path):
        return "text tower"
    return "one row" if len(plain) == len(paths) else "cross"


def _tokens_of(path: tuple[str, ...], kind: str, tokens: Tokens) -> int:
    if _is_one_vector(path):
        return 1
    if kind == "text":
        return tokens.text
    if kind == "one row":
        return tokens.image + tokens.text
    if kind == "cross":
        return tokens.text if _CROSS.search(path[0]) and _KEYS_VALUES.search(path[-1]) else tokens.image
    pattern, here, elsewhere = (
        (_OTHER_TOWER, tokens.image, tokens.text) if kind == "image tower" else (_TEXT, tokens.text, tokens.image)
    )
    return here if any(pattern.search(part) for part in path) else elsewhere


def _attended(layer: _Layer, kind: str, tokens: Tokens) -> int:
    """How many tokens a query of this layer attends to."""
    if kind == "text":
        return tokens.text
    if kind == "cross":
        return tokens.text if _CROSS.search(layer.path[0]) else tokens.image
    if kind == "image tower" and not any(_OTHER_TOWER.search(part) for part in layer.path):
        return tokens.text
    return tokens.image + tokens.text


def _is_one_vector(path: tuple[str, ...]) -> bool:
    return any(_ONE_VECTOR.search(part) for part in path)
