# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the package has to do on the simulated device, on one rank, and on each of several alike. A case raises, or
returns plain values that the test compares. Must not run in the process of the tests.
"""

from __future__ import annotations

import gc
import importlib.metadata
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from diffusers import DiffusionPipeline, FluxPipeline
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.device.onload import default_device
from diffusers_dlo.device.platform import get_platform
from tests import toys
from tests.npu import collectives
from tests.npu.comparing import REAL, TOYS, assert_outputs, assert_weights, device, logged, pair, whole_life
from tests.toys import toy


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


_ops = torch.ops.simulated_npu


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
        "platform": type(get_platform(default_device(None))).__name__,
        "codecs": list(get_platform(default_device(None)).codecs),
        "ans": refusal_of("ans"),
        "name": torch._C._get_privateuse1_backend_name(),
    }


def refusal_of(codec: str) -> str:
    """Why the device cannot decode with a codec."""
    try:
        get_platform(default_device(None)).open_codec(codec)
    except RuntimeError as error:
        return str(error)
    return ""


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


def its_streams(rank: int, size: int, folder: Path) -> str:
    """A stream does its work later, events order it with others; host memory is page-locked, and has to stay."""
    source, target = torch.arange(64.0).pin_memory(), torch.zeros(64, device="npu")
    stream, event = torch.npu.Stream(device="npu"), torch.npu.Event()
    with held(stream):
        target.copy_(source, non_blocking=True)
        event.record(stream)
        assert not event.query() and stream.query() is False
    torch.npu.current_stream().wait_event(event)
    assert torch.equal(target.cpu(), source) and event.query()
    with torch.npu.stream(stream):
        target.copy_(source, non_blocking=True)
        target.copy_(torch.ones(64), non_blocking=True)  # pageable: the host waits for what is before it
    assert target.sum().item() == 64
    with held(stream):
        target.copy_(source, non_blocking=True)
        del source
    try:
        torch.npu.synchronize()
    except RuntimeError:
        return _ops.take_fault()
    return "nothing"


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """The body queues its work on `stream`, which begins with it after."""
    moment = _ops.new_moment()
    with torch.npu.stream(stream):
        _ops.wait_for(moment)
        yield
    _ops.reach(moment)


def models(rank: int, size: int, folder: Path) -> dict[str, str]:
    """Toys and real classes, with streams that lag, in the way that is chosen and with three slots."""
    _ops.lag(300, 0)
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
    """Memory that all ranks share, none of which can be registered here, is copied through page-locked buffers."""
    model, reference = pair("five unequal blocks")
    handle = apply_distributed_layerwise_offload(model, host="packed")
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
    transfer = "all_gather" if size > 1 else "local"
    handle = apply_distributed_layerwise_offload(model, device_budget=7 * block, transfer=transfer)
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
    }
    handle.remove()
    return found


ONE_RANK = {
    case.__name__: case
    for case in (
        the_device,
        its_rules,
        its_streams,
        models,
        memory,
        already_there,
        without_room,
        pipeline,
        host_memory,
        budget,
    )
}
