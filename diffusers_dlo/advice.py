# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the sentence that says what bounds a run, and which setting would help. Must not measure: it is given figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .timeline import BlockTiming, PassTiming


_NEGLIGIBLE = 0.05
"""A loss of less than this part of a pass is not what bounds it."""
_FILLED = 0.7
"""Copies hide behind computing if they take this part of it, or less: blocks differ, and so do ranks' links."""


_DECODED_ONCE = 'host="packed" may help, with which weights are decoded once'
"""What spares a device the decoding."""


@dataclass(frozen=True)
class Setting:
    """
    What a run had to do with: ranks that share weights, slots, whether weights may stay on the device, whether the
    device has streams, without which it copies and computes in turn, `gather` of the config, and the codec of the
    device that these weights could be coded with; empty if there is none, or they are.
    """

    ranks: int
    num_slots: int
    has_budget: bool
    has_streams: bool = True
    gather: str = "auto"
    codec: str = ""


@dataclass(frozen=True)
class _Case:
    """The component that is looked at. `whole_ms`: if this rank copied each block whole; None if it copied nothing."""

    timing: PassTiming
    whole_ms: float | None
    setting: Setting


def advise(passes: Sequence[PassTiming], blocks: Sequence[BlockTiming], setting: Setting) -> str:
    """
    What bounds the component that took most of the timed time, and which setting would help, as one sentence.

    The losses of a pass are computing's wait for blocks, this rank's wait for the others, and the device's idle time
    between blocks where the hooks account for half of it or more. The largest counts, if it is 5 % of the pass or
    more; otherwise computing bounds the run. A wait for blocks is put down to copies, decodings or gathers, whichever
    are longest.
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
    own = [block for block in blocks if block.component == timing.component]
    bound, why, remedy = cause(_Case(timing, _whole_ms(own, setting.ranks), setting))
    return f"{bound} this run: in a pass of '{timing.component}', which takes {_ms(timing.pass_ms)}, {why}; {remedy}."


def _whole_ms(blocks: Sequence[BlockTiming], ranks: int) -> float | None:
    """What a pass of copies takes a rank that copies whole blocks; those that stay are taken to be like the others."""
    shards = [block.h2d_ms for block in blocks if block.h2d_ms > 0]
    return sum(shards) / len(shards) * len(blocks) * ranks if shards else None


def _computing(case: _Case) -> tuple[str, str, str]:
    timing = case.timing
    why = f"blocks compute for {_ms(timing.compute_ms)} and wait for {_ms(timing.exposed_ms)}"
    remedy = _less_beside(case) or _less_decoding(case)
    return "The computing bounds", why, remedy or "no setting of the offload would make it faster"


def _less_beside(case: _Case) -> str | None:
    """Gathers run beside computing, and take a part of the device also while they wait for slower ranks."""
    timing, gathers = case.timing, _ms(case.timing.gather_ms)
    if timing.gather_ms < _NEGLIGIBLE * timing.pass_ms or not case.setting.has_streams:
        return None
    if case.whole_ms is None:
        return (
            f'transfer="local" may help, which does without the gathers that run beside it for {gathers}, if whole '
            "blocks arrive in time: these passes copied none to tell by"
        )
    if case.whole_ms > _FILLED * timing.compute_ms:
        return None
    return (
        f'transfer="local" would help, which does without the gathers that run beside it for {gathers}, and copies '
        f"whole blocks in about {_ms(case.whole_ms)}, behind the computing"
    )


def _less_decoding(case: _Case) -> str | None:
    """Decoding takes a part of the device too."""
    timing = case.timing
    if timing.decode_ms < _NEGLIGIBLE * timing.pass_ms or not case.setting.has_streams:
        return None
    return f"{_DECODED_ONCE}, and not beside it for {_ms(timing.decode_ms)} in each pass"


def _ranks(case: _Case) -> tuple[str, str, str]:
    remedy = "equal work on all ranks would help"
    if case.whole_ms is None or case.whole_ms < case.timing.pass_ms:
        remedy += ', or transfer="local", with which no rank waits'
    return "The other ranks bound", f"this rank waits for them for {_ms(case.timing.rank_wait_ms)}", remedy


def _python(case: _Case) -> tuple[str, str, str]:
    remedy = "no setting would help, and more work for each call of a block (pixels, frames, batch) hides it"
    return "The host's Python bounds", f"the hooks take {_ms(case.timing.hook_ms)}", remedy


def _blocks(case: _Case) -> tuple[str, str, str]:
    """Computing waits for blocks: for the copies, for their decoding, or for the gathers?"""
    timing, setting = case.timing, case.setting
    busy, bound, what = max(
        (timing.h2d_ms, "The host link bounds", "copies"),
        (timing.gather_ms, "The gather bounds", "gathers"),
        (timing.decode_ms, "The decoding bounds", "decodings"),
        key=lambda stage: stage[0],
    )
    why = f"computing waits for {_ms(timing.exposed_ms)}, and {what} take {_ms(busy)}"
    if not setting.has_streams:
        if what == "decodings":
            return bound, why, f"{_DECODED_ONCE}, into memory"
        return bound, why, "no setting would help, because this device has no streams: it copies and computes in turn"
    if busy < timing.compute_ms and setting.num_slots < 3:
        remedy = "num_slots=3 would help, with which transfers run further ahead"
        return bound, why, f"as the blocks compute for {_ms(timing.compute_ms)} in all, {remedy}"
    if what == "decodings":
        return bound, why, f"{_DECODED_ONCE}, and all of their bytes are copied"
    return bound, why, _less_gathering(case) if what == "gathers" else _less_copying(case)


def _less_copying(case: _Case) -> str:
    remedy, codec = _fewer_copies(case), case.setting.codec
    if not codec:
        return remedy
    return f"{remedy}; and so would weights coded by `diffusers-dlo pack --codec {codec}`, which are fewer bytes"


def _fewer_copies(case: _Case) -> str:
    setting = case.setting
    if setting.ranks > 1 and case.timing.gather_ms == 0:
        return f'transfer="all_gather" would help, with which each rank copies 1/{setting.ranks} of a block'
    if not setting.has_budget:
        return 'device_budget="auto" would help, with which weights stay on the device as far as there is room'
    return "more ranks would help, each of which copies its part over a link of its own"


def _less_gathering(case: _Case) -> str:
    if case.whole_ms is not None and case.whole_ms < case.timing.gather_ms:
        return f'transfer="local" would help, with which each rank copies whole blocks in about {_ms(case.whole_ms)}'
    if not case.setting.has_budget:
        return 'device_budget="auto" would help, with which blocks stay on the device as far as there is room'
    if case.whole_ms is None and case.setting.gather == "collective":
        return 'gather="auto" would help, with which ranks pull what stays from each other\'s devices, if these can'
    return "no setting would help, and faster links between the devices would"


def _ms(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 99.95 else f"{ms:.3g} ms"
