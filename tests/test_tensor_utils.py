# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What is done to single tensors: placeholders, byte images, which tensors are managed, re-pointing and moving."""

from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload, tensor_utils
from diffusers_dlo.block_discovery import discover_blocks
from diffusers_dlo.casts import flat_bytes
from diffusers_dlo.managed_tensor import ManagedTensor
from diffusers_dlo.tensor_utils import (
    Move,
    OwnedTensor,
    make_offload_placeholder,
    move_tensors,
    nbytes_of,
    owned_tensors,
    partition_tensors,
    put_back,
    set_tensor_storage,
    typed_view,
)
from tests import toys, zoo
from tests.toys import Block, feed, toy


@pytest.fixture(autouse=True)
def small_buffers_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of these sizes stay on the device otherwise; how large ones stream shows on them."""
    monkeypatch.setattr(tensor_utils, "SMALL_BUFFER_NBYTES", 0)


CPU = torch.device("cpu")
META = torch.device("meta")
"""Stands in for an accelerator: like some of them, it cannot exchange memory with a tensor of the CPU."""

FLOATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def filled(dtype: torch.dtype, shape: Sequence[int], order: Sequence[int] | None = None) -> torch.Tensor:
    """Every bit random (of a bool, its one), dense, with the dimensions in memory in `order`."""
    order = tuple(range(len(shape))) if order is None else tuple(order)
    stored = torch.empty([shape[dim] for dim in order], dtype=dtype)
    memory = random_bytes(stored.nbytes)
    if dtype == torch.bool:
        memory &= 1
    memory = memory.view(dtype).view(stored.shape)
    return memory.permute([order.index(dim) for dim in range(len(shape))])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also where NaNs are: compared as bytes, element by element in the order of the indices."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)


# ----------------------------------------------------------------------------------------------- placeholders


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((6,), (3, 5), (2, 1, 4), (1,), ()), ids=str)
def test_a_placeholder_is_true_to_shape_and_dtype_and_costs_one_element(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    original = filled(dtype, shape)
    placeholder = make_offload_placeholder(original, CPU)
    assert (placeholder.shape, placeholder.dtype, placeholder.device) == (original.shape, dtype, CPU)
    assert placeholder.untyped_storage().nbytes() == dtype.itemsize
    assert placeholder.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
    if dtype in FLOATS:
        assert placeholder.double().isnan().all()
    elif dtype in COMPLEX:
        assert placeholder.isnan().all()
    elif dtype == torch.bool:
        assert placeholder.all()
    else:
        assert set(placeholder.flatten().tolist()) == {torch.iinfo(dtype).min}


def test_a_placeholder_is_on_the_device_asked_for() -> None:
    assert make_offload_placeholder(torch.zeros(3, 2), META).device == META
    assert make_offload_placeholder(torch.zeros(3, 2, device=META), "cpu").device == CPU


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(2),
    "copy_": lambda t: t.copy_(torch.ones(t.shape)),
    "add to a row": lambda t: t[0].add_(1),
    "assign a column": lambda t: t.__setitem__((slice(None), 0), torch.ones(3)),
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t),
}
QUIET_WRITES = {
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(1.0),
    "zeros_": lambda t: nn.init.zeros_(t),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(3, 5, dtype=torch.bool), 2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_placeholder_raises(write: str) -> None:
    placeholder = make_offload_placeholder(torch.ones(3, 5), CPU)
    with pytest.raises(RuntimeError):
        WRITES[write](placeholder)
    assert placeholder.isnan().all(), "and nothing was written"


@pytest.mark.parametrize("write", QUIET_WRITES)
def test_what_torch_lets_write_to_a_placeholder_is_noticed_at_the_next_turn(write: str) -> None:
    module = nn.Linear(5, 3)
    managed = ManagedTensor(owned_tensors(module)[0], CPU)
    managed.insert()
    managed.check_unwritten()
    with torch.no_grad():
        QUIET_WRITES[write](module.weight)
    with pytest.raises(RuntimeError, match="'weight' was written to while its block was not on the device.*Disable"):
        managed.check_unwritten()


def test_a_placeholder_of_a_parameter_is_no_parameter() -> None:
    placeholder = make_offload_placeholder(nn.Parameter(torch.ones(3)), CPU)
    assert type(placeholder) is torch.Tensor and not placeholder.requires_grad and placeholder.grad_fn is None


# ------------------------------------------------------------------------------------------------------ bytes


LAYOUTS = {
    "vector": ((7,), (0,)),
    "rows": ((3, 5), (0, 1)),
    "columns": ((3, 5), (1, 0)),
    "permuted": ((2, 3, 5), (2, 0, 1)),
    "channels last": ((2, 3, 4, 5), (0, 2, 3, 1)),
    "a size of one": ((4, 1, 3), (2, 1, 0)),
    "scalar": ((), ()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_and_back(layout: str, dtype: torch.dtype) -> None:
    tensor = filled(dtype, *LAYOUTS[layout])
    content = flat_bytes(tensor)
    assert content.dtype == torch.uint8 and content.shape == (tensor.nbytes,)
    assert content.data_ptr() == tensor.data_ptr(), "the same memory"
    expected = random_bytes(tensor.nbytes)
    assert torch.equal(content, expected & 1 if dtype == torch.bool else expected), "in the order of storage"

    image = random_bytes(512 + tensor.nbytes + 64, seed=1)
    image[512 : 512 + tensor.nbytes] = content
    before = image.clone()
    view = typed_view(image, 512, tensor.nbytes, dtype, tensor.shape, tensor.stride())
    assert same_bits(view, tensor) and view.stride() == tensor.stride()
    assert view.data_ptr() == image.data_ptr() + 512
    # A view and not a copy, of these bytes alone.
    view.zero_()
    assert not image[512 : 512 + tensor.nbytes].any()
    assert torch.equal(image[:512], before[:512])
    assert torch.equal(image[512 + tensor.nbytes :], before[512 + tensor.nbytes :])


def test_bytes_of_a_part_of_a_larger_storage() -> None:
    whole = torch.arange(100, dtype=torch.int32)
    part = whole[40:60].view(4, 5).t()
    assert torch.equal(flat_bytes(part).view(torch.int32), torch.arange(40, 60, dtype=torch.int32))


def test_bytes_of_a_parameter_do_not_require_a_gradient() -> None:
    content = flat_bytes(nn.Parameter(torch.ones(2, 3)))
    assert not content.requires_grad and type(content) is torch.Tensor


def test_set_tensor_storage_keeps_the_object() -> None:
    parameter = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    view = torch.arange(6.0).view(3, 2).t()
    set_tensor_storage(parameter, view)
    assert type(parameter) is nn.Parameter and not parameter.requires_grad
    assert parameter.data_ptr() == view.data_ptr() and parameter.stride() == (1, 2)


# -------------------------------------------------------------------------------------------------- partition


def split(model: nn.Module, units: Sequence[nn.Module] | None = None) -> tuple[list[set[str]], set[str]]:
    """The names of managed tensors, for each unit, and of those that stay; every tensor is in one of them, once."""
    units = list(discover_blocks(model).blocks.values()) if units is None else units
    managed, resident = partition_tensors(model, [(unit,) for unit in units])
    owned = [*(tensor for unit in managed for tensor in unit), *resident]
    everything = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    assert sorted(id(item.tensor) for item in owned) == sorted(everything)
    return [{item.name for item in unit} for unit in managed], {item.name for item in resident}


BLOCK = {f"{name}.{kind}" for name in ("norm", "up", "down") for kind in ("weight", "bias")}
ENDS = {f"{name}.{kind}" for name in ("inp", "out") for kind in ("weight", "bias")}


def block(index: int, without: Sequence[str] = ()) -> set[str]:
    return {f"blocks.{index}.{name}" for name in BLOCK - set(without)}


def test_a_plain_model() -> None:
    managed, resident = split(toy(toys.Stack, 3))
    assert managed == [block(0), block(1), block(2)] and resident == ENDS


def test_buffers_are_managed_also_those_that_are_not_saved() -> None:
    managed, _ = split(toy(toys.Stack, 1, toys.CountingBlock))
    assert managed == [block(0) | {"blocks.0.calls", "blocks.0.last"}]


def test_what_is_shared_stays() -> None:
    managed, resident = split(toy(toys.Tied))
    # Within one block nothing is shared with others: the tensor streams, under its first name.
    assert managed == [
        block(0, ("up.weight", "down.bias")),
        block(1, ("up.weight",)),
        block(2, ("down.weight",)),
    ]
    assert resident == ENDS - {"out.weight"} | {"blocks.0.up.weight", "blocks.2.down.weight"}


def test_every_place_of_a_tied_tensor_is_known() -> None:
    model = toy(toys.Tied)
    places = {
        item.name: [(owner.name, owner.attribute, owner.kind) for owner in item.owners]
        for item in owned_tensors(model)
    }
    assert places["blocks.0.up.weight"] == [
        ("blocks.0.up.weight", "weight", "parameter"),
        ("blocks.1.up.weight", "weight", "parameter"),
    ]
    assert [name for name, *_ in places["blocks.0.norm.bias"]] == ["blocks.0.norm.bias", "blocks.0.down.bias"]
    assert [name for name, *_ in places["blocks.2.down.weight"]] == ["blocks.2.down.weight", "out.weight"]
    assert nbytes_of(owned_tensors(model)) == sum(p.nbytes for p in model.parameters()), "counted once"
    for item in owned_tensors(model):
        assert all(owner.slots[owner.attribute] is item.tensor for owner in item.owners)


def test_a_parameter_that_is_a_buffer_elsewhere_is_tied() -> None:
    model = toy(toys.Stack, 2)
    model.register_buffer("copy", model.blocks[0].up.weight)
    managed, resident = split(model)
    assert managed == [block(0, ("up.weight",)), block(1)] and resident == ENDS | {"copy"}


def test_a_module_shared_by_two_blocks_stays() -> None:
    model = toy(toys.Stack, 3)
    model.blocks[2].norm = model.blocks[0].norm
    managed, resident = split(model)
    norm = ("norm.weight", "norm.bias")
    assert managed == [block(0, norm), block(1), block(2, norm)]
    assert resident == ENDS | {"blocks.0.norm.weight", "blocks.0.norm.bias"}


@pytest.mark.parametrize("first", (True, False), ids=("registered before", "registered after"))
def test_a_module_shared_by_a_block_and_the_rest_stays(first: bool) -> None:
    """As a tensor that both have: the rest may call it, or read it, at any time."""
    model = toy(toys.Stack, 2)
    norm = model.blocks[0].norm
    if first:
        blocks = model.blocks
        del model.blocks
        model.extra = norm
        model.blocks = blocks
    else:
        model.extra = norm
    managed, resident = split(model)
    assert managed == [block(0, ("norm.weight", "norm.bias")), block(1)]
    assert len(resident - ENDS) == 2


def test_single_elements_stay() -> None:
    """Their placeholder, of one element, could be written to without an error."""
    model = toy(toys.Stack, 1)
    model.blocks[0].scale = nn.Parameter(torch.tensor(0.5))
    model.blocks[0].gate = nn.Parameter(torch.ones(1, 1, 1))
    model.blocks[0].register_buffer("nothing", torch.empty(0, 4))
    model.blocks[0].register_buffer("pair", torch.ones(2))
    managed, resident = split(model)
    assert managed == [block(0) | {"blocks.0.pair"}]
    assert resident == ENDS | {"blocks.0.scale", "blocks.0.gate", "blocks.0.nothing"}


def test_tensors_with_gaps_or_overlaps_stay_and_permuted_ones_stream() -> None:
    model = toy(toys.Stack, 1)
    odd = {
        "expanded": torch.ones(1, 4).expand(3, 4),
        "strided": torch.arange(20.0)[::2],
        "columns": torch.arange(20.0).view(4, 5)[:, :3],
        "windows": torch.arange(20.0).unfold(0, 4, 1),
    }
    dense = {
        "transposed": torch.arange(20.0).view(4, 5).t(),
        "permuted": torch.arange(60.0).view(3, 4, 5).permute(2, 0, 1),
        "part": torch.arange(20.0)[5:15],
        "channels_last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    for name, tensor in {**odd, **dense}.items():
        model.blocks[0].register_buffer(name, tensor)
    managed, resident = split(model)
    assert managed == [block(0) | {f"blocks.0.{name}" for name in dense}]
    assert resident == ENDS | {f"blocks.0.{name}" for name in odd}


@pytest.mark.parametrize("kind", ("conjugate", "negative"))
def test_a_tensor_whose_bytes_are_not_its_value_is_not_streamed_as_bytes(kind: str) -> None:
    """torch conjugates and negates lazily, with a bit beside the bytes (rotary tables are often conjugated)."""

    class Rotary(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = torch.view_as_real(self.table.resolve_conj()) if kind == "conjugate" else self.table
            return super().forward(x) + table.sum()

    model = toy(toys.Stack, 1, Rotary)
    table = torch.randn(8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    model.blocks[0].register_buffer(
        "table", table.conj() if kind == "conjugate" else torch._neg_view(table.real.clone())
    )
    assert model.blocks[0].table.is_conj() or model.blocks[0].table.is_neg()
    with torch.no_grad():
        expected = model(feed(0))
        handle = apply_distributed_layerwise_offload(model)
        try:
            assert torch.equal(model(feed(0)), expected)
        finally:
            handle.remove()
        assert torch.equal(model(feed(0)), expected)


LORA = {
    "lora": LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_out.0"], init_lora_weights=False),
    "lora with bias": LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False, lora_bias=True),
    "dora": LoraConfig(r=2, target_modules=["to_v"], init_lora_weights=False, use_dora=True),
}


@pytest.mark.parametrize("name", ("wan", "flux"))
@pytest.mark.parametrize("kind", LORA)
def test_adapters_stay_and_what_they_wrap_streams(kind: str, name: str) -> None:
    model = zoo.build(name)
    before = [{id(item.tensor) for item in unit} for unit in partition(model)]
    resident_before = set(split(model)[1])
    model.add_adapter(LORA[kind], adapter_name="first")
    model.add_adapter(LORA[kind], adapter_name="second")
    managed, resident = split(model)
    assert [{id(item.tensor) for item in unit} for unit in partition(model)] == before, "the same tensors as without"
    wrapped = {item for unit in managed for item in unit if ".base_layer." in item}
    assert wrapped and not any("lora_" in item for unit in managed for item in unit)
    added = resident - resident_before
    assert added and all("lora_" in item and (".first." in item or ".second." in item) for item in added)


def partition(model: nn.Module) -> list[list[OwnedTensor]]:
    return partition_tensors(model, [(block,) for block in discover_blocks(model).blocks.values()])[0]


def test_a_wrapped_leaf_inside_an_adapted_block_keeps_its_order() -> None:
    """The order of tensors, and so the image, is that of the model without adapters."""
    model = zoo.build("wan")
    before = [[id(item.tensor) for item in unit] for unit in partition(model)]
    model.add_adapter(LORA["lora"])
    assert [[id(item.tensor) for item in unit] for unit in partition(model)] == before


# --------------------------------------------------------------------------------------------- managed tensors


def managed(model: nn.Module, name: str) -> ManagedTensor:
    owned = next(item for item in owned_tensors(model) if item.name == name)
    return ManagedTensor(owned, CPU)


def test_point_and_unpoint() -> None:
    model = toy(toys.Stack, 1)
    up = model.blocks[0].up
    original, value = up.weight, up.weight.detach().clone()
    original.note = "kept"
    tensor = managed(model, "blocks.0.up.weight")
    assert up.weight is original, "nothing is put in before insert"
    tensor.insert()
    born = up.weight
    assert born is tensor.born is not original
    assert type(born) is nn.Parameter and born.requires_grad and born.note == "kept"
    assert born.isnan().all() and born.untyped_storage().nbytes() == 4
    assert torch.equal(original, value), "the original keeps its bytes until they are dropped"

    for index in range(3):
        slot = torch.empty(value.nbytes + 256, dtype=torch.uint8)
        view = typed_view(slot, 256, value.nbytes, torch.float32, value.shape, value.stride())
        view.copy_(value + index)
        tensor.point(view)
        assert up.weight is born and born.data_ptr() == view.data_ptr() and torch.equal(born, value + index)
        tensor.unpoint(view)
        assert up.weight is born and born.isnan().all() and born.untyped_storage().nbytes() == 4
        assert torch.equal(view, value + index), "the slot is not written to"
    assert not tensor.kept

    tensor.drop_original()
    assert original.untyped_storage().nbytes() == 4  # one NaN
    tensor.restore(value.clone())
    assert up.weight is original and torch.equal(original, value) and original.requires_grad


def test_a_frozen_parameter_stays_frozen_and_a_buffer_a_buffer() -> None:
    model = toy(toys.Stack, 1, toys.CountingBlock)
    model.requires_grad_(False)
    tensors = [managed(model, f"blocks.0.{name}") for name in ("up.weight", "calls", "last")]
    originals = [tensor.original for tensor in tensors]
    for tensor in tensors:
        tensor.insert()
    weight, calls, last = model.blocks[0].up.weight, model.blocks[0].calls, model.blocks[0].last
    assert type(weight) is nn.Parameter and not weight.requires_grad
    assert type(calls) is type(last) is torch.Tensor and "calls" in model.blocks[0]._buffers
    assert "blocks.0.calls" in model.state_dict() and "blocks.0.last" not in model.state_dict()
    for tensor in tensors:
        tensor.restore(None)
    now = [model.blocks[0].up.weight, model.blocks[0].calls, model.blocks[0].last]
    assert all(one is other for one, other in zip(now, originals))


@pytest.mark.parametrize("inference", (False, True), ids=("no_grad", "inference_mode"))
@pytest.mark.parametrize("part", (False, True), ids=("whole", "one element"))
def test_what_forward_writes_is_kept(part: bool, inference: bool) -> None:
    model = toy(toys.Stack, 1, toys.CountingBlock)
    tensor = managed(model, "blocks.0.calls")
    original = tensor.original
    tensor.insert()
    view = torch.arange(4.0)
    expected = torch.arange(4.0)
    with torch.inference_mode() if inference else torch.no_grad():
        tensor.point(view)
        if part:
            model.blocks[0].calls[2] += 1
            expected[2] += 1
        else:
            model.blocks[0].calls += 1
            expected += 1
        tensor.unpoint(view)
    assert tensor.kept
    view.fill_(-1)  # the slot is used for another block
    born = model.blocks[0].calls
    assert born is tensor.born and torch.equal(born, expected) and not born.is_inference()
    born += 1  # and it may be written to again, in any mode
    tensor.restore(born.detach().clone())
    assert model.blocks[0].calls is original and torch.equal(original, expected + 1)


def test_reading_is_not_writing() -> None:
    model = toy(toys.Stack, 1)
    tensor = managed(model, "blocks.0.up.weight")
    tensor.insert()
    view = tensor.original.detach().clone()
    tensor.point(view)
    with torch.no_grad():
        (model.blocks[0].up.weight.t() @ torch.ones(24, 2)).add_(1)
        model.blocks[0].up.weight.view(-1)[:3].clone().mul_(2)
    tensor.unpoint(view)
    assert not tensor.kept and model.blocks[0].up.weight.isnan().all()


def test_a_kept_permuted_tensor_keeps_its_strides() -> None:
    model = toy(toys.Stack, 1, toys.MixedBlock)
    tensor = managed(model, "blocks.0.up.weight")
    tensor.insert()
    memory = tensor.original.detach().clone()
    assert memory.stride() == (1, 24)
    tensor.point(memory)
    with torch.no_grad():
        tensor.born.mul_(2)
    tensor.unpoint(memory)
    assert tensor.kept and tensor.born.stride() == (1, 24)
    assert torch.equal(tensor.born, memory) and tensor.born.data_ptr() != memory.data_ptr()


def test_a_tie_within_a_block_is_one_tensor_everywhere() -> None:
    model = toy(toys.Tied)
    first = model.blocks[0]
    original, value = first.norm.bias, first.norm.bias.detach().clone()
    tensor = managed(model, "blocks.0.norm.bias")
    tensor.insert()
    assert first.norm.bias is first.down.bias is tensor.born
    tensor.point(value)
    assert first.down.bias.data_ptr() == first.norm.bias.data_ptr() == value.data_ptr()
    tensor.unpoint(value)
    tensor.drop_original()
    tensor.restore(value)
    assert first.norm.bias is first.down.bias is original and torch.equal(original, value)


def test_what_somebody_put_in_meanwhile_is_left() -> None:
    model = toy(toys.Tied)
    first = model.blocks[0]
    tensor = managed(model, "blocks.0.norm.bias")
    original = tensor.original
    tensor.insert()
    own = nn.Parameter(torch.ones(16))
    first.down.bias = own
    tensor.restore(None)
    assert first.down.bias is own and first.norm.bias is original


def test_restoring_to_another_device_makes_a_parameter_of_the_same_kind() -> None:
    """The original was on an accelerator, and the value comes from the host."""
    module = nn.Linear(3, 4, device=META)
    module.weight.requires_grad_(False)
    module.register_buffer("table", torch.zeros(5, device=META))
    weight, table = (ManagedTensor(item, CPU) for item in owned_tensors(module) if item.name in ("weight", "table"))
    for tensor, value in ((weight, torch.ones(4, 3)), (table, torch.arange(5.0))):
        tensor.insert()
        tensor.restore(value)
    assert type(module.weight) is nn.Parameter and not module.weight.requires_grad
    assert torch.equal(module.weight, torch.ones(4, 3))
    assert torch.equal(module.table, torch.arange(5.0)) and not isinstance(module.table, nn.Parameter)


# ------------------------------------------------------------------------------------------------------- moving


def test_moving_and_putting_back_keeps_ties_and_objects() -> None:
    model = toy(toys.Tied)
    model.register_buffer("table", torch.arange(6.0))
    model.alias = nn.Module()
    model.alias.register_buffer("table", model.table, persistent=False)
    model.inp.weight.requires_grad_(False)
    before = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = {name: (tensor, tensor.data_ptr(), tensor.detach().clone()) for name, tensor in before.items()}

    moved: list[Move] = []
    move_tensors(owned_tensors(model), META, moved)
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.device == META and tensor.shape == before[name].shape
        assert type(tensor) is type(before[name]) and tensor.requires_grad == before[name].requires_grad
    assert model.blocks[0].up.weight is model.blocks[1].up.weight
    assert model.blocks[2].down.weight is model.out.weight
    assert model.blocks[0].norm.bias is model.blocks[0].down.bias
    assert model.table is model.alias.table

    put_back(moved)
    assert moved == []
    now = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, (tensor, pointer, value) in values.items():
        assert now[name] is tensor and tensor.data_ptr() == pointer and torch.equal(tensor, value)
    assert sum(name.endswith("table") for name in model.state_dict()) == 1


def test_what_is_there_already_is_not_moved() -> None:
    model = toy(toys.Stack, 1)
    moved: list[Move] = []
    move_tensors(owned_tensors(model), CPU, moved)
    assert moved == []


def test_a_move_that_fails_can_be_undone() -> None:
    """What was done is noted as it happens, so an error in the middle leaves nothing behind."""
    model = toy(toys.Stack, 2)
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    moved: list[Move] = []

    def failing() -> Sequence[OwnedTensor]:
        for index, item in enumerate(owned_tensors(model)):
            if index == 5:
                raise MemoryError
            yield item

    with pytest.raises(MemoryError):
        move_tensors(failing(), META, moved)
    assert sum(p.is_meta for p in model.parameters()) == len(moved) == 5
    put_back(moved)
    assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()}.keys() == before.keys()
    assert all(p is before[name][0] and p.data_ptr() == before[name][1] for name, p in model.named_parameters())
