# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The plan: layouts, shards, sizes and order against sums made here, on real and on meta models."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from diffusers_dlo import DistributedLayerwiseOffloadConfig as Config
from diffusers_dlo import (
    OffloadPlan,
    apply_distributed_layerwise_offload,
    plan_distributed_layerwise_offload,
    tensor_utils,
)
from diffusers_dlo.block_discovery import Selection
from diffusers_dlo.block_layout import align
from diffusers_dlo.byte_size import format_bytes
from diffusers_dlo.offload_plan import build_plan, find_all, get_offload_plan
from tests import toys, zoo
from tests.toys import Block, feed, toy


@pytest.fixture(autouse=True)
def small_buffers_stream_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of these sizes stay on the device otherwise; how large ones stream shows on them."""
    monkeypatch.setattr(tensor_utils, "SMALL_BUFFER_NBYTES", 0)


GROUP_SIZES = range(1, 9)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": lambda: toy(toys.Stack, 4),
    "mixed": lambda: toy(toys.Stack, 3, toys.MixedBlock),
    "counting": lambda: toy(toys.Stack, 2, toys.CountingBlock),
    "nested": lambda: toy(toys.Nested),
    "tied": lambda: toy(toys.Tied),
    "repeated": lambda: toy(toys.Repeated),
    "leafy": lambda: toy(toys.Leafy),
    **{name: (lambda name=name: zoo.build(name, dtype=torch.bfloat16)) for name in ("cosmos3", "flux", "sd3", "wan")},
    **{name: (lambda name=name: zoo.build(name)) for name in ("t5", "qwen2_5_vl", "cogvideox")},
}


def up(nbytes: int) -> int:
    """To the next multiple of 256."""
    return (nbytes + 255) // 256 * 256


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers by every name they have, in order of registration."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, submodule in module.named_modules()
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items())
        if tensor is not None
    }


def unique_nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors.values()}.values())


def packed_end(sizes: list[int]) -> int:
    """Where an image ends whose tensors begin at multiples of 256."""
    end = 0
    for nbytes in sizes:
        end = up(end) + nbytes
    return end


class Pipe:
    """What a pipeline is to the plan: an object with a mapping of components."""

    def __init__(self, **components: object) -> None:
        self.components = components


def pipe() -> Pipe:
    """A transformer, two encoders that stream beside it, one of them with a leaf, and a placed encoder."""
    big = zoo.build("qwen2_5_vl")
    return Pipe(
        text_encoder=zoo.build("t5"),
        text_encoder_2=big,
        text_encoder_3=zoo.build("clip", 1, dtype=torch.bfloat16),
        transformer=zoo.build("wan", 3),
        tokenizer=object(),
    )


# --------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("name", MODELS)
def test_layouts_describe_the_tensors(name: str) -> None:
    model = MODELS[name]()
    state = state_of(model)
    plan = plan_distributed_layerwise_offload(model)
    (component,) = plan.components
    names = [tensor.name for unit in (*component.blocks, *component.leaves) for tensor in unit.tensors]
    assert len(set(names)) == len(names)
    order = list(state)
    for unit in (*component.blocks, *component.leaves):
        assert [t.name for t in unit.tensors] == sorted((t.name for t in unit.tensors), key=order.index)
        end = 0
        for tensor in unit.tensors:
            actual = state[tensor.name]
            owner, _, attribute = tensor.name.rpartition(".")
            module = model.get_submodule(owner)
            kind = "parameter" if attribute in module._parameters else "buffer"
            if attribute in module._non_persistent_buffers_set:
                kind = "non-persistent buffer"
            assert tensor.offset % 256 == 0 and tensor.offset == up(end), "aligned, and no gap larger than that takes"
            assert (tensor.shape, tensor.stride) == (tuple(actual.shape), actual.stride())
            assert f"torch.{tensor.dtype}" == str(actual.dtype)
            assert tensor.nbytes == actual.nbytes and tensor.kind == kind
            assert tensor.name.startswith(f"{unit.name}.")
            end = tensor.offset + tensor.nbytes
        assert unit.nbytes == end


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_is_streamed_fetched_on_demand_or_stays(name: str) -> None:
    model = MODELS[name]()
    state = state_of(model)
    plan = plan_distributed_layerwise_offload(model)
    (component,) = plan.components
    managed = {t.name: state[t.name] for unit in (*component.blocks, *component.leaves) for t in unit.tensors}
    assert component.placed_nbytes == unique_nbytes(state) - unique_nbytes(managed)
    assert plan.device_placed_nbytes == component.placed_nbytes
    assert component.class_name == type(model).__name__ and component.name == "model"


@pytest.mark.parametrize("name", ("cosmos3", "flux", "sd3", "wan", "stack"))
def test_what_a_block_without_ties_holds_is_in_its_image(name: str) -> None:
    """From the modules' own state, not from the layouts."""
    model = MODELS[name]()
    plan = plan_distributed_layerwise_offload(model)
    for block in plan.blocks:
        module = model.get_submodule(block.name)
        sizes = [tensor.nbytes for tensor in state_of(module).values() if tensor.numel() > 1]
        assert block.nbytes == packed_end(sizes)
    assert plan.streamed_nbytes == sum(block.nbytes for block in plan.blocks)
    assert plan.components[0].largest_block is max(plan.blocks, key=lambda block: block.nbytes)


