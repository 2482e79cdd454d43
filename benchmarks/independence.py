# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Times what it costs that ranks are independent: forwards of ranks that have equally much to do, against forwards of one
rank while the others have ended theirs, and what the main thread waits for the other ranks' agreement to a pass.

    torchrun --standalone --nproc_per_node 2 benchmarks/independence.py
    torchrun --standalone --nproc_per_node 2 benchmarks/independence.py --device cpu

Every output is compared, bit by bit, with that of the model without offload.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.distributed.turn import Turn
from diffusers_dlo.tables import render_table


SIZES = {"cuda": (36, 8192, 24576, 16384, torch.bfloat16), "cpu": (36, 64, 128, 8, torch.float32)}
"""Blocks, features, features inside a block, tokens and dtype, by device."""


class Block(nn.Module):
    """A residual layer of two products, as large and as slow as one wants."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and one small module beside them, as real models have."""

    def __init__(self, count: int, dim: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, width) for _ in range(count))
        self.rest = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make(device: torch.device, home: torch.device, count: int, dim: int, width: int, dtype: torch.dtype) -> nn.Module:
    """A stack on `home`, with weights drawn on `device`, the same on every rank."""
    with torch.device("meta"):
        model = Stack(count, dim, width).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
            setattr(module, name, nn.Parameter(weight.to(home), requires_grad=False))
    return model.eval()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def forwards(model: nn.Module, inputs: list[torch.Tensor], device: torch.device) -> tuple[float, list[torch.Tensor]]:
    """Seconds and outputs of one forward for each input."""
    synchronize(device)
    start = time.perf_counter()
    with torch.inference_mode():
        outputs = [model(x) for x in inputs]
    synchronize(device)
    return time.perf_counter() - start, outputs


def watch_requests() -> list[float]:
    """Seconds that the main thread waits for each pass it asks for, from now on."""
    waits: list[float] = []
    request = Turn.request

    def timed(self: Turn, asked: dict) -> None:
        start = time.perf_counter()
        request(self, asked)
        waits.append(time.perf_counter() - start)

    Turn.request = timed  # type: ignore[method-assign]
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8, help="forwards of the rank that computes longest")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", type=int, help="blocks of the model")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    count, dim, width, tokens, dtype = SIZES[options.device]
    count = options.blocks or count

    generator = torch.Generator(device).manual_seed(rank)
    inputs = [torch.randn(tokens, dim, device=device, dtype=dtype, generator=generator) for _ in range(options.steps)]
    reference = make(device, device, count, dim, width, dtype)
    resident_time, expected = forwards(reference, inputs, device)
    resident_time, expected = forwards(reference, inputs, device)
    del reference
    model = make(device, torch.device("cpu"), count, dim, width, dtype)
    handle = apply_distributed_layerwise_offload(model, onload_device=device, transfer="all_gather", host="packed")
    forwards(model, inputs[:2], device)
    waits = watch_requests()

    def run(steps: int) -> float:
        dist.barrier()
        synchronize(device)
        taken, outputs = forwards(model, inputs[:steps], device)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected)), "outputs differ from the resident model's"
        dist.barrier()  # where the ranks with less to do wait, in the user's own collective
        synchronize(device)
        return taken

    lockstep = min(run(options.steps) for _ in range(options.repeats))
    before = handle.report().ghost_passes
    equal_waits = list(waits)
    uneven = min(run(options.steps if rank == 0 else options.steps // 2) for _ in range(options.repeats))
    handle.join()
    report = handle.report()
    if rank == 0:
        figures = {
            "ranks": dist.get_world_size(),
            "block_nbytes": handle.plan.blocks[0].nbytes,
            "resident_s": resident_time,
            "lockstep_s": lockstep,
            "uneven_s": uneven,
            "uneven_over_lockstep": uneven / lockstep,
            "rendezvous_median_ms": 1e3 * statistics.median(equal_waits),
            "rendezvous_worst_ms": 1e3 * max(equal_waits),
        }
        steps = options.steps
        rows = [
            [f"{steps} forwards, all weights resident", f"{resident_time:.3f} s"],
            [f"{steps} forwards on every rank", f"{lockstep:.3f} s"],
            [f"{steps} on rank 0, {steps // 2} on the others", f"{uneven:.3f} s, {uneven / lockstep:.3f} x"],
            ["a pass's rendezvous, median", f"{figures['rendezvous_median_ms']:.3f} ms"],
            ["a pass's rendezvous, worst", f"{figures['rendezvous_worst_ms']:.3f} ms"],
        ]
        print(
            render_table(
                f"{figures['ranks']} ranks, {count} blocks of {figures['block_nbytes']} bytes", ["what", "time"], rows
            )
        )
        if options.json:
            with open(options.json, "w") as file:
                json.dump(figures, file, indent=1)
    print(f"rank {rank}: ghost passes {before} in lockstep, {report.ghost_passes} in all; outputs equal", flush=True)
    handle.remove()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
