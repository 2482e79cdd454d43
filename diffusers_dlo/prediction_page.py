# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how a prediction looks: tables for a terminal, a picture. Must not compute what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .byte_size import format_bytes
from .coding.codec import ON_HOST
from .tables import render_plan, render_table
from .usage_code import pack_command


if TYPE_CHECKING:
    from .outline import Outline
    from .prediction import Machine, Option, Prediction
    from .simulation import Simulation


def render_prediction(outline: Outline, prediction: Prediction) -> str:
    """The whole page, without the code to paste."""
    shown = prediction.best or prediction.options[0]
    parts = [
        render_plan(shown.plan),
        _render_files(outline, shown),
        _render_memory(prediction.machine, shown),
        _render_options(prediction),
        *_render_encoders(shown),
        _render_assumptions(prediction, shown),
        *_render_coding(outline, prediction),
    ]
    if prediction.scaling:
        parts.append(_render_scaling(prediction))
    return "\n\n".join(parts)


def _render_files(outline: Outline, option: Option) -> str:
    dtype = str(outline.dtype).removeprefix("torch.")
    if outline.cast_nbytes:
        lines = [
            f"dtype:  {dtype}; {format_bytes(outline.cast_nbytes)} are in another dtype in the files, and are cast "
            "and kept in shared memory (packed)"
        ]
    else:
        lines = [f"dtype:  {dtype}, as in the files"]
        lines[0] += "" if outline.coded else ": weights stream from their page cache (mapped)"
    for name, file in outline.coded.items():
        how = "blocks stream as they lie there"
        if file.codec == ON_HOST:
            how = "as no device decodes it, blocks are decoded into shared memory (packed)"
        lines.append(
            f"coded:  '{name}' by '{file.codec}' for {_ranks(file.ranks)}; {format_bytes(outline.file_nbytes)} of "
            f"files in all; {how}"
        )
        ranks = option.plan.group_size
        if file.codec != ON_HOST and ranks not in (1, file.ranks):
            lines.append(
                f"        {_ranks(ranks)} cannot share its shards, so each copies whole blocks; to have it for them: "
                f"{file.repack_command(ranks)}"
            )
    return "\n".join(lines)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _render_memory(machine: Machine, option: Option) -> str:
    memory = option.memory
    rows = [
        ["device", f"{option.plan.num_slots} slots", format_bytes(memory.slots)],
        ["", "placed", format_bytes(memory.placed)],
        ["", "largest leaf, on demand", format_bytes(memory.on_demand)],
        ["", "residents", format_bytes(memory.residents)],
        *([["", "decoding (at most)", format_bytes(memory.decoding)]] if memory.decoding else []),
        ["", "activations (estimate)", format_bytes(memory.activations)],
        ["", "in all", format_bytes(memory.total)],
        ["", "there is, with a margin", _amount(machine.usable_nbytes)],
        ["host", "coded, once" if memory.decoding else "mapped or packed, once", format_bytes(option.host_nbytes)],
        ["", "pinned, all ranks", format_bytes(option.pinned_nbytes)],
        ["", "there is", _amount(machine.host_nbytes)],
    ]
    return render_table("Memory of each device and of each host", ["memory", "for", "bytes"], rows)


def _render_options(prediction: Prediction) -> str:
    rows = [
        [
            option.transfer,
            option.gather or "-",
            str(option.plan.num_slots),
            _amount(option.budget, "-"),
            format_bytes(option.memory.total),
            format_milliseconds(option.seconds),
            f"{option.seconds / option.limit_seconds:.2f}",
            format_milliseconds(sum(f.simulation.exposed_seconds for f in option.denoisers) / len(option.denoisers)),
            f"{sum(f.simulation.link_idle for f in option.denoisers) / len(option.denoisers):.0%}",
            "recommended" if option is prediction.best else "" if option.fits else "does not fit",
        ]
        for option in prediction.options
    ]
    names = [forward.component for forward in prediction.options[0].denoisers]
    columns = ["transfer", "gather", "slots", "budget", "device", "ms", "to limit", "waiting, ms", "link idle", ""]
    return render_table(f"One forward of {' or '.join(names)}, predicted", columns, rows)


def _render_encoders(option: Option) -> list[str]:
    encoders = [forward for forward in option.forwards if forward.is_encoder]
    return [f"{one.component}: {format_milliseconds(one.seconds)} ms for one prompt, local" for one in encoders]


