# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the rows about whole models: streamed, against the same on the device."""

from __future__ import annotations

import copy
import gc
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload

from .context import Context, demand
from .models import Stack, tiny_forward, tiny_model
from .outcome import Failed, Finding


_HOSTS = ("pinned", "packed", "mapped")
_SEEDS = (1, 2, 3)


class Refused(Exception):
    """This device does not go with a host store."""


@contextmanager
def streamed(context: Context, model: nn.Module, **options: Any) -> Iterator[OffloadHandle]:
    """The model under the offload. Late ranks are noticed before the time for a row is over."""
    try:
        handle = apply_distributed_layerwise_offload(
            model, onload_device=context.device, timeout=context.limit / 3, **options
        )
    except RuntimeError as error:
        registers = context.platform.registers_host_memory
        if options.get("host") in ("packed", "mapped") and not registers and "did not allocate" in str(error):
            raise Refused from error
        raise
    try:
        yield handle
    finally:
        handle.remove()


@contextmanager
def source(context: Context, host: str) -> Iterator[nn.Module]:
    """The tiny model as a host store wants it: from a file, which all ranks of the host read, or from memory."""
    model = tiny_model()
    if host != "mapped":
        yield model
        return
    folder = tempfile.mkdtemp() if context.ranks.local_rank == 0 else ""
    try:
        if folder:
            model.save_pretrained(folder)
        folders = context.ranks.exchange(folder)
        path = [text for text in folders[: context.ranks.rank + 1] if text][-1]  # that of this host's first rank
        yield FluxTransformer2DModel.from_pretrained(path, dtype=torch.bfloat16).eval()
        context.ranks.exchange(None)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


@lru_cache
def expected(device: torch.device, seed: int) -> torch.Tensor:
    """What the model on the device makes of the inputs of a seed."""
    output = tiny_forward(tiny_model().to(device), seed, device)
    if output.isnan().any() or output.float().std() == 0:
        raise Failed("the model on the device, without any offload, makes nothing of its inputs")
    return output


def _seed(context: Context, step: int) -> int:
    return 100 * context.ranks.rank + step


def _compare(context: Context, host: str, **options: Any) -> tuple[str, str]:
    """What is wrong, if anything, and the kind of host store."""
    with source(context, host) as model:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with streamed(context, model, host=host, **options) as handle:
            wrong = [
                seed
                for seed in _SEEDS
                if not torch.equal(
                    tiny_forward(model, _seed(context, seed), context.device),
                    expected(context.device, _seed(context, seed)),
                )
            ]
            report = handle.report()
        after = model.state_dict()
        if wrong:
            return f"forward {wrong[0]} has other bits", report.host_kind
        if report.h2d_bytes == 0:
            return "nothing was copied", report.host_kind
        if any(not torch.equal(after[name], value) for name, value in weights.items()):
            return "weights have changed once it is disabled", report.host_kind
        return "", report.host_kind


def _compare_all(context: Context, transfer: str) -> str:
    """
    With every host store; those that were used, in words.

    Raises:
        `Failed`: bits differ.
    """
    said = []
    for host in _HOSTS:
        try:
            wrong, kind = _compare(context, host, transfer=transfer)
        except Refused:
            said.append(f"{host} refused")
            continue
        demand(not wrong, f"transfer={transfer!r}, host={host!r}: {wrong}")
        demand(kind == host, f"host={host!r} became {kind!r}")
        said.append(host)
    return f"{transfer}: {', '.join(said)}"


def alone(context: Context) -> Finding:
    """Each rank with inputs of its own, every host store."""
    return Finding(_compare_all(context, "local"))


def together(context: Context) -> Finding:
    """Gathered from shards, and chosen by timing, every host store."""
    said = [_compare_all(context, "all_gather")]
    wrong, kind = _compare(context, "auto", transfer="auto")
    demand(not wrong, f"transfer='auto', host='auto': {wrong}")
    return Finding("; ".join([*said, f"auto: {kind}"]))


def unequal_work(context: Context) -> Finding:
    """Each rank has two forwards more than the one before it, and then waits in a sum over the world's group."""
    ranks, model = context.ranks, tiny_model()
    count = 1 + 2 * ranks.rank
    with streamed(context, model, transfer="all_gather", host="pinned") as handle:
        same = [
            torch.equal(
                tiny_forward(model, _seed(context, step), context.device),
                expected(context.device, _seed(context, step)),
            )
            for step in range(count)
        ]
        total = torch.tensor([float(count)], device=context.device)
        dist.all_reduce(total)
        value = total.item()
        handle.join()
        report = handle.report()
    demand(all(same), f"{same.count(False)} of {count} forwards have other bits")
    demand(value == sum(1 + 2 * rank for rank in range(ranks.size)), f"the sum that ranks waited in is {value}")
    demand(report.passes == count, f"{report.passes} passes for {count} forwards")
    said = ranks.exchange([report.passes, report.ghost_passes])
    sums = {passes + ghosts for passes, ghosts in said}
    demand(len(sums) == 1, f"ranks took part in {sorted(sums)} passes")
    text = ", ".join(f"{passes} + {ghosts} for others" for passes, ghosts in said)
    return Finding(f"passes: {text}", {"passes": said})


