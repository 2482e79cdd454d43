# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which hooks of diffusers decide whether a block is computed, and where it then is. Must not fetch, nor change the
registries that these hooks are in.

[Note: Step caches]
    A step cache puts a hook on each block, in the registry of diffusers, and this hook calls what lies under it or
    leaves it out. Our own forward hooks lie outside of all that. So where the outermost hooks of a block are ones that
    may leave it out, and are known not to use its weights themselves (`_DECIDING`), the block is not acquired for its
    call. It is acquired where the innermost of them calls on.

    For that the hook is given a stand-in for its reference to what lies under it (`fn_ref`). The registry has
    references of its own and works with these, so a chain is what it was, whoever adds and removes hooks, and in
    whatever order. What a block's hooks are, and that they are really called, is looked up in each call of it.

    A block is acquired for its whole call, as without a cache, if another hook lies outside of those, or there is a
    forward hook of torch that is not ours: it may use weights. The same where the block itself is compiled: a stand-in
    would break its graph. Caches that replace parts of a block (attention) have their hooks on these, inside its call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn


Begin: TypeAlias = Callable[[tuple, dict[str, Any]], None]
End: TypeAlias = Callable[[Any], Any]

_DECIDING = frozenset(
    {
        # FirstBlockCache: the first block is always computed, and what changed in it decides about the others.
        "diffusers.hooks.first_block_cache.FBCHeadBlockHook",
        "diffusers.hooks.first_block_cache.FBCBlockHook",
        # MagCache and SeaCache: decided before the first block, which is left out with the others.
        "diffusers.hooks.mag_cache.MagCacheHeadHook",
        "diffusers.hooks.mag_cache.MagCacheBlockHook",
        "diffusers.hooks.sea_cache.SeaCacheLeaderBlockHook",
        "diffusers.hooks.sea_cache.SeaCacheBlockHook",
        # TaylorSeer: each module decides by itself; blocks do in its lite mode, and where patterns name them.
        "diffusers.hooks.taylorseer_cache.TaylorSeerCacheHook",
        # Layer skipping, which guiders put on and take off between two forwards.
        "diffusers.hooks.layer_skip.TransformerBlockSkipHook",
    }
)
"""
Classes of hooks that leave out what lies under them, and use none of its weights themselves. By class and not by their
name in a registry: guiders choose that. TextKVCache is none of them: its hook computes with layers of its block.
"""


class ComputedInside:
    """
    Stands in for a hook's `fn_ref`: what the hook calls there is enclosed in an acquire and a release.

    Args:
        reference (`HookFunctionReference`): the registry's own.
        begin (`Callable`): called with the arguments, before.
        end (`Callable`): called with the output, None where it raised, after; if it returns another one, that is the
            output.
    """

    def __init__(self, reference: Any, begin: Begin, end: End) -> None:
        self.reference = reference
        self.begin = begin
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reference, name)

    # Not disabled as a whole: where a model is compiled around its blocks, these compute compiled.
    @torch.compiler.disable(recursive=False)
    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What lies under the hook."""
        self._enter(args, kwargs)
        output = replaced = None
        try:
            output = self.reference.original_forward(*args, **kwargs)
        finally:
            replaced = self._leave(output)
        return output if replaced is None else replaced

    @torch.compiler.disable
    def _enter(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.begin(args, kwargs)

    @torch.compiler.disable
    def _leave(self, output: Any) -> Any:
        return self._end(output)


def acquire_inside(module: nn.Module, begin: Begin, end: End, allowed: bool) -> bool:
    """
    Has `begin` and `end` called around the computing of `module`, if hooks decide about it and that is `allowed`; says
    whether it does. `module` is about to be called, and its hooks may have changed since the last time.
    """
    decides = _innermost(module) if allowed else None
    for hook in _registry(module).hooks.values():
        if hook is not decides:
            _give_back(hook)
    if decides is None:
        return False
    if not isinstance(decides.fn_ref, ComputedInside) or decides.fn_ref.begin is not begin:
        _give_back(decides)
        decides.fn_ref = ComputedInside(decides.fn_ref, begin, end)  # type: ignore[assignment]
    return True


def is_acquired_inside(module: nn.Module) -> bool:
    """Whether it was, in the call that has just ended."""
    return any(isinstance(hook.fn_ref, ComputedInside) for hook in _registry(module).hooks.values())


def has_hooks(module: nn.Module) -> bool:
    """Whether diffusers ever put a hook on `module`."""
    return "_diffusers_hook" in vars(module)


def give_back_references(root: nn.Module) -> None:
    """Takes back every stand-in on the hooks of `root` and of what is in it."""
    for module in root.modules():
        if has_hooks(module):
            for hook in _registry(module).hooks.values():
                _give_back(hook)


def _registry(module: nn.Module) -> HookRegistry:
    return vars(module)["_diffusers_hook"]


def _give_back(hook: ModelHook) -> None:
    if isinstance(hook.fn_ref, ComputedInside):
        hook.fn_ref = hook.fn_ref.reference


def _innermost(module: nn.Module) -> ModelHook | None:
    """The innermost hook on `module` that decides and has only such around it, see [Note: Step caches]."""
    if module._compiled_call_impl is not None or len(module._forward_pre_hooks) > 1 or len(module._forward_hooks) > 1:
        return None
    registry, found = _registry(module), None
    forward = vars(module).get("forward")
    for name, reference in zip(reversed(registry._hook_order), reversed(registry._fn_refs)):
        hook = registry.hooks[name]
        if f"{type(hook).__module__}.{type(hook).__qualname__}" not in _DECIDING:
            break
        if not (_calls(forward, reference) and _is_in_force(hook, reference)):
            break
        found, forward = hook, reference.original_forward
    return found


def _calls(forward: Any, reference: Any) -> bool:
    """Whether `forward` is what a registry made for `reference`: somebody may have exchanged it since."""
    cells: Any = getattr(getattr(forward, "func", None), "__closure__", None)
    return cells is not None and len(cells) == 1 and cells[0].cell_contents is reference


def _is_in_force(hook: ModelHook, reference: Any) -> bool:
    """
    Whether a hook that its registry lists is really called: where one directly under it was removed, it is left out.
    """
    real = hook.fn_ref.reference if isinstance(hook.fn_ref, ComputedInside) else hook.fn_ref
    return real is reference and getattr(reference.forward, "func", None) == getattr(hook, "new_forward", None)
