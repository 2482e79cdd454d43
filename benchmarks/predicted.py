# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the package's planner says that variants take, on links of given rates. Pure: needs no device and no weights.
Must not know what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from sizes import ModelFacts, Workload, make_meta_model, weigh
from variants import Variant

from diffusers_dlo import DistributedLayerwiseOffloadConfig, plan_distributed_layerwise_offload
from diffusers_dlo.compute_estimate import Tokens, block_flops
from diffusers_dlo.offload_plan import OffloadPlan
from diffusers_dlo.planner import predict
from diffusers_dlo.prediction import Machine, Work
from diffusers_dlo.simulation import Links


@cache
def make_plan(config: tuple[tuple[str, Any], ...], dtype: torch.dtype) -> OffloadPlan:
    """The plan of a model, which takes a second to make."""
    return plan_distributed_layerwise_offload(make_meta_model(dict(config), dtype))


class Predicted:
    """
    The predictions for one model on one machine.

    Args:
        config (`Mapping`), dtype (`torch.dtype`): the model.
        ranks (`int`): of the run; a variant may have smaller groups of them.
        links (`Mapping`): rates in bytes per second, as `merge_links` of `results.py` gives them. Pulls are not
            measured; for what is pulled, the planner's own rate between devices counts.
        device_nbytes (`int`, *optional*): of a device; without it nothing is predicted for a budget of `"auto"`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        ranks: int,
        links: Mapping[str, Any],
        device_nbytes: int | None = None,
    ) -> None:
        self._model = tuple(config.items())
        self._dtype = dtype
        self._ranks = ranks
        self._links = links
        self._device_nbytes = device_nbytes
        self._facts: ModelFacts = weigh(config, dtype)
        self._found: dict[tuple[str, str, float | None], float | None] = {}

    def seconds(self, variant: Variant, workload: Workload, compute: float | None) -> float | None:
        """
        Of one forward, from what computing alone takes (estimated from the tokens if None); None where the planner
        has nothing to say: other ways than this package's, coded weights, of which it knows a usual size only, and
        `"auto"` where the device's memory is not known.
        """
        is_auto = variant.budget == "auto"
        if variant.family != "dlo" or variant.is_coded or (is_auto and self._device_nbytes is None):
            return None
        key = (variant.name, workload.name, compute)
        if key not in self._found:
            self._found[key] = self._predict(variant, workload, compute, self._device_nbytes if is_auto else None)
        return self._found[key]

    def compute_seconds(self, workload: Workload) -> float:
        """What computing alone takes, estimated from the tokens."""
        tokens = Tokens(workload.tokens, workload.text_tokens)
        blocks = make_plan(self._model, self._dtype).blocks
        return sum(block_flops(block, tokens) for block in blocks) / (Work().tflops * 1e12)

    def _predict(
        self, variant: Variant, workload: Workload, compute: float | None, device_nbytes: int | None
    ) -> float | None:
        options = variant.enabling_options(self._facts, self._ranks)
        budget = options.get("device_budget")
        plan = replace(make_plan(self._model, self._dtype), group_size=options.get("group", self._ranks))
        work = Work(workload.tokens, workload.text_tokens, compute)
        slots = DistributedLayerwiseOffloadConfig(
            num_slots=options.get("num_slots", "auto"), device_budget=budget
        ).slots

        def by_gather(links: Links) -> dict[str, float]:
            found = predict(plan, Machine(device_nbytes, links=links), work, num_slots=slots, device_budget=budget)
            fitting = [option for option in found.options if option.transfer == options["transfer"] and option.fits]
            return {option.gather: option.seconds for option in fitting}

        pulls = budget is not None and options.get("gather") != "collective"
        found = by_gather(self._rates(variant))
        if pulls and "pull" in found:
            return by_gather(Links(h2d=self._rates(variant).h2d))["pull"]
        # No such option: something streams, is gathered by a collective and sets the time.
        return found.get("collective", found.get(""))

    def _rates(self, variant: Variant) -> Links:
        h2d = self._links["h2d_together_bytes_per_s"]
        group = variant.shards(self._ranks)
        if group == 1:
            return Links(h2d=h2d)
        # What was measured counts the whole block; a rank receives the others' shards of it.
        return Links(h2d=h2d, gather=self._links["gather_in_groups"][group] * (group - 1) / group)