def test_a_mixed_block() -> None:
    """The odd dtypes, strides and kinds, spelt out: dim 16, width 24."""
    (block,) = plan_distributed_layerwise_offload(toy(toys.Stack, 1, toys.MixedBlock)).blocks
    expected = {
        "odd": ("parameter", 3 * 7 * 5 * 4, "float32", (5, 3, 7), (1, 35, 5)),
        "shift": ("buffer", 16 * 8, "int64", (16,), (1,)),
        "mask": ("buffer", 16, "bool", (16,), (1,)),
        "table": ("non-persistent buffer", 16 * 8, "float64", (16,), (1,)),
        "norm.weight": ("parameter", 16 * 4, "float32", (16,), (1,)),
        "norm.bias": ("parameter", 16 * 4, "float32", (16,), (1,)),
        "up.weight": ("parameter", 24 * 16 * 2, "bfloat16", (24, 16), (1, 24)),
        "up.bias": ("parameter", 24 * 2, "bfloat16", (24,), (1,)),
        "down.weight": ("parameter", 16 * 24 * 2, "bfloat16", (16, 24), (24, 1)),
        "down.bias": ("parameter", 16 * 2, "bfloat16", (16,), (1,)),
    }
    got = {
        t.name.removeprefix("blocks.0."): (t.kind, t.nbytes, t.dtype, tuple(t.shape), tuple(t.stride))
        for t in block.tensors
    }
    assert got == expected, "the scalar parameter stays on the device"
    assert [t.offset for t in block.tensors] == [0, 512, 768, 1024, 1280, 1536, 1792, 2560, 2816, 3584]
    assert block.nbytes == 3584 + 32


# ---------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_shards_are_equal_aligned_and_no_larger_than_need_be(group_size: int) -> None:
    for name in ("stack", "mixed", "flux", "leafy"):
        plan = plan_distributed_layerwise_offload(MODELS[name](), Config(transfer="all_gather"), group_size)
        for _, unit in plan.units:
            shard = unit.shard_nbytes(group_size)
            assert shard % 256 == 0 and shard > 0
            assert unit.padded_nbytes(group_size) == group_size * shard >= unit.nbytes
            assert (shard - 256) * group_size < unit.nbytes, "one step less would not hold the block"


def test_align() -> None:
    assert [align(n) for n in (0, 1, 255, 256, 257, 512, 2**40 + 1)] == [0, 256, 256, 256, 512, 512, 2**40 + 256]


