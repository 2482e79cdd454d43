# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the package has to do on the simulated device, on one rank and on several. A case raises, or returns plain
values that the test compares. Must not run in the process of the tests.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from diffusers import DiffusionPipeline, FluxPipeline
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from diffusers_dlo.device.onload import default_device
from diffusers_dlo.device.platform import get_platform
from tests import toys
from tests.npu import collectives
from tests.toys import feed, toy
from tests.zoo import MODELS, build, flat, place


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


_ops = torch.ops.simulated_npu
TOYS: dict[str, Callable[[], nn.Module]] = {
    "five unequal blocks": lambda: toy(toys.Stack, 5),
    "dtypes, strides and buffers": lambda: toy(toys.Stack, 3, toys.MixedBlock),
    "buffers that are written": lambda: toy(toys.Stack, 3, toys.CountingBlock),
    "tied weights": lambda: toy(toys.Tied),
    "weights that are returned": lambda: toy(toys.Returning),
    "large leaves": lambda: toy(toys.Leafy),
}
REAL = ("cosmos3", "wan", "flux")


def device() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def compute(module: nn.Module, name: str, seed: int) -> list[torch.Tensor]:
    """The outputs of one forward on the device, on the host."""
    with torch.no_grad():
        if name in MODELS:
            dtype = next(p.dtype for p in module.parameters())
            output = module(**place(MODELS[name].inputs(seed), dtype=dtype, device=device()))
        else:
            output = module(feed(seed).to(device()))
    return [tensor.cpu() for tensor in flat(output)]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The model to offload, on the host, and the same whole on the device."""
    if name in TOYS:
        return TOYS[name](), TOYS[name]().to(device())
    return build(name, 3, dtype=torch.bfloat16), build(name, 3, dtype=torch.bfloat16).to(device())


def assert_outputs(model: nn.Module, reference: nn.Module, name: str, seed: int) -> None:
    got, expected = compute(model, name, seed), compute(reference, name, seed)
    assert got and len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and torch.equal(a, b) and not torch.isnan(a).any(), (name, seed)


def assert_weights(model: nn.Module, expected: dict[str, torch.Tensor], kind: str) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert state[key].device.type == kind or kind == "any", (key, state[key].device)
        assert torch.equal(state[key].cpu(), value), key


def whole_life(name: str, rank: int, size: int, **options: Any) -> OffloadHandle:
    """
    A model from before enabling until after disabling: its outputs, its weights, and which objects they are.
    """
    model, reference = pair(name)
    originals = dict(model.named_parameters())
    weights = {key: value.cpu().clone() for key, value in reference.state_dict().items()}
    handle = apply_distributed_layerwise_offload(model, onload_device="npu", **options)
    try:
        born = dict(model.named_parameters())
        assert all(parameter.device == device() for parameter in born.values())
        managed = [key for key, parameter in born.items() if parameter.dim() and not any(parameter.stride())]
        assert managed and not any(born[key] is originals[key] for key in managed)
        assert all(type(born[key]) is type(originals[key]) for key in managed)
        for step in range(3):
            assert_outputs(model, reference, name, 10 * rank + step)
            assert all(parameter is born[key] for key, parameter in model.named_parameters())
            assert all(parameter.device == device() for parameter in model.parameters())
        if size == 1 and "written" not in name:
            assert_weights(model, weights, "any")
    finally:
        handle.remove()
    put_back = dict(model.named_parameters())
    other = [key for key in managed if put_back[key] is not originals[key]]
    assert not other, (name, other)
    after = {key: value.cpu().clone() for key, value in reference.state_dict().items()}
    assert_weights(model, after, "cpu")
    assert_outputs(model.to(device()), reference, name, 10 * rank)
    return handle


# ------------------------------------------------------------------------------------------------------ one rank alone


def the_device(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """What torch, accelerate and the package take it for."""
    state = PartialState()
    return {
        "version": importlib.metadata.version("torch_npu"),
        "accelerator": str(torch.accelerator.current_accelerator()),
        "default": str(default_device(None)),
        "accelerate": state.device.type,
        "backend": get_platform(default_device(None)).backend,
        "registers": get_platform(default_device(None)).registers_host_memory,
        "name": torch._C._get_privateuse1_backend_name(),
    }


def its_rules(rank: int, size: int, folder: Path) -> dict[str, str]:
    """What the device refuses, as an NPU does: without that, the other cases would prove little."""
    found: dict[str, str] = {}

    @contextmanager
    def refused(what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            found[what] = str(error).splitlines()[0]

    on_host, on_device = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="npu"))
    with refused("host parameter, device data"):
        on_host.data = on_device.detach()
    with refused("device parameter, host data"):
        on_device.data = torch.ones(3)
    view = torch.ones(6, device="npu")[2:5]
    on_device.data = view
    assert on_device.data_ptr() == view.data_ptr() and on_device.sum().item() == 3
    with refused("registration"):
        get_platform(device()).register_host_memory(on_host.data_ptr(), 12)

    def in_a_thread() -> None:
        with refused("a thread"):
            torch.zeros(3, device="npu")
        torch.npu.set_device(1)
        assert torch.zeros(3, device="npu").device.index == 1

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert torch.npu.current_device() == 0
    return found


def its_streams(rank: int, size: int, folder: Path) -> bool:
    """A stream lags, events order it with others, and its host memory has to be page-locked."""
    _ops.lag(200_000, 3)
    source, target = torch.arange(64.0).pin_memory(), torch.zeros(64, device="npu")
    stream, event = torch.npu.Stream(device="npu"), torch.npu.Event()
    before = torch.npu.Event()
    before.record(torch.npu.current_stream())
    stream.wait_event(before)
    with torch.npu.stream(stream):
        target.copy_(source, non_blocking=True)
    event.record(stream)
    behind = not event.query()
    torch.npu.current_stream().wait_event(event)
    assert torch.equal(target.cpu(), source) and event.query()
    waits = _ops.counts()[0]
    with torch.npu.stream(stream):
        target.copy_(source, non_blocking=True)
        target.copy_(torch.ones(64), non_blocking=True)  # pageable: the host waits for what is before it
    assert _ops.counts()[0] == waits + 1 and target.sum().item() == 64
    _ops.lag(300, 3)
    return behind


def models(rank: int, size: int, folder: Path) -> dict[str, str]:
    """Toys and real classes, with streams that lag, in the way that is chosen and with three slots."""
    kinds = {}
    for index, name in enumerate((*TOYS, *REAL)):
        kinds[name] = whole_life(name, rank, size, num_slots=2 + index % 2).report().host_kind
    return kinds


def memory(rank: int, size: int, folder: Path) -> dict[str, int]:
    """Device and page-locked memory while enabled, and that the host waits for no stream."""
    gc.collect()  # what other cases left
    torch.npu.synchronize()
    before = torch.npu.memory_allocated(), _ops.counts()[2]
    model = toy(toys.Stack, 7, toys.Block, 64, (256, 64))
    largest = sum(p.nbytes for p in model.blocks[0].parameters())
    rest = sum(p.nbytes for part in (model.inp, model.out) for p in part.parameters())
    inputs = torch.randn(4, 64, device="npu")
    handle = apply_distributed_layerwise_offload(model)
    enabled = torch.npu.memory_allocated() - before[0]
    with torch.no_grad():
        model(inputs)
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        waits, copies, _ = _ops.counts()
        for _ in range(3):
            model(inputs)
        after_waits, after_copies, pinned = _ops.counts()
    torch.npu.synchronize()
    peak = torch.npu.max_memory_allocated() - before[0]
    handle.remove()
    return {
        "largest block": largest,
        "rest": rest,
        "enabled": enabled,
        "peak": peak,
        "host waits": after_waits - waits,
        "copies": after_copies - copies,
        "pinned while enabled": pinned - before[1],
        "pinned after": _ops.counts()[2] - before[1],
        "inputs": inputs.nbytes,
        "after": torch.npu.memory_allocated() - before[0],
    }


def already_there(rank: int, size: int, folder: Path) -> str:
    """A model that was on the device before; where disabling leaves its weights."""
    model, reference = toy(toys.Stack, 4).to(device()), toy(toys.Stack, 4).to(device())
    weights = {key: value.cpu() for key, value in reference.state_dict().items()}
    handle = apply_distributed_layerwise_offload(model)
    for seed in range(2):
        assert_outputs(model, reference, "toy", seed)
    handle.remove()
    assert_weights(model, weights, "any")
    kind = {parameter.device.type for parameter in model.parameters()}
    assert_outputs(model.to(device()), reference, "toy", 2)
    return "+".join(sorted(kind))


def without_room(rank: int, size: int, folder: Path) -> str:
    """The device is full on the last rank: enabling fails on all of them and leaves everything as it was."""
    model, reference = pair("five unequal blocks")
    originals, used = dict(model.named_parameters()), torch.npu.memory_allocated()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    pinned = _ops.counts()[2]
    free, _ = torch.npu.mem_get_info()
    hog = torch.empty(free - 2048, dtype=torch.uint8, device=device()) if rank == size - 1 else None
    try:
        apply_distributed_layerwise_offload(model, onload_device="npu")
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        raise AssertionError("there was room")
    del hog
    assert all(parameter is originals[key] for key, parameter in model.named_parameters())
    assert_weights(model, weights, "cpu")
    assert torch.npu.memory_allocated() == used and _ops.counts()[2] == pinned
    handle = apply_distributed_layerwise_offload(model, onload_device="npu")
    assert_outputs(model, reference, "toy", rank)
    handle.remove()
    return said


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = _Lines(), logging.getLogger("diffusers_dlo")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def generate(pipe: DiffusionPipeline, seed: int, output: str) -> torch.Tensor:
    options = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": output}
    pipe.set_progress_bar_config(disable=True)
    return pipe("a fox in the snow", generator=torch.Generator().manual_seed(seed), **options).images.cpu()


def pipeline(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A pipeline from safetensors."""
    path = folder / f"flux-{size}"
    if rank == 0:
        tiny_checkpoints.build_tiny_flux(path)
    if size > 1:
        dist.barrier()
    reference, pipe = (FluxPipeline.from_pretrained(path, dtype=torch.bfloat16) for _ in range(2))
    reference.to(device())
    streamed = ["transformer", "text_encoder_2"]
    with logged() as lines:
        handle = pipe.enable_distributed_layerwise_offload(components=streamed, onload_device="npu")
    kinds = {component.name: component.transfer for component in handle.plan.components}
    assert pipe._execution_device == device()
    output = "latent" if size > 1 else "pt"  # decoding takes longest, and is each rank's own
    got, expected = generate(pipe, rank, output), generate(reference, rank, output)
    assert got.isfinite().all() and got.float().std() > 0 and torch.equal(got, expected)
    found = {"transfers": kinds, "log": lines, "host": handle.report().host_kind}
    pipe.disable_distributed_layerwise_offload()
    for name in ("transformer", "text_encoder", "text_encoder_2", "vae"):
        weights = {key: value.cpu() for key, value in getattr(reference, name).state_dict().items()}
        assert_weights(getattr(pipe, name), weights, "any")
    return found


