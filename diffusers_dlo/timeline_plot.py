# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the picture of a timed pass. Must not measure, nor need matplotlib before a picture is asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .timeline import COMPUTE, COPY, DECODE, GATHER, WAIT, Timeline


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANES = (COMPUTE, GATHER, DECODE, COPY)
_COLOURS = {COPY: "#4c78a8", DECODE: "#b279a2", GATHER: "#72b7b2", COMPUTE: "#54a24b", WAIT: "#e45756"}
_WIDTH_INCHES, _HEIGHT_INCHES = 12.0, 3.0
_ROOM_FOR_NAME = 0.09
"""A name is written into a span that takes at least this part of the width."""


def plot_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """
    Draws one pass into a file, in the format of its suffix; the file is there whole or not at all.

    Raises:
        `ImportError`: matplotlib is not installed. `ValueError`: there is no such format, or no such directory.
    """
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    if not os.path.isdir(folder):
        raise ValueError(f"'{path}' cannot be written, because there is no directory '{folder}'. Make it first.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"'{name}' cannot be drawn, because matplotlib is not installed: pip install \"diffusers-dlo[plot]\""
        ) from error
    suffix = os.path.splitext(name)[1].removeprefix(".").lower()
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if suffix not in formats:
        raise ValueError(
            f"'{name}' has no suffix that names a picture matplotlib can write. Use one of: {', '.join(formats)}."
        )
    _draw(figure, timeline)
    part = os.path.join(folder, f".{name}.{os.getpid()}.part")
    try:
        with rc_context({"svg.fonttype": "none"}):  # text that can be searched and read aloud
            figure.savefig(part, format=suffix, dpi=150)
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.unlink(part)


def _draw(figure: Figure, timeline: Timeline) -> None:
    axes = figure.subplots()
    decodes = any(span.kind == DECODE for span in timeline.spans)
    lanes = [lane for lane in _LANES if decodes or lane != DECODE]
    for kind, colour in _COLOURS.items():
        if kind == DECODE and not decodes:
            continue
        row = lanes.index(COMPUTE if kind == WAIT else kind)
        bars = []
        for span in timeline.spans:
            begin, end = max(span.begin_ms, 0.0), min(span.end_ms, timeline.pass_ms)
            if span.kind == kind and end > begin:
                bars.append((begin, end - begin))
                if kind != WAIT and end - begin >= _ROOM_FOR_NAME * timeline.pass_ms:
                    middle = (begin + end) / 2
                    axes.text(middle, row, span.block, ha="center", va="center", color="white", fontsize=7)
        axes.broken_barh(
            bars,
            (row - 0.38, 0.76),
            facecolor=colour,
            edgecolor="white",
            linewidth=0.4,
            hatch="////" if kind == WAIT else None,
            label="exposed wait" if kind == WAIT else None,
        )
    axes.set_xlim(0.0, timeline.pass_ms)
    axes.set_ylim(-0.5, len(lanes) - 0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlabel("milliseconds since the pass began")
    axes.set_title(f"One pass of '{timeline.component}'", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
