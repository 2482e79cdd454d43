# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the other tensors that show the memory of a quantized parameter: they are pointed wherever it is, so that nobody
computes with what they showed before. Must not decide where that is.
"""

from __future__ import annotations

import torch

from .owned_tensor import OwnedTensor
from .quantized_parameter import side_holders


class Twins:
    """
    The twins of one streamed parameter: the originals, and what stands in for them in the objects beside `born`.

    Args:
        owned (`OwnedTensor`): the parameter, with its twins.
        born (`torch.Tensor`): what takes its place.
        placeholder (`torch.Tensor`): what that shows while the bytes are elsewhere.
    """

    def __init__(self, owned: OwnedTensor, born: torch.Tensor, placeholder: torch.Tensor) -> None:
        self._born = born
        self._modules = [owner.module for owner in owned.owners]
        twins = owned.twins.values()
        self._pairs = [(twin, placeholder.view(placeholder.shape)) for twin in twins] if twins else []

    def insert(self) -> None:
        """Puts the stand-ins beside what takes the parameter's place; the parameter itself keeps its own."""
        self._exchange({id(original): standing for original, standing in self._pairs})

    def remove(self) -> None:
        """Puts the originals back, wherever forward has put the stand-ins since."""
        self._exchange({id(standing): original for original, standing in self._pairs})

    def point(self, view: torch.Tensor) -> None:
        """Points the stand-ins at the bytes."""
        for _, standing in self._pairs:
            standing.data = view

    def point_originals(self, value: torch.Tensor) -> None:
        """Points the originals at what is the parameter's memory now."""
        for original, _ in self._pairs:
            original.data = value

    def renew(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Others take the place of the originals, beside a `parameter` that was made anew over `value`."""
        others = {id(original): value.view(value.shape) for original, _ in self._pairs}
        self._pairs = [(others[id(original)], standing) for original, standing in self._pairs]
        vars(parameter).update({k: others[id(v)] for k, v in vars(parameter).items() if id(v) in others})

    def _exchange(self, others: dict[int, torch.Tensor]) -> None:
        for module in self._modules if others else ():
            for holder, _ in side_holders(self._born, module):
                attributes = vars(holder)
                for name, value in attributes.items():
                    if id(value) in others:
                        attributes[name] = others[id(value)]
