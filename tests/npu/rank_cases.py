# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what several ranks of the package have to do on the simulated devices, each on its own. A case raises, or returns
plain values that the test compares. Must not run in the process of the tests.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.device.onload import default_device
from tests import toys
from tests.npu import collectives
from tests.npu.cases import budget, host_memory, pipeline, without_room
from tests.npu.comparing import REAL, TOYS, assert_outputs, device, whole_life
from tests.toys import toy


_ops = torch.ops.simulated_npu


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
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
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
    unequal = 3 + rank
    dist.all_gather_into_tensor(
        torch.zeros(2 * unequal, dtype=torch.uint8, device=device()),
        torch.zeros(unequal, dtype=torch.uint8, device=device()),
        group=group,
    )
    try:
        torch.npu.synchronize()
    except RuntimeError:
        found.append(_ops.take_fault())
    return found


def lost_rank(rank: int, size: int, folder: Path) -> str:
    """The last rank ends in the middle of a pass, with gathers begun on the others. What those are told."""
    model, reference = (toy(toys.Stack, 5) for _ in range(2))
    reference.to(device())
    apply_distributed_layerwise_offload(model, transfer="all_gather", host="pinned")
    assert_outputs(model, reference, "toy", rank)
    if rank == size - 1:
        model.blocks[2].register_forward_pre_hook(lambda *_: os._exit(0))
    try:
        assert_outputs(model, reference, "toy", rank)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


SEVERAL_RANKS = {
    case.__name__: case
    for case in (
        connect,
        group_rules,
        gathered_models,
        addresses,
        unequal_work,
        without_room,
        pipeline,
        host_memory,
        budget,
    )
}
LOST_RANK = {case.__name__: case for case in (connect, lost_rank)}
