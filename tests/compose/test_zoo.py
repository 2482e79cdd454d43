# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Every class that diffusers exports, and the encoders its pipelines load: bit-equal to the model without offload, and
the blocks that stream are those its forward calls.
"""

from __future__ import annotations

import gc
import importlib.util

import pytest
from torch import nn

from diffusers_dlo import plan_distributed_layerwise_offload
from diffusers_dlo.block_discovery import discover_blocks
from tests.checks import check
from tests.ranks import run_ranks
from tests.zoo import Tiny, build, run

from .registries import COMMON, CONTROLNETS, ENCODERS, MODELS, OWN_ORDER, TRANSFORMERS, UNETS


# Their forwards use torchvision, which is no requirement of ours nor of diffusers.
NEED_TORCHVISION = ("CosmosControlNetModel",) if importlib.util.find_spec("torchvision") is None else ()

# Blocks that the inputs here do not reach: a tower for pictures, of a model that is given a prompt, and the heads of
# other codebooks.
NOT_CALLED: dict[str, tuple[str, ...]] = {
    "Gemma3ForConditionalGeneration": ("model.vision_tower.",),
    "MiniMaxMusic3RVQDepthDecoder": ("audio_heads.0", "audio_heads.1", "audio_heads.2"),
}


def names(registry: dict[str, Tiny]) -> list[str]:
    return [name for name in registry if name not in NEED_TORCHVISION]


@pytest.mark.parametrize("name", names(MODELS))
def test_one_rank(name: str) -> None:
    check(MODELS[name], 2)


def _many(rank: int, size: int, chosen: list[str]) -> int:
    for name in chosen:
        check(MODELS[name], 2, rank, passes=2, transfer="all_gather")
        gc.freeze()  # what its class has imported
    return len(chosen)


@pytest.mark.parametrize(
    "registry", (TRANSFORMERS, UNETS, CONTROLNETS, ENCODERS), ids=("transformers", "unets", "controlnets", "encoders")
)
def test_two_ranks(registry: dict[str, Tiny]) -> None:
    chosen = names(registry)
    assert run_ranks(2, _many, chosen) == [len(chosen)] * 2


def calls(model: nn.Module, tiny: Tiny) -> list[str]:
    """The members of lists and dictionaries that hold weights, in the order of their first calls in a forward."""
    members = {
        f"{path}.{key}": member
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict))
        for key, member in module.named_children()
        if not isinstance(member, (nn.ModuleList, nn.ModuleDict)) and any(True for _ in member.parameters())
    }
    seen: dict[str, None] = {}
    handles = [
        member.register_forward_pre_hook(lambda module, args, name=name: seen.setdefault(name))
        for name, member in members.items()
    ]
    run(model, tiny.inputs(0))
    for handle in handles:
        handle.remove()
    return list(seen)


@pytest.mark.parametrize("name", names({**MODELS, **COMMON}))
def test_blocks_are_what_forward_calls(name: str) -> None:
    tiny = {**MODELS, **COMMON}[name]
    model = build(tiny, 2)
    assert type(model).__name__ == name
    blocks = discover_blocks(model).blocks
    assert [block.name for block in plan_distributed_layerwise_offload(model).blocks] == list(blocks)
    called = calls(model, tiny)
    reached = [block for block in blocks if not block.startswith(NOT_CALLED.get(name, ()))]
    assert len(reached) < len(blocks) or name not in NOT_CALLED
    order = [block for block in called if block in blocks]
    assert sorted(order) == sorted(reached), "a block that no forward calls, or that is missing"
    assert (order == reached) == (name not in OWN_ORDER)
    # What is called beside them and stays is small.
    mean = sum(map(_nbytes, blocks.values())) / len(blocks)
    for other in called:
        if not any(f"{other}.".startswith(f"{block}.") or f"{block}.".startswith(f"{other}.") for block in blocks):
            assert _nbytes(model.get_submodule(other)) < mean, f"'{other}' is as large as a block and stays"


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
