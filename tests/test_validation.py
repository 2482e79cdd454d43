# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Every refusal before anything is changed: its type, its words, its remedy, and a module that is as it was."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import attach_align_device_hook, remove_hook_from_module
from diffusers import ContextParallelConfig
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from diffusers_dlo import (
    DistributedLayerwiseOffloadConfig,
    apply_distributed_layerwise_offload,
    is_distributed_layerwise_offload_enabled,
    remove_distributed_layerwise_offload,
)
from diffusers_dlo.validation import validate_blocks_option, validate_module
from tests import toys, zoo
from tests.ranks import run_ranks
from tests.toys import Block, feed, toy


TRANSFERS = ("all_gather", "local")
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def call(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(feed(0))


def content_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the bytes of an ordinary tensor, NaNs and all; None for those that have none of their own."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or tensor.is_quantized:
        return None
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)


class Snapshot:
    """Everything that enabling could change: tensors by identity, place and value, attributes and hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.classes = {name: type(module) for name, module in self.modules.items()}
        self.attributes = {name: dict(vars(module)) for name, module in self.modules.items()}
        self.hooks = {
            (name, kind): list(getattr(module, kind).items())
            for name, module in self.modules.items()
            for kind in HOOKS
        }
        self.tensors = {
            (name, attribute): (tensor, tensor.requires_grad, tensor.device, content_of(tensor))
            for name, module in self.modules.items()
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }

    def check(self) -> None:
        modules = dict(self.model.named_modules())
        assert modules.keys() == self.modules.keys()
        assert all(modules[name] is module for name, module in self.modules.items())
        now = Snapshot(self.model)
        assert now.classes == self.classes
        for name, attributes in self.attributes.items():
            assert now.attributes[name].keys() == attributes.keys(), f"attributes of '{name}'"
            assert all(now.attributes[name][key] is value for key, value in attributes.items())
        assert now.hooks == self.hooks
        assert now.tensors.keys() == self.tensors.keys()
        for key, (tensor, requires_grad, device, value) in self.tensors.items():
            other, *facts, content = now.tensors[key]
            assert other is tensor and facts == [requires_grad, device], key
            assert value is None or torch.equal(content, value), key


@contextmanager
def refused(
    model: nn.Module, error: type[Exception], *texts: str, run: Callable[[nn.Module], torch.Tensor] | None = call
) -> Iterator[None]:
    """What the body does to `model` is refused with an error that says `texts`, and leaves no trace."""
    expected = run(model) if run is not None else None
    before = Snapshot(model)
    enabled = is_distributed_layerwise_offload_enabled(model)
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error, f"{caught.type.__name__}: {caught.value}"
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)
    before.check()
    assert is_distributed_layerwise_offload_enabled(model) == enabled
    if run is not None:
        assert torch.equal(run(model), expected)


def works(model: nn.Module, reference: nn.Module, **options: Any) -> None:
    """Once the reason is gone, it can be enabled, and is exact."""
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        assert torch.equal(call(model), call(reference))
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------- others that move weights


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("where", ("", "blocks.1"), ids=("root", "block"))
def test_accelerate_offload(where: str, transfer: str) -> None:
    model = toy(toys.Stack, 3)
    target = model.get_submodule(where)
    cpu_offload(target, execution_device=torch.device("cpu"))
    path = f"'model.{where}'" if where else "'model"
    with refused(model, ValueError, path, "accelerate moves its weights", "AlignDevicesHook", "remove_all_hooks()"):
        apply_distributed_layerwise_offload(model, transfer=transfer)
    remove_hook_from_module(target, recurse=True)
    works(model, toy(toys.Stack, 3), transfer=transfer)


def test_other_accelerate_hooks() -> None:
    model = toy(toys.Stack, 3)
    attach_align_device_hook(model.blocks[2], execution_device="cpu", offload=False)
    with refused(model, ValueError, "'model.blocks.2", "accelerate moves its weights"):
        apply_distributed_layerwise_offload(model)
    model = toy(toys.Stack, 3)
    cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    with refused(model, ValueError, "'model'", "CpuOffload", "accelerate moves its weights"):
        apply_distributed_layerwise_offload(model)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("kind", ("leaf_level", "block_level"))
def test_group_offloading(kind: str, transfer: str) -> None:
    model = toy(toys.Stack, 3)
    apply_group_offloading(
        model,
        onload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
    )
    with refused(model, ValueError, "'model", "group offloading is active", "Reload it without that, or use one"):
        apply_distributed_layerwise_offload(model, transfer=transfer)


def test_group_offloading_of_one_block() -> None:
    model = toy(toys.Stack, 3)
    apply_group_offloading(model.blocks[1], onload_device=torch.device("cpu"), offload_type="leaf_level")
    with refused(model, ValueError, "'model.blocks.1", "group offloading is active"):
        apply_distributed_layerwise_offload(model)


def test_layerwise_casting() -> None:
    model = toy(toys.Stack, 3)
    apply_layerwise_casting(
        model.blocks, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32, skip_modules_pattern=("norm",)
    )
    with refused(model, ValueError, "'model.blocks.0.up'", "layerwise casting is active", "use one of the two"):
        apply_distributed_layerwise_offload(model)


def test_layerwise_casting_of_a_real_model() -> None:
    model = zoo.build("wan")
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)

    def run(model: nn.Module) -> torch.Tensor:
        return zoo.run(model, zoo.MODELS["wan"].inputs(0), dtype=torch.float32)[0]

    with refused(model, ValueError, "layerwise casting is active", run=run):
        model.enable_distributed_layerwise_offload()


def test_harmless_hooks_are_no_reason() -> None:
    """A cache of diffusers is in the same registry."""
    from diffusers.hooks import FirstBlockCacheConfig

    model = zoo.build("flux", 3)
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    validate_module(model, "transformer", "all_gather")


# ----------------------------------------------------------------------------------------- weights of other kinds


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("where", ("blocks.1.up", "out"), ids=("in a block", "outside"))
@pytest.mark.parametrize("kind", ("parameter", "buffer"))
def test_meta_weights(kind: str, where: str, transfer: str) -> None:
    model = toy(toys.Stack, 3)
    module = model.get_submodule(where)
    if kind == "parameter":
        module.bias = nn.Parameter(module.bias.detach().to("meta"))
    else:
        module.register_buffer("bias2", torch.empty(3, device="meta"), persistent=False)
    name = f"'{where}.bias{'2' if kind == 'buffer' else ''}' of 'model'"
    run = call if kind == "buffer" else None
    with refused(model, RuntimeError, name, "no values", "safetensors", "from_pretrained", run=run):
        apply_distributed_layerwise_offload(model, transfer=transfer)


def test_a_model_wholly_on_meta() -> None:
    with torch.device("meta"):
        model = toys.Stack(2)
    with refused(model, RuntimeError, "of 'model' has no values (it is on the meta device)", run=None):
        apply_distributed_layerwise_offload(model)


class Packed(torch.Tensor):
    """As the weights of quantizers: a subclass with a layout of its own."""


@pytest.mark.parametrize(
    "transfer,error,texts",
    (
        ("all_gather", ValueError, ("sharding would break its layout", "Load it unquantized")),
        ("local", NotImplementedError, ("cannot be streamed yet", "ordinary dense weights")),
    ),
)
@pytest.mark.parametrize("kind", ("parameter", "buffer"))
def test_a_tensor_subclass(kind: str, transfer: str, error: type[Exception], texts: Sequence[str]) -> None:
    model = toy(toys.Stack, 3)
    up = model.blocks[1].up
    if kind == "parameter":
        up.weight = nn.Parameter(up.weight.detach().as_subclass(Packed))
        name = "'blocks.1.up.weight' of 'model'"
    else:
        up.register_buffer("scales", torch.ones(3).as_subclass(Packed))
        name = "'blocks.1.up.scales' of 'model'"
    with refused(model, error, name, "Packed", *texts):
        apply_distributed_layerwise_offload(model, transfer=transfer)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("kind", ("sparse", "quantized"))
def test_tensors_that_are_not_dense(kind: str, transfer: str) -> None:
    model = toy(toys.Stack, 3)
    tensor = (
        torch.eye(4).to_sparse() if kind == "sparse" else torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    )
    model.blocks[1].register_buffer("table", tensor)
    with refused(model, NotImplementedError, "'blocks.1.table' of 'model'", "cannot be streamed yet", "dense weights"):
        apply_distributed_layerwise_offload(model, transfer=transfer)


def test_ordinary_tensors_of_all_kinds_are_no_reason() -> None:
    model = toy(toys.Stack, 3, toys.MixedBlock)
    model.blocks[0].table2 = nn.Buffer(torch.ones(3))
    model.requires_grad_(False)
    for transfer in TRANSFERS:
        validate_module(model, "model", transfer)


class Quantizer:
    """What a quantizer of transformers or diffusers leaves on the model that it loaded."""


def test_a_quantizer() -> None:
    model = toy(toys.Stack, 3)
    model.hf_quantizer = Quantizer()
    texts = ("'model' was quantized while it was loaded (Quantizer)", "Save it quantized", 'transfer="local"')
    with refused(model, ValueError, *texts):
        apply_distributed_layerwise_offload(model, transfer="all_gather")
    works(model, toy(toys.Stack, 3), transfer="local")


# ---------------------------------------------------------------------------------------------- sharded weights


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "transfer,error,text",
    (
        ("all_gather", ValueError, "all_gather would shard it a second time"),
        ("local", NotImplementedError, "cannot be streamed"),
    ),
)
@pytest.mark.parametrize("placement", (Shard(0), Replicate()), ids=("sharded", "replicated"))
def test_dtensor_weights(world_of_one: None, placement: Any, transfer: str, error: type[Exception], text: str) -> None:
    model = toy(toys.Stack, 3)
    down = model.blocks[1].down
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), init_device_mesh("cpu", (1,)), [placement]))
    texts = ("'blocks.1.down.weight' of 'model' is a DTensor", text, "Load ordinary weights")
    with refused(model, error, *texts, run=None):
        apply_distributed_layerwise_offload(model, transfer=transfer)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_tensor_parallelism_of_transformers(transfer: str) -> None:
    model = toy(toys.Stack, 3)
    model._tp_size = 2
    with refused(model, ValueError, "'model' is split by tensor parallelism of degree 2", "Use one of the two"):
        apply_distributed_layerwise_offload(model, transfer=transfer)
    model._tp_size = None
    works(model, toy(toys.Stack, 3), transfer=transfer)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_tensor_parallelism_of_diffusers(transfer: str) -> None:
    """As `enable_parallelism` leaves it on a model."""
    model = toy(toys.Stack, 3)
    model._parallel_config = ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2))
    with refused(model, ValueError, "'model' is split by tensor parallelism of degree 2", "Use one of the two"):
        apply_distributed_layerwise_offload(model, transfer=transfer).remove()


def test_context_parallelism_is_no_reason() -> None:
    """It splits activations and leaves weights whole."""
    model = toy(toys.Stack, 3)
    model._parallel_config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
    validate_module(model, "transformer", "all_gather")


@pytest.mark.parametrize("how", ("in place", "block in place", "wrapper"))
def test_compilation_that_fixes_addresses(how: str) -> None:
    """CUDA graphs replay with the addresses they recorded, and a block's change with its slot."""
    model = toy(toys.Stack, 3)
    if how == "wrapper":
        target: Any = torch.compile(model, mode="reduce-overhead")
    else:
        target = model
        (model if how == "in place" else model.blocks[1]).compile(mode="reduce-overhead")
    with refused(model, ValueError, "reduce-overhead", run=None):
        apply_distributed_layerwise_offload(target).remove()


