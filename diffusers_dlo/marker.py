# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns our entry in the registry of a component's root: put on, and taken off so that all other hooks stay as they were.
Must not move weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from torch import nn


MARKER = "distributed_layerwise_offload"


class DistributedLayerwiseOffloadHook(ModelHook):
    """
    An inert entry in a model's `HookRegistry`: it shows in its `repr`, and removing it (`remove_hook(MARKER)`)
    disables the offload. Weights are moved by forward hooks, never here.
    """

    def __init__(self, on_removal: Callable[[], None]) -> None:
        super().__init__()
        self.leaving = False
        self.installed: Any = None
        "the model's `forward` as the registry left it"
        self._on_removal = on_removal

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """What diffusers calls when the hook is removed: by its own tools, unless we are `leaving` ourselves."""
        _mend_over(module)
        if not self.leaving:
            self.leaving = True
            self._on_removal()
        return module


def put_marker(root: nn.Module, on_removal: Callable[[], None]) -> None:
    """
    Registers the entry; `on_removal` is called when somebody else removes it. It only has to be called if hooks are
    under it, which the registry takes out of the chain through it. Without any, `forward` stays as it is: some expect
    the class's own.
    """
    marker, before = DistributedLayerwiseOffloadHook(on_removal), vars(root).get("forward")
    registry = HookRegistry.check_if_exists_or_initialize(root)
    registry.register_hook(marker, MARKER)
    if len(registry.hooks) == 1:
        _set_forward(root, before)
    marker.installed = vars(root).get("forward")


def remove_marker(root: nn.Module) -> None:
    """Takes the entry off, unless that is under way or done."""
    registry: HookRegistry | None = getattr(root, "_diffusers_hook", None)
    marker = registry.get_hook(MARKER) if registry is not None else None
    if registry is None or not isinstance(marker, DistributedLayerwiseOffloadHook) or marker.leaving:
        return
    marker.leaving = True
    forward = vars(root).get("forward")
    # Others exchange `forward` past the registry, which would put back what it was before them.
    is_exchanged = registry._hook_order[-1] == MARKER and forward is not marker.installed
    registry.remove_hook(MARKER, recurse=False)
    if is_exchanged:
        _set_forward(root, forward)
    if not registry.hooks:  # the registry leaves the class's own method on the instance, and itself
        if getattr(vars(root).get("forward"), "__func__", None) is type(root).forward:
            del root.forward
        del root._diffusers_hook


def _set_forward(root: nn.Module, forward: Any) -> None:
    """Gives a module a `forward` of its own, or its class's where that is None."""
    vars(root).pop("forward", None)
    if forward is not None:
        root.forward = forward


def _mend_over(root: nn.Module) -> None:
    """
    The registry has just taken the entry out of the chain. A hook over it that replaces forward calls what lies under
    it through `original_forward`, but the registry writes to `forward`, and the hook would be left out.
    """
    registry: HookRegistry = root._diffusers_hook  # type: ignore[assignment]
    over = registry._hook_order.index(MARKER) + 1
    if over == len(registry._hook_order) or registry._fn_refs[over].original_forward is None:
        return
    reference, hook = registry._fn_refs[over], registry.hooks[registry._hook_order[over]]
    replacement = functools.partial(hook.new_forward, root)  # type: ignore[attr-defined]
    reference.original_forward = reference.forward
    reference.forward = functools.update_wrapper(replacement, hook.new_forward)  # type: ignore[attr-defined]
