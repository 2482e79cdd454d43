# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Which quantized weights are refused, before anything is changed, and what enabling does not do to those that are not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusers_dlo import apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from diffusers_dlo.block_discovery import find_units
from diffusers_dlo.managed_tensor import ManagedTensor
from diffusers_dlo.owned_tensor import owned_tensors
from diffusers_dlo.tensor_utils import Move, move_tensors, put_back
from diffusers_dlo.wrapped_tensor import inner_tensors, plain_tensors, rewrap, set_inner
from tests.quantized import KINDS, Scaled, Stack, feed, quantized, scale_weights, stack
from tests.test_validation import refused


def call(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(feed(0))


def test_a_plan_on_meta_is_the_plan_of_the_model() -> None:
    with torch.device("meta"):
        model = Stack(5, dim=64, widths=(96, 160, 32)).to(torch.bfloat16)
        scale_weights(model)
    plan, real = (
        plan_distributed_layerwise_offload(model),
        plan_distributed_layerwise_offload(quantized("wrappers", stack(5))),
    )
    assert plan.digest == real.digest and plan.blocks == real.blocks
    assert plan.components[0].placed_nbytes == real.components[0].placed_nbytes


class Hiding(Scaled):
    """Has a tensor that it does not tell of."""

    def __init__(self, *args: torch.Tensor) -> None:
        super().__init__(*args)
        self.secret = torch.ones(3)


class Closed(Scaled):
    """Cannot be made around other tensors."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: None, size: torch.Size, stride: tuple[int, ...]) -> Scaled:
        raise ValueError("no")


class Forgetful(Scaled):
    """Is something else when it is made anew."""

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: None, size: torch.Size, stride: tuple[int, ...]) -> Scaled:
        return Scaled(**inner)


@pytest.mark.parametrize(
    "cls,reason",
    (
        (Hiding, "its 'secret' is a tensor that it does not list among those inside it"),
        (Closed, "it cannot be made anew (ValueError: no)"),
        (Forgetful, "it is not the same when it is made anew"),
    ),
    ids=("hiding", "closed", "forgetful"),
)
@pytest.mark.parametrize("transfer,error", (("local", NotImplementedError), ("all_gather", ValueError)))
def test_wrappers_that_are_not_safe(cls: type[Scaled], reason: str, transfer: str, error: type[Exception]) -> None:
    model = stack()
    q, scale = torch.ones(160, 64, dtype=torch.int8), torch.ones(160, 1)
    weight = cls(q, scale, torch.empty(0), torch.ones(()))
    model.blocks[1].up.weight = nn.Parameter(weight, requires_grad=False)
    with refused(model, error, "'blocks.1.up.weight' of 'model' is a " + cls.__name__, reason, run=call):
        apply_distributed_layerwise_offload(model, transfer=transfer)


def test_what_is_inside_has_to_be_plain() -> None:
    model = stack()
    weight = Scaled(torch.ones(160, 64), torch.ones(160, 1), torch.eye(2).to_sparse(), torch.ones(()))
    model.blocks[1].up.weight = nn.Parameter(weight, requires_grad=False)
    with refused(model, NotImplementedError, "its 'empty' is a Tensor of layout torch.sparse_coo", run=call):
        apply_distributed_layerwise_offload(model, transfer="local")


@pytest.mark.parametrize("kind", ("int8", "nf4"))
def test_weights_that_are_still_to_be_quantized(kind: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = stack()
    linear = model.blocks[1].up
    if kind == "int8":
        model.blocks[1].up = bnb.nn.Linear8bitLt(64, 160, has_fp16_weights=False)
        model.blocks[1].up.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False)
    else:
        model.blocks[1].up = bnb.nn.Linear4bit(64, 160)
    texts = ("'blocks.1.up.weight' of 'model'", "has not been quantized yet", "Move the model with .to(...) first")
    for transfer in ("local", "all_gather"):
        with refused(model, ValueError, *texts, run=None):
            apply_distributed_layerwise_offload(model, transfer=transfer)


def test_weights_that_were_packed_for_the_cpu() -> None:
    pytest.importorskip("bitsandbytes")
    model = quantized("bnb_nf4", stack())
    layer = model.blocks[1].up
    if not type(layer)(64, 64).support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no instructions for which weights are packed anew")
    reference = quantized("bnb_nf4", stack())
    for module in (layer, reference.blocks[1].up):
        module.support_avx512bf16_for_cpu = True
    handle = apply_distributed_layerwise_offload(model)
    for step in range(3):  # the first packs; what that makes stays on the device
        with torch.no_grad():
            assert torch.equal(model(feed(step)), reference(feed(step)))
    handle.remove()
    assert torch.equal(call(model), call(reference))
    with refused(model, ValueError, "'blocks.1.up.weight'", "was packed anew by a forward on the CPU", run=call):
        apply_distributed_layerwise_offload(model)


def test_weights_that_ask_for_gradients() -> None:
    model = quantized("wrappers", stack())
    model.blocks[1].down.weight.requires_grad_(True)
    handle = apply_distributed_layerwise_offload(model)
    with pytest.raises(RuntimeError, match="block 'blocks.1' of 'model' was called with gradients enabled"):
        model(feed(0))
    handle.remove()
    assert model.blocks[1].down.weight.requires_grad and not model.blocks[1].up.weight.requires_grad


class Converting(nn.Linear):
    """Saves its weight in another form than it has it."""

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t().contiguous()


def test_a_class_that_converts_what_it_saves_is_not_saved_wrong() -> None:
    model = stack()
    model.blocks[1].up.__class__ = Converting
    expected, state = call(model), model.state_dict()
    handle = apply_distributed_layerwise_offload(model)
    with pytest.raises(RuntimeError, match="'blocks.1.up.weight' of 'model' was read while it is saved.*Disable"):
        model.state_dict()
    assert torch.equal(call(model), expected)
    handle.remove()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_twins_are_pointed_too_and_come_back() -> None:
    """LLM.int8() holds its weight a second time: beside it at first, and in its state from the first forward on."""
    pytest.importorskip("bitsandbytes")
    expected, model = call(quantized("bnb_int8", stack())), quantized("bnb_int8", stack())
    layer = model.blocks[1].up
    weight, twin, state = layer.weight, layer.weight.CB, layer.state
    handle = apply_distributed_layerwise_offload(model)
    born = layer.weight
    assert born is not weight and born.CB is not twin and born.CB.data_ptr() == born.data_ptr()
    assert torch.equal(call(model), expected) and torch.equal(call(model), expected)
    assert born.CB is None and state.CB.data_ptr() == born.data_ptr() and state.CB.stride() == (0, 0)
    handle.remove()
    assert layer.weight is weight and state.CB is twin and twin.data_ptr() == weight.data_ptr()
    assert torch.equal(call(model), expected)
    handle = apply_distributed_layerwise_offload(model)  # its state has the weight already
    assert torch.equal(call(model), expected)
    handle.remove()
    assert state.CB.data_ptr() == layer.weight.data_ptr() and torch.equal(call(model), expected)


META = torch.device("meta")
"""Stands in for an accelerator: it cannot exchange memory with a tensor of the CPU, and a wrapper says where it is."""


@pytest.mark.parametrize("kind", ("wrappers", "torchao_int8", "quanto_int4", "bnb_int8", "bnb_nf4", "gguf_q8"))
@pytest.mark.parametrize("ran", (False, True), ids=("fresh", "ran"))
def test_weights_that_go_to_another_device_and_come_back(kind: str, ran: bool) -> None:
    pytest.importorskip(KINDS[kind][0])
    model = quantized(kind, stack(3))
    expected = call(quantized(kind, stack(3)))
    if ran:
        call(model)
    parameters = dict(model.named_parameters())
    before = {owned.name: (owned.tensor, owned.tensor.data_ptr()) for owned in owned_tensors(model)}
    twins = [(twin, twin.data_ptr()) for owned in owned_tensors(model) for twin in owned.twins.values()]
    assert bool(twins) == (kind == "bnb_int8")
    units, resident = find_units(model)
    managed = [ManagedTensor(owned, META) for unit in units for owned in unit.tensors]
    moved: list[Move] = []
    move_tensors(resident, META, moved)
    for tensor in managed:
        tensor.insert()
    there = owned_tensors(model)
    assert {owned.name for owned in there} == before.keys()
    assert {owned.tensor.device for owned in there} == {p.device for p in model.parameters()} == {META}
    assert {twin.device for owned in there for twin in owned.twins.values()} <= {META}
    assert all(type(p) is type(parameters[name]) for name, p in model.named_parameters())
    if kind == "wrappers":
        block = model.blocks[0]
        assert block.again is block.down.weight and block.up.weight.scale is block.gate.weight.scale
    for tensor in managed:
        tensor.restore(None)
    put_back(moved)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    for owned in owned_tensors(model):
        assert before[owned.name][0] is owned.tensor and before[owned.name][1] == owned.tensor.data_ptr()
        assert all(any(twin is t and twin.data_ptr() == p for t, p in twins) for twin in owned.twins.values())
    assert torch.equal(call(model), expected)


def contents(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(plain_tensors(tensor)) if isinstance(tensor, Scaled) else []


def test_a_wrapper_that_came_from_another_device_says_where_it_is() -> None:
    """As after disabling a model that was on an accelerator: its weights are on the CPU then."""
    model = quantized("wrappers", stack(3))
    weight = model.out.weight
    inner = dict(inner_tensors(weight))
    away = rewrap(weight, {path: torch.empty_like(tensor, device=META) for path, tensor in inner.items()})
    for path, tensor in inner.items():
        set_inner(away, path, tensor)
    model.out.weight = away
    assert model.out.weight.device == META
    move_tensors(owned_tensors(model), torch.device("cpu"), [])
    assert model.out.weight.device == torch.device("cpu") and type(model.out.weight) is Scaled
    assert all(a is b for a, b in zip(contents(model.out.weight), inner.values(), strict=True))
    assert torch.equal(call(model), call(quantized("wrappers", stack(3))))


@pytest.mark.parametrize("kind", ("wrappers", "torchao_int8", "bnb_int8", "gguf_q8"))
def test_weights_that_were_made_in_inference_mode(kind: str) -> None:
    """Their memory cannot be exchanged, so others of their kind come back."""
    pytest.importorskip(KINDS[kind][0])
    with torch.inference_mode():
        model, expected = quantized(kind, stack(3)), call(quantized(kind, stack(3)))
        handle = apply_distributed_layerwise_offload(model)
        assert all(torch.equal(call(model), expected) for _ in range(2))
        classes = {name: type(parameter) for name, parameter in model.named_parameters()}
        handle.remove()
        assert {name: type(parameter) for name, parameter in model.named_parameters()} == classes
        assert torch.equal(call(model), expected)


class Made(TorchDispatchMode):
    """What is made meanwhile: the bytes of all new memory, and of the largest that holds floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.largest_floating = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(made):
            if type(leaf) is torch.Tensor and leaf.untyped_storage()._cdata not in known:
                nbytes = leaf.untyped_storage().nbytes()
                self.nbytes += nbytes
                self.largest_floating = max(self.largest_floating, nbytes if leaf.is_floating_point() else 0)
        return made


@pytest.mark.parametrize("kind", ("wrappers", "torchao_int8", "bnb_nf4", "gguf_q8", "quanto_int4"))
def test_enabling_dequantizes_nothing(kind: str) -> None:
    pytest.importorskip(KINDS[kind][0])
    model = quantized(kind, stack(3))
    plan = plan_distributed_layerwise_offload(model)
    with Made() as made:
        handle = apply_distributed_layerwise_offload(model, transfer="local")
        handle.remove()
    assert made.largest_floating < 32 * 64 * 2, "that is the smallest weight as bf16"
    assert plan.device_slot_nbytes <= made.nbytes <= plan.device_slot_nbytes + (2 << 10)
