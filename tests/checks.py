# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the comparison of a tiny model under the offload with the same model without it. Must not know any model.
"""

from __future__ import annotations

from typing import Any

import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.zoo import Tiny, build, run


def check(
    tiny: Tiny,
    num_blocks: int,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    passes: int = 3,
    **options: Any,
) -> None:
    """Passes on inputs of this rank's own, then disabled again: outputs and weights bit-equal throughout."""
    reference, model = build(tiny, num_blocks, dtype=dtype), build(tiny, num_blocks, dtype=dtype)
    seeds = [10 * rank + step for step in range(passes)]
    expected = [run(reference, tiny.inputs(seed)) for seed in seeds]
    weights = {key: value.clone() for key, value in reference.state_dict().items()}
    buffers = {key: value.clone() for key, value in reference.named_buffers()}
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for seed, outputs in zip(seeds, expected):
            assert_equal(run(model, tiny.inputs(seed)), outputs, f"{tiny.name} {num_blocks} blocks, seed {seed}")
        if handle.report().host_kind == "packed":
            assert_same(model.state_dict(), weights)
    finally:
        handle.remove()
    assert_same(model.state_dict(), weights)
    assert_same(dict(model.named_buffers()), buffers)
    assert_equal(run(model, tiny.inputs(seeds[0])), expected[0], f"{tiny.name} after disabling")


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    """The same bits, and something in them."""
    assert expected and len(got) == len(expected), what
    for index, (a, b) in enumerate(zip(got, expected)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: output {index} differs"
        assert not torch.isnan(a).any(), what


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same tensors, under the same names and with the same strides."""
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and got[key].stride() == value.stride(), key
        assert torch.equal(got[key], value), key
