# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of the PEFT adapters on a model: their layers, names and configurations, and taking some out. Must
not know what streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.utils import is_peft_available, recurse_remove_peft_layers
from torch import nn


def tuner_layers(root: nn.Module) -> list[tuple[str, Any]]:
    """The layers of a model that PEFT has put adapters on, by their names."""
    if not is_peft_available():
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(path, module) for path, module in root.named_modules() if isinstance(module, BaseTunerLayer)]


def adapter_modules(root: nn.Module) -> set[int]:
    """The ids of modules that belong to PEFT adapters and not to the base layer they wrap."""
    found: set[int] = set()
    for _, layer in tuner_layers(root):
        base = {id(m) for m in layer.get_base_layer().modules()}
        found |= {id(m) for m in layer.modules() if id(m) not in base and m is not layer}
    return found


def adapter_configs(root: nn.Module) -> tuple[object, ...]:
    """The configurations of the PEFT adapters of a model, which tell whether others came or went."""
    return tuple((getattr(root, "peft_config", None) or {}).values())


def same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


def adapter_names(root: nn.Module) -> set[str]:
    """The names of the adapters that any layer of a model has."""
    return {
        name
        for _, layer in tuner_layers(root)
        for attribute in layer.adapter_layer_names
        for name in getattr(layer, attribute, ())
    }


def take_out(root: nn.Module, before: set[str]) -> None:
    """Takes out adapters that were not there before; they may be in some layers only."""
    if not before and tuner_layers(root):
        recurse_remove_peft_layers(root)
        vars(root).pop("peft_config", None)
        root._hf_peft_config_loaded = False  # type: ignore[assignment]
        return
    for name in adapter_names(root) - before:
        for _, layer in tuner_layers(root):
            layer.delete_adapter(name)
        getattr(root, "peft_config", {}).pop(name, None)
