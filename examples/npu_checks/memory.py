# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the rows about memory: pinning, links, re-pointing, placeholders, alignment."""

from __future__ import annotations

import math
import mmap
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from diffusers_dlo.tensor_utils import born_on_device as make_born
from diffusers_dlo.tensor_utils import make_offload_placeholder, set_tensor_storage, typed_view

from .context import Context, demand, pattern
from .outcome import Finding


_MIB = 1 << 20
_RATE_NBYTES = 256 * _MIB
_NEEDED = (torch.float32, torch.bfloat16, torch.float16)
_OTHERS = (torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64, torch.bool)


def pinned(context: Context) -> Finding:
    """Copies from page-locked memory: the right bytes, and not there yet when they have been queued."""
    platform = context.platform
    host = platform.pinned_empty(_RATE_NBYTES)
    demand(host.is_pinned(), "the memory is not page-locked; look at `ulimit -l` and the container's limits")
    odd = 5 * _MIB + 3
    host[:odd] = pattern(odd, 1)
    host[odd:] = 7
    target, done = platform.empty(host.numel()), platform.new_event()
    platform.synchronize()
    start = time.perf_counter()
    platform.submit(platform.new_stream(), lambda: target.copy_(host, non_blocking=True), (), done)
    queued = (time.perf_counter() - start) * 1e3
    under_way = not platform.is_done(done)
    platform.compute_wait(done)
    demand(torch.equal(target.cpu(), host), "the copy brought other bytes")
    demand(under_way, f"the copy was done when it had been queued, after {queued:.1f} ms: it waits")
    return Finding(f"256 MiB queued in {queued:.2f} ms", {"queued_ms": queued})


def rates(context: Context) -> Finding:
    """256 MiB from page-locked memory, one rank at a time and all at once, and from pageable memory."""
    ranks, platform = context.ranks, context.platform
    target = platform.empty(_RATE_NBYTES)
    locked, pageable = platform.pinned_empty(_RATE_NBYTES), torch.empty(_RATE_NBYTES, dtype=torch.uint8)
    locked.fill_(1)
    pageable.fill_(1)

    def rate(source: torch.Tensor) -> float:
        times = []
        for _ in range(6):
            platform.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            platform.synchronize()
            times.append(time.perf_counter() - start)
        return _RATE_NBYTES / 1e9 / min(times[1:])

    mine = []
    for rank in range(ranks.size):
        ranks.exchange(None)
        if rank == ranks.rank:
            mine = [rate(locked), rate(pageable)]
    ranks.exchange(None)
    together = rate(locked) if ranks.size > 1 else None
    said = ranks.exchange([*mine, together])
    alone, slow = [values[0] for values in said], [values[1] for values in said]
    figures = {"pinned_gb_s": alone, "pageable_gb_s": slow}
    text = f"page-locked {_range(alone)} GB/s"
    if ranks.size > 1:
        figures["pinned_together_gb_s"] = [values[2] for values in said]
        text += f", all ranks at once {_range(figures['pinned_together_gb_s'])}"
    text += f"; pageable {_range(slow)}"
    demand(all(fast >= 0.9 * other for fast, other in zip(alone, slow)), f"page-locking makes it slower: {text}")
    return Finding(text, figures)


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low}-{high}"


