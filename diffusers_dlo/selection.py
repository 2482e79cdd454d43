# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which modules of what a user passes in stream, and whether their weights lie in mapped files. Pure: reads no
weights. Must not plan how they stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from .block_discovery import Selection, find_units, select_components
from .checkpoint.mapped import locate_tensors
from .checkpoint.remap import remap_function
from .config import DistributedLayerwiseOffloadConfig
from .validation import is_moved_by_others, refuse_fixed_addresses


def select(
    module_or_pipeline: object, config: DistributedLayerwiseOffloadConfig, components: Sequence[str] | None
) -> Selection:
    """
    The components of a pipeline, or of a single module, which is then the component `model`. Those that something
    else moves, and that would not stream, are left to it.
    """
    if isinstance(module_or_pipeline, nn.Module):
        if components is not None:
            raise ValueError("'components' belongs to a pipeline; a single module is one component.")
        return Selection({"model": _unwrap(module_or_pipeline, "model")}, frozenset(), {})
    named = getattr(module_or_pipeline, "components", None)
    if not isinstance(named, Mapping):
        raise TypeError(
            f"Expected a torch.nn.Module or a DiffusionPipeline, got {type(module_or_pipeline).__name__!r}."
        )
    modules = {name: _unwrap(value, name) for name, value in named.items() if isinstance(value, nn.Module)}
    selection = select_components(
        modules, components, config.blocks_of if isinstance(config.blocks, Mapping) else _class_decides
    )
    placed = {name: module for name, module in selection.placed.items() if not is_moved_by_others(module)}
    return replace(selection, placed=placed)


def _unwrap(module: nn.Module, name: str) -> nn.Module:
    refuse_fixed_addresses(module, module.forward, name)
    return unwrap_module(module)


def _class_decides(name: str) -> None:
    return None


def supports_mmap_loading(pipeline_or_module: object) -> bool:
    r"""
    Whether every component that would stream can be fed from mapped safetensors files: its class defines
    `_remap_ckpt_key`, or the weights of its blocks are views of mapped files already, as `from_pretrained` leaves them
    where the dtype is the file's. Reads no weights.

    Args:
        pipeline_or_module (`DiffusionPipeline` or `torch.nn.Module`): of a pipeline, the components that enabling
            without options would stream.
    """
    try:
        streamed = select(pipeline_or_module, DistributedLayerwiseOffloadConfig(), None).streamed
        return bool(streamed) and all(
            remap_function(module) is not None or _is_mapped(module) for module in streamed.values()
        )
    except (TypeError, ValueError, RuntimeError):
        return False  # nothing to stream, no blocks, or a file that was cut off


def _is_mapped(module: nn.Module) -> bool:
    parameters = [
        owned.tensor for unit in find_units(module)[0] for owned in unit.tensors if owned.owners[0].kind == "parameter"
    ]
    return len(locate_tensors(parameters).ranges) == len(parameters)
