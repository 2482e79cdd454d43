# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns one tensor whose bytes stream: its places in modules, the stand-in that is in them meanwhile, and the original.
Must not know where the bytes are.
"""

from __future__ import annotations

import torch
from torch import nn

from .casts import set_pending_casts
from .quantized_parameter import is_known_parameter
from .tensor_utils import OwnedTensor, born_on_device, make_offload_placeholder, put, set_tensor_storage
from .twins import Twins


class ManagedTensor:
    """
    One tensor whose bytes stream: its places in modules, the device-born tensor that is in them meanwhile, and the
    original, which keeps its identity for the time after.

    Args:
        owned (`OwnedTensor`): the original and its places.
        device (`torch.device`): where the stand-in is born.
    """

    def __init__(self, owned: OwnedTensor, device: torch.device) -> None:
        self.name = owned.name
        self.owners = owned.owners
        self.original = owned.tensor
        self.stride = owned.tensor.stride()
        self.placeholder = make_offload_placeholder(owned.tensor, device)
        self.born = born_on_device(owned.tensor, self.placeholder)
        self._twins = Twins(owned, self.born, self.placeholder)
        self._has_twins = bool(owned.twins)
        # One that is re-pointed looks ordinary and has no version counter, so it is not to be used again.
        self._is_inference = owned.tensor.is_inference()
        self.kept = False
        "Whether it stays on the device: forward wrote to it, and its value is this rank's own, or reads it anywhere."
        self._version = self.born._version

    @property
    def held(self) -> list[torch.Tensor]:
        """What stands in modules for it: itself, and the wrappers that it is in."""
        return [self.born, *(owner.wrapper.current for owner in self.owners if owner.wrapper is not None)]

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter whose bytes it carries asks for gradients."""
        return any(tensor.requires_grad for tensor in self.held)

    def insert(self) -> None:
        """Puts the stand-in in the modules."""
        if is_known_parameter(self.original):
            vars(self.born).update(vars(self.original))  # what is beside it has been moved since
        put(self.owners, self.born)
        self._twins.insert()

    def drop_original(self) -> None:
        """Lets go of the original's memory, whose bytes are in a host store now; who kept a reference reads NaN."""
        if self.original.is_meta:  # coded: there never was any
            return
        dropped = make_offload_placeholder(self.original, self.original.device)
        set_tensor_storage(self.original, dropped)
        self._twins.point_originals(dropped)

    def lose(self) -> None:
        """The bytes are lost. What is put back is empty, so that any use of it raises."""
        self.original = nn.Parameter(torch.empty(0), requires_grad=False)
        self.restore(None)

    def check_unwritten(self) -> None:
        """
        Raises if somebody wrote to the placeholder.

        Raises:
            `RuntimeError`: naming the tensor: what was written has no effect.
        """
        if self.born._version != self._version or self.born.data_ptr() != self.placeholder.data_ptr():
            raise RuntimeError(
                f"'{self.name}' was written to while its block was not on the device, so the new value is lost. "
                "Disable the offload, change the weights, and enable it again."
            )

    def point(self, view: torch.Tensor) -> None:
        """Points the stand-in at a block's bytes in a slot."""
        self.born.data = view
        if self._has_twins:
            self._twins.point(view)

    def unpoint(self, view: torch.Tensor) -> None:
        """
        Points the stand-in at its placeholder again; a value that forward wrote, or put in its place (`.data =`), is
        kept on the device instead.
        """
        replaced = self.born.data_ptr() != view.data_ptr()
        if replaced or self.born._version != self._version:
            with torch.inference_mode(False):
                value = (self.born.detach() if replaced else view).clone()
            self.kept = True
            self._version = self.born._version
        else:
            value = self.placeholder
        self.born.data = value
        if self._has_twins:
            self._twins.point(value)

    def restore(self, value: torch.Tensor | None) -> None:
        """Puts the original back in the modules, with `value` as its memory; None leaves it what it has."""
        if value is not None:
            set_pending_casts(self.original, ())
            same_kind = torch._has_compatible_shallow_copy_type(self.original, value)
            if same_kind and not self._is_inference:
                set_tensor_storage(self.original, value)
                self._twins.point_originals(value)
            elif isinstance(self.original, nn.Parameter):
                self.original = born_on_device(self.original, value)
                self._twins.renew(self.original, value)
            else:
                self.original = value
        if isinstance(self.original, nn.Parameter):
            self.original.requires_grad_(self.born.requires_grad)
        self._twins.remove()
        for owner in self.owners:
            owner.restore(self.born, self.original)
