# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns finding the plain tensors that carry the bytes of a module's parameters and buffers, and the places that hold
each: in the module, inside a wrapper, or beside a quantized parameter. Must not decide which of them stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .quantized_parameter import is_known_parameter, shows_memory_of, side_tensors
from .wrapped_tensor import Path, Wrapper, inner_tensors, is_wrapper


SIDE = "side tensor"
"""The kind of what a quantized parameter needs beside its bytes: it stays on the device."""


@dataclass(frozen=True)
class Owner:
    """
    One place where a module holds a tensor: its own dictionary; `path` inside the `wrapper` that is there; or an
    attribute of `holder`, an object beside a quantized parameter.
    """

    module: nn.Module
    attribute: str
    name: str
    kind: str
    '`"parameter"`, `"buffer"`, `"non-persistent buffer"` or `"side tensor"`'
    wrapper: Wrapper | None = None
    path: Path = ()
    holder: Any = None

    @property
    def slots(self) -> dict:
        """The dictionary that holds the tensor, or the wrapper that it is in."""
        if self.holder is not None:
            return vars(self.holder)
        return self.module._parameters if self.kind == "parameter" else self.module._buffers

    def put(self, tensor: torch.Tensor) -> None:
        """Puts `tensor` in this place."""
        if self.wrapper is not None:
            self.wrapper.place(self.path, tensor)
        else:
            self.slots[self.attribute] = tensor

    def restore(self, stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
        """Puts back the `tensor` that was there at first, or what has become of it, unless somebody put another."""
        if self.wrapper is not None:
            if self.slots.get(self.attribute) is self.wrapper.current:
                self.wrapper.restore(self.path, tensor)
        elif self.slots.get(self.attribute) is stand_in:
            self.slots[self.attribute] = tensor


@dataclass
class OwnedTensor:
    """
    A tensor together with every place that holds it. `twins` are other tensors beside it that show the whole of its
    memory, by id.
    """

    tensor: torch.Tensor
    owners: list[Owner] = field(default_factory=list)
    twins: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.owners[0].name


class _Finding:
    """Owned tensors that are being found, by identity."""

    def __init__(self) -> None:
        self.found: dict[int, OwnedTensor] = {}
        self._wrappers: dict[int, Wrapper] = {}

    def add(self, tensor: torch.Tensor, owner: Owner) -> None:
        """
        A place that holds a tensor with memory of its own. What is beside a quantized parameter comes before it: who
        makes the parameter anew takes that along.
        """
        owned = self.found.get(id(tensor), OwnedTensor(tensor))
        if is_known_parameter(tensor):
            self._add_sides(owned, owner)
        owned.owners.append(owner)
        self.found[id(tensor)] = owned

    def add_wrapper(self, tensor: torch.Tensor, place: Owner) -> None:
        """A place that holds a wrapper."""
        wrapper = self._wrappers.setdefault(id(tensor), Wrapper(tensor))
        wrapper.slots.append((place.slots, place.attribute))
        for path, inner in inner_tensors(tensor):
            name = ".".join((place.name, *path))
            self.add(inner, Owner(place.module, place.attribute, name, place.kind, wrapper, path))

    def _add_sides(self, owned: OwnedTensor, place: Owner) -> None:
        for side in side_tensors(owned.tensor, place.module):
            if shows_memory_of(owned.tensor, side.tensor):
                owned.twins[id(side.tensor)] = side.tensor
            else:
                name = f"{place.name}.{side.name}"
                self.add(side.tensor, Owner(place.module, side.attribute, name, SIDE, holder=side.holder))


def owned_tensors(module: nn.Module) -> list[OwnedTensor]:
    """
    Every tensor that carries bytes of the parameters and buffers of `module`, each once, in order of registration,
    keyed by identity and not by name.
    """
    finding = _Finding()
    for path, submodule in module.named_modules():
        for kind, tensors in (("parameter", submodule._parameters), ("buffer", submodule._buffers)):
            for attribute, tensor in tensors.items():
                if tensor is None:
                    continue
                name = f"{path}.{attribute}" if path else attribute
                if kind == "buffer" and attribute in submodule._non_persistent_buffers_set:
                    place = Owner(submodule, attribute, name, "non-persistent buffer")
                else:
                    place = Owner(submodule, attribute, name, kind)
                if is_wrapper(tensor):
                    finding.add_wrapper(tensor, place)
                else:
                    finding.add(tensor, place)
    return list(finding.found.values())


def put(owners: Iterable[Owner], tensor: torch.Tensor) -> None:
    """Puts `tensor` in every place of `owners`."""
    for owner in owners:
        owner.put(tensor)
