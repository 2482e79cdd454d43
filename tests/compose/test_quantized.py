# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Weights that were quantized before enabling stream as the bytes they are: equal to the same model without the offload,
on one and two ranks, by each transfer, and afterwards the very same tensors again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload, host_view, plan_distributed_layerwise_offload
from diffusers_dlo.owned_tensor import SIDE, OwnedTensor, owned_tensors
from diffusers_dlo.wrapped_tensor import is_wrapper
from tests import toys
from tests.quantized import KINDS, feed, quantized, stack
from tests.ranks import run_ranks
from tests.toys import toy


AVAILABLE = [kind for kind, (library, _) in KINDS.items() if importlib.util.find_spec(library.partition(".")[0])]
IN_ALL_WAYS = ("wrappers", "torchao_int8", "bnb_int8")
"""The others differ from one of these in their classes alone, so fewer ways will do."""
LOCAL_OPTIONS: tuple[dict, ...] = (
    {"transfer": "local", "host": "packed"},
    {"transfer": "local", "host": "pinned", "num_slots": 3},
    {"transfer": "all_gather", "device_budget": "20KiB"},
)
GROUP_OPTIONS: tuple[dict, ...] = (
    {"transfer": "all_gather", "host": "packed"},
    {"transfer": "all_gather", "host": "pinned", "device_budget": "8KiB"},
    {"transfer": "local"},
)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, whatever its dtype and class."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


def contents(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]:
    """Every tensor that carries bytes of a model: itself, its bytes, its strides."""
    return {o.name: (o.tensor, bytes_of(o.tensor), o.tensor.stride()) for o in owned_tensors(model)}


