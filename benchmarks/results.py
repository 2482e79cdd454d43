# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what follows from the ranks' figures: one row for each variant and workload, its limit, its ratios, and whether
its outputs have the right bits. Pure. Must not run or show anything.

[Note: Limit]
    No forward is faster than computing alone, nor than the link that brings its weights: `max(compute, bytes / H2D)`.
    *Compute* is the resident model's time in the same run; where that does not fit, the time of the same model with
    one layer's weights in place of all others'. *Bytes* are those that have to cross each rank's link: the blocks that
    do not stay on the device, and an embedding that is larger than a block; divided by the number of ranks for ways
    that share the links, undivided for ways in which each rank copies everything. *H2D* is the rate measured in the
    same run with all ranks copying at once, of the slowest rank. Times are medians, of the slowest rank in each
    repetition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sizes import ModelFacts, Workload
from variants import Variant


HOST_SHARE, HOST_RANK_NBYTES = 1.05, 2 << 30
"""One copy per host: all ranks together take no more than this much of the checkpoint, and this for each rank."""


@dataclass
class Result:
    """What the ranks of one variant found."""

    variant: Variant
    ranks: list[dict[str, Any]]


@dataclass
class Comparison:
    """All of a run: the machine, the model, the links, what was measured and what was not, and why."""

    machine: dict[str, Any]
    options: dict[str, Any]
    model: dict[str, Any]
    links: dict[str, Any]
    workloads: dict[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[dict[str, str]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


def merge_links(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The links of all ranks: the slowest rank's rates, as ranks wait for each other; each rank's own to the host."""
    keys = [key for key in ("h2d_alone", "h2d_together", "gather") if key in found[0]]
    links: dict[str, Any] = {f"{key}_bytes_per_s": min(rank[key] for rank in found) for key in keys}
    for key in ("h2d_alone", "h2d_together"):
        links[f"{key}_by_rank"] = [rank[key] for rank in found]
    groups = found[0].get("gather_in_groups", {})
    links["gather_in_groups"] = {group: min(rank["gather_in_groups"][group] for rank in found) for group in groups}
    for key in ("gemm_beside_h2d", "gemm_beside_gather"):
        if key in found[0]:
            links[key] = max(rank[key] for rank in found)
    return links


Predict = Callable[[Variant, Workload, float | None], float | None]
"""Seconds that a variant's forward is predicted to take, from what computing alone takes; None where nothing is."""


def make_rows(
    results: Sequence[Result], workloads: Sequence[Workload], facts: ModelFacts, h2d: float, predict: Predict
) -> list[dict[str, Any]]:
    """A row for each variant and workload ([Note: Limit]), with what was predicted for it."""
    base = next((r for r in results if r.variant.is_base), None)
    rows = []
    for workload in workloads:
        compute, bits = None, None
        if base is not None:
            forwards = [rank["forwards"][workload.name] for rank in base.ranks]
            compute = median(slowest(forwards, "compute" if base.variant.family == "reference" else "seconds"))
            bits = forwards[0]["digests"][0]
        for result in results:
            if workload.name in result.ranks[0]["forwards"]:
                row = _row(result, workload, facts, h2d, compute, bits)
                rows.append(row | {"predicted_ms": _times(predict(result.variant, workload, compute), 1e3)})
    return rows


def slowest(forwards: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The slowest rank's time in each repetition."""
    return [max(times) for times in zip(*(rank[key] for rank in forwards))]


def _row(
    result: Result, workload: Workload, facts: ModelFacts, h2d: float, compute: float | None, bits: str | None
) -> dict[str, Any]:
    variant, ranks = result.variant, result.ranks
    forwards = [rank["forwards"][workload.name] for rank in ranks]
    times = slowest(forwards, "seconds")
    link_nbytes = variant.pass_nbytes(facts, len(ranks))
    if link_nbytes is None and forwards[0]["h2d"] is not None:
        link_nbytes = round(max(rank["h2d"] for rank in forwards))  # decided at run time, so as it was counted
    link = None if link_nbytes is None else link_nbytes / h2d
    limit = None if compute is None or link is None else max(compute, link)
    digests = {digest for rank in forwards for digest in rank["digests"]}
    hosts = [rank["host"] for rank in ranks]
    pss = sum(host["pss"] for host in hosts)
    return {
        "variant": variant.name,
        "family": variant.family,
        "workload": workload.name,
        "tokens": workload.tokens,
        "ranks": len(ranks),
        "options": {key: str(value) for key, value in (*variant.options.items(), ("budget", variant.budget)) if value},
        "median_ms": median(times) * 1e3,
        "best_ms": min(times) * 1e3,
        "repeats": len(times),
        "compute_ms": _times(compute, 1e3),
        "link_ms": _times(link, 1e3),
        "limit_ms": _times(limit, 1e3),
        "to_limit": median(times) / limit if limit else None,
        "to_compute": median(times) / compute if compute else None,
        "bit_equal": None if bits is None else digests == {bits},
        "finite": all(rank["finite"] for rank in forwards),
        "device_weights_nbytes": _most(ranks, "weights"),
        "device_weights_after_nbytes": _most(ranks, "weights_after"),
        "device_used_nbytes": _most(ranks, "used"),
        "device_peak_nbytes": _most(forwards, "device_peak_nbytes"),
        "slots_nbytes": _most(ranks, "slots"),
        "resident_nbytes": _most(ranks, "resident"),
        "h2d_nbytes": _most(forwards, "h2d"),
        "host_kind": ranks[0].get("host_kind"),
        "host_pss_nbytes": pss,
        "host_private_nbytes": sum(host["private"] for host in hosts),
        "host_uss_nbytes": sum(host["uss"] for host in hosts),
        "host_page_cache_nbytes": sum(host["file"] for host in hosts),
        "host_shared_memory_nbytes": sum(host["shared_memory"] for host in hosts),
        "host_before_nbytes": sum(rank["host_before"]["pss"] for rank in ranks),
        "one_copy": pss <= HOST_SHARE * facts.nbytes + HOST_RANK_NBYTES * len(ranks),
        "load_s": _most(ranks, "load_s"),
        "enable_s": _most(ranks, "enable_s"),
        "enabled": "cold" if variant.cold else "warm",
        "cached_part": ranks[0]["cached"],
        "enable_bytes_per_s": facts.nbytes / _most(ranks, "enable_s"),
        "disk_bytes_per_s": ranks[0].get("disk"),
    }


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _most(ranks: Sequence[Mapping[str, Any]], key: str) -> Any:
    values = [rank[key] for rank in ranks if rank.get(key) is not None]
    return max(values, default=None)
