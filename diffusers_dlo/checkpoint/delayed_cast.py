# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tensors that stand for a cast which has not been done, and the modes that make them. Must not know which tensors
lie in files, nor of models.

[Note: Casts put off]
    While a model is being loaded, a cast of a tensor that lies in a mapped file gives a `DelayedCast`: a tensor that
    has the dtype, shape and strides of the result and nothing else. Whatever the loader does with it but look at it,
    alias it or cast it on does the cast first and then goes on with ordinary memory, so that loading means what it
    always means. When the outermost call returns, each `DelayedCast` that the model holds gives way to an ordinary
    parameter over the file, with the casts left as its `pending_casts`. One that a loader keeps elsewhere stays what
    it is, and right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..tensor_utils import is_dense


@dataclass
class Elements:
    """
    The elements that one or several `DelayedCast` stand for: a tensor in the file and the casts to be done, or, from
    when something needed them to have memory, that memory.
    """

    source: torch.Tensor
    casts: tuple[torch.dtype, ...] = ()
    original: torch.Tensor | None = None
    """What the loader cast. `source` is an alias of it that does not see it re-pointed, nor count writes to it."""
    version: int = 0

    @classmethod
    def of_cast(cls, tensor: torch.Tensor, dtype: torch.dtype) -> Elements:
        """Those of `tensor` after a cast to `dtype`."""
        if tensor.is_inference():  # which counts no writes
            return cls(tensor.detach(), (dtype,))
        return cls(tensor.detach(), (dtype,), tensor, tensor._version)

    def then(self, dtype: torch.dtype) -> Elements:
        """These elements, cast once more."""
        return Elements(self.source, (*self.casts, dtype), self.original, self.version)

    def check_unwritten(self) -> None:
        """
        Raises:
            `RuntimeError`: the tensor was written to after it was cast, and what it held is lost.
        """
        if self.original is not None and self.original._version != self.version:
            raise RuntimeError(
                f"A tensor of shape {tuple(self.source.shape)} was written to after the loader had cast it, and under "
                "mapped_loading the cast waits. Load this model without mapped_loading."
            )

    def compute(self) -> torch.Tensor:
        """The elements; in memory of their own for as long as casts wait."""
        self.check_unwritten()
        value = self.source
        for dtype in self.casts:
            # Not `.to`, which would be put off in its turn; it does the same.
            value = torch.empty_like(value, dtype=dtype).copy_(value)
        return value

    def keep(self) -> torch.Tensor:
        """The elements, in the one memory that all who share them see from now on."""
        with torch.no_grad():
            self.source, self.casts, self.original = self.compute(), (), None
        return self.source


class DelayedCast(torch.Tensor):
    """What a cast gives while a model loads; see [Note: Casts put off]."""

    elements: Elements

    @staticmethod
    def __new__(cls, elements: Elements) -> DelayedCast:
        like, dtype = elements.source, (elements.source.dtype, *elements.casts)[-1]
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )

    def __init__(self, elements: Elements) -> None:
        self.elements = elements

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            copied = self.elements.compute().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(copied, requires_grad=self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], DelayedCast):
            return args[0]._assign(args[1])
        if func in _READ_MEMORY:
            args = tree_map(_kept, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        composed = func.decompose(*args, **kwargs)  # in inference mode they come as they were called
        if composed is not NotImplemented:
            return composed
        if func in _ALIAS:
            return DelayedCast(args[0].elements)
        if func is torch.ops.aten._to_copy.default and args[0].elements.casts and _can_wait(args[0], **kwargs):
            return DelayedCast(args[0].elements.then(kwargs["dtype"]))
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} on a weight being loaded is not supported under mapped_loading.")
        shares = any(argument.alias_info is not None for argument in func._schema.arguments)
        stands_for: dict[int, tuple[torch.Tensor, DelayedCast]] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, DelayedCast):
                return leaf
            value = leaf.elements.keep() if shares else leaf.elements.compute()
            stands_for[id(value)] = (value, leaf)
            return value

        result = func(*tree_map(real, args), **tree_map(real, kwargs))
        return tree_map(lambda leaf: stands_for[id(leaf)][1] if id(leaf) in stands_for else leaf, result)

    def _assign(self, value: torch.Tensor) -> None:
        """`self.data = value`."""
        other = value if isinstance(value, DelayedCast) else DelayedCast(Elements(value.detach()))
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(self, other)
        self.elements = other.elements


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ALIAS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_READ_MEMORY = {
    getattr(torch.Tensor, name)
    for name in (
        "__array__",
        "__dlpack__",
        "__reduce_ex__",
        "_typed_storage",
        "data_ptr",
        "is_shared",
        "numpy",
        "share_memory_",
        "storage",
        "tolist",
        "untyped_storage",
    )
}
"""What reads memory past the dispatcher."""


def _kept(leaf: Any) -> Any:
    return leaf.elements.keep() if isinstance(leaf, DelayedCast) else leaf


def _can_wait(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> bool:
    """Whether a copy (the arguments are those of `aten::_to_copy`) changes the floating dtype and nothing else."""
    return (
        dtype is not None
        and dtype != tensor.dtype
        and dtype.is_floating_point
        and tensor.dtype.is_floating_point
        and tensor.device.type == "cpu"
        and (device is None or device.type == "cpu")
        and layout in (None, torch.strided)
        and tensor.layout == torch.strided
        and not pin_memory
        and (
            memory_format in (None, torch.preserve_format)
            or (memory_format == torch.contiguous_format and tensor.is_contiguous())
        )
        and tensor.numel() > 0
        and is_dense(tensor)
        and not tensor.is_neg()
    )


class PutOffCasts(TorchDispatchMode):
    """Gives a `DelayedCast` for a cast of a tensor that `may_wait`."""

    def __init__(self, may_wait: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._may_wait = may_wait

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.to:  # in inference mode; it ends in the copy
            with self:
                return func.decompose(*args, **kwargs)
        if (
            func is torch.ops.aten._to_copy.default
            and type(args[0]) in (torch.Tensor, nn.Parameter)
            and _can_wait(args[0], **kwargs)
            and self._may_wait(args[0])
        ):
            return DelayedCast(Elements.of_cast(args[0], kwargs["dtype"]))
        return func(*args, **kwargs)


class DataAssignment(TorchFunctionMode):
    """
    Does the cast where an ordinary tensor is re-pointed at a `DelayedCast`: torch would take it for a tensor with
    memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func == _SET_DATA and not isinstance(args[0], DelayedCast):
            args = tree_map(_kept, args)
        return func(*args, **(kwargs or {}))
