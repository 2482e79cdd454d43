# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns code to paste: how a checkpoint is loaded and offloaded, with recommended settings or none. Must not choose them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .device.ans_codec import ANS


if TYPE_CHECKING:
    from .outline import Outline
    from .prediction import Option, Prediction


def code_to_paste(outline: Outline, prediction: Prediction) -> str:
    """The recommended settings as a script; empty where something does not fit."""
    option = prediction.best
    if option is None or prediction.shortfalls:
        return ""
    ranks = option.plan.group_size
    pull = ["# Where the devices can map each other's memory, shards that stay are pulled."]
    code = _script(outline, outline.model, _settings(outline, option), pull if option.gather == "pull" else [])
    return (f"# torchrun --nproc_per_node {ranks} script.py\n" if ranks > 1 else "") + code


def usage_code(outline: Outline, name: str) -> str:
    """A script that loads the checkpoint by this name, and offloads it with the default settings."""
    return _script(outline, name, _chosen(outline), [])


def pack_command(outline: Outline, ranks: int) -> str:
    """What to type to have the weights coded for a number of ranks, by a codec of the devices."""
    dtype = str(outline.dtype).removeprefix("torch.")
    return f"diffusers-dlo pack {shlex.quote(outline.model)} OUT --dtype {dtype} --codec {ANS} --ranks {ranks}"


def _script(outline: Outline, name: str, settings: Sequence[str], notes: Sequence[str]) -> str:
    from_transformers = not outline.is_pipeline and outline.library == "transformers"
    variable = "pipe" if outline.is_pipeline else "model"
    load = f"{variable} = {outline.class_name}.from_pretrained({json.dumps(name)}, dtype={outline.dtype})"
    lines = [
        "import torch",
        f"from {outline.library} import {outline.class_name}",
        "",
        "import diffusers_dlo",
        "",
        "",
    ]
    if outline.cast_nbytes:
        lines += ["with diffusers_dlo.mapped_loading():", f"    {load}"]
    else:
        lines.append(load)
    lines += notes
    if from_transformers:
        arguments = ", ".join(["model", *settings])
        lines.append(f"diffusers_dlo.apply_distributed_layerwise_offload({arguments})")
    else:
        lines.append(f"{variable}.enable_distributed_layerwise_offload({', '.join(settings)})")
    return "\n".join(lines) + "\n"


def _settings(outline: Outline, option: Option) -> list[str]:
    """What differs from the defaults."""
    settings = []
    if option.transfer == "local" and option.plan.group_size > 1:
        settings.append('transfer="local"')
    if option.plan.num_slots != (3 if option.budget else 2):
        settings.append(f"num_slots={option.plan.num_slots}")
    if option.budget:
        settings.append(f"device_budget={amount_to_paste(option.budget)}")
    return settings + _chosen(outline)


def _chosen(outline: Outline) -> list[str]:
    return [f"components={json.dumps(outline.chosen)}"] if outline.chosen else []


def amount_to_paste(nbytes: int) -> str:
    """An amount of memory as an option takes it: text where that is as exact as a number."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes % factor == 0:
            return f'"{nbytes // factor}{unit}"'
    return str(nbytes)
