# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how a comparison looks: on the terminal, as a section of a Markdown page, as a picture. Must not compute what it
shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import Comparison
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from diffusers_dlo.byte_size import format_bytes


GIB = 1 << 30
COLORS = {"resident": "black", "dlo": "tab:green", "group": "tab:orange", "fsdp": "tab:blue", "sequential": "tab:red"}


def _number(key: str, digits: int, unit: float = 1.0) -> Callable[[dict[str, Any]], str]:
    def show(row: dict[str, Any]) -> str:
        value = row[key]
        return "-" if value is None else f"{value / unit:,.{digits}f}"

    return show


def _bits(row: dict[str, Any]) -> str:
    if not row["finite"]:
        return "not finite"
    return {True: "equal", False: "differ", None: "-"}[row["bit_equal"]]


COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("ms", lambda row: _number("median_ms", 1 if row["median_ms"] < 100 else 0)(row)),
    ("best", lambda row: _number("best_ms", 1 if row["best_ms"] < 100 else 0)(row)),
    ("limit, ms", lambda row: _number("limit_ms", 1 if (row["limit_ms"] or 0) < 100 else 0)(row)),
    ("to limit", _number("to_limit", 2)),
    ("predicted, ms", lambda row: _number("predicted_ms", 1 if (row["predicted_ms"] or 0) < 100 else 0)(row)),
    ("to compute", _number("to_compute", 2)),
    ("bits", _bits),
    ("weights on device, GiB", _number("device_weights_nbytes", 2, GIB)),
    ("device peak, GiB", _number("device_peak_nbytes", 2, GIB)),
    ("host PSS, GiB", _number("host_pss_nbytes", 1, GIB)),
    ("host private, GiB", _number("host_private_nbytes", 1, GIB)),
    ("enable, s", _number("enable_s", 1)),
)

LEGEND = (
    "*ms* is the median forward, of the slowest rank in each repetition, *best* the fastest. *Limit* is the larger of "
    "the computing alone and of what the link needs: the bytes that cross each rank's link, divided by the H2D rate; "
    "*to limit* and *to compute* are the median divided by it and by computing alone. *Predicted* is what the planner "
    "says for these links and this computing. *Bits* compares the outputs of all repetitions and ranks with the model "
    "without offload. *PSS* is the host memory of all ranks, what they share counted once, page cache of mapped files "
    "included; *private* is what each has for itself: not files, not shared memory. *Enable* is the enabling call "
    "alone, with the files in memory unless the name says cold."
)


def rows_by_workload(comparison: Comparison) -> list[tuple[str, list[dict[str, Any]]]]:
    """The rows under the title of each workload, those without rows left out."""
    groups = [
        (title, [row for row in comparison.rows if row["workload"] == name])
        for name, title in comparison.workloads.items()
    ]
    return [(title, rows) for title, rows in groups if rows]


def print_tables(comparison: Comparison, console: Console) -> None:
    """The tables, the links, and what was not measured."""
    console.print(f"\n{describe_model(comparison)}\n{describe_machine(comparison)}\n{describe_links(comparison)}\n")
    for title, rows in rows_by_workload(comparison):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("variant", no_wrap=True)
        for name, _ in COLUMNS:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(row["variant"], *(show(row) for _, show in COLUMNS))
        console.print(table)
    for missing in comparison.not_measured:
        console.print(f"not measured: {missing['variant']}: {missing['reason']}", markup=False, highlight=False)


def describe_model(comparison: Comparison) -> str:
    """The model in a sentence."""
    model = comparison.model
    depth = f"{model['layers']} layers"
    if model["layers"] < model["full_layers"]:
        depth = f"{model['layers']} of {model['full_layers']} layers"
    return (
        f"{model['class']} of size '{model['size']}', {depth} of {format_bytes(model['block_nbytes'])}, "
        f"{format_bytes(model['nbytes'])} in all, {model['dtype']}, random weights, on {comparison.options['ranks']} "
        f"rank{'s' if comparison.options['ranks'] > 1 else ''}"
    )


def describe_machine(comparison: Comparison) -> str:
    """The machine and the versions in a sentence."""
    machine = comparison.machine
    cap = comparison.options["device_cap_nbytes"]
    capped = f", each capped to {cap / GIB:.0f} GiB" if cap else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = "in shared memory" if machine["checkpoint_in_memory"] else "on a disk"
    return f"{machine['device']}{capped}; {versions}; {machine['date']}; the checkpoint {where}"


