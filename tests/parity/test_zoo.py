# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Real diffusers and transformers classes: bit-equal to the model without offload, on one and several gloo ranks."""

import pytest
import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.ranks import run_ranks
from tests.zoo import MODELS, TEXT_ENCODERS, build, run


ALL = {**MODELS, **TEXT_ENCODERS}
BLOCKS = (1, 2, 3, 5)


def check(name: str, num_blocks: int, rank: int = 0, dtype: torch.dtype = torch.float32, **options) -> None:
    """Three passes on inputs of this rank's own, then disabled again: outputs and weights bit-equal throughout."""
    reference, model = build(name, num_blocks, dtype=dtype), build(name, num_blocks, dtype=dtype)
    seeds = [10 * rank + step for step in range(3)]
    expected = [run(reference, ALL[name].inputs(seed)) for seed in seeds]
    weights = {key: value.clone() for key, value in reference.state_dict().items()}
    buffers = {key: value.clone() for key, value in reference.named_buffers()}
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for seed, outputs in zip(seeds, expected):
            assert_equal(run(model, ALL[name].inputs(seed)), outputs, f"{name} {num_blocks} blocks, seed {seed}")
        if handle.report().host_kind == "packed":
            assert_same(model.state_dict(), weights)
    finally:
        handle.remove()
    assert_same(model.state_dict(), weights)
    assert_same(dict(model.named_buffers()), buffers)
    assert_equal(run(model, ALL[name].inputs(seeds[0])), expected[0], f"{name} after disabling")


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: output {index} differs"
        assert not torch.isnan(a).any(), what


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and got[key].stride() == value.stride(), key
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("num_blocks", BLOCKS)
@pytest.mark.parametrize("name", ALL)
def test_one_rank(name: str, num_blocks: int) -> None:
    check(name, num_blocks)


@pytest.mark.parametrize("name", ALL)
def test_one_rank_bf16_more_slots_pinned(name: str) -> None:
    check(name, 3, dtype=torch.bfloat16, num_slots=4, host="pinned")


def _many(rank: int, size: int, cases: list[tuple[str, int, dict]]) -> int:
    for name, num_blocks, options in cases:
        check(name, num_blocks, rank, **options)
    return len(cases)


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("num_blocks", BLOCKS)
def test_ranks(size: int, num_blocks: int) -> None:
    run_ranks(size, _many, [(name, num_blocks, {}) for name in ALL])


def test_two_ranks_other_options() -> None:
    cases = []
    for name in ALL:
        cases.append((name, 3, {"transfer": "local"}))
        cases.append((name, 3, {"host": "pinned", "num_slots": 3, "dtype": torch.bfloat16}))
        cases.append((name, 2, {"num_slots": 7}))
    assert run_ranks(2, _many, cases) == [len(cases)] * 2
