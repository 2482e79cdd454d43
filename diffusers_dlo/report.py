# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what an offload tells about itself afterwards. Must not measure or move anything: it reads counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from .byte_size import format_bytes
from .engine import Engine
from .host.store import HostStore
from .offload_plan import OffloadPlan
from .tables import render_table
from .units import Counters


@dataclass(frozen=True)
class OffloadReport:
    r"""
    Counters since enabling, of this rank; of all that streams in this process. Bytes are those that crossed a link,
    padding included.

    Attributes:
        host_kind (`str`): where the bytes live: `"mapped"`, `"packed"`, `"mapped+packed"` or `"pinned"`.
        transfer (`str`): how blocks reach the device; several kinds are joined by `+`.
        passes (`int`): passes that this rank computed.
        ghost_passes (`int`): passes in which this rank only transferred, for other ranks.
        h2d_bytes (`int`): copied from the host to the device for blocks.
        gather_bytes (`int`): received from other ranks by all-gathers.
        on_demand_bytes (`int`): copied to the device for leaves outside blocks.
        device_slot_bytes (`int`): device memory of the slots that exist now.
        resident_bytes (`int`): device memory of what stays for the `device_budget`, staging included.
        device_placed_bytes (`int`): device memory of weights that are never streamed.
        host_private_bytes (`int`): host memory of this rank alone.
        host_shared_bytes (`int`): host memory that the ranks of the group share, counted once.
        host_files_bytes (`int`): those of them that are page cache of the checkpoint's own files.
        extents_per_block (`int`): how many copies this rank makes for a block, at most.
    """

    host_kind: str
    transfer: str
    passes: int
    ghost_passes: int
    h2d_bytes: int
    gather_bytes: int
    on_demand_bytes: int
    device_slot_bytes: int
    resident_bytes: int
    device_placed_bytes: int
    host_private_bytes: int
    host_shared_bytes: int
    host_files_bytes: int
    extents_per_block: int

    def __str__(self) -> str:
        rows = []
        for field in fields(self):
            value = getattr(self, field.name)
            shown = format_bytes(value) if field.name.endswith("_bytes") else str(value)
            rows.append([field.name.removesuffix("_bytes").replace("_", " "), shown])
        return render_table("Offload report of this rank", ["what", "value"], rows)


def make_report(
    engine: Engine, start: Counters, plan: OffloadPlan, store: HostStore, transfers: Iterable[str]
) -> OffloadReport:
    """The report of what the engine counted since `start`, with one handle's plan, store and kinds of transfer."""
    counters = engine.counters.since(start)
    return OffloadReport(
        host_kind=store.kind,
        transfer="+".join(sorted(transfers)),
        passes=counters.passes,
        ghost_passes=counters.ghost_passes,
        h2d_bytes=counters.h2d_nbytes,
        gather_bytes=counters.gather_nbytes,
        on_demand_bytes=counters.on_demand_nbytes,
        device_slot_bytes=engine.device_slot_nbytes,
        resident_bytes=engine.resident_nbytes,
        device_placed_bytes=plan.device_placed_nbytes,
        host_private_bytes=store.private_nbytes,
        host_shared_bytes=store.shared_nbytes,
        host_files_bytes=store.files_nbytes,
        extents_per_block=max(len(store.extents(i)) for i, layout in enumerate(store.layouts) if not layout.is_leaf),
    )
