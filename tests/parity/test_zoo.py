# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Real diffusers and transformers classes: bit-equal to the model without offload, on one and several gloo ranks."""

import pytest
import torch

from tests.checks import check
from tests.ranks import run_ranks
from tests.zoo import MODELS, TEXT_ENCODERS


ALL = {**MODELS, **TEXT_ENCODERS}
BLOCKS = (1, 2, 3, 5)


@pytest.mark.parametrize("num_blocks", BLOCKS)
@pytest.mark.parametrize("name", ALL)
def test_one_rank(name: str, num_blocks: int) -> None:
    check(ALL[name], num_blocks)


@pytest.mark.parametrize("name", ALL)
def test_one_rank_bf16_more_slots_pinned(name: str) -> None:
    check(ALL[name], 3, dtype=torch.bfloat16, num_slots=4, host="pinned")


def _many(rank: int, size: int, cases: list[tuple[str, int, dict]]) -> int:
    for name, num_blocks, options in cases:
        check(ALL[name], num_blocks, rank, **options)
    return len(cases)


@pytest.mark.parametrize(
    "size,num_blocks",
    (
        (2, 1),
        (2, 2),
        (2, 5),
        (3, 3),
        *(pytest.param(size, blocks, marks=pytest.mark.slow) for size, blocks in ((2, 3), (3, 1), (3, 2), (3, 5))),
    ),
)
def test_ranks(size: int, num_blocks: int) -> None:
    run_ranks(size, _many, [(name, num_blocks, {}) for name in ALL])


def test_two_ranks_other_options() -> None:
    cases = []
    for name in ALL:
        cases.append((name, 3, {"transfer": "local"}))
        cases.append((name, 3, {"host": "pinned", "num_slots": 3, "dtype": torch.bfloat16}))
        cases.append((name, 2, {"num_slots": 7}))
    assert run_ranks(2, _many, cases) == [len(cases)] * 2
