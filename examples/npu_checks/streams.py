# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the rows about streams and events: what the engine's order rests on."""

from __future__ import annotations

import time

import torch

from .context import Context, demand
from .outcome import Finding


_ROUNDS = 40
_COPY_NBYTES = 64 << 20


def priorities(context: Context) -> Finding:
    """Work on a stream of each priority, one behind the other."""
    platform = context.platform
    values = torch.zeros(2, device=context.device)
    start = platform.new_event()
    platform.compute_record(start)
    for index, high in enumerate((False, True)):
        stream, done = platform.new_stream(high), platform.new_event()
        for value in range(1, _ROUNDS + 1):
            platform.submit(stream, lambda i=index, v=value: values[i].mul_(0).add_(v), [start], done)
        platform.compute_wait(done)
    seen = values.tolist()
    demand(seen == [_ROUNDS] * 2, f"the last of {_ROUNDS} values written in order is {seen}")
    return Finding("both")


def side(context: Context) -> Finding:
    """Copies on a side stream behind work that takes its time, each seen by the current stream after its event."""
    platform, stream = context.platform, context.platform.new_stream()
    source, target = (torch.zeros(1 << 20, device=context.device) for _ in range(2))
    seen = torch.zeros(_ROUNDS, 2, device=context.device)
    not_done = 0
    busy = context.busy

    def copy() -> None:
        busy.work(2)
        target.copy_(source)

    for index in range(_ROUNDS):
        before, done = platform.new_event(), platform.new_event()
        source.fill_(index + 1)
        platform.compute_record(before)
        platform.submit(stream, copy, [before], done)
        not_done += not platform.is_done(done)
        platform.compute_wait(done)
        seen[index, 0].copy_(target[0])
        seen[index, 1].copy_(target[-1])
    platform.synchronize()
    expected = torch.arange(1, _ROUNDS + 1).float()
    wrong = int((seen.cpu() != expected[:, None]).any(dim=1).sum())
    demand(not wrong, f"{wrong} of {_ROUNDS} copies were not seen after waiting for their event")
    demand(not_done > 0, "no copy was still under way when it had been queued: queueing waits")
    return Finding(f"{not_done} of {_ROUNDS} under way once queued", {"under_way": not_done, "copies": _ROUNDS})


def never_recorded(context: Context) -> Finding:
    """Waiting on streams for events that nothing has recorded, and asking for them."""
    platform = context.platform
    demand(platform.is_done(platform.new_event()), "an event that was never recorded is said to be not done")
    value = torch.zeros(1, device=context.device)
    start = time.perf_counter()
    done = platform.new_event()
    platform.submit(platform.new_stream(), lambda: None, [platform.new_event()], done)
    platform.compute_wait(platform.new_event())
    platform.compute_wait(done)
    value += 1
    demand(value.item() == 1, "what was queued behind the wait was not done")
    ms = (time.perf_counter() - start) * 1e3
    return Finding(f"after {ms:.2f} ms", {"ms": ms})


def again(context: Context) -> Finding:
    """The slots' protocol with the same events throughout, and what a wait means once its event is recorded anew."""
    platform, stream, busy = context.platform, context.platform.new_stream(), context.busy
    slots = [torch.zeros(1 << 18, device=context.device) for _ in range(2)]
    events = [(platform.new_event(), platform.new_event()) for _ in slots]
    for _, free in events:
        platform.compute_record(free)
    seen = torch.zeros(_ROUNDS, device=context.device)
    for index in range(_ROUNDS):
        slot, (ready, free) = slots[index % 2], events[index % 2]

        def fetch(slot: torch.Tensor = slot, index: int = index) -> None:
            busy.work(1 if index % 3 else 3)
            slot.fill_(index + 1)

        platform.submit(stream, fetch, [free], ready)
        platform.compute_wait(ready)
        seen[index].copy_(slot[-1])
        platform.compute_record(free)
    platform.synchronize()
    wrong = int((seen.cpu() != torch.arange(1, _ROUNDS + 1)).sum())
    demand(not wrong, f"{wrong} of {_ROUNDS} slots were read before or after their turn")

    event, read = platform.new_event(), platform.new_event()
    platform.submit(stream, lambda: (busy.work(10), slots[0].fill_(-1)), (), event)
    platform.compute_wait(event)
    seen[0].copy_(slots[0][0])
    platform.compute_record(read)
    platform.submit(stream, lambda: busy.work(200), (), event)
    while not platform.is_done(read):
        time.sleep(0.001)
    demand(not platform.is_done(event), "a wait stood for a recording that came after it")
    platform.synchronize()
    demand(seen[0].item() == -1, "a wait did not stand for the recording before it")
    return Finding(f"{_ROUNDS} turns with 4 events")


def timing(context: Context) -> Finding:
    """Three timing events around work: the parts come to the whole, and the whole to what the host sees."""
    platform, busy = context.platform, context.busy
    first, second, third = (platform.new_timing_event() for _ in range(3))
    platform.synchronize()
    start = time.perf_counter()
    platform.compute_record(first)
    busy.work(10)
    platform.compute_record(second)
    busy.work(20)
    platform.compute_record(third)
    platform.synchronize()
    host = (time.perf_counter() - start) * 1e3
    one, two, both = (platform.elapsed(*pair) for pair in ((first, second), (second, third), (first, third)))
    figures = {"first_ms": one, "second_ms": two, "both_ms": both, "host_ms": host}
    text = f"{one:.2f} + {two:.2f} ms, together {both:.2f}; the host saw {host:.2f}"
    demand(one > 0 and two > 0, f"no time passed: {text}")
    demand(abs(one + two - both) <= 0.1 + 0.01 * both, f"the parts are not the whole: {text}")
    demand(0.3 * host - 5 <= both <= 1.05 * host + 1, f"the device's clock is not the host's: {text}")
    return Finding(text, figures)


def beside_computing(context: Context) -> Finding:
    """Copies and computing alone, and both at once, on the host's clock."""
    platform, stream, busy = context.platform, context.platform.new_stream(), context.busy
    host = platform.pinned_empty(_COPY_NBYTES)
    target = platform.empty(_COPY_NBYTES)

    def copies(count: int) -> None:
        platform.submit(stream, lambda: [target.copy_(host, non_blocking=True) for _ in range(count)])

    def best_ms(copy_count: int, work_ms: float) -> float:
        times = []
        for _ in range(4):
            platform.synchronize()
            start = time.perf_counter()
            if copy_count:
                copies(copy_count)
            if work_ms:
                busy.work(work_ms)
            platform.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return min(times[1:])

    computing = best_ms(0, 40)
    count = max(round(computing / best_ms(1, 0)), 1)
    copying = best_ms(count, 0)
    both = best_ms(count, 40)
    hidden = (computing + copying - both) / min(computing, copying)
    text = f"computing {computing:.1f} ms, copies {copying:.1f} ms, at once {both:.1f} ms: {hidden:.0%} hidden"
    demand(hidden > 0.5, f"they wait for each other: {text}")
    return Finding(text, {"computing_ms": computing, "copies_ms": copying, "both_ms": both, "hidden": hidden})