def data_view(context: Context) -> Finding:
    """One parameter in two slots in turn, by `.data`."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(96, 64, generator=generator) for _ in range(2)]
    x = torch.randn(8, 64, generator=generator).to(context.device)
    slots, views = [], []
    for value in values:
        slot = context.platform.empty(value.numel() * 4)
        slot.copy_(value.flatten().view(torch.uint8))
        slots.append(slot)
        views.append(typed_view(slot, 0, slot.numel(), value.dtype, value.shape, value.stride()))
    expected = [F.linear(x, value.to(context.device)) for value in values]
    weight = nn.Parameter(make_offload_placeholder(values[0], context.device), requires_grad=False)
    layer = nn.Linear(64, 96, bias=False, device="meta")
    layer.weight = weight
    with torch.inference_mode():
        for turn in range(50):
            set_tensor_storage(weight, views[turn % 2])
            demand(weight.data_ptr() == slots[turn % 2].data_ptr(), "the parameter does not show the slot")
            demand(torch.equal(layer(x), expected[turn % 2]), f"turn {turn} computed with other weights")
    demand(
        layer.weight is weight and type(weight) is nn.Parameter, "the parameter is another object, or of another class"
    )
    demand(not weight.requires_grad and weight.is_leaf, "the parameter has changed its flags")
    return Finding("50 turns between two slots")


def across(context: Context) -> Finding:
    """What `.data` across devices does; nothing depends on it."""
    host = nn.Parameter(torch.ones(4), requires_grad=False)
    try:
        host.data = torch.full((4,), 2.0, device=context.device)
    except RuntimeError as error:
        return Finding(f"refused: {str(error).splitlines()[0]}", {"accepted": False})
    return Finding(f"accepted; the parameter is on '{host.device.type}' then", {"accepted": True})


def born_on_device(context: Context) -> Finding:
    """The stand-in of a weight of 64 MiB: on the device from the start, of no size, and right in a slot."""
    original = nn.Parameter(torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)), requires_grad=False)
    before = _allocated(context)
    weight = make_born(original, make_offload_placeholder(original, context.device))
    taken = _allocated(context) - before
    demand(type(weight) is nn.Parameter and weight.device.type == context.device.type, f"it is on '{weight.device}'")
    demand(taken <= 4096, f"the stand-in of a weight takes {taken} bytes of device memory")
    slot = context.platform.empty(original.numel() * 4)
    slot.copy_(original.detach().flatten().view(torch.uint8))
    set_tensor_storage(weight, typed_view(slot, 0, slot.numel(), original.dtype, original.shape, original.stride()))
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(1)).to(context.device)
    own = context.platform.empty(original.numel() * 4).view(torch.float32).view(4096, 4096)
    own.copy_(original.detach())
    demand(torch.equal(F.linear(x, weight), F.linear(x, own)), "it computes otherwise than the weight")
    return Finding(f"its stand-in takes {taken} bytes", {"nbytes": taken})


def _allocated(context: Context) -> int:
    if not context.has_streams:
        return 0
    return int(torch.get_device_module(context.device).memory_allocated(context.device))


def placeholder(context: Context) -> Finding:
    """A placeholder of each dtype; those that models do not need may be refused."""
    refused = []
    for dtype in (*_NEEDED, *_OTHERS):
        try:
            made = make_offload_placeholder(torch.empty(512, 256, dtype=dtype), context.device)
        except (RuntimeError, TypeError):
            demand(dtype not in _NEEDED, f"there is no placeholder of {dtype}")
            refused.append(str(dtype).removeprefix("torch."))
            continue
        name = str(dtype)
        demand(made.stride() == (0, 0) and made.shape == (512, 256), f"of {name}: strides {made.stride()}")
        demand(
            made.dtype == dtype and made.device.type == context.device.type, f"of {name}: {made.dtype}, {made.device}"
        )
        if dtype in _NEEDED:
            x = torch.ones(4, 256, dtype=dtype, device=context.device)
            demand(bool(F.linear(x, made).isnan().all()), f"of {name}: a product with it is not all NaN")
            demand(bool((made[0] + 1).isnan().all()), f"of {name}: a sum with it is not NaN")
    return Finding(f"not of {', '.join(refused)}" if refused else "of every dtype", {"refused": refused})


def alignment(context: Context) -> Finding:
    """Addresses of buffers of odd sizes, while others are held."""
    sizes = [1, 3, 255, 256, 257, 1000, 4097, 65_537, _MIB + 1, 20 * _MIB + 77]
    held = [context.platform.empty(size) for size in (*sizes, *reversed(sizes))]
    addresses = [memory.data_ptr() for memory in held]
    common = math.gcd(*addresses)
    demand(common % 256 == 0, f"addresses have {common} bytes in common")
    return Finding(f"{len(held)} buffers", {"common": min(common, 1 << 20)})


def typed_views(context: Context) -> Finding:
    """One buffer of bytes with weights of several dtypes and strides, copied as bytes and read as weights."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(33, 17, generator=generator).to(dtype) for dtype in _NEEDED]
    weights += [
        weights[1].t().contiguous().t(),
        torch.arange(77),
        torch.randn(5, 3, 7, generator=generator).permute(2, 0, 1),
    ]
    weights += [weights[0].to(torch.float8_e4m3fn), torch.arange(100).to(torch.int8)]
    places, end = [], 0
    for weight in weights:
        places.append(end)
        end += -(-weight.numel() * weight.element_size() // 256) * 256
    image = torch.zeros(end, dtype=torch.uint8)
    for at, weight in zip(places, weights):
        typed_view(image, at, _nbytes(weight), weight.dtype, weight.shape, weight.stride()).copy_(weight)
    slot = context.platform.empty(end)
    slot.copy_(image)
    refused = []
    for at, weight in zip(places, weights):
        name = str(weight.dtype).removeprefix("torch.")
        try:
            view = typed_view(slot, at, _nbytes(weight), weight.dtype, weight.shape, weight.stride())
            same = torch.equal(view.cpu().view(torch.uint8) if weight.is_contiguous() else view.cpu(), _bytes(weight))
        except (RuntimeError, TypeError):
            demand(weight.dtype in _OTHERS, f"bytes cannot be viewed as {name}")
            refused.append(name)
            continue
        demand(view.data_ptr() == slot.data_ptr() + at, f"the view as {name} lies elsewhere")
        demand(
            same, f"the view as {name} of shape {tuple(weight.shape)} and strides {weight.stride()} shows other values"
        )
    find_format = getattr(sys.modules.get("torch_npu"), "get_npu_format", None)
    text = f"not as {', '.join(refused)}" if refused else f"{len(weights)} weights"
    return Finding(text + (f"; format {find_format(view)}" if find_format else ""), {"refused": refused})


def _nbytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.uint8) if weight.is_contiguous() else weight


