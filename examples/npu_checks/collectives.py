# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the rows about collectives, in groups like those that the package makes."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from .context import Context, demand, pattern
from .outcome import Finding


_SIZES = (1, 3, 255, 256, 257, 4096, 65_537, 1 << 20, (4 << 20) + 5)
"""Bytes of a shard, before it is padded."""
_LARGE = (208 << 20) + 3
"""More than the buffers through which HCCL moves data, of 200 MB by default: there it may go another way."""
_ROUNDS = 100
_LAPS = 20


def control_group(context: Context) -> Finding:
    """A sum over the device's backend, and one over gloo beside it."""
    ranks, backend = context.ranks, context.platform.backend
    expected = ranks.size * (ranks.size + 1) // 2
    on_device = torch.tensor([ranks.rank + 1.0], device=context.device)
    dist.all_reduce(on_device)
    demand(on_device.item() == expected, f"the sum over {backend} is {on_device.item()}, not {expected}")
    group = dist.new_group(backend="gloo")
    on_host = torch.tensor([ranks.rank + 1])
    dist.all_reduce(on_host, group=group)
    demand(on_host.item() == expected, f"the sum over gloo is {on_host.item()}, not {expected}")
    context.platform.synchronize()
    return Finding(f"{backend} and gloo")


def _gather(context: Context, image: torch.Tensor, shard: torch.Tensor) -> None:
    """A gather on the current stream, seen by what is queued there next; where there are no streams, done."""
    if context.platform.waits_on_host:
        context.gather.start(image, shard).wait()
    else:
        context.gather(image, shard)


