# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns tensors whose bytes lie in other tensors inside them (traceable wrapper subclasses, as quantizers make them): the
plain tensors inside, making one anew around others, and which kinds that is safe for. Must not move bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


Path = tuple[str, ...]
"""The attributes that lead from a wrapper to a tensor inside it."""


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the bytes of `tensor` lie in tensors inside it: all of them, which is not so of a `DTensor`."""
    from torch.distributed.tensor import DTensor

    return is_traceable_wrapper_subclass(tensor) and tensor.layout == torch.strided and not isinstance(tensor, DTensor)


def inner_tensors(wrapper: torch.Tensor, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors inside a wrapper that are none themselves, in its order; whatever depth they are at."""
    for name in wrapper.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(wrapper, name)
        if is_wrapper(inner):
            yield from inner_tensors(inner, (*path, name))
        else:
            yield (*path, name), inner


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that carry the bytes of `tensor`: those inside a wrapper, else itself."""
    return (inner for _, inner in inner_tensors(tensor)) if is_wrapper(tensor) else iter((tensor,))


def rewrap(wrapper: torch.Tensor, inner: Mapping[Path, torch.Tensor]) -> torch.Tensor:
    """A wrapper like `wrapper`, a parameter if it is one, around other tensors: those of `inner`, by their path."""
    made = _rewrap(wrapper, inner, ())
    if isinstance(wrapper, nn.Parameter):
        made = nn.Parameter(made, requires_grad=wrapper.requires_grad)
    for path, tensor in inner.items():  # a parameter has views of them
        set_inner(made, path, tensor)
    return made


def _rewrap(wrapper: torch.Tensor, inner: Mapping[Path, torch.Tensor], path: Path) -> torch.Tensor:
    names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {}
    for name in names:
        part = getattr(wrapper, name)
        place = (*path, name)
        parts[name] = _rewrap(part, inner, place) if is_wrapper(part) else inner[place]
    unflatten = type(wrapper).__tensor_unflatten__  # type: ignore[attr-defined]
    return unflatten(parts, context, wrapper.size(), wrapper.stride())


def set_inner(wrapper: torch.Tensor, path: Path, tensor: torch.Tensor) -> None:
    """Puts `tensor` at a place inside a wrapper."""
    for name in path[:-1]:
        wrapper = getattr(wrapper, name)
    setattr(wrapper, path[-1], tensor)


def get_inner(wrapper: torch.Tensor, path: Path) -> torch.Tensor:
    """The tensor at a place inside a wrapper."""
    for name in path:
        wrapper = getattr(wrapper, name)
    return wrapper


def why_not_wrapped(wrapper: torch.Tensor) -> str | None:
    """Why a wrapper cannot be made anew around other tensors with nothing lost, or None."""
    inner = dict(inner_tensors(wrapper))
    for path, tensor in inner.items():
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return f"its '{'.'.join(path)}' is a {type(tensor).__name__} of layout {tensor.layout}"
    known = set(wrapper.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    for name, value in vars(wrapper).items():
        if isinstance(value, torch.Tensor) and name not in known:
            return f"its '{name}' is a tensor that it does not list among those inside it"
    try:
        again = rewrap(wrapper, {path: stand_in(tensor, tensor.device) for path, tensor in inner.items()})
    except Exception as error:  # whatever its class raises: it is not ours
        return f"it cannot be made anew ({type(error).__name__}: {error})"
    same = (type(again), again.dtype, again.shape, again.device) == (
        type(wrapper),
        wrapper.dtype,
        wrapper.shape,
        wrapper.device,
    )
    return None if same else "it is not the same when it is made anew"


def stand_in(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Something of the shape and dtype of `tensor` on `device`, of a single element, for a place to be filled."""
    return torch.empty((1,) * tensor.dim(), dtype=tensor.dtype, device=device).expand(tensor.shape)


class Wrapper:
    """
    A wrapper in a module, and what stands there for it while tensors inside it are others: the original is never
    changed, so it can come back as it was.

    Args:
        original (`torch.Tensor`): the wrapper.
    """

    def __init__(self, original: torch.Tensor) -> None:
        self.original = original
        self.current = original
        "What the modules hold."
        self.slots: list[tuple[dict, str]] = []
        "The modules' dictionaries that hold it, and the key in each."
        self._inner = dict(inner_tensors(original))

    def place(self, path: Path, tensor: torch.Tensor) -> None:
        """Has the modules hold a wrapper with `tensor` at a place inside; the original, where that is its own."""
        if tensor is self._inner[path]:
            self._hold(self.original)
            return
        if self.current is self.original or self.current.device != tensor.device:
            self._hold(self._around(tensor.device))
        set_inner(self.current, path, tensor)

    def settle(self, device: torch.device) -> None:
        """All that stays of it is on `device` now: has the modules hold a wrapper that says so."""
        if self.current.device != device:
            self._hold(self._around(device))

    def restore(self, path: Path, tensor: torch.Tensor) -> None:
        """Has the modules hold the original again, with `tensor` at a place inside."""
        if get_inner(self.original, path) is not tensor:
            set_inner(self.original, path, tensor)
        self._hold(self.original)

    def _around(self, device: torch.device) -> torch.Tensor:
        """A new one on `device`, with what is there already; places for the rest."""
        inner = inner_tensors(self.current)
        return rewrap(self.current, {p: t if t.device == device else stand_in(t, device) for p, t in inner})

    def _hold(self, wrapper: torch.Tensor) -> None:
        for slots, key in self.slots:
            if slots.get(key) is self.current:
                slots[key] = wrapper
        self.current = wrapper