def assert_same_state(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        mine = got[name]
        assert type(mine) is type(value) and (mine.dtype, mine.shape) == (value.dtype, value.shape), name
        if is_wrapper(value):
            one, two = (nn.ParameterList([x]) for x in (mine, value))
            assert_same_contents(contents(one), contents(two))
        else:
            assert torch.equal(bytes_of(mine), bytes_of(value)), name


def assert_same_contents(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, (_, value, stride) in expected.items():
        assert torch.equal(got[name][1], value) and got[name][2] == stride, name


def streaming(model: nn.Module) -> list[OwnedTensor]:
    """
    What has to stream of a toy: of its blocks all but single numbers, what is beside quantized parameters, and what
    two blocks share.
    """
    return [
        o
        for o in owned_tensors(model)
        if o.name.startswith("blocks.")
        and o.owners[0].kind != SIDE
        and o.tensor.numel() > 1
        and len({owner.name.split(".")[1] for owner in o.owners}) == 1
    ]


def check_plan(model: nn.Module, plan) -> None:
    """The layout lists the plain tensors, as bytes, aligned; the rest is counted as what stays."""
    expected = {o.name: (o.tensor.nbytes, o.tensor.dtype, o.tensor.stride()) for o in streaming(model)}
    placed = sum(o.tensor.nbytes for o in owned_tensors(model) if o.name not in expected)
    tensors = [tensor for block in plan.blocks for tensor in block.tensors]
    assert {t.name: (t.nbytes, getattr(torch, t.dtype), t.stride) for t in tensors} == expected
    assert all(tensor.offset % 256 == 0 for tensor in tensors)
    assert plan.components[0].placed_nbytes == placed


def check(kind: str, rank: int = 0, size: int = 1, **options) -> None:
    """Passes equal to those of the same model without offload; saved values, bytes moved and restored tensors too."""
    reference, model = quantized(kind, stack(4)), quantized(kind, stack(4))
    inference = kind != "quanto_int4"  # which fails under inference_mode without the offload too
    before = contents(model)
    parameters = {name: (parameter, type(parameter)) for name, parameter in model.named_parameters()}
    check_plan(model, plan_distributed_layerwise_offload(model))
    handle = apply_distributed_layerwise_offload(model, **options)
    moved = []
    try:
        for step in range(3):
            with torch.inference_mode() if step % 2 and inference else torch.no_grad():
                got, expected = model(feed(10 * rank + step)), reference(feed(10 * rank + step))
            assert torch.equal(got, expected) and not torch.isnan(got).any(), f"pass {step}"
            moved.append(handle.report().h2d_bytes)
        assert all(not tensor.kept for part in handle._parts for u in part.component.units for tensor in u.tensors)
        if "device_budget" not in options:
            shards = size if options["transfer"] == "all_gather" else 1
            assert moved[2] - moved[1] == sum(block.shard_nbytes(shards) for block in handle.plan.blocks)
        if handle.report().host_kind == "packed":
            assert_same_state(model.state_dict(), reference.state_dict())
            value = host_view(model, "blocks.1.up.weight")
            assert_same_state({"": value}, {"": reference.blocks[1].up.weight.detach()})
    finally:
        handle.remove()
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name][0] and type(parameter) is parameters[name][1], name
    after = {id(o.tensor) for o in owned_tensors(model)}
    for name, (tensor, value, stride) in before.items():
        assert id(tensor) in after and torch.equal(bytes_of(tensor), value) and tensor.stride() == stride, name
    assert_same_state(model.state_dict(), reference.state_dict())
    with torch.no_grad():
        assert torch.equal(model(feed(7)), reference(feed(7)))


@pytest.mark.parametrize("kind", AVAILABLE)
def test_one_rank(kind: str) -> None:
    for options in LOCAL_OPTIONS if kind in IN_ALL_WAYS else LOCAL_OPTIONS[:1]:
        check(kind, **options)


@pytest.mark.parametrize("kind", [kind for kind in AVAILABLE if kind in ("wrappers", "quanto_int4", "bnb_int8")])
def test_a_cache_of_quantized_weights(kind: str, tmp_path: Path) -> None:
    expected = quantized(kind, stack())
    for _ in range(2):  # written, then read
        model = quantized(kind, stack())
        handle = apply_distributed_layerwise_offload(model, transfer="local", cache_dir=str(tmp_path))
        assert handle.report().host_kind == "mapped"
        with torch.no_grad():
            assert torch.equal(model(feed(0)), expected(feed(0)))
        assert_same_state(model.state_dict(), expected.state_dict())
        handle.remove()
    assert_same_state(model.state_dict(), expected.state_dict())


def check_on_ranks(rank: int, size: int) -> None:
    for kind in AVAILABLE:
        for options in GROUP_OPTIONS if kind in IN_ALL_WAYS else GROUP_OPTIONS[:1]:
            check(kind, rank, size, **options)
    for kind in AVAILABLE[::5]:
        model = quantized(kind, stack(3, seed=rank))
        with pytest.raises(RuntimeError, match="do not have the same model.*first difference"):
            apply_distributed_layerwise_offload(model, transfer="all_gather")


def test_two_ranks() -> None:
    run_ranks(2, check_on_ranks)


class Exchanging(toys.Block):
    """Puts another bias in place in each call, and another weight in the second, as quantized layers do."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.down.bias.data = self.down.bias.data + 1
        if self.calls == 2:
            self.up.weight.data = self.up.weight.data.t().contiguous().t() * 2
        return super().forward(x)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_a_weight_that_forward_exchanges_stays_exchanged(transfer: str) -> None:
    reference, model = toy(toys.Stack, 3, Exchanging), toy(toys.Stack, 3, Exchanging)
    handle = apply_distributed_layerwise_offload(model, transfer=transfer)
    for step in range(4):
        with torch.no_grad():
            assert torch.equal(model(toys.feed(step)), reference(toys.feed(step))), f"pass {step}"
    assert_same_state(model.state_dict(), reference.state_dict())
    handle.remove()
    assert_same_contents(contents(model), contents(reference))


@pytest.mark.parametrize("kind", [kind for kind in AVAILABLE if kind in ("quanto_int8", "bnb_int8", "gguf_q8")])
def test_an_adapter_does_not_merge_into_what_is_not_there(kind: str) -> None:
    """PEFT would make quantized weights anew from placeholders; integers among these are no NaN that would show."""
    reference, model = quantized(kind, stack()), quantized(kind, stack())
    handle = apply_distributed_layerwise_offload(model, transfer="local")
    for each in (reference, model):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["up"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, each, "x")
        each.requires_grad_(False)
    for _ in range(2):
        assert torch.equal(model(feed(0)), reference(feed(0)))
        layer = model.blocks[1].up
        for safe in (False, True):
            with pytest.raises(ValueError, match="'merge' is refused while 'model'.*Fuse before enabling"):
                layer.merge(safe_merge=safe)
    handle.remove()
    assert "merge" not in vars(layer)
    assert_same_state(model.state_dict(), reference.state_dict())


@pytest.mark.skipif("bnb_int8" not in AVAILABLE, reason="needs bitsandbytes")
def test_what_shows_the_bytes_a_second_time_keeps_no_memory() -> None:
    """A forward before enabling has put the bytes beside the layer: they go when the parameter's go, and come back."""
    model = quantized("bnb_int8", stack())
    model(feed(0))
    layer = model.blocks[1].up
    twin, nbytes = layer.state.CB, layer.weight.nbytes
    assert twin.untyped_storage().nbytes() == nbytes
    handle = apply_distributed_layerwise_offload(model, transfer="local")
    assert twin.untyped_storage().nbytes() == 1
    handle.remove()
    assert layer.state.CB is twin and twin.data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("kind", [kind for kind in AVAILABLE if kind in ("torchao_int8", "quanto_int8")])
def test_part_of_the_weights_does_not_load_into_a_wrapper(kind: str) -> None:
    reference, model = quantized(kind, stack()), quantized(kind, stack())
    handle = apply_distributed_layerwise_offload(model, transfer="local")
    with pytest.raises(ValueError, match="'load_state_dict' is refused.*Disable first"):
        model.load_state_dict({"blocks.1.up.weight": torch.zeros(model.blocks[1].up.weight.shape)}, strict=False)
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
    handle.remove()
    assert_same_state(model.state_dict(), reference.state_dict())
