# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the guard of models whose weights are still to be cast: they must not compute. Must not cast anything unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from ..casts import cast, had_casts, is_elsewhere, pending_casts, run_dtype, set_pending_casts
from ..tensor_utils import owned_tensors


def guard_pending(model: nn.Module) -> None:
    """Guards a model that has tensors with casts pending, and every part of it that holds such tensors itself."""
    name = type(model).__name__
    guarded: dict[int, tuple[nn.Module, str]] = {}
    for owned in owned_tensors(model):
        if pending_casts(owned.tensor):
            guarded[id(model)] = (model, name)
            for owner in owned.owners:
                path = owner.name.removesuffix(owner.attribute).removesuffix(".")
                guarded[id(owner.module)] = (owner.module, f"{name}.{path}" if path else name)
    for module, label in guarded.values():
        PendingGuard(module, label, is_root=module is model).attach()


def find_change(model: nn.Module) -> str | None:
    """
    What was changed in a model while it had casts pending, in words: a change that is made before a cast is another
    one than the same change made after it. What the guard itself has cast, when asked to, is no change.
    """
    tensors = _floating(model)
    for name, tensor in tensors.items():
        if is_elsewhere(tensor):
            return f"'{name}' has got other memory"
    for guard in model._forward_pre_hooks.values():
        if isinstance(guard, PendingGuard) and guard.names is not None:
            added = next((name for name in tensors if name not in guard.names), None)
            if added is not None:
                return f"'{added}' was added"
            lost = next(
                (
                    n
                    for n, pending in guard.names.items()
                    if n not in tensors or (pending and not had_casts(tensors[n]))
                ),
                None,
            )
            if lost is not None:
                return f"'{lost}' was exchanged or taken away"
    return None


def _floating(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


class PendingGuard:
    """
    Stands on a module whose weights are still to be cast, and on the model itself, and goes once they are: refuses
    `forward`, casts before `.to` and its like, and has copies remember what is left to do.

    Args:
        module (`nn.Module`): the module.
        label (`str`): what to call it.
        is_root (`bool`): whether it is the model itself.

    Attributes:
        names (`dict[str, bool]`, *optional*): of a model, its floating tensors, and which of them had casts pending.
    """

    def __init__(self, module: nn.Module, label: str, is_root: bool) -> None:
        self._module = module
        self._label = label
        self.names = {name: bool(pending_casts(t)) for name, t in _floating(module).items()} if is_root else None
        self._dtypes = {name: (tensor.dtype, run_dtype(tensor)) for name, tensor in self._pending().items()}

    def attach(self) -> None:
        """Puts it on."""
        self._module.register_forward_pre_hook(self)
        object.__setattr__(self._module, "_apply", self.apply)

    def remove(self) -> None:
        """Takes it off."""
        hooks = self._module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]
        if getattr(vars(self._module).get("_apply"), "__self__", None) is self:
            del vars(self._module)["_apply"]

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple) -> None:
        """The forward pre-hook, which speaks for the guards on all parts of the module."""
        guards = [
            hook
            for part in module.modules()
            for hook in part._forward_pre_hooks.values()
            if isinstance(hook, PendingGuard)
        ]
        uncast = [found for guard in guards for found in guard.uncast()]
        if uncast:
            more = f", and {len(uncast) - 1} more" if len(uncast) > 1 else ""
            raise RuntimeError(
                f"'{self._label}' cannot compute yet: it was loaded inside mapped_loading, and {uncast[0]}{more}. "
                "Enable the offload first, cast it with .to(dtype), or load it without mapped_loading."
            )
        for guard in guards:
            guard.remove()

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """The module's `_apply`: what `fn` would change is cast first, what it would leave alone stays as it is."""
        module, left_alone = self._module, set()
        for tensor in self._pending().values():
            # Both as it is and as it is to be: asking for the dtype that it is to have asks for the cast.
            probes = [torch.empty(0, dtype=dtype, device=tensor.device) for dtype in (tensor.dtype, run_dtype(tensor))]
            if all(fn(probe) is probe and not probe.is_shared() for probe in probes):
                left_alone.add(id(tensor))
            else:
                with torch.no_grad():
                    tensor.data = cast(tensor).detach()
                set_pending_casts(tensor, ())
        result = type(module)._apply(module, lambda leaf: leaf if id(leaf) in left_alone else fn(leaf), recurse)
        if not any(pending_casts(owned.tensor) for owned in owned_tensors(module)):
            self.remove()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingGuard:
        copied = memo[id(self)] = object.__new__(PendingGuard)
        vars(copied).update(vars(self), _module=deepcopy(self._module, memo))
        for tensor in self._pending().values():
            set_pending_casts(deepcopy(tensor, memo), pending_casts(tensor))
        return copied

    def _pending(self) -> dict[str, torch.Tensor]:
        """The module's own tensors with casts pending, by name."""
        own = {**self._module._parameters, **self._module._buffers}
        return {name: tensor for name, tensor in own.items() if tensor is not None and pending_casts(tensor)}

    def uncast(self) -> Iterator[str]:
        """Tensors with casts pending, or that lost the note of them to something that made new ones; in words."""
        for name, (before, after) in self._dtypes.items():
            tensor = self._module._parameters.get(name, self._module._buffers.get(name))
            if tensor is not None and (pending_casts(tensor) or (before != after and tensor.dtype == before)):
                yield f"'{name}' of '{self._label}' is still to be cast from {before} to {after}"
