# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Says what forwards would take on 4 and 8 GPUs of one host, with each rank copying for itself and in groups of 2, 4 and
8 that share the weights: predicted, with rates that were measured on 2 GPUs. Needs no device; prints the tables of
docs/benchmarks.md.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --h2d 40 --gather 200      other rates, in GB/s
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predicted import Predicted
from sizes import SIZES, VIDEO, ModelFacts, Size, Workload, make_config, weigh
from variants import Variant, all_variants, group_sizes


H2D = 55.2
"""GB/s from the host to each GPU, measured with 2 H200s of one host copying."""
GATHERS = (151.0, 270.0)
"""GB/s that a GPU receives from the other one while a block is gathered, as two runs with 2 H200s measured it."""
COMPUTE = {("nano", "t2i-1024"): 0.0642, ("nano", "t2v-720p"): 1.711}
"""Seconds of the resident model, measured on 2 H200s; where there are none, computing is estimated from the tokens."""
RANKS = (4, 8)
NAMES = ("nano", "super")
WORKLOADS = (VIDEO[0], VIDEO[-1])


@dataclass(frozen=True)
class Model:
    """A size, what it weighs, and its predictions for the most GPUs that are looked at, one for each gather rate."""

    size: Size
    facts: ModelFacts
    predictions: Sequence[Predicted]

    def times(self, variant: Variant, workload: Workload, h2d: float) -> tuple[list[float], float]:
        """Milliseconds of a forward for each rate of gathering, and those of the limit ([Note: Limit])."""
        compute = COMPUTE.get((self.size.name, workload.name))
        alone = self.predictions[0].compute_seconds(workload) if compute is None else compute
        different = self.predictions if variant.shares_links else self.predictions[:1]
        found = [one.seconds(variant, workload, compute) or math.nan for one in different]
        needed = (variant.pass_nbytes(self.facts, RANKS[-1]) or 0) / h2d
        return [1e3 * seconds for seconds in found], 1e3 * max(alone, needed)


def make_model(name: str, h2d: float, gathers: Sequence[float]) -> Model:
    """A size and its predictions, with rates in bytes per second."""
    size, ranks = SIZES[name], RANKS[-1]
    config = make_config(size, size.layers, None)
    predictions = []
    for received in gathers:
        # `compare.py` counts the whole block for a gather.
        rates = {group: received * group / (group - 1) for group in group_sizes(ranks)}
        links = {"h2d_together_bytes_per_s": h2d, "gather_in_groups": rates}
        predictions.append(Predicted(config, size.dtype, ranks, links))
    return Model(size, weigh(config, size.dtype), predictions)


def make_line(variant: Variant, model: Model, h2d: float, gathers: Sequence[float]) -> str:
    """The line of a way to hold the weights. How many groups there are beside one makes no difference to it."""
    facts, group = model.facts, variant.shards(RANKS[-1])
    copied = facts.blocks_nbytes / group + facts.leaf_nbytes  # an embedding comes whole to each rank
    received = facts.blocks_nbytes * (group - 1) / group
    weights = "`local`" if group == 1 else f"`all_gather`, groups of {group}"
    cells = [", ".join(str(ranks) for ranks in RANKS if ranks >= group), weights, f"{1e3 * copied / h2d:,.0f}"]
    cells.append(pair([1e3 * received / rate for rate in gathers]) if received else "-")
    slots = replace(variant, name=f"{variant.name}-3-slots", options={**variant.options, "num_slots": 3})
    for way, workload in ((variant, WORKLOADS[0]), (slots, WORKLOADS[0]), (variant, WORKLOADS[1])):
        times, limit = model.times(way, workload, h2d)
        cells += [pair(times), pair([time / limit for time in times], 2)]
    return f"| {' | '.join(cells)} |"


def pair(values: Sequence[float], digits: int = 0) -> str:
    """One figure for each rate of gathering, or one if they are the same."""
    said = [f"{value:,.{digits}f}" for value in values]
    return " / ".join(said if len(set(said)) > 1 else said[:1]) or "-"


def make_table(name: str, h2d: float = H2D, gathers: Sequence[float] = GATHERS) -> str:
    """The table of a size, with rates in GB/s."""
    h2d, gathers = 1e9 * h2d, [1e9 * rate for rate in gathers]
    few, many = (f"{workload.tokens:,} tokens, ms" for workload in WORKLOADS)
    heads = ["GPUs", "weights", "copies, ms", "gathers, ms"]
    for column in (few, "3 slots, ms", many):
        heads += [column, "to limit"]
    ways = [way for way in all_variants(RANKS[-1]) if way.name.startswith(("local-mapped", "all_gather-mapped"))]
    ways = [way for way in ways if not way.cold and "num_slots" not in way.options]
    model = make_model(name, h2d, gathers)
    facts = model.facts
    blocks = f"{facts.layers} layers of {facts.block_nbytes / 2**20:,.0f} MiB, {facts.nbytes / 2**30:.1f} GiB in all"
    lines = [f"Predicted, not measured: Cosmos3-{name.title()}, {blocks}.", ""]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [make_line(way, model, h2d, gathers) for way in sorted(ways, key=lambda way: way.shards(RANKS[-1]))]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h2d", type=float, default=H2D, help="GB/s to each GPU while all copy")
    parser.add_argument(
        "--gather", type=float, nargs="+", default=GATHERS, help="GB/s that each receives from the others"
    )
    args = parser.parse_args()
    print("\n\n".join(make_table(name, args.h2d, args.gather) for name in NAMES))


if __name__ == "__main__":
    main()
