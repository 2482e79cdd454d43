# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how plans and reports look in a terminal. Must not compute what it shows.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .byte_size import format_bytes


if TYPE_CHECKING:
    from .offload_plan import OffloadPlan


def render_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text; the first two columns are names, the others numbers."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=140, color_system=None)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def render_plan(plan: OffloadPlan) -> str:
    """A plan as a table, with the memory it takes below."""
    rows = []
    for component in plan.components:
        largest = component.largest_block
        rows.append(
            [
                component.name,
                component.class_name,
                component.transfer,
                str(len(component.blocks)),
                format_bytes(largest.nbytes),
                format_bytes(component.streamed_nbytes),
                format_bytes(sum(leaf.nbytes for leaf in component.leaves)) if component.leaves else "-",
                format_bytes(component.placed_nbytes),
            ]
        )
    rows += [[name, cls, "placed", "-", "-", "-", "-", format_bytes(nbytes)] for name, cls, nbytes in plan.placed]
    columns = ["component", "class", "transfer", "blocks", "largest block", "streamed", "on demand", "on device"]
    ranks = f"{plan.group_size} rank{'s' if plan.group_size > 1 else ''}"
    slots = " + ".join(
        f"{plan.num_slots} x {format_bytes(plan.slot_nbytes(transfer))} ({transfer})"
        for transfer in ("all_gather", "local")
        if plan.slot_nbytes(transfer)
    )
    resident = []
    if plan.residents:
        shards, whole = (sum(map(len, kept.values())) for kept in (plan.residents.shards, plan.residents.whole))
        parts = [f"{shards} shards"] * (shards > 0) + [f"{whole} whole blocks"] * (whole > 0)
        parts += ["staging"] * (plan.residents.staging_nbytes > 0)
        resident = [f"        {format_bytes(plan.residents.nbytes)} for what stays of them: {', '.join(parts)}"]
    elif plan.device_budget == "auto":
        resident = ["        and what the first forward leaves free, for what stays of them"]
    from .planned_coding import decoding_nbytes  # which needs plans

    decoding = []
    if plan.host == "coded":
        decoding = [
            f"        {format_bytes(decoding_nbytes(plan))} at most for coded shards on their way, and decoding"
        ]
    return "\n".join(
        [
            render_table(f"Offload plan, {ranks} sharing weights", columns, rows),
            f"device: {slots} in slots, {format_bytes(plan.device_placed_nbytes)} of weights that never stream",
            *decoding,
            *resident,
            f"host:   {format_bytes(plan.host_nbytes_per_rank)} per rank ({plan.host}), "
            f"{format_bytes(plan.host_nbytes_per_rank * plan.group_size)} in all",
        ]
    )
