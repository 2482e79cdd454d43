# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of the PEFT adapters on a model: their layers, names and configurations, and taking some out. Must
not know what streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from diffusers.utils import is_peft_available, recurse_remove_peft_layers
from torch import nn


def tuner_layers(root: nn.Module) -> list[tuple[str, Any]]:
    """The layers of a model that PEFT has put adapters on, by their names."""
    return [(path, module) for path, module in root.named_modules() if _is_tuner_layer(module)]


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


class Adapters:
    """
    The adapters that a model has, so that what a loader that fails adds can be taken out again; it may have got to
    some layers only, or to none.

    Args:
        root (`nn.Module`): the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root: Any = root
        self._names = {*adapter_names(root), *(getattr(root, "peft_config", None) or {})}
        self._active = {id(layer): (layer, list(layer.active_adapters)) for _, layer in tuner_layers(root)}
        self._marks = {name: vars(root)[name] for name in ("_hf_peft_config_loaded",) if name in vars(root)}

    def restore(self) -> None:
        """Takes out what was not there when this was made."""
        root = self._root
        if not self._names:
            if tuner_layers(root):
                recurse_remove_peft_layers(root)
            vars(root).pop("peft_config", None)
            vars(root).pop("_hf_peft_config_loaded", None)
            vars(root).update(self._marks)
            return
        configs = getattr(root, "peft_config", {})
        for name in {*adapter_names(root), *configs} - self._names:
            for _, layer in tuner_layers(root):
                layer.delete_adapter(name)
            configs.pop(name, None)
        for layer, active in self._active.values():
            if list(layer.active_adapters) != active:
                layer.set_adapter(active)
        for parent in list(root.modules()):
            for name, child in list(parent.named_children()):
                if _is_tuner_layer(child) and id(child) not in self._active:
                    setattr(parent, name, child.get_base_layer())


def _is_tuner_layer(module: nn.Module) -> TypeGuard[Any]:
    if not is_peft_available():
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)
