# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the section of a model card says: how the model is used, and a table of predicted memory and time. Must not
predict, nor know of the rest of the card.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .byte_size import format_bytes
from .coding.codec import ON_HOST
from .prediction_page import format_milliseconds
from .usage_code import amount_to_paste, usage_code


if TYPE_CHECKING:
    from .outline import Outline


MOST_DEVICES = 8
"""Up to this many devices the table shows: those of one host."""


@dataclass(frozen=True)
class _Row:
    """A line of the table."""

    devices: int
    transfer: str
    budget: int
    device_nbytes: int
    host_nbytes: int
    seconds: float


@dataclass(frozen=True)
class _Assumed:
    """What the predictions rest on; rates in bytes per second, memory 0 where none was given."""

    h2d: float
    gather: float
    tokens: int
    text_tokens: int
    tflops: float
    is_estimate: bool
    device_nbytes: int
    decode: float = 0.0


@dataclass(frozen=True)
class CardFigures:
    """The part of a prediction that a card shows."""

    rows: tuple[_Row, ...]
    assumed: _Assumed

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CardFigures:
        """
        From a prediction in plain values, as `diffusers-dlo plan --json` writes them.

        Raises:
            `KeyError`, `TypeError` or `ValueError`: they are no prediction. `ValueError`: nothing fits.
        """
        rows = {}
        for option in values["simulated"]:
            devices = _whole(option["devices"])
            if devices <= MOST_DEVICES:
                rows[devices] = _row(devices, option)
        recommended = values["recommended"]
        if recommended is not None:
            option = values["options"][_whole(recommended)]
            rows.setdefault(_whole(option["ranks"]), _row(_whole(option["ranks"]), option))
        assumed = values["assumed"]
        return cls(
            tuple(rows[devices] for devices in sorted(rows)),
            _Assumed(
                h2d=_positive(assumed["h2d_bytes_per_second"]),
                gather=_positive(assumed["gather_bytes_per_second"]),
                tokens=_whole(assumed["tokens"]),
                text_tokens=_whole(assumed["text_tokens"]),
                tflops=_positive(assumed["tflops"]),
                is_estimate=assumed["compute"] == "estimate",
                device_nbytes=_whole(values["device_bytes"] or 0),
                decode=_positive(assumed.get("decode_bytes_per_second", 0.0)),
            ),
        )


def render_section(outline: Outline, figures: CardFigures, name: str) -> str:
    r"""
    The section, as Markdown without a line break at its end.

    Args:
        outline (`Outline`): of the checkpoint.
        figures (`CardFigures`): for the table.
        name (`str`): what the code loads: a name on the Hub, or of a directory.
    """
    kind = "pipeline" if outline.is_pipeline else "model"
    return "\n".join(
        [
            "## Distributed Layerwise Offload",
            "",
            f"With the package `diffusers_dlo`, the weights of this {kind} stay in host memory, once per host, and",
            "stream block by block through a few buffers on each device. Outputs are bit-equal to those without it.",
            *_coding(outline),
            "",
            "```python",
            usage_code(outline, name) + "```",
            "",
            "On several accelerators of a host, start the same script once for each. They share the one copy:",
            "",
            "```bash",
            "accelerate launch --num_processes 2 my_script.py",
            "```",
            "",
            *_table(figures.rows),
            "",
            _explanation(figures.assumed, any(file.codec != ON_HOST for file in outline.coded.values())),
        ]
    )


def _table(rows: Sequence[_Row]) -> list[str]:
    has_budget = any(row.budget for row in rows)
    names = ["accelerators", "transfer", "device memory, each", "host memory, once", "one forward, predicted"]
    lines = []
    for row in rows:
        cells = [
            str(row.devices),
            f"`{row.transfer}`",
            format_bytes(row.device_nbytes),
            format_bytes(row.host_nbytes),
            f"{format_milliseconds(row.seconds)} ms",
        ]
        if has_budget:
            cells.insert(2, f"`{amount_to_paste(row.budget)}`" if row.budget else "-")
        lines.append(cells)
    if has_budget:
        names.insert(2, "`device_budget`")
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *lines)]


def _coding(outline: Outline) -> list[str]:
    """What readers have to know of coded weights."""
    if not outline.coded:
        return []
    ranks = sorted({file.ranks for file in outline.coded.values()})
    codecs = sorted({file.codec for file in outline.coded.values()})
    count = f"{' and '.join(map(str, ranks))} rank{'s' if ranks != [1] else ''}"
    how = f" and for {count}; with another number, each copies whole blocks."
    if codecs == [ON_HOST]:
        how = "; accelerators do not decode it, so they are decoded into host memory when the offload is enabled."
    return [
        "",
        f"The weights of its blocks are coded without loss, by {' and '.join(f'`{codec}`' for codec in codecs)}{how}",
        'Other software does not load them, and the package needs its extra: `pip install "diffusers-dlo[coded]"`.',
    ]


def _explanation(assumed: _Assumed, decodes: bool) -> str:
    computing = f"an estimate at {assumed.tflops:g} TFLOP/s" if assumed.is_estimate else "as it was measured before"
    given = f"Planned for devices with {format_bytes(assumed.device_nbytes)} each. " if assumed.device_nbytes else ""
    decoding = f", {assumed.decode / 1e9:g} GB/s of weights decoded" if decodes and assumed.decode else ""
    return (
        "Predicted by `diffusers-dlo plan`, and not measured. Assumed link rates: "
        f"{assumed.h2d / 1e9:g} GB/s from the host to each device, {assumed.gather / 1e9:g} GB/s between devices"
        f"{decoding}.\n"
        f"Computing is {computing}, for {assumed.tokens:,} tokens of the image or video and {assumed.text_tokens:,} "
        f"of the text.\n{given}Device memory is with an estimate of activations, and without those of the VAE."
    )


def _row(devices: int, option: Mapping[str, Any]) -> _Row:
    transfer = option["transfer"]
    if transfer not in ("all_gather", "local"):
        raise ValueError(f"no transfer: {transfer!r}")
    return _Row(
        devices,
        transfer,
        _whole(option["device_budget"] or 0),
        _whole(option["device_memory"]["total"]),
        _whole(option["host_weights_bytes"]),
        _positive(option["seconds"]),
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"no whole number: {value!r:.40}")
    return value


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"no amount: {value!r:.40}")
    return float(value)
