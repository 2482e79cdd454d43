# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how a prediction looks: tables for a terminal, values for a JSON file, a picture. Must not compute what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .byte_size import format_bytes
from .tables import render_plan, render_table
from .usage_code import code_to_paste, pack_command


if TYPE_CHECKING:
    from .offload_plan import ComponentPlan
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
        lines = [f"dtype:  {dtype}, as in the files: weights stream from their page cache (mapped)"]
    for name, file in outline.coded.items():
        lines.append(
            f"coded:  '{name}' by '{file.codec}' for {_ranks(file.ranks)}; {format_bytes(outline.file_nbytes)} of "
            "files in all, and blocks stream as they lie there"
        )
        if option.plan.group_size not in (1, file.ranks):
            lines.append(
                f"        {_ranks(option.plan.group_size)} cannot share its shards, so each copies whole blocks; to "
                f"have it for {option.plan.group_size}: {file.repack_command(option.plan.group_size)}"
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


def as_values(outline: Outline, prediction: Prediction) -> dict[str, Any]:
    """Everything in plain values, for a JSON file: bytes and seconds."""
    return {
        "model": outline.model,
        "class": outline.class_name,
        "dtype": str(outline.dtype).removeprefix("torch."),
        "cast_bytes": outline.cast_nbytes,
        "assumed": {
            "h2d_bytes_per_second": prediction.machine.links.h2d,
            "gather_bytes_per_second": prediction.machine.links.gather,
            "gather_slowdown": prediction.machine.links.gather_slowdown,
            "decode_bytes_per_second": prediction.machine.links.decode,
            "tokens": prediction.work.tokens,
            "text_tokens": prediction.work.text_tokens,
            "compute": "estimate" if prediction.work.compute_seconds is None else "given",
            "tflops": prediction.work.tflops,
        },
        "device_bytes": prediction.machine.device_nbytes,
        "host_bytes": prediction.machine.host_nbytes,
        "components": [
            {
                "name": component.name,
                "class": component.class_name,
                "transfer": component.transfer,
                "blocks": len(component.blocks),
                "largest_block_bytes": component.largest_block.nbytes,
                "streamed_bytes": component.streamed_nbytes,
                "on_demand_bytes": sum(leaf.nbytes for leaf in component.leaves),
                "placed_bytes": component.placed_nbytes,
                **_coded_values(outline, component),
            }
            for component in prediction.options[0].plan.components
        ]
        + [
            {"name": name, "class": class_name, "transfer": "placed", "placed_bytes": nbytes}
            for name, class_name, nbytes in prediction.options[0].plan.placed
        ],
        "options": [_option_values(option) for option in prediction.options],
        "recommended": None if prediction.best is None else prediction.options.index(prediction.best),
        "coding": _coding_values(prediction),
        "shortfalls": list(prediction.shortfalls),
        "code": code_to_paste(outline, prediction),
        "simulated": [
            {"devices": scale.devices, "hosts": scale.hosts, **_option_values(scale.option)}
            for scale in prediction.scaling
        ],
    }


def _coded_values(outline: Outline, component: ComponentPlan) -> dict[str, Any]:
    """What a coded component has beside others."""
    file = outline.coded.get(component.name)
    if file is None:
        return {}
    nbytes = sum(block.coded_nbytes for block in file.blocks.values())
    return {"codec": file.codec, "coded_ranks": file.ranks, "coded_bytes": nbytes}


def _coding_values(prediction: Prediction) -> dict[str, Any] | None:
    coding = prediction.coding
    if coding is None:
        return None
    return {
        "is_coded": coding.is_coded,
        "assumed_ratio": None if coding.is_coded else prediction.machine.coded_ratio,
        "helps": coding.helps,
        "plain": _option_values(coding.plain),
        "coded": _option_values(coding.coded),
    }


def _option_values(option: Option) -> dict[str, Any]:
    memory = option.memory
    return {
        "ranks": option.plan.group_size,
        "transfer": option.transfer,
        "gather": option.gather or None,
        "num_slots": option.plan.num_slots,
        "device_budget": option.budget,
        "fits": option.fits,
        "seconds": option.seconds,
        "limit_seconds": option.limit_seconds,
        "forwards": {
            forward.component: {
                "seconds": forward.seconds,
                "compute_seconds": forward.simulation.compute_seconds,
                "copy_seconds": forward.simulation.copy_seconds,
                "decode_seconds": forward.simulation.decode_seconds,
                "exposed_seconds": forward.simulation.exposed_seconds,
                "link_idle": forward.simulation.link_idle,
                "h2d_bytes": forward.simulation.h2d_nbytes,
                "gather_bytes": forward.simulation.gather_nbytes,
            }
            for forward in option.forwards
        },
        "device_memory": {
            "slots": memory.slots,
            "placed": memory.placed,
            "on_demand": memory.on_demand,
            "residents": memory.residents,
            "activations_estimate": memory.activations,
            "decoding": memory.decoding,
            "total": memory.total,
        },
        "host_weights_bytes": option.host_nbytes,
        "host_pinned_bytes": option.pinned_nbytes,
    }


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
