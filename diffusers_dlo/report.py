# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what an offload tells about itself afterwards. Must not measure or move anything: it reads counters and figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import diffusers

from .advice import Setting, advise
from .byte_size import format_bytes
from .coding.codec import ON_HOST
from .coding.shard_coding import CODED_DTYPES
from .config import DistributedLayerwiseOffloadConfig
from .engine import Engine
from .host.store import HostStore
from .offload_plan import OffloadPlan
from .tables import render_table
from .timeline import BlockTiming, PassMeans, PassTiming, Timeline, overlap_of
from .timeline_plot import plot_timeline
from .timing import Timing
from .units import Counters


_SLOWEST = 5
"""So many blocks are shown: those that computing waited for longest, then those that compute longest."""
_FIGURE = {"figure": True}
"""Marks the fields that are not counters."""


@dataclass(frozen=True)
class OffloadReport:
    r"""
    Counters since enabling, of this rank; of all that streams in this process. Bytes are those that crossed a link,
    padding included. Times are of the last `with handle.timing():`, in milliseconds: means over the last passes of
    each component, 16 at most. The fields for them are empty where nothing was timed. `print` it.

    Attributes:
        host_kind (`str`): where the bytes live: `"mapped"`, `"packed"`, `"pinned"` or `"coded"`; several kinds are
            joined by `+`.
        transfer (`str`): how blocks reach the device; several kinds are joined by `+`.
        passes (`int`): passes that this rank computed.
        ghost_passes (`int`): passes in which this rank only transferred, for other ranks.
        skipped_blocks (`int`): blocks that complete forwards left out of those that earlier ones computed, or that a
            step cache decided about; summed over the forwards.
        h2d_bytes (`int`): copied from the host to the device for blocks, coded ones as they are coded.
        decoded_bytes (`int`): what the device has decoded from coded ones of these.
        gather_bytes (`int`): received from other ranks by all-gathers.
        on_demand_bytes (`int`): copied to the device for leaves outside blocks.
        device_slot_bytes (`int`): device memory of the slots that exist now, and of what blocks are decoded from.
        resident_bytes (`int`): device memory of what stays for the `device_budget`, staging included.
        device_placed_bytes (`int`): device memory of weights that are never streamed.
        host_private_bytes (`int`): host memory of this rank alone: its own part of the weights, and the page-locked
            buffers that copies go through where the device cannot page-lock the memory that the ranks share.
        host_shared_bytes (`int`): host memory that the ranks of the group share, counted once.
        host_files_bytes (`int`): those of them that are page cache of the checkpoint's own files.
        extents_per_block (`int`): how many copies this rank makes for a block, at most.
        advice (`str`): what bounds the timed passes, and which setting would help.
        blocks (`tuple[BlockTiming, ...]`): each block's copy, decoding, gather, computing and exposed wait, in
            streaming order.
        timed_passes (`tuple[PassTiming, ...]`): what a pass of each component takes, and how many were timed.
        host_ms_per_hook (`float`, *optional*): the host's time in one hook before or after a block.
        overlap (`float`, *optional*): the part of the transfers that hid behind computing, 0 to 1: 1 - exposed wait /
            time in which there was a copy, a decoding or a gather. None also where nothing was transferred.
        timeline (`Timeline`, *optional*): the last complete pass, which `plot` draws.
    """

    host_kind: str
    transfer: str
    passes: int
    ghost_passes: int
    skipped_blocks: int
    h2d_bytes: int
    decoded_bytes: int
    gather_bytes: int
    on_demand_bytes: int
    device_slot_bytes: int
    resident_bytes: int
    device_placed_bytes: int
    host_private_bytes: int
    host_shared_bytes: int
    host_files_bytes: int
    extents_per_block: int
    advice: str = field(metadata=_FIGURE)
    blocks: tuple[BlockTiming, ...] = field(metadata=_FIGURE)
    timed_passes: tuple[PassTiming, ...] = field(metadata=_FIGURE)
    host_ms_per_hook: float | None = field(metadata=_FIGURE)
    overlap: float | None = field(metadata=_FIGURE)
    timeline: Timeline | None = field(metadata=_FIGURE, repr=False)

    def plot(self, path: str | os.PathLike[str]) -> None:
        r"""
        Draws the last complete pass that was timed: copies, gathers and computing side by side, with the waits of
        computing marked. Needs matplotlib: `pip install "diffusers-dlo[plot]"`.

        Args:
            path (`str` or `os.PathLike`): the file to write, `.png`, `.svg` or what else matplotlib knows.

        Raises:
            `ValueError`: nothing was timed, or the suffix or the directory of `path` will not do. `ImportError`:
            matplotlib is not installed.
        """
        if self.timeline is None:
            raise ValueError(
                f"'{path}' is not drawn, because nothing was timed. Run a pass inside `with handle.timing():`."
            )
        plot_timeline(self.timeline, path)

    def __str__(self) -> str:
        rows = []
        for counter in fields(self):
            if not counter.metadata.get("figure"):
                value = getattr(self, counter.name)
                shown = format_bytes(value) if counter.name.endswith("_bytes") else str(value)
                rows.append([counter.name.removesuffix("_bytes").replace("_", " "), shown])
        parts = [render_table("Offload report of this rank", ["what", "value"], rows)]
        if self.timed_passes:
            parts += [self._passes_table(), self._blocks_table()]
        return "\n\n".join([*parts, self.advice])

    def _passes_table(self) -> str:
        decodes = any(timing.decode_ms for timing in self.timed_passes)
        decoding = ["decoding"] if decodes else []
        columns = ["component", "passes", "one pass", "copies", *decoding, "gathers", "computing", "exposed wait"]
        rows = []
        for timing in self.timed_passes:
            decoded = [timing.decode_ms] if decodes else []
            times = (timing.pass_ms, timing.h2d_ms, *decoded, timing.gather_ms, timing.compute_ms, timing.exposed_ms)
            overlap = "-" if timing.overlap is None else f"{timing.overlap:.0%}"
            left_out = timing.averaged < timing.passes
            passes = f"last {timing.averaged} of {timing.passes}" if left_out else str(timing.passes)
            rows.append([timing.component, passes, *(f"{ms:,.2f}" for ms in times), overlap])
        table = render_table("Timed passes: means in ms", [*columns, "overlap"], rows)
        if self.host_ms_per_hook is None:
            return table
        return f"{table}\n\nThe host takes {self.host_ms_per_hook:.3f} ms for the hook before or after a block."

    def _blocks_table(self) -> str:
        slowest = sorted(self.blocks, key=lambda block: (-block.exposed_ms, -block.compute_ms))[:_SLOWEST]
        decodes = any(block.decode_ms for block in self.blocks)
        rows = []
        for block in slowest:
            decoded = [block.decode_ms] if decodes else []
            times = (block.h2d_ms, *decoded, block.gather_ms, block.compute_ms, block.exposed_ms)
            rows.append([block.component, block.name, *(f"{ms:,.2f}" for ms in times)])
        decoding = ["decoding"] if decodes else []
        columns = ["component", "block", "copy", *decoding, "gather", "computing", "exposed wait"]
        title = f"{len(rows)} of {len(self.blocks)} blocks, those waited for longest first: means in ms"
        return render_table(title, columns, rows)