def host_memory(rank: int, size: int, folder: Path) -> str:
    """What comes of asking for memory that all ranks share: nothing on the host can be registered here."""
    model, reference = pair("five unequal blocks")
    try:
        handle = apply_distributed_layerwise_offload(model, host="packed")
    except RuntimeError as error:
        return str(error)
    for step in range(3):
        assert_outputs(model, reference, "toy", step + 10 * rank)
    kind = handle.report().host_kind
    handle.remove()
    return kind


def budget(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Part of the weights stays on the device. Blocks are equal: a gather's addresses depend on its slot alone."""
    model, reference = (toy(toys.Stack, 7, toys.Block, 16, (32,)) for _ in range(2))
    reference.to(device())
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    collectives.gathers.clear()
    # Slots and whatever is beside them take part of it; what is left is not enough for all blocks.
    handle = apply_distributed_layerwise_offload(model, device_budget=7 * block, transfer=transfer_of(size))
    collectives.gathers.clear()  # those that tried the communicator out
    for step in range(4):
        assert_outputs(model, reference, "toy", step + 10 * rank)
    report = handle.report()
    handle.join()
    found = {
        "gathers": [tuple(gather) for gather in collectives.gathers],
        "resident": report.resident_bytes,
        "slots": report.device_slot_bytes,
        "num_slots": handle.plan.num_slots,
        "platform": type(get_platform(device())).__name__,
    }
    handle.remove()
    return found


def transfer_of(size: int) -> str:
    return "all_gather" if size > 1 else "local"


# ------------------------------------------------------------------------------------------------------ several ranks


def connect(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """As a user's script does under a launcher."""
    _ops.lag(300, rank)
    state = PartialState(init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return {
        "device": str(state.device),
        "backend": dist.get_backend(),
        "group": type(dist.group.WORLD).__name__,
        "processes": state.num_processes,
        "default": str(default_device(rank)),
    }


def gathered_models(rank: int, size: int, folder: Path) -> dict[str, str]:
    """Each rank computes with inputs of its own."""
    kinds = {}
    for index, name in enumerate((*TOYS, *REAL)):
        report = whole_life(name, rank, size, num_slots=2 + index % 2, transfer="all_gather").report()
        kinds[name] = f"{report.transfer} {report.host_kind}"
    return kinds


def addresses(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Every gather of equal blocks, in many passes."""
    model, reference = (toy(toys.Stack, 5, toys.Block, 16, (32,)) for _ in range(2))
    reference.to(device())
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    collectives.gathers.clear()
    waits = _ops.counts()[0]
    for step in range(5):
        assert_outputs(model, reference, "toy", step + 10 * rank)
    found = {"host waits": _ops.counts()[0] - waits, "num_slots": handle.plan.num_slots}
    handle.join()
    found["gathers"] = [tuple(gather) for gather in collectives.gathers]
    handle.remove()
    return found


def unequal_work(rank: int, size: int, folder: Path) -> tuple[int, int]:
    """A rank that has nothing to do transfers for the other, on a thread of its own and the right device."""
    model, reference = (toy(toys.Stack, 5) for _ in range(2))
    reference.to(device())
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather", grace=0.1)
    for step in range(3 if rank == 0 else 1):
        assert_outputs(model, reference, "toy", step + 10 * rank)
    dist.barrier()
    handle.join()
    report = handle.report()
    handle.remove()
    return report.passes, report.ghost_passes


def group_rules(rank: int, size: int, folder: Path) -> list[str]:
    """What the gathers of an "hccl" group refuse."""
    found = []
    group = dist.new_group(backend="hccl")
    for output, input in ((8, 3), (8, 5)):
        try:
            dist.all_gather_into_tensor(
                torch.zeros(output, dtype=torch.uint8, device=device()),
                torch.zeros(input, dtype=torch.uint8, device=device()),
                group=group,
            )
        except RuntimeError as error:
            found.append(str(error))
    return found


ONE_RANK = {
    case.__name__: case
    for case in (
        the_device, its_rules, its_streams, models, memory, already_there, without_room, pipeline, host_memory, budget
    )
}  # fmt: skip
SEVERAL_RANKS = {
    case.__name__: case
    for case in (
        connect, group_rules, gathered_models, addresses, unequal_work, without_room, pipeline, host_memory, budget
    )
}  # fmt: skip
