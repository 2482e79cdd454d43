# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the ways of holding weights that are compared: their names, options, which of them suit a number of ranks, and
what host memory and time each is expected to take. Pure. Must not touch a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from sizes import ModelFacts


PINNED_ROUNDING = 1.4
"""torch rounds each pinned tensor up to a power of two; this much, at most, in sum for the sizes measured here."""
CODED_PART = 0.75
"""What is left of weights, at most, once they are coded."""
CODING_RATE = 0.4e9
"""Bytes of weights that are coded, written and digested in a second, at least."""
RANK_NBYTES = {"cpu": 512 << 20, "cuda": 6 << 30}
"""Host memory of a rank beside weights, by device: libraries, contexts, staging."""

SLACK = 1.004
"""How much larger a block's image may be than its weights: gaps and realigned tensors come along from a file."""


@dataclass(frozen=True)
class Variant:
    """
    One way of holding weights.

    Attributes:
        family (`str`): what does it: `resident`, `reference`, `dlo`, `group`, `fsdp` or `sequential`.
        options (`Mapping`): of the family's enabling call; with `group`, how many of the ranks share weights.
        shares_links (`bool`): whether ranks each copy 1/N of the weights, or all of them each.
        budget (`float` or `str`, *optional*): the part of what a rank copies that may stay on the device, or `"auto"`.
        cold (`bool`): whether it is enabled with the checkpoint out of the page cache.
    """

    name: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shares_links: bool = False
    budget: float | str | None = None
    cold: bool = False

    def shards(self, ranks: int) -> int:
        """In how many parts ranks share the copying of a block."""
        return int(self.options.get("group", ranks)) if self.shares_links else 1

    def enabling_options(self, facts: ModelFacts, ranks: int) -> dict[str, Any]:
        """The options with the budget in bytes, or `"auto"`."""
        options = dict(self.options)
        if self.budget == "auto":
            options["device_budget"] = "auto"
        elif self.budget is not None:
            options["device_budget"] = budget_nbytes(float(self.budget), facts, self.shards(ranks))
        return options

    @property
    def is_coded(self) -> bool:
        """Whether it streams from a coded checkpoint."""
        return self.options.get("host") == "coded"

    @property
    def is_base(self) -> bool:
        """Whether others are compared with it."""
        return self.family in ("resident", "reference")

    def host_nbytes(self, facts: ModelFacts, ranks: int, device: str) -> int:
        """Host memory that it takes beside the checkpoint's files, at most, for all ranks together."""
        weights = facts.nbytes
        if self.family == "dlo":
            host = self.options.get("host")
            pinned = PINNED_ROUNDING * (1 if self.shares_links else ranks)
            # The coded checkpoint lies beside the other one, in memory where that does.
            copies = {"packed": 1, "pinned": pinned, "coded": CODED_PART}.get(str(host), 0)
            weights = round(copies * weights)
        elif self.family == "group":
            weights = round(PINNED_ROUNDING * weights * ranks)
        elif self.family == "fsdp":
            weights = round(PINNED_ROUNDING * weights)
        else:
            weights = 0
        return weights + RANK_NBYTES[device] * ranks

    def enable_seconds(self, facts: ModelFacts, ranks: int) -> float:
        """About how long starting, loading and enabling takes, from what was seen on one kind of machine."""
        rates = {"resident": 3e9, "reference": 1e12, "group": 0.6e9, "fsdp": 0.7e9 * ranks, "sequential": 1e12}
        rate = rates.get(self.family)
        if rate is None:
            rate = {"packed": 2.5e9, "pinned": 2.5e9}.get(str(self.options.get("host")), 1e9 if self.cold else 15e9)
        return 8 + facts.nbytes / rate

    def pass_nbytes(self, facts: ModelFacts, ranks: int) -> int | None:
        """
        Bytes of weights that cross each rank's link in a forward, at least; None where it is decided at run time. What
        is coded is fewer bytes: it is compared with what the weights would take.
        """
        if self.is_base or self.budget == "auto":
            return 0 if self.family == "resident" else None
        stays = float(self.budget or 0.0)
        shards = self.shards(ranks)
        leaves = 0 if self.budget else facts.leaf_nbytes // shards  # a budget pays for them first
        return round((1 - stays) * facts.blocks_nbytes / shards) + leaves