def _render_assumptions(prediction: Prediction, option: Option) -> str:
    work, links = prediction.work, prediction.machine.links
    compute = sum(f.simulation.compute_seconds for f in option.denoisers) / len(option.denoisers)
    if work.compute_seconds is None:
        source = f"estimate: {work.tokens:,} tokens, {work.text_tokens:,} of text, at {work.tflops:g} TFLOP/s"
    else:
        source = "as given"
    lines = [
        f"assumed:  {links.h2d / 1e9:g} GB/s from the host to each device, {links.gather / 1e9:g} between devices",
        f"          {format_milliseconds(compute)} ms of computing ({source})",
        "to limit: the time divided by the larger of computing and copying, each alone",
    ]
    if option.decode_seconds:
        lines[-1] = "to limit: the time divided by the larger of computing, with decoding, and copying, each alone"
        lines.insert(
            2,
            f"          {format_milliseconds(option.decode_seconds)} ms of decoding, at {links.decode / 1e9:g} GB/s "
            "of weights, while computing stands still",
        )
    if any(one.gather == "pull" for one in prediction.options):
        lines.append(
            "pull:     only where the devices can map each other's memory; it takes no part of the compute units"
        )
    return "\n".join(lines)


_SETS = {"copies": "copies set", "gathers": "gathers set", "computing": "computing sets"}


def _render_coding(outline: Outline, prediction: Prediction) -> list[str]:
    """What coded weights bring, or would."""
    coding = prediction.coding
    if coding is None:
        return []
    plain, coded, links = coding.plain, coding.coded, prediction.machine.links
    verdict = "help" if coding.helps else "make no forward faster"
    verdict = f"coded weights {verdict}" if coding.is_coded else f"coded weights would {verdict}"
    time = f"{format_milliseconds(coded.seconds)} ms a forward in place of {format_milliseconds(plain.seconds)}"
    memory = f"{format_bytes(coded.host_nbytes)} of host memory in place of {format_bytes(plain.host_nbytes)}"
    lines = [f"coding:   {verdict}, since {_SETS[plain.bound]} the time: {time}", f"          and {memory}"]
    if coded.memory.decoding:
        lines[1] += (
            f"; decoding takes {format_milliseconds(coded.decode_seconds)} ms of it, and at most "
            f"{format_bytes(coded.memory.decoding)} of each device"
        )
    if not coding.is_coded:
        lines.append(
            f"          (assumed: {prediction.machine.coded_ratio:g} of the bytes, {links.decode / 1e9:g} GB/s of "
            "weights; for devices that have the codec)"
        )
        if coding.helps:
            lines.append(f"          {pack_command(outline, coded.plan.group_size)}")
    return ["\n".join(lines)]


def _render_scaling(prediction: Prediction) -> str:
    rows = [
        [
            str(scale.devices),
            f"{scale.hosts} x {scale.option.plan.group_size}",
            scale.option.transfer + (" (pull)" if scale.option.gather == "pull" else ""),
            _amount(scale.option.budget, "-"),
            format_milliseconds(scale.option.seconds),
            f"{scale.devices / scale.option.seconds:,.1f}" if scale.option.seconds else "-",
            format_bytes(scale.option.host_nbytes),
        ]
        for scale in prediction.scaling
    ]
    columns = ["devices", "hosts x ranks", "transfer", "budget", "ms", "forwards/s in all", "each host"]
    title = "Other numbers of devices, simulated: each with its own link, none measured"
    return render_table(title, columns, rows)


def draw_timeline(simulation: Simulation, title: str, path: str) -> None:
    """
    Draws the lanes of a simulated forward.

    Raises:
        `RuntimeError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("A picture needs matplotlib, which is not installed: pip install matplotlib.") from error
    figure = Figure(figsize=(12, 3), layout="constrained")
    axes = figure.subplots()
    lanes: Sequence[str] = ("compute", "gather", "copy")
    if simulation.decode_seconds:
        lanes = ("compute", "gather", "decode", "copy")
    for height, lane in enumerate(lanes):
        spans = [span for span in simulation.spans if span.stream == lane]
        for shade in (0, 1):  # neighbours are told apart
            bars = [(s.start * 1e3, (s.stop - s.start) * 1e3) for s in spans if s.block % 2 == shade]
            axes.broken_barh(bars, (height - 0.4, 0.8), color=f"C{height}", alpha=0.95 - 0.35 * shade)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlim(0, max(simulation.seconds * 1e3, 1e-9))
    axes.set_xlabel("ms")
    axes.set_title(title)
    figure.savefig(path)


def _amount(nbytes: int | None, missing: str = "not given") -> str:
    return missing if nbytes is None else format_bytes(nbytes)


def format_milliseconds(seconds: float) -> str:
    """`seconds` in milliseconds, three digits."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