def test_other_compilation_is_no_reason() -> None:
    model = toy(toys.Stack, 3)
    model.blocks[0].compile(backend="eager")
    validate_module(model, "model", "all_gather")
    apply_distributed_layerwise_offload(torch.compile(model, backend="eager")).remove()


# ------------------------------------------------------------------------------------------------ enabled already


@pytest.mark.parametrize("options", ({}, {"transfer": "all_gather"}, {"num_slots": 4}), ids=str)
def test_enabling_twice(options: dict[str, Any]) -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    try:
        slots = handle.report().device_slot_bytes
        with refused(model, ValueError, "'model' is under distributed layerwise offload already", "Disable it first"):
            apply_distributed_layerwise_offload(model, **options)
        assert handle.enabled and handle.report().device_slot_bytes == slots
        assert torch.equal(call(model), call(reference))
    finally:
        handle.remove()
    works(model, reference, **options)


class Outer(nn.Module):
    """Blocks, and a model with blocks of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = toys.Stack(2)
        self.blocks = nn.ModuleList(Block(16, 24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("first", ("inner", "outer"))
def test_enabling_a_part_and_the_whole(first: str) -> None:
    model = toy(Outer)
    targets = [model.inner, model] if first == "inner" else [model, model.inner]
    expected = call(model)
    handle = apply_distributed_layerwise_offload(targets[0])
    try:
        with refused(model, ValueError, "distributed layerwise offload already", "Disable it first"):
            apply_distributed_layerwise_offload(targets[1])
    finally:
        for target in reversed(targets):  # the second too, where it was not refused
            if is_distributed_layerwise_offload_enabled(target):
                remove_distributed_layerwise_offload(target)
    assert not handle.enabled and torch.equal(call(model), expected)


def test_removing_what_is_not_enabled() -> None:
    model = toy(toys.Stack, 3)
    with refused(model, ValueError, "'Stack' is not under distributed layerwise offload"):
        remove_distributed_layerwise_offload(model)


# ---------------------------------------------------------------------------------------------- options and targets


@pytest.mark.parametrize(
    "blocks,texts",
    (
        (["layers"], ("'layers' is not a ModuleList of 'Stack'", "it has: blocks")),
        (["blocks", "blocks.0"], ("'blocks.0' is not a ModuleList of 'Stack'", "it has: blocks")),
        ({"transformer": ["blocks"]}, ("'blocks' names 'transformer'", "does not stream", "these do: model")),
        ({"model": ["inp"]}, ("'inp' is not a ModuleList of 'Stack'", "it has: blocks")),
    ),
    ids=str,
)
def test_wrong_blocks(blocks: Any, texts: Sequence[str]) -> None:
    model = toy(toys.Stack, 3)
    with refused(model, ValueError, *texts):
        apply_distributed_layerwise_offload(model, blocks=blocks)


def test_a_list_of_blocks_for_several_components() -> None:
    one = DistributedLayerwiseOffloadConfig(blocks=["blocks"])
    validate_blocks_option(one, ["transformer"])
    with pytest.raises(ValueError, match="'blocks' is a list, and 2 components stream; pass a mapping.*: a, b"):
        validate_blocks_option(one, iter(["a", "b"]))
    mapping = DistributedLayerwiseOffloadConfig(blocks={"b": ["blocks"]})
    validate_blocks_option(mapping, iter(["a", "b"]))
    with pytest.raises(ValueError, match="'blocks' names 'b', which does not stream; these do: a, c"):
        validate_blocks_option(mapping, iter(["a", "c"]))
    validate_blocks_option(DistributedLayerwiseOffloadConfig(), ["a", "b"])


def test_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with refused(model, ValueError, "No blocks found in 'Sequential'", "blocks=[...]"):
        apply_distributed_layerwise_offload(model)


@pytest.mark.parametrize(
    "options,error,text",
    (
        ({"transfer": "gather"}, ValueError, "'transfer' must be one of auto, all_gather, local"),
        ({"num_slots": 1}, ValueError, "'num_slots' must be at least 2"),
        ({"device": "cpu"}, TypeError, "Unknown option 'device'"),
        ({"config": "local"}, TypeError, "'config' must be a DistributedLayerwiseOffloadConfig"),
        ({"onload_device": "meta"}, ValueError, "'onload_device' must be a device that computes"),
    ),
    ids=str,
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = toy(toys.Stack, 3)
    with refused(model, error, text):
        apply_distributed_layerwise_offload(model, **options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_device_that_is_not_there() -> None:
    model = toy(toys.Stack, 3)
    with refused(model, ValueError, "'cuda:0' is not available", "no accelerator", "Leave 'onload_device' out"):
        apply_distributed_layerwise_offload(model, onload_device="cuda:0")


@pytest.mark.parametrize("target", (None, "model", nn.Linear, [nn.Linear(2, 2)]), ids=("none", "str", "class", "list"))
def test_something_else_than_a_module(target: Any) -> None:
    with pytest.raises(TypeError, match="torch.nn.Module"):
        apply_distributed_layerwise_offload(target)
    with pytest.raises(TypeError, match="'vae' must be a torch.nn.Module, got"):
        validate_module(target, "vae", "local")


# ------------------------------------------------------------------------------------------------- several ranks


def _refused_alike(rank: int, size: int) -> None:
    """What is wrong on the last rank alone is refused on all of them, and they can go on together."""
    reference = toy(toys.Stack, 3)

    def quantize(model: nn.Module) -> None:
        model.hf_quantizer = Quantizer()

    def to_meta(model: nn.Module) -> None:
        model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach().to("meta"))

    def subclass(model: nn.Module) -> None:
        model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach().as_subclass(Packed))

    def cast(model: nn.Module) -> None:
        apply_layerwise_casting(model.blocks, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=("norm",))

    faults: list[tuple[Callable[[nn.Module], None], type[Exception], str]] = [
        (quantize, ValueError, "was quantized while it was loaded (Quantizer)"),
        (to_meta, RuntimeError, "'blocks.1.up.weight' of 'model' has no values"),
        (subclass, ValueError, "is a Packed, and sharding would break its layout"),
        (cast, ValueError, "layerwise casting is active"),
    ]
    for spoil, error, text in faults:
        model = toy(toys.Stack, 3)
        last = rank == size - 1
        if last:
            spoil(model)
        texts = [text] if last else [text, f"rank {size - 1} failed"]
        with refused(model, error, *texts, run=None if last else call):
            apply_distributed_layerwise_offload(model)
    model = toy(toys.Stack, 3)
    options: list[dict[str, Any]] = [{"num_slots": 1}, {"blocks": ["layers"]}, {"colour": "blue"}]
    for wrong, error in zip(options, (ValueError, ValueError, TypeError)):
        texts = [] if rank == 0 else ["rank 0 failed"]
        with refused(model, error, next(iter(wrong.values()))[0] if "blocks" in wrong else next(iter(wrong)), *texts):
            apply_distributed_layerwise_offload(model, **(wrong if rank == 0 else {}))

    mesh = init_device_mesh("cpu", (size,))
    sharded = toy(toys.Stack, 3)
    down = sharded.blocks[1].down
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(0)]))
    with refused(sharded, ValueError, "is a DTensor", "all_gather would shard it a second time", run=None):
        apply_distributed_layerwise_offload(sharded)
    works(model, reference)


@pytest.mark.parametrize("size", (2, 3))
def test_refused_alike_on_all_ranks(size: int) -> None:
    run_ranks(size, _refused_alike)
