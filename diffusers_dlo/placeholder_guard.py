# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns noticing that an operation reads the placeholder of a weight, and which weight that is. Must not decide when to
look, nor move weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from .units import Component, Unit
from .wrapped_tensor import plain_tensors


RE_POINTING = frozenset({torch.ops.aten._has_compatible_shallow_copy_type.default})
"""What `.data =` dispatches: it reads no value."""
_OUTSIDE = (
    "outside its block's turn, when its weights are not on the device. Name the ModuleLists that can stream with "
    "blocks=[...], or leave this component out with components=[...]"
)


def find_placeholders(component: Component) -> dict[int, tuple[Unit, int]]:
    """What each placeholder of a component stands for, by its storage."""
    return {
        tensor.placeholder.untyped_storage()._cdata: (unit, index)
        for unit in component.units
        for index, tensor in enumerate(unit.tensors)
    }


class PlaceholderGuard(TorchDispatchMode):
    """
    Raises when an operation reads the placeholder of a managed tensor, naming it. NaNs are no reliable alarm: a
    comparison swallows them, an integer has none.

    Args:
        allowed (`Collection`): operations that read no value; nor do those whose result is on the meta device.
        when (`str`): the end of the message: when it was read, and the way out.
        keep (`Callable`, *optional*): called first with a leaf whose placeholder is read; it may be there after that.
        is_over (`Callable`, *optional*): whether what it watches has ended without taking it off: it lets all pass.
    """

    def __init__(
        self,
        component: Component,
        allowed: Collection[Any] = RE_POINTING,
        when: str = _OUTSIDE,
        keep: Callable[[Unit], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._component = component
        self._allowed = allowed
        self._when = when
        self._keep = keep
        self._is_over = is_over
        self._below: list[TorchDispatchMode] = []
        self._placeholders = find_placeholders(component)

    def __enter__(self) -> Any:
        self._below = _get_current_dispatch_mode_stack()[-1:]
        return super().__enter__()

    def take_off(self) -> None:
        """
        Ends it wherever it is. After an interrupt, users may have entered modes of their own that are still on; or a
        mode that they left took this one off in its place, and is on still.
        """
        stack = _get_current_dispatch_mode_stack()
        last = [index for index, mode in enumerate(stack) if mode is self or mode in self._below][-1:]
        if not last:
            return
        above = [_pop_mode() for _ in range(len(stack) - 1 - last[0])]
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        reads = func not in self._allowed and str((kwargs or {}).get("device")) != "meta"
        for operand in tree_leaves((args, kwargs)) if reads else ():
            if not isinstance(operand, torch.Tensor) or operand.layout != torch.strided:
                continue
            for plain in plain_tensors(operand):
                found = self._find(plain)
                if found is not None and self._is_over():
                    return func(*args, **(kwargs or {}))
                if found is not None and self._keep is not None and found[0].layout.is_leaf:
                    self._keep(found[0])
                    found = self._find(plain)  # a view that was made before is still one of the placeholder
                if found is not None:
                    name = f"'{found[0].tensors[found[1]].name}' of '{self._component.name}'"
                    raise RuntimeError(f"{name} was read {self._when} ({func}).")
        return func(*args, **(kwargs or {}))

    def _find(self, operand: torch.Tensor) -> tuple[Unit, int] | None:
        return self._placeholders.get(operand.untyped_storage()._cdata)
