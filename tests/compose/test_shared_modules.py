# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Components that have modules in common: the Z-Image ControlNet uses embedders and refiners of the transformer. What
both have stays on the device, and each streams the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import DiffusionPipeline, ZImageControlNetModel, ZImageTransformer2DModel
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from tests.checks import assert_equal
from tests.ranks import run_ranks
from tests.toys import Stack, toy
from tests.zoo import Tiny, build, flat

from .controlnet_models import MODELS


class Pair(DiffusionPipeline):
    """A transformer with a net beside it."""

    def __init__(self, transformer: nn.Module, controlnet: nn.Module) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, controlnet=controlnet)


def make() -> Pair:
    def together(num_blocks: int) -> nn.Module:
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=num_blocks,
            n_refiner_layers=2,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=24,
            axes_dims=[4, 6, 6],
            axes_lens=[64, 16, 16],
        )
        net = MODELS["ZImageControlNetModel"].build(num_blocks)
        return nn.ModuleList([transformer, ZImageControlNetModel.from_transformer(net, transformer)])

    return Pair(*build(Tiny("pair", together, MODELS["ZImageControlNetModel"].inputs)))


def step(pipe: Pair, seed: int) -> list[torch.Tensor]:
    """A step as the pipeline does it: the net, then the transformer with its residuals."""
    inputs = MODELS["ZImageControlNetModel"].inputs(seed)
    with torch.no_grad():
        residuals = pipe.controlnet(**inputs)
        noise = pipe.transformer(inputs["x"], inputs["t"], inputs["cap_feats"], controlnet_block_samples=residuals)
    return [tensor.clone() for tensor in (*flat(noise), *flat(residuals))]


def check(pipe: Pair, handle: OffloadHandle, expected: Sequence[list[torch.Tensor]], first: int, what: str) -> None:
    try:
        for seed, outputs in enumerate(expected, first):
            assert_equal(step(pipe, seed), outputs, what)
    finally:
        handle.remove()
    assert_equal(step(pipe, first), expected[0], f"{what}, disabled")


def _both_orders(rank: int, size: int, transfer: str) -> None:
    first = 10 * rank
    expected = [step(make(), seed) for seed in range(first, first + 3)]
    pipe = make()
    handle = pipe.enable_distributed_layerwise_offload(transfer=transfer)
    streamed = {c.name: {block.name.partition(".")[0] for block in c.blocks} for c in handle.plan.components}
    assert streamed == {"transformer": {"layers"}, "controlnet": {"control_layers", "control_noise_refiner"}}
    check(pipe, handle, expected, first, "both")
    pipe = make()
    check(
        pipe,
        pipe.enable_distributed_layerwise_offload(components=["transformer"], transfer=transfer),
        expected,
        first,
        "the net placed",
    )
    pipe = make()
    check(
        pipe,
        apply_distributed_layerwise_offload(pipe.transformer, transfer=transfer),
        expected,
        first,
        "the net left alone",
    )


def test_one_rank() -> None:
    _both_orders(0, 1, "local")


def test_two_ranks() -> None:
    run_ranks(2, _both_orders, "all_gather")


def test_what_is_shared_counts_once() -> None:
    one, other = toy(Stack, 3), toy(Stack, 2)
    other.blocks[1] = one.blocks[2]
    other.out = one.out
    plan = plan_distributed_layerwise_offload(Pair(one, other), components=["transformer", "controlnet"])
    assert [block.name for block in plan.blocks] == ["blocks.0", "blocks.1", "blocks.0"]
    nbytes = {id(t): t.nbytes for stack in (one, other) for t in stack.parameters()}
    streamed = sum(t.nbytes for b in (*one.blocks[:2], other.blocks[0]) for t in b.parameters())
    assert sum(tensor.nbytes for block in plan.blocks for tensor in block.tensors) == streamed
    assert streamed + sum(c.placed_nbytes for c in plan.components) == sum(nbytes.values())
    (alone,) = plan_distributed_layerwise_offload(one).components
    assert len(alone.blocks) == 3, "by itself it shares nothing"
    placed = plan_distributed_layerwise_offload(Pair(one, other), components=["transformer"])
    assert [block.name for block in placed.blocks] == ["blocks.0", "blocks.1"]
    ((_, _, rest),) = placed.placed
    assert rest == sum(t.nbytes for t in (*other.inp.parameters(), *other.blocks[0].parameters()))
