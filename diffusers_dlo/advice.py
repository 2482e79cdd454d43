# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the sentence that says what bounds a run, and which setting would help. Must not measure: it is given figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import PassTiming


_NEGLIGIBLE = 0.05
"""A loss of less than this part of a pass is not what bounds it."""


@dataclass(frozen=True)
class Setting:
    """
    What a run had to do with: ranks that share weights, slots, whether weights may stay on the device, and whether
    the device has streams, without which it copies and computes in turn.
    """

    ranks: int
    num_slots: int
    has_budget: bool
    has_streams: bool = True


def advise(passes: Sequence[PassTiming], setting: Setting) -> str:
    """
    What bounds the component that took most of the timed time, and which setting would help, as one sentence.

    The losses of a pass are computing's wait for blocks, this rank's wait for the others, and the device's idle time
    between blocks where the hooks account for half of it or more. The largest counts, if it is 5 % of the pass or
    more; otherwise computing bounds the run. A wait for blocks is put down to copies or gathers, whichever are longer.
    """
    if not passes:
        return "Nothing was timed: run a pass inside `with handle.timing():` to see what bounds it."
    timing = max(passes, key=lambda timing: timing.pass_ms * timing.passes)
    idle = timing.pass_ms - timing.compute_ms - timing.exposed_ms - timing.rank_wait_ms
    losses = {
        _blocks: timing.exposed_ms,
        _ranks: timing.rank_wait_ms,
        _python: idle if timing.hook_ms >= idle / 2 else 0.0,
    }
    cause = max(losses, key=lambda cause: losses[cause])
    if losses[cause] < _NEGLIGIBLE * timing.pass_ms:
        cause = _computing
    bound, remedy = cause(timing, setting)
    return f"{bound} of a pass of '{timing.component}' ({_ms(timing.pass_ms)}); {remedy}."


def _computing(timing: PassTiming, setting: Setting) -> tuple[str, str]:
    return (
        f"The computing bounds this run: blocks compute for {_ms(timing.compute_ms)} and wait for "
        f"{_ms(timing.exposed_ms)}",
        "no setting of the offload would make it faster",
    )


def _ranks(timing: PassTiming, setting: Setting) -> tuple[str, str]:
    return (
        f"The other ranks bound this run: this one waits for them for {_ms(timing.rank_wait_ms)}",
        'equal work on all ranks would help, or transfer="local", with which no rank waits',
    )


def _python(timing: PassTiming, setting: Setting) -> tuple[str, str]:
    return (
        f"The host's Python bounds this run: the hooks take {_ms(timing.hook_ms)}",
        "no setting would help, and more work for each call of a block (pixels, frames, batch) hides it",
    )


def _blocks(timing: PassTiming, setting: Setting) -> tuple[str, str]:
    """Computing waits for blocks: for the copies, or for the gathers?"""
    is_gather = timing.gather_ms > timing.h2d_ms
    name, what = ("gather", "gathers") if is_gather else ("host link", "copies")
    busy = max(timing.gather_ms, timing.h2d_ms)
    bound = f"The {name} bounds this run: {what} take {_ms(busy)} and computing waits for {_ms(timing.exposed_ms)}"
    if not setting.has_streams:
        return bound, "no setting would help, because this device has no streams: it copies and computes in turn"
    if busy < timing.compute_ms and setting.num_slots < 3:
        return bound, (
            f"as the blocks compute for {_ms(timing.compute_ms)} in all, num_slots=3 would help, with which transfers "
            "run further ahead"
        )
    return bound, _less_gathering(timing, setting) if is_gather else _less_copying(timing, setting)


def _less_copying(timing: PassTiming, setting: Setting) -> str:
    if setting.ranks > 1 and timing.gather_ms == 0:
        return f'transfer="all_gather" would help, with which each rank copies 1/{setting.ranks} of a block'
    if not setting.has_budget:
        return 'device_budget="auto" would help, with which weights stay on the device as far as there is room'
    return "more ranks would help, each of which copies its part over a link of its own"


def _less_gathering(timing: PassTiming, setting: Setting) -> str:
    whole = timing.h2d_ms * setting.ranks
    if whole < timing.gather_ms:
        return f'transfer="local" would help, with which each rank copies whole blocks in about {_ms(whole)}'
    if not setting.has_budget:
        return 'device_budget="auto" would help, with which blocks stay on the device as far as there is room'
    return "no setting would help, and faster links between the devices would"


def _ms(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 99.95 else f"{ms:.3g} ms"
