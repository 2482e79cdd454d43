# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is known of quantized parameters that are no wrappers: which subclasses of `nn.Parameter` hold nothing but
bytes, the tensors beside those bytes that say what they mean, and when one is not ready to stream. Must not change
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_KNOWN = {("bitsandbytes", "Params4bit"), ("bitsandbytes", "Int8Params"), ("diffusers", "GGUFParameter")}
"""Package and class of those whose bytes are in their own memory, and of which `.data =` keeps everything else."""


def is_known_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class of quantized parameters whose memory may be re-pointed."""
    return type(tensor) not in _PLAIN and (_package_of(tensor), type(tensor).__name__) in _KNOWN


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are in its own memory, and its class changes nothing about that."""
    return type(tensor) in _PLAIN or is_known_parameter(tensor)


class Side(NamedTuple):
    """A tensor beside a quantized parameter: the object that holds it, its attribute there, its name, itself."""

    holder: Any
    attribute: str
    name: str
    tensor: torch.Tensor


def side_tensors(parameter: torch.Tensor, module: nn.Module) -> Iterator[Side]:
    """
    The tensors beside the bytes of a quantized parameter: scales and code books, and what shows its bytes a second
    time. They are found in its own attributes, and in the objects that its package keeps in those and on `module`.
    """
    for holder, path in side_holders(parameter, module):
        for attribute, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                yield Side(holder, attribute, f"{path}.{attribute}" if path else attribute, value)


def side_holders(parameter: torch.Tensor, module: nn.Module) -> list[tuple[Any, str]]:
    """The objects in whose attributes `side_tensors` looks, each with its path; the parameter is the first."""
    package = _package_of(parameter)
    found: list[tuple[Any, str]] = [(parameter, "")]
    seen = {id(parameter), id(module)}
    todo: list[tuple[Any, str]] = [(parameter, ""), (module, "")]
    while todo:
        owner, path = todo.pop(0)
        for attribute, value in vars(owner).items():
            known = _package_of(value) == package and not isinstance(value, (nn.Module, torch.Tensor))
            if known and hasattr(value, "__dict__") and id(value) not in seen:
                seen.add(id(value))
                found.append((value, f"{path}.{attribute}" if path else attribute))
                todo.append(found[-1])
    return found


def shows_memory_of(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is the whole of a parameter's memory once more."""
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()) == (
        parameter.device,
        parameter.dtype,
        parameter.shape,
        parameter.stride(),
        parameter.data_ptr(),
    )


def why_not_ready(parameter: torch.Tensor) -> str | None:
    """What keeps a parameter of a known class from being streamed or placed as it is, with the remedy, or None."""
    name = type(parameter).__name__
    waits = name == "Params4bit" and not parameter.bnb_quantized  # type: ignore[attr-defined]
    if waits or (name == "Int8Params" and parameter.dtype != torch.int8):
        return "has not been quantized yet, which a move to a device does. Move the model with .to(...) first"
    if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
        return (
            "was packed anew by a forward on the CPU, for that alone. Load the model again, and enable before it runs"
        )
    return None


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]