def residents(context: Context) -> Finding:
    """About half of the weights stay on the device."""
    transfer = "all_gather" if context.ranks.size > 1 else "local"
    model = tiny_model()
    with streamed(context, model, transfer=transfer, host="pinned") as handle:
        budget = max(sum(block.padded_nbytes(context.ranks.size) for block in handle.plan.blocks) // 2, 1)
        slot = handle.report().device_slot_bytes
    budget = budget // context.ranks.size + slot
    model = tiny_model()
    with streamed(context, model, transfer=transfer, host="pinned", device_budget=budget) as handle:
        same = [
            torch.equal(
                tiny_forward(model, _seed(context, seed), context.device),
                expected(context.device, _seed(context, seed)),
            )
            for seed in (*_SEEDS, *_SEEDS)
        ]
        report = handle.report()
    demand(all(same), f"{same.count(False)} of {len(same)} forwards have other bits")
    demand(report.resident_bytes > 0, f"nothing stays for a budget of {budget} bytes")
    return Finding(f"{report.resident_bytes >> 10} KiB stay", {"resident_bytes": report.resident_bytes})


def overlap(context: Context) -> Finding:
    """A stack of eight large blocks, timed: bits, bytes that crossed the link, and what of it was hidden."""
    size = context.ranks.size
    model = Stack(context.block_mib)
    generator = torch.Generator().manual_seed(context.ranks.rank)
    x = torch.randn(context.tokens, model.dim, generator=generator).to(torch.bfloat16).to(context.device)
    with torch.inference_mode():
        on_device = copy.deepcopy(model).to(context.device)
        right = on_device(x).cpu()
        del on_device
        transfer = "all_gather" if size > 1 else "local"
        with streamed(context, model, transfer=transfer, host="pinned") as handle:
            model(x)
            model(x)
            context.platform.synchronize()
            before = handle.report()
            with handle.timing():
                outputs = [model(x) for _ in range(4)]
            after = handle.report()
            blocks = handle.plan.blocks
    demand(all(torch.equal(output.cpu(), right) for output in outputs), "a forward has other bits")
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    planned = sum(block.padded_nbytes(size) for block in blocks) // size
    demand(0 <= planned * size - weights <= 8 * 1024 * size, f"{planned * size} bytes are planned for {weights}")
    copied = (after.h2d_bytes - before.h2d_bytes) / 4
    demand(copied == planned, f"{copied:.0f} bytes were copied in a pass, {planned} were planned")
    gathered = (after.gather_bytes - before.gather_bytes) / 4
    demand(gathered == planned * (size - 1), f"{gathered:.0f} bytes were gathered, not {planned * (size - 1)}")
    (timing,) = after.timed_passes
    hidden = "nothing to hide" if after.overlap is None else f"{after.overlap:.0%} hidden"
    text = (
        f"{planned / 2**20:.0f} MiB a pass; {timing.pass_ms:.1f} ms, copies {timing.h2d_ms:.1f}, gathers "
        f"{timing.gather_ms:.1f}, computing {timing.compute_ms:.1f}, {hidden}"
    )
    names = ("pass_ms", "h2d_ms", "gather_ms", "transfer_ms", "compute_ms", "exposed_ms", "hook_ms", "rank_wait_ms")
    figures = {name: getattr(timing, name) for name in names}
    return Finding(text, {"h2d_bytes": copied, "overlap": after.overlap, "block_mib": context.block_mib, **figures})


def memory_back(context: Context) -> Finding:
    """Enabling, forwards and disabling, three times: after the first, what is allocated stays the same."""
    transfer = "all_gather" if context.ranks.size > 1 else "local"
    module = torch.get_device_module(context.device)
    allocated = []
    for _ in range(3):
        model = tiny_model()
        with streamed(context, model, transfer=transfer, host="pinned") as handle:
            tiny_forward(model, 1, context.device)
            slots = handle.report().device_slot_bytes
        del model, handle
        gc.collect()
        context.platform.synchronize()
        allocated.append(int(module.memory_allocated(context.device)))
    demand(slots > 0, "there were no slots")
    demand(allocated[0] == allocated[2], f"{allocated[2] - allocated[0]} bytes more after two more times")
    return Finding("3 times", {"slots": slots, "allocated": allocated})