@dataclass(frozen=True)
class ReportSources:
    """What a report is made from: an engine that counted since `start`, and one handle's own things."""

    engine: Engine
    start: Counters
    plan: OffloadPlan
    config: DistributedLayerwiseOffloadConfig
    store: HostStore
    transfers: Iterable[str]
    timing: Timing | None


def make_report(sources: ReportSources) -> OffloadReport:
    """The report; waits for the device where passes were timed."""
    engine, store = sources.engine, sources.store
    means, timeline = sources.timing.figures() if sources.timing is not None else (PassMeans(), None)
    setting = Setting(
        ranks=sources.plan.group_size,
        num_slots=sources.plan.num_slots,
        has_budget=bool(sources.config.device_budget),
        has_streams=not engine.platform.waits_on_host,
        gather=sources.config.gather,
        codec=_codec_for(sources),
    )
    counters = engine.counters.since(sources.start)
    return OffloadReport(
        host_kind=store.kind,
        transfer="+".join(sorted(sources.transfers)),
        passes=counters.passes,
        ghost_passes=counters.ghost_passes,
        skipped_blocks=counters.skipped_blocks,
        h2d_bytes=counters.h2d_nbytes,
        decoded_bytes=counters.decoded_nbytes,
        gather_bytes=counters.gather_nbytes,
        on_demand_bytes=counters.on_demand_nbytes,
        device_slot_bytes=engine.lanes.device_slot_nbytes,
        resident_bytes=engine.lanes.resident_nbytes,
        device_placed_bytes=sources.plan.device_placed_nbytes,
        host_private_bytes=store.private_nbytes + engine.host_nbytes,
        host_shared_bytes=store.shared_nbytes,
        host_files_bytes=store.files_nbytes,
        extents_per_block=max(len(store.extents(i)) for i, layout in enumerate(store.layouts) if not layout.is_leaf),
        advice=advise(means.passes, means.blocks, setting),
        blocks=means.blocks,
        timed_passes=means.passes,
        host_ms_per_hook=means.ms_per_hook,
        overlap=overlap_of(means.passes),
        timeline=timeline,
    )


def _codec_for(sources: ReportSources) -> str:
    """The codec of the device that most of the weights could be packed with; empty if there is none, or they are."""
    codecs = [name for name in sources.engine.platform.codecs if name != ON_HOST]
    if sources.store.codec is not None or not codecs:
        return ""
    tensors = [
        tensor
        for component in sources.plan.components
        if hasattr(diffusers, component.class_name)
        for block in component.blocks
        for tensor in block.tensors
    ]
    codable = sum(tensor.nbytes for tensor in tensors if tensor.dtype in CODED_DTYPES)
    return codecs[0] if 2 * codable > sources.plan.streamed_nbytes else ""