def describe_links(comparison: Comparison) -> str:
    """The links' rates in a sentence."""
    links = comparison.links
    words = {
        "h2d_together_bytes_per_s": "H2D with all ranks copying",
        "h2d_alone_bytes_per_s": "with one at a time",
        "gather_bytes_per_s": "a block gathered in place",
    }
    said = [f"{text} {links[key] / 1e9:.1f} GB/s" for key, text in words.items() if key in links]
    if comparison.options["ranks"] > 1:
        said[0] += f" each ({max(links['h2d_together_by_rank']) / 1e9:.1f} the fastest of them)"
    for group, rate in links["gather_in_groups"].items():
        if group < comparison.options["ranks"]:
            said.append(f"in groups of {group} {rate / 1e9:.1f} GB/s")
    for row in comparison.rows:
        if row["disk_bytes_per_s"]:
            disk, enabling = row["disk_bytes_per_s"] / 1e9, row["enable_bytes_per_s"] / 1e9
            said.append(f"the cold disk {disk:.2f} GB/s for one thread, and enabling from it {enabling:.2f} GB/s")
            break
    words = {"gemm_beside_h2d": "copy", "gemm_beside_gather": "gather"}
    said += [f"products of matrices beside a {text} x {links[key]:.3f}" for key, text in words.items() if key in links]
    return f"Links: {', '.join(said)}"


def to_markdown(comparison: Comparison) -> str:
    """A section of a page."""
    options = comparison.options
    lines = [
        f"## Size '{comparison.model['size']}', {options['ranks']} rank{'s' if options['ranks'] > 1 else ''}",
        "",
        f"{describe_model(comparison)}. {describe_machine(comparison)}. {describe_links(comparison)}.",
        "",
        f"`{options['command']}`",
        "",
        LEGEND,
        "",
    ]
    for title, rows in rows_by_workload(comparison):
        lines += [f"### {title}", "", "| variant | " + " | ".join(name for name, _ in COLUMNS) + " |"]
        lines.append("|---" * (len(COLUMNS) + 1) + "|")
        lines += ["| " + " | ".join([row["variant"], *(show(row) for _, show in COLUMNS)]) + " |" for row in rows]
        lines.append("")
    if comparison.not_measured:
        lines += ["Not measured:", ""]
        lines += [f"- `{missing['variant']}`: {missing['reason']}" for missing in comparison.not_measured]
        lines.append("")
    if options["device_cap_nbytes"]:
        lines += ["The log of the run:", "", "```", *comparison.log, "```", ""]
    return "\n".join(lines)


def _spot(nbytes: float, ms: float) -> tuple[int, int]:
    """Equal for points that lie on each other, or nearly so."""
    return round(nbytes / GIB / 1.5), round(12 * math.log(max(ms, 1e-3)))


def plot(comparison: Comparison, path: Path) -> None:
    """Time against device memory, a panel for each workload; where the device has no peak, its weights."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    groups = rows_by_workload(comparison)
    figure = Figure(figsize=(5.2 * max(len(groups), 1), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(len(groups), 1), squeeze=False)[0]
    for panel, (title, rows) in zip(panels, groups):
        points = []
        labels: dict[tuple[int, int], list[tuple[float, dict[str, Any]]]] = {}
        for row in rows:
            memory = row["device_peak_nbytes"] or row["device_weights_nbytes"]
            if memory is None:
                continue
            points.append(row["median_ms"])
            color = COLORS.get(row["family"], "gray")
            # Filled where the outputs have the right bits.
            face = color if row["bit_equal"] else "none"
            panel.scatter(memory / GIB, row["median_ms"], s=36, color=color, facecolors=face)
            labels.setdefault(_spot(memory, row["median_ms"]), []).append((memory / GIB, row))
        for together in labels.values():  # points that lie on each other have one label
            memory, row = together[0]
            names = "\n".join(row["variant"] for _, row in together)
            below = row["family"] == "dlo"
            panel.annotate(
                names,
                (memory, row["median_ms"]),
                fontsize=6,
                xytext=(5, -4 if below else 3),
                textcoords="offset points",
                va="top" if below else "bottom",
            )
        compute = next((row["compute_ms"] for row in rows if row["compute_ms"] is not None), None)
        if compute is not None:
            panel.axhline(compute, color="black", linestyle=":", linewidth=1, label="computing alone")
            panel.legend(fontsize=7, loc="upper right")
        if points:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            panel.yaxis.set_minor_formatter(StrMethodFormatter("{x:,.0f}"))
            panel.tick_params(axis="y", which="both", labelsize=6)
        panel.margins(x=0.25, y=0.15)
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.set_title(title, fontsize=8)
        panel.set_xlabel("device memory, GiB")
        panel.set_ylabel("a forward, ms")
    figure.suptitle(f"{describe_model(comparison)}\n{comparison.machine['device']}", fontsize=8)
    figure.savefig(path, dpi=110)