def figures(context: Context) -> Finding:
    """Memory in use, left and at its peak, as 64 MiB come and go."""
    platform = context.platform
    platform.synchronize()
    before = _allocated(context)
    held = platform.empty(64 * _MIB)
    taken = _allocated(context) - before
    demand(64 * _MIB <= taken < 80 * _MIB, f"64 MiB count as {taken / _MIB:.1f}")
    platform.watch_peak()
    more = platform.empty(128 * _MIB)
    del more
    peak = platform.peak_above_now()
    demand(128 * _MIB <= peak < 160 * _MIB, f"a peak of 128 MiB is said to be {peak / _MIB:.1f}")
    del held
    demand(_allocated(context) == before, "memory that was given back still counts")
    left, total = platform.memory_left(), platform.memory_total
    demand(left is not None and 0 < left <= total, f"{left} of {total} bytes are said to be left")
    return Finding(f"{total / 2**30:.1f} GiB, {(left or 0) / 2**30:.1f} left", {"total": total, "left": left})


def registration(context: Context) -> Finding:
    """A mapping of our own, page-locked and copied from; or the refusal, where the platform says that it cannot."""
    platform, nbytes = context.platform, 64 * _MIB
    mapping = mmap.mmap(-1, nbytes)
    source = torch.frombuffer(mapping, dtype=torch.uint8)
    source[: 5 * _MIB] = pattern(5 * _MIB, 2)
    if not platform.registers_host_memory:
        try:
            platform.register_host_memory(source.data_ptr(), nbytes)
        except RuntimeError as error:
            return Finding(f"not used here: {error}", {"registers": False})
        demand(False, "the platform says that it cannot, and did")
    platform.register_host_memory(source.data_ptr(), nbytes)
    try:
        target = platform.empty(nbytes)
        for _ in range(2):
            platform.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            platform.synchronize()
            seconds = time.perf_counter() - start
        demand(torch.equal(target.cpu(), source), "a copy from it brought other bytes")
    finally:
        platform.unregister_host_memory(source.data_ptr())
    if not platform.has_host_link:
        return Finding("there is no link to need it", {"registers": True})
    rate = nbytes / 1e9 / seconds
    return Finding(f"copied from at {rate:.1f} GB/s", {"registers": True, "gb_s": rate})
