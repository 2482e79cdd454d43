# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the way from the name of a checkpoint to its prediction. Must not print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch

from .coding.codec import ON_HOST
from .config import DistributedLayerwiseOffloadConfig
from .offload_plan import plan_distributed_layerwise_offload
from .outline import Outline, open_outline
from .planned_coding import assume_coded, with_coded_blocks
from .planner import predict
from .prediction import Machine, Prediction, Work
from .prediction_page import draw_timeline
from .prediction_values import as_values


def plan_checkpoint(
    model: str,
    ranks: int,
    machine: Machine,
    work: Work,
    *,
    dtype: torch.dtype | None = None,
    config: DistributedLayerwiseOffloadConfig | None = None,
    components: Sequence[str] | None = None,
) -> tuple[Outline, Prediction]:
    r"""
    What a checkpoint would take, from its configurations and the headers of its files.

    Args:
        model (`str`), dtype (`torch.dtype`, *optional*): as for `open_outline`.
        ranks (`int`): of one host, which share the weights.
        machine (`Machine`), work (`Work`): as for `predict`.
        config (`DistributedLayerwiseOffloadConfig`, *optional*): its `num_slots` and `device_budget` count.
        components (`Sequence[str]`, *optional*): as for enabling.

    Raises:
        `ValueError`: as `open_outline`, `plan_distributed_layerwise_offload` and `with_coded_blocks`.
    """
    from diffusers import ModelMixin

    config = config if config is not None else DistributedLayerwiseOffloadConfig()
    outline = open_outline(model, dtype, components)
    planned = outline if outline.is_pipeline else outline.components["model"]
    plan = plan_distributed_layerwise_offload(planned, config, ranks, components=components)  # type: ignore[arg-type]
    plan = replace(plan, placed=(*plan.placed, *outline.unknown))
    plan = with_coded_blocks(plan, outline.coded)
    if any(file.codec == ON_HOST for file in outline.coded.values()):
        plan = replace(plan, host="packed")  # no device decodes it
    codable = [name for name, module in outline.components.items() if isinstance(module, ModelMixin)]
    coded_plan = None if outline.coded else assume_coded(plan, machine.coded_ratio, codable)
    prediction = predict(
        plan,
        machine,
        work,
        num_slots=config.num_slots,
        device_budget=config.device_budget,
        coded_plan=coded_plan,
    )
    return outline, prediction


def write_json(outline: Outline, prediction: Prediction, path: str) -> None:
    """Writes a prediction to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(as_values(outline, prediction), file, indent=2)
        file.write("\n")


def write_timeline(prediction: Prediction, path: str) -> None:
    """Draws the first denoiser's forward, with the recommended settings, to a file."""
    option = prediction.best or prediction.options[0]
    forward = option.denoisers[0]
    draw_timeline(forward.simulation, f"{forward.component}, {option.plan.group_size} ranks, simulated", path)