def _check_gathers(context: Context, in_place: bool, is_part: bool) -> Finding:
    """Gathers of all sizes, as the package asks for them; `is_part`: of shards that lie in the image."""
    size, rank = context.ranks.size, context.ranks.rank
    sizes = (*_SIZES, _LARGE) if context.has_streams else _SIZES
    gather = context.gather
    before, gather.in_place = gather.in_place, in_place
    try:
        for wanted in sizes:
            nbytes = -(-wanted // 256) * 256
            image = context.platform.empty(size * nbytes)
            image.fill_(0xEE)
            parts = image.split(nbytes)
            mine = parts[rank] if is_part else context.platform.empty(nbytes)
            mine.copy_(_bytes_of(context, rank, nbytes))
            _gather(context, image, mine)
            wrong = [
                other for other in range(size) if not torch.equal(parts[other], _bytes_of(context, other, nbytes))
            ]
            demand(not wrong, f"a gather of {wanted} bytes from each rank brought others from rank(s) {wrong}")
    finally:
        gather.in_place = before
    return Finding(f"{len(sizes)} sizes up to {max(sizes) >> 20} MiB from each rank")


def _bytes_of(context: Context, rank: int, nbytes: int) -> torch.Tensor:
    """What a rank contributes, on the device."""
    drawn = pattern(min(nbytes, 1_000_003), 1000 * rank + nbytes).to(context.device)
    return drawn.repeat(-(-nbytes // drawn.numel()))[:nbytes]


def in_place(context: Context) -> Finding:
    """Shards that lie in the image they are gathered to."""
    return _check_gathers(context, in_place=True, is_part=True)


def out_of_place(context: Context) -> Finding:
    """Shards in memory of their own, and shards in the image with `gather_in_place=False`."""
    _check_gathers(context, in_place=True, is_part=False)
    return _check_gathers(context, in_place=False, is_part=True)


def same_addresses(context: Context) -> Finding:
    """
    Two slots in turn; copies, gathers and reading on three streams, as in the engine. Then the rate of large ones.
    """
    platform, size, rank = context.platform, context.ranks.size, context.ranks.rank
    nbytes, rounds = (4 << 20, _ROUNDS) if context.has_streams else (64 << 10, 20)
    copying, gathering = platform.new_stream(), platform.new_stream(high_priority=True)
    slots = [platform.empty(size * nbytes) for _ in range(2)]
    events = [[platform.new_event() for _ in range(3)] for _ in slots]
    wrong = torch.zeros(1, dtype=torch.int64, device=context.device)
    expected = torch.zeros(size, 1, dtype=torch.uint8, device=context.device)
    offsets = (torch.arange(size, dtype=torch.uint8) * 31).to(context.device).view(size, 1)
    for _, _, free in events:
        platform.compute_record(free)
    for index in range(rounds):
        slot, (arrived, ready, free) = slots[index % 2], events[index % 2]
        shard = slot[rank * nbytes : (rank + 1) * nbytes]
        value = (index * 7 + rank * 31) % 256
        platform.submit(copying, lambda shard=shard, value=value: shard.fill_(value), [free], arrived)
        platform.submit(gathering, lambda slot=slot, shard=shard: _gather(context, slot, shard), [arrived], ready)
        platform.compute_wait(ready)
        expected.copy_(offsets).add_(index * 7 % 256)
        wrong += (slot.view(size, nbytes) != expected).sum()
        platform.compute_record(free)
    platform.synchronize()
    demand(wrong.item() == 0, f"{wrong.item()} bytes of {rounds} gathers are wrong")
    rate = _rate(context, (64 if context.has_streams else 1) << 20)
    return Finding(f"{rounds} gathers; {rate:.1f} GB/s received by each rank", {"gb_s": rate, "gathers": rounds})


def _rate(context: Context, nbytes: int) -> float:
    size, rank = context.ranks.size, context.ranks.rank
    image = context.platform.empty(size * nbytes)
    times = []
    for _ in range(6):
        context.ranks.exchange(None)
        start = time.perf_counter()
        _gather(context, image, image[rank * nbytes : (rank + 1) * nbytes])
        context.platform.synchronize()
        times.append(time.perf_counter() - start)
    return (size - 1) * nbytes / 1e9 / min(times[1:])


def second_thread(context: Context) -> Finding:
    """
    All ranks but the first wait in a sum over the world's group, while a thread of theirs gathers with the first one,
    which comes to the sum only after its gathers: so a rank serves others while it waits elsewhere.
    """
    platform, size, rank = context.platform, context.ranks.size, context.ranks.rank
    nbytes = (4 << 20) if context.has_streams else (64 << 10)
    image = platform.empty(size * nbytes)
    shard = image[rank * nbytes : (rank + 1) * nbytes]
    expected = torch.arange(1, size + 1, dtype=torch.uint8).repeat_interleave(nbytes)
    total = torch.ones(1, device=context.device)
    platform.synchronize()
    errors: list[BaseException] = []
    laps: list[float] = []

    def gather() -> None:
        stream, done = platform.new_stream(high_priority=True), platform.new_event()
        for lap in range(_LAPS):
            start = time.perf_counter()
            platform.submit(stream, lambda lap=lap: shard.fill_(rank + 1 + lap), (), None)
            platform.submit(stream, lambda: _gather(context, image, shard), (), done)
            while not platform.is_done(done):
                time.sleep(0.0002)
            laps.append((time.perf_counter() - start) * 1e3)

    def serve() -> None:
        try:
            platform.use_in_this_thread()
            gather()
        except BaseException as error:
            errors.append(error)

    _gather(context, image, shard)  # the communicators are open then
    dist.all_reduce(torch.zeros(1, device=context.device))
    platform.synchronize()
    context.ranks.exchange(None)
    if rank == 0:
        gather()
        dist.all_reduce(total)
        value = total.item()
    else:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        dist.all_reduce(total)
        value = total.item()
        thread.join()
    if errors:
        raise errors[0]
    demand(value == size, f"the sum that ranks waited in is {value}, not {size}")
    same = torch.equal(image.cpu(), expected + (_LAPS - 1))
    demand(same, "the gathers of the second thread brought other bytes")
    ms = sorted(laps)[len(laps) // 2]
    return Finding(f"{_LAPS} gathers, {ms:.2f} ms each", {"gather_ms": ms})


def unequal_shards(context: Context) -> Finding:
    """What the backend does with them; nothing depends on it."""
    size, rank = context.ranks.size, context.ranks.rank
    said = []
    image, shard = context.platform.empty(size * 256), context.platform.empty(260)
    try:
        _gather(context, image, shard)
        said.append("an image of another size than its shards is accepted")
    except (RuntimeError, ValueError):
        said.append("an image of another size than its shards is refused")
    lists = [torch.zeros(256 * (other + 1), dtype=torch.uint8, device=context.device) for other in range(size)]
    mine = torch.full_like(lists[rank], rank + 1)
    try:
        dist.all_gather(lists, mine)
        right = all(bool((part == other + 1).all()) for other, part in enumerate(lists))
        said.append(f"lists of unequal shards are {'right' if right else 'wrong'}")
    except (RuntimeError, ValueError):
        said.append("lists of unequal shards are refused")
    return Finding("; ".join(said), {"said": said})
