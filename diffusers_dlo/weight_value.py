# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns reading one weight's value, without a copy where it streams. Must not change anything."""

from __future__ import annotations

import torch
from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from .casts import cast
from .process_engine import find_streamed
from .tensor_utils import of_kind
from .wrapped_tensor import inner_tensors, is_wrapper, rewrap


def host_view(module: nn.Module, name: str) -> torch.Tensor:
    r"""
    The value of a parameter or buffer, whether it streams or not; for reading only. Of one that streams, it is a view
    of the host store on the CPU: nothing is copied, and no other rank takes part.

    Args:
        module (`torch.nn.Module`): an offloaded model, a part of it, or any other module.
        name (`str`): the name within `module`, as `named_parameters` or `named_buffers` give it.

    Raises:
        `ValueError`: there is no such name. `RuntimeError`: the host store has only shards (`"pinned"` with
        `all_gather`), or the file that the weights are in has changed.
    """
    path, _, attribute = name.rpartition(".")
    try:
        owner = unwrap_module(module).get_submodule(path)
        tensor = owner._parameters[attribute] if attribute in owner._parameters else owner._buffers[attribute]
    except (AttributeError, KeyError):
        tensor = None
    if tensor is None:
        raise ValueError(f"'{type(module).__name__}' has no parameter or buffer '{name}'; see its named_parameters().")
    if not is_wrapper(tensor):
        return _value_of(tensor)
    values = {path: _value_of(inner) for path, inner in inner_tensors(tensor)}
    on_host = any(find_streamed(inner) is not None for _, inner in inner_tensors(tensor))
    device = torch.device("cpu") if on_host else tensor.device
    return rewrap(tensor, {path: value.to(device) for path, value in values.items()}).detach()


def _value_of(tensor: torch.Tensor) -> torch.Tensor:
    found = find_streamed(tensor)
    if found is None:
        return cast(tensor).detach()
    unit, index = found
    detached = tensor.detach()
    return detached if unit.tensors[index].kept else of_kind(detached, unit.value(index))