def budget_nbytes(fraction: float, facts: ModelFacts, shards: int) -> int:
    """
    Device bytes for a part of what a rank copies for blocks, and for the embedding outside them, which stays first.
    Where more than half of it stays, there is room for two staging buffers of the size of a shard beside it, which a
    budget also has to pay for; but not where all of it stays.
    """
    shard = -(-facts.block_nbytes // (256 * shards)) * 256
    staging = 2 * shard if 0.5 < fraction < 1 and shards > 1 else 0
    return round(SLACK * (round(fraction * facts.layers) * shard + facts.leaf_nbytes)) + staging


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Of how many ranks groups are looked at that share weights: 2, 4 and so on, and all; none for a rank alone."""
    powers = [1 << power for power in range(1, ranks.bit_length())]
    return (*(group for group in powers if group < ranks and ranks % group == 0), ranks) if ranks > 1 else ()


def all_variants(ranks: int) -> list[Variant]:
    """Every variant that suits a number of ranks, in the order in which they are measured: what matters most first."""
    transfers = ("all_gather", "local") if ranks > 1 else ("local",)
    main, shared = transfers[0], ranks > 1

    def dlo(name: str, transfer: str, host: str, **more: Any) -> Variant:
        budget, cold = more.get("budget"), more.get("cold", False)
        names = ("gather", "group", "num_slots")
        options = {"transfer": transfer, "host": host} | {name: more[name] for name in names if more.get(name)}
        return Variant(name, "dlo", options, transfer == "all_gather", budget, cold)

    budgets = []
    for label, part in (("half", 0.5), ("three-quarters", 0.75), ("all", 1.0)):
        for gather in ("collective", "pull") if shared else (None,):
            name = f"budget-{label}" + (f"-{gather}" if gather else "")
            budgets.append(dlo(name, main, "mapped", budget=part, gather=gather))
    budgets.append(dlo("budget-auto", main, "mapped", budget="auto"))
    streams = {"use_stream": True, "record_stream": True, "non_blocking": True}
    variants = [Variant("resident", "resident")]
    variants += [dlo(f"{transfer}-mapped", transfer, "mapped") for transfer in transfers]
    variants += [dlo(f"{transfer}-coded", transfer, "coded") for transfer in transfers]
    for group in group_sizes(ranks)[:-1]:
        variants.append(dlo(f"{main}-mapped-groups-of-{group}", main, "mapped", group=group))
    if shared:
        variants.append(dlo(f"{main}-mapped-3-slots", main, "mapped", num_slots=3))
    variants += [
        Variant("group-block", "group", {"offload_type": "block_level", "num_blocks_per_group": 1, **streams})
    ]
    variants += [Variant("fsdp2", "fsdp", shares_links=True)]
    variants += budgets
    variants += [dlo(f"{transfer}-{host}", transfer, host) for host in ("packed", "pinned") for transfer in transfers]
    variants += [dlo(f"{main}-mapped-cold", main, "mapped", cold=True)]
    variants += [Variant("sequential", "sequential")]
    variants += [Variant("group-leaf", "group", {"offload_type": "leaf_level", **streams})]
    return variants


REFERENCE = Variant("reference", "reference")
"""What outputs are compared with where the model does not fit the device: one layer there at a time."""


def choose_variants(known: Sequence[Variant], patterns: Sequence[str]) -> list[Variant]:
    """
    Those of which the name fits one of the patterns, in their order, behind one that all others are compared with.

    Raises:
        `ValueError`: a pattern fits none.
    """
    if REFERENCE.name in patterns:
        known = [REFERENCE, *known]
    for pattern in patterns:
        if not any(fnmatchcase(variant.name, pattern) for variant in known):
            names = ", ".join(variant.name for variant in known)
            raise ValueError(f"'{pattern}' fits no variant for this number of ranks; there are: {names}.")
    chosen = [v for v in known if not patterns or any(fnmatchcase(v.name, pattern) for pattern in patterns)]
    if not any(variant.is_base for variant in chosen):
        chosen.insert(0, next(variant for variant in known if variant.is_base))
    return chosen
