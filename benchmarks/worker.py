# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what one rank does: it waits for a job, does it, sends what it measured, and ends. Must not compare ranks, nor
know what else is measured.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint import cached_part, coded_folder, evict, load_model, read, write_checkpoint
from holding import hold
from links import measure_links
from measure import clock, device_memory, host_memory, synchronize, time_forwards
from sizes import Workload, make_inputs
from torch import nn
from variants import Variant

from diffusers_dlo.pack import pack_checkpoint


@dataclass(frozen=True)
class Job:
    """
    What a set of ranks is to do: prepare (write the weights, measure the links), code the weights, or measure a
    variant.
    """

    kind: str
    folder: Path
    config: Mapping[str, Any]
    dtype: torch.dtype
    device: str
    workloads: tuple[Workload, ...]
    repeats: int
    cap_nbytes: int | None = None
    variant: Variant | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    block_nbytes: int = 0
    interference: bool = False


COLD_NBYTES = 8 << 30
"""How much is read to find out how fast a disk is."""
Tell = Callable[[str], None]


def work(rank: int, size: int, store: str, log: str, connection: Connection) -> None:
    """The whole life of a rank. It has imported what takes long before it waits for its job, and touched no device."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which a fork has from the command
    with open(log, "wb", buffering=0) as file:  # libraries write much
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        job = connection.recv()
    except EOFError:
        return
    code = 0
    try:
        value = _do(job, rank, size, store, lambda text: connection.send(("tell", text)))
        connection.send(("done", value))
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        connection.send(("failed", f"{type(error).__name__}: {lines[0]}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the kernel takes back tens of gigabytes faster than destructors give them


def _do(job: Job, rank: int, size: int, store: str, tell: Tell) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    if job.device == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
    device = torch.device("cpu") if job.device == "cpu" else torch.device(job.device, rank)
    if device.type != "cpu":
        torch.cuda.set_device(device)
        total = torch.cuda.get_device_properties(device).total_memory
        if job.cap_nbytes is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap_nbytes / total), device)
    if size > 1 or (job.variant is not None and job.variant.family == "fsdp"):
        dist.init_process_group(
            _backend(job, device),
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(minutes=30),
            device_id=None if device.type == "cpu" else device,
        )
    value = JOBS[job.kind](job, device, rank, size, tell)
    if size > 1:
        dist.barrier()  # nobody leaves while another still needs it
    return value


def _backend(job: Job, device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    # FSDP2 with weights on the host may talk about them there.
    return "cpu:gloo,cuda:nccl" if job.variant is not None and job.variant.family == "fsdp" else "nccl"


def _prepare(job: Job, device: torch.device, rank: int, size: int, tell: Tell) -> dict[str, Any]:
    """Writes the checkpoint, measures the links, and says what machine this is."""
    found: dict[str, Any] = {"device": "CPU", "device_nbytes": None}
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found = {"device": properties.name, "device_nbytes": properties.total_memory}
        found["driver_cuda"] = torch.version.cuda
    if rank == 0:
        write_checkpoint(job.folder, job.config, job.dtype, device, tell)
    if size > 1:
        dist.barrier()
    tell("measuring links")
    found |= measure_links(device, rank, size, job.block_nbytes, job.interference)
    if size > 1:
        dist.barrier()
    return found


def _code(job: Job, device: torch.device, rank: int, size: int, tell: Tell) -> dict[str, Any]:
    """Writes the weights as a coded checkpoint for this many ranks, which takes one of them."""
    if rank == 0:
        tell("coding the weights")
        coded = coded_folder(job.folder)
        pack_checkpoint(str(job.folder), str(coded), job.dtype, "zstd" if job.device == "cpu" else "ans", size)
        tell(f"coded weights take {_files_nbytes(coded) / _files_nbytes(job.folder):.3f} of the bytes")
    if size > 1:
        dist.barrier()
    return {}


def _files_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _measure(job: Job, device: torch.device, rank: int, size: int, tell: Tell) -> dict[str, Any]:
    variant = job.variant
    assert variant is not None
    before = device_memory(device)
    disk = _set_page_cache(job, variant, rank, size, tell)
    tell("loading")
    folder = coded_folder(job.folder) if variant.name.endswith("-coded") else job.folder
    load_seconds, model = clock(lambda: load_model(folder, job.dtype), device)
    found: dict[str, Any] = {"load_s": load_seconds, "host_before": host_memory()}
    if variant.cold:
        found["disk"] = disk
    found["cached"] = cached_part(job.folder)
    if size > 1:
        dist.barrier()
    tell("enabling")
    enable_seconds, handle = clock(lambda: hold(model, variant.family, dict(job.options), device, size), device)
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()
    memory = device_memory(device)
    found |= {"enable_s": enable_seconds, "weights": memory["allocated"]}
    workloads = sorted(job.workloads, key=lambda workload: -workload.tokens)  # so that "auto" sees the largest first
    if variant.cold:
        workloads = workloads[-1:]
    found["forwards"] = {}
    for workload in workloads:
        tell(f"enabled in {enable_seconds:.1f} s; {workload.name}")
        found["forwards"][workload.name] = _forwards(job, variant, model, handle, workload, device, size)
    if variant.family == "reference":
        handle.share_first_layer()
        for workload in workloads:
            tell(f"what computing alone takes; {workload.name}")
            alone = time_forwards(model, make_inputs(workload, model, device), device, job.repeats, size)
            found["forwards"][workload.name]["compute"] = alone["seconds"]
    synchronize(device)
    memory = device_memory(device)
    if memory["used"] is not None and before["used"] is not None:
        found["used"] = memory["used"] - before["used"]
    found["weights_after"] = memory["allocated"]
    found["host"] = host_memory()
    if variant.family == "dlo":
        found |= _report(handle)
        if device.type == "cpu":  # whose memory is not counted by anyone else
            found["weights"] = found["slots"] + found["placed"]
        handle.join()
    elif device.type == "cpu" and variant.family == "resident":
        found["weights"] = sum(parameter.nbytes for parameter in model.parameters())
    return found


def _set_page_cache(job: Job, variant: Variant, rank: int, size: int, tell: Tell) -> float | None:
    """Cold or warm, as the variant wants the checkpoint; bytes per second of the disk, where that was found out."""
    disk = None
    if rank == 0 and variant.cold:
        tell("measuring the disk")
        evict(job.folder)
        disk = read(job.folder, most=COLD_NBYTES)
        evict(job.folder)
    elif rank == 0 and cached_part(job.folder) < 1:
        tell("reading the checkpoint into the page cache")
        read(job.folder)
    if size > 1:
        dist.barrier()
    return disk


def _forwards(
    job: Job, variant: Variant, model: nn.Module, handle: Any, workload: Workload, device: torch.device, size: int
) -> dict[str, Any]:
    def copied() -> int:
        report = handle.report()
        return report.h2d_bytes + report.on_demand_bytes

    inputs = make_inputs(workload, model, device)
    if variant.family == "dlo":
        return time_forwards(model, inputs, device, job.repeats, size, copied)
    result = time_forwards(model, inputs, device, 1 if variant.family == "reference" else job.repeats, size)
    return result | {"h2d": None}


def _report(handle: Any) -> dict[str, Any]:
    report = handle.report()
    return {
        "host_kind": report.host_kind,
        "transfer": report.transfer,
        "slots": report.device_slot_bytes,
        "placed": report.device_placed_bytes,
        "resident": getattr(report, "resident_bytes", None),
        "extents": report.extents_per_block,
    }


JOBS = {"prepare": _prepare, "code": _code, "measure": _measure}