# --------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("host", ("auto", "packed", "pinned"))
@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_memory_of_one_model(transfer: str, host: str, group_size: int) -> None:
    model = toy(toys.Leafy)
    config = Config(transfer=transfer, host=host, num_slots=3)
    plan = plan_distributed_layerwise_offload(model, config, group_size)
    sizes = [packed_end([t.nbytes for t in block.parameters()]) for block in model.blocks]
    leaves = [model.embed.weight.nbytes, packed_end([model.lm_head.weight.nbytes, model.lm_head.bias.nbytes])]
    shards = group_size if transfer == "all_gather" else 1
    assert [block.nbytes for block in plan.blocks] == sizes and sizes[0] < sizes[1]
    assert [leaf.nbytes for leaf in plan.components[0].leaves] == leaves
    assert plan.streamed_nbytes == sum(sizes), "leaves are not in laps"

    def shard(nbytes: int, count: int) -> int:
        return up((nbytes + count - 1) // count)

    # A leaf is larger than any block and does not set the size of a slot.
    assert plan.slot_nbytes(transfer) == shards * shard(sizes[1], shards)
    assert plan.slot_nbytes("local" if transfer == "all_gather" else "all_gather") == 0
    assert plan.device_slot_nbytes == 3 * shards * shard(sizes[1], shards)
    assert plan.device_placed_nbytes == 2 * (16 * 16 + 16) * 4
    if host == "pinned":
        expected = sum(shard(n, shards) for n in sizes) + sum(up(n) for n in leaves)
    else:
        expected = sum(shard(n, group_size) for n in (*sizes, *leaves))
    assert plan.host_nbytes_per_rank == expected


@pytest.mark.parametrize("host", ("packed", "pinned"))
@pytest.mark.parametrize("group_size", (1, 2, 5))
def test_memory_of_a_pipeline(group_size: int, host: str) -> None:
    fake = pipe()
    plan = plan_distributed_layerwise_offload(fake, Config(host=host), group_size)
    models: dict[str, Any] = fake.components
    gathered = group_size > 1
    assert [(c.name, c.transfer, c.transient) for c in plan.components] == [
        ("transformer", "all_gather" if gathered else "local", False),
        ("text_encoder", "local", gathered),
        ("text_encoder_2", "local", gathered),
    ]
    sizes = {
        name: [packed_end([t.nbytes for t in state_of(block).values()]) for block in blocks]
        for name, blocks in {
            "transformer": models["transformer"].blocks,
            "text_encoder": models["text_encoder"].encoder.block,
            "text_encoder_2": [
                *models["text_encoder_2"].model.visual.blocks,
                *models["text_encoder_2"].model.language_model.layers,
            ],
        }.items()
    }
    assert [block.nbytes for block in plan.blocks] == [n for of_one in sizes.values() for n in of_one]
    own, others = sizes["transformer"], sizes["text_encoder"] + sizes["text_encoder_2"]
    leaf = packed_end([t.nbytes for t in models["text_encoder_2"].model.visual.merger.mlp[0].parameters()])
    assert [unit.nbytes for _, unit in plan.units if unit.is_leaf] == [leaf]

    def shard(nbytes: int) -> int:
        return up((nbytes + group_size - 1) // group_size)

    if gathered:
        assert plan.slot_nbytes("all_gather") == group_size * shard(max(own))
        assert plan.slot_nbytes("local") == up(max(others))
        assert plan.device_slot_nbytes == 2 * (group_size * shard(max(own)) + up(max(others)))
    else:
        assert plan.device_slot_nbytes == 2 * up(max(own + others))
    if host == "packed":
        assert plan.host_nbytes_per_rank == sum(map(shard, own + others + [leaf]))
    else:
        # What is copied whole is held whole, by each rank.
        assert plan.host_nbytes_per_rank == sum(map(shard, own)) + sum(map(up, [*others, leaf]))
    clip = models["text_encoder_3"]
    assert plan.placed == (("text_encoder_3", "CLIPTextModel", unique_nbytes(state_of(clip))),)
    stay = sum(unique_nbytes(state_of(m)) for m in models.values() if isinstance(m, nn.Module))
    stay -= sum(t.nbytes for _, unit in plan.units for t in unit.tensors)
    assert plan.device_placed_nbytes == stay


def test_encoders_alone_are_the_work_and_not_transient() -> None:
    plan = plan_distributed_layerwise_offload(
        pipe(), Config(transfer="all_gather"), 2, components=["text_encoder", "text_encoder_2"]
    )
    assert [(c.name, c.transient) for c in plan.components] == [("text_encoder", False), ("text_encoder_2", False)]
    assert [name for name, *_ in plan.placed] == ["text_encoder_3", "transformer"]


def test_blocks_are_in_streaming_order() -> None:
    plan = plan_distributed_layerwise_offload(pipe(), group_size=2)
    expected = [
        *(f"blocks.{i}" for i in range(3)),
        *(f"encoder.block.{i}" for i in range(2)),
        *(f"model.visual.blocks.{i}" for i in range(2)),
        *(f"model.language_model.layers.{i}" for i in range(2)),
    ]
    assert [block.name for block in plan.blocks] == expected
    assert not any(block.is_leaf for block in plan.blocks)
    units = [(component.name, unit.name) for component, unit in plan.units]
    assert units == [
        *(("transformer", name) for name in expected[:3]),
        *(("text_encoder", name) for name in expected[3:5]),
        *(("text_encoder_2", name) for name in (*expected[5:], "model.visual.merger.mlp.0")),
    ]


def test_more_than_nine_blocks_keep_their_order() -> None:
    blocks = plan_distributed_layerwise_offload(toy(toys.Stack, 12)).blocks
    assert [block.name for block in blocks] == [f"blocks.{i}" for i in range(12)]


@pytest.mark.parametrize("group_size", (0, -1, 1.0, "2", True, None))
def test_a_bad_group_size(group_size: Any) -> None:
    with pytest.raises(ValueError, match=r"'group_size' must be a number of ranks, 1 or more; got"):
        plan_distributed_layerwise_offload(toy(toys.Stack, 2), group_size=group_size)


def test_the_original_name() -> None:
    assert get_offload_plan(toy(toys.Stack, 2), group_size=2) == plan_distributed_layerwise_offload(
        toy(toys.Stack, 2), group_size=2
    )


def test_components_of_the_blocks_option() -> None:
    flux = zoo.build("flux")
    plan = plan_distributed_layerwise_offload(flux, Config(blocks=["single_transformer_blocks"]))
    assert [block.name for block in plan.blocks] == ["single_transformer_blocks.0"]
    assert plan == plan_distributed_layerwise_offload(flux, Config(blocks={"model": ["single_transformer_blocks"]}))
    with pytest.raises(ValueError, match="'blocks' names 'transformer', which does not stream; these do: model"):
        plan_distributed_layerwise_offload(flux, Config(blocks={"transformer": ["transformer_blocks"]}))
    with pytest.raises(ValueError, match="'blocks' is a list, and 3 components stream; pass a mapping"):
        plan_distributed_layerwise_offload(pipe(), Config(blocks=["blocks"]))


# ------------------------------------------------------------------------------------------- what has nothing


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class SharedInside(nn.Module):
    """Block 1 has no tensor of its own: all it holds is a layer of block 0."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            [Holder(nn.Sequential(shared, nn.Tanh(), nn.Linear(16, 16))), Holder(shared), Holder(nn.Linear(16, 16))]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_whose_tensors_all_stay_is_not_streamed() -> None:
    plan = plan_distributed_layerwise_offload(toy(SharedInside))
    assert [block.name for block in plan.blocks] == ["blocks.0", "blocks.2"]
    assert [t.name for t in plan.blocks[0].tensors] == ["blocks.0.inner.2.weight", "blocks.0.inner.2.bias"]
    assert plan.device_placed_nbytes == (16 * 16 + 16) * 4


def test_a_block_whose_tensors_all_stay_does_not_mix_up_the_others() -> None:
    """What is attached is what was planned, also where a block was dropped from the plan."""
    model = toy(SharedInside)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(feed(0))
        handle = apply_distributed_layerwise_offload(model)
        try:
            assert torch.equal(model(feed(0)), expected)
        finally:
            handle.remove()
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("planning", (True, False), ids=("plan", "enable"))
def test_nothing_to_stream_is_refused_with_the_remedy(planning: bool) -> None:
    """Blocks there are, but everything in them is shared: as with no blocks at all."""
    model = nn.Module()
    shared = nn.Linear(16, 16)
    model.blocks = nn.ModuleList(Holder(shared) for _ in range(3))
    with pytest.raises(ValueError, match="(?i)'Module'.*(components|blocks)="):
        if planning:
            str(plan_distributed_layerwise_offload(model))
        else:
            apply_distributed_layerwise_offload(model).remove()


# ------------------------------------------------------------------------------------------------- meta models


META: dict[str, Callable[[], nn.Module]] = {
    **{name: tiny.build for name, tiny in {**zoo.MODELS, **zoo.TEXT_ENCODERS}.items()},  # type: ignore[dict-item]
    "mixed": lambda n: toys.Stack(n, toys.MixedBlock),
    "leafy": lambda n: toys.Leafy(),
    "tied": lambda n: toys.Tied(),
    "counting": lambda n: toys.Stack(n, toys.CountingBlock),
}


@pytest.mark.parametrize("name", META)
def test_a_meta_model_has_the_same_plan(name: str) -> None:
    real = META[name](2)
    with torch.device("meta"):
        meta = META[name](2)
    assert all(parameter.is_meta for parameter in meta.parameters())
    config = Config(transfer="all_gather", num_slots=3)
    plans = [plan_distributed_layerwise_offload(model, config, 3) for model in (real, meta)]
    assert plans[0] == plans[1]
    assert plans[0].digest == plans[1].digest and str(plans[0]) == str(plans[1])


def test_planning_leaves_the_model_alone() -> None:
    model = toy(toys.Stack, 2, toys.MixedBlock)
    before = {name: (tensor, tensor._version, tensor.data_ptr()) for name, tensor in state_of(model).items()}
    keys = [set(vars(module)) for module in model.modules()]
    str(plan_distributed_layerwise_offload(model, group_size=4))
    after = state_of(model)
    assert before.keys() == after.keys()
    for name, (tensor, version, pointer) in before.items():
        assert after[name] is tensor and (tensor._version, tensor.data_ptr()) == (version, pointer)
    assert [set(vars(module)) for module in model.modules()] == keys


# --------------------------------------------------------------------------------------------------- digests


def stack(change: Callable[[toys.Stack], object] = lambda model: None) -> toys.Stack:
    model = toy(toys.Stack, 3, toys.CountingBlock)
    assert isinstance(model, toys.Stack)
    change(model)
    return model


def _transposed(model: toys.Stack) -> None:
    weight = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.data.t().contiguous().t())


def _reshaped(model: toys.Stack) -> None:
    model.blocks[1].up.bias = nn.Parameter(model.blocks[1].up.bias.data.view(5, 8))


def _swapped(model: toys.Stack) -> None:
    first, second, third = model.blocks
    model.blocks = nn.ModuleList([second, first, third])


def _tied(model: toys.Stack) -> None:
    model.blocks[2].norm.weight = model.blocks[0].norm.weight


def _reordered_inside(model: toys.Stack) -> None:
    norm = model.blocks[0].norm
    del model.blocks[0].norm
    model.blocks[0].norm = norm


def _buffer_to_parameter(model: toys.Stack) -> None:
    calls = model.blocks[0].calls
    del model.blocks[0].calls
    model.blocks[0].calls = nn.Parameter(calls)


MODEL_CHANGES: dict[str, Callable[[toys.Stack], object]] = {
    "dtype of all": lambda model: model.to(torch.bfloat16),
    "dtype of one, of equal size": lambda model: model.blocks[1].norm.to(torch.float16),
    "dtype of one, same bytes": lambda model: setattr(
        model.blocks[0], "calls", model.blocks[0].calls.view(torch.int32)
    ),
    "shape": _reshaped,
    "an element more, within the alignment": lambda model: setattr(
        model.blocks[1].up, "bias", nn.Parameter(torch.zeros(41))
    ),
    "stride": _transposed,
    "order of blocks": _swapped,
    "order of tensors": _reordered_inside,
    "one block more": lambda model: model.blocks.append(Block(16, 24)),
    "one block fewer": lambda model: model.blocks.__delitem__(-1),
    "a tie": _tied,
    "a buffer that is not saved": lambda model: model.blocks[0].register_buffer(
        "calls", model.blocks[0].calls, persistent=False
    ),
    "a buffer made a parameter": _buffer_to_parameter,
    "another list name": lambda model: (setattr(model, "layers", model.blocks), delattr(model, "blocks")),
}


@pytest.mark.parametrize("change", MODEL_CHANGES)
def test_the_digest_tells_models_apart(change: str) -> None:
    same = [plan_distributed_layerwise_offload(stack(), group_size=2).digest for _ in range(2)]
    other = plan_distributed_layerwise_offload(stack(MODEL_CHANGES[change]), group_size=2).digest
    assert same[0] == same[1] != other


def test_the_digest_does_not_depend_on_values() -> None:
    plans = [plan_distributed_layerwise_offload(toy(toys.Stack, 3, seed=seed)) for seed in (0, 1)]
    assert plans[0].digest == plans[1].digest


def test_the_digest_tells_options_apart() -> None:
    plans = {
        "2 ranks": plan_distributed_layerwise_offload(stack(), group_size=2),
        "3 ranks": plan_distributed_layerwise_offload(stack(), group_size=3),
        "local": plan_distributed_layerwise_offload(stack(), Config(transfer="local"), 2),
        "3 slots": plan_distributed_layerwise_offload(stack(), Config(num_slots=3), 2),
    }
    assert len({plan.digest for plan in plans.values()}) == len(plans)
    assert plan_distributed_layerwise_offload(stack(), Config(num_slots=2), 2).digest == plans["2 ranks"].digest
    component = plans["2 ranks"].components[0]
    for changed in (
        dataclasses.replace(component, name="transformer_2"),
        dataclasses.replace(component, class_name="Other"),
        dataclasses.replace(component, transient=True),
        dataclasses.replace(component, blocks=component.blocks[::-1]),
        dataclasses.replace(
            component,
            blocks=component.blocks[:-1],
            leaves=(dataclasses.replace(component.blocks[-1], is_leaf=True),),
        ),
    ):
        assert dataclasses.replace(plans["2 ranks"], components=(changed,)).digest != plans["2 ranks"].digest


def test_components_count_in_their_order() -> None:
    first, second = zoo.build("wan"), zoo.build("flux")
    selections = [
        Selection(dict(items), frozenset(), {})
        for items in ([("a", first), ("b", second)], [("b", second), ("a", first)])
    ]
    plans = [build_plan(selection, find_all(selection, Config()), Config(), 2) for selection in selections]
    assert plans[0].digest != plans[1].digest


def test_the_digest_of_a_leaf_is_not_that_of_a_block() -> None:
    plan = plan_distributed_layerwise_offload(toy(toys.Leafy)).components[0]
    leaf = plan.leaves[0]
    assert leaf.is_leaf and dataclasses.replace(leaf, is_leaf=False).digest != leaf.digest


# ------------------------------------------------------------------------------------------------ what is shown


UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE = r"(\d[\d,]*\.?\d*) (B|KiB|MiB|GiB)"


def sizes_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in re.findall(SIZE, text)]


def near(expected: list[int]) -> Any:
    """Three digits."""
    return pytest.approx(expected, rel=0.006)


def shown(plan: OffloadPlan) -> tuple[dict[str, str], list[str]]:
    """The rows by component, and the lines below the table."""
    lines = str(plan).splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip() and not line.startswith(("device:", "host:"))}
    return rows, lines[-2:]


def test_the_table_of_a_pipeline() -> None:
    plan = plan_distributed_layerwise_offload(pipe(), Config(host="pinned", num_slots=3), 2)
    rows, (device, host) = shown(plan)
    assert str(plan).startswith("Offload plan, 2 ranks sharing weights")
    transformer, t5, qwen = plan.components
    for component, transfer in ((transformer, "all_gather"), (t5, "local"), (qwen, "local")):
        row = rows[component.name]
        assert row.split()[1:4] == [component.class_name, transfer, str(len(component.blocks))]
        assert component.class_name in (
            "WanTransformer3DModel",
            "T5EncoderModel",
            "Qwen2_5_VLForConditionalGeneration",
        )
        largest = max(block.nbytes for block in component.blocks)
        on_demand = [leaf.nbytes for leaf in component.leaves]
        streamed = sum(block.nbytes for block in component.blocks)
        assert sizes_in(row) == near([largest, streamed, *on_demand, component.placed_nbytes])
    assert [len(component.leaves) for component in plan.components] == [0, 0, 1]
    assert rows["text_encoder_3"].split()[1:3] == ["CLIPTextModel", "placed"]
    assert sizes_in(rows["text_encoder_3"]) == near([plan.placed[0][2]])
    assert re.search(rf"3 x {SIZE} \(all_gather\) \+ 3 x {SIZE} \(local\)", device)
    stay = plan.device_placed_nbytes
    assert sizes_in(device) == near([plan.slot_nbytes("all_gather"), plan.slot_nbytes("local"), stay])
    assert "per rank (pinned)" in host
    assert sizes_in(host) == near([plan.host_nbytes_per_rank, 2 * plan.host_nbytes_per_rank])


def test_the_table_of_one_model_on_one_rank() -> None:
    rows, (device, host) = shown(plan_distributed_layerwise_offload(toy(toys.Stack, 2), Config(host="packed")))
    assert "Offload plan, 1 rank sharing weights" in "\n".join(rows.values())
    # Blocks of 24 and 40 inner features: norm 2 x 64 B, up, its bias, down, its bias, each from a multiple of 256.
    second = packed_end([64, 64, 40 * 16 * 4, 40 * 4, 16 * 40 * 4, 64])
    assert rows["model"].split()[:4] == ["model", "Stack", "local", "2"]
    assert sizes_in(rows["model"])[:1] == near([second])
    assert "all_gather" not in device and "per rank (packed)" in host


@pytest.mark.parametrize("host", ("auto", "packed", "pinned"))
def test_the_host_kind_is_shown(host: str) -> None:
    assert f"({host})" in str(plan_distributed_layerwise_offload(toy(toys.Stack, 2), Config(host=host)))


@pytest.mark.parametrize(
    "nbytes,text",
    (
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999.4 * 2**10, "999 KiB"),
        (28 * 2**30, "28 GiB"),
        (1234 * 2**30, "1,234 GiB"),
    ),
)
def test_sizes_for_people(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_sizes_are_never_shown_with_an_exponent() -> None:
    texts = [format_bytes(2**exponent * (1 + step / 1000)) for exponent in range(41) for step in range(1000)]
    assert {text for text in texts if "e" in text} == set()
