# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the guard of models whose weights are still in coded shards: nothing may read, move or cast them. Must not know
where they are, nor decode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from ..tensor_utils import owned_tensors


_REMEDY = "Enable the offload first, or decode the checkpoint with `diffusers-dlo pack --decode` and load that."
_REFUSED = (
    "add_adapter",
    "dequantize",
    "enable_group_offload",
    "enable_layerwise_casting",
    "fuse_qkv_projections",
    "load_lora_adapter",
    "save_pretrained",
)
"""Methods of models that would read weights, or put others in their place."""


def guard_coded(model: nn.Module, names: Collection[str]) -> None:
    """Guards a model of whose tensors those called `names` are coded, and every part that holds one itself."""
    label = type(model).__name__
    guarded: dict[int, tuple[nn.Module, str]] = {id(model): (model, label)}
    for owned in owned_tensors(model):
        for owner in owned.owners:
            if owner.name in names:
                path = owner.name.removesuffix(owner.attribute).removesuffix(".")
                guarded[id(owner.module)] = (owner.module, f"{label}.{path}" if path else label)
    for module, path in guarded.values():
        refused = [name for name in _REFUSED if callable(getattr(model, name, None))] if module is model else []
        CodedGuard(module, path, [_Refusal(model, name, label) for name in refused]).attach()


def unguard_coded(model: nn.Module) -> None:
    """Takes all guards off a model. What something else stands before goes when that is gone."""
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, CodedGuard):
                hook.remove()


def is_guarded_coded(module: nn.Module) -> bool:
    """Whether a module is a coded model, or a part of one that holds coded tensors itself."""
    return any(isinstance(hook, CodedGuard) for hook in module._forward_pre_hooks.values())


class CodedGuard:
    """
    Stands on a module that holds coded tensors, and on the model itself: refuses `forward`, and what would read, load,
    move or cast them.

    Args:
        module (`nn.Module`): the module.
        label (`str`): what to call it.
        refusals (`Sequence[_Refusal]`): what is to stand in for methods of it.

    Attributes:
        is_over (`bool`): whether it was taken off. Others may have put themselves before it meanwhile, and call it
            still (`Shadows`): it then gives way.
    """

    def __init__(self, module: nn.Module, label: str, refusals: Sequence[_Refusal]) -> None:
        self._module = module
        self._label = label
        self._refusals = refusals
        self.is_over = False

    def attach(self) -> None:
        """Puts it on."""
        self._module.register_forward_pre_hook(self)
        self._module.register_state_dict_pre_hook(self.refuse_reading)
        self._module.register_load_state_dict_pre_hook(self.refuse_loading)
        object.__setattr__(self._module, "_apply", self.apply)
        for refusal in self._refusals:
            object.__setattr__(self._module, refusal.name, refusal)

    def remove(self) -> None:
        """Takes it off."""
        self.is_over = True
        module = self._module
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if _guard_of(hook) is self]:
                del hooks[key]
        if getattr(vars(module).get("_apply"), "__self__", None) is self:
            del vars(module)["_apply"]
        for refusal in self._refusals:
            refusal.is_over = True
            if vars(module).get(refusal.name) is refusal:
                del vars(module)[refusal.name]

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple) -> None:
        """The forward pre-hook."""
        raise self._refusal("cannot compute yet")

    def refuse_reading(self, *_: Any) -> None:
        """The hook before `state_dict`."""
        raise self._refusal("has no values to read yet")

    def refuse_loading(self, *_: Any) -> None:
        """The hook before `load_state_dict`."""
        raise self._refusal("cannot be loaded into")

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """The module's `_apply`: refused where `fn` would change what is coded, which counts as on the CPU."""
        module = self._module
        if self.is_over:
            self.remove()
            return type(module)._apply(module, fn, recurse)
        parts = module.modules() if recurse else [module]
        tensors = [t for part in parts for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
        for dtype in {tensor.dtype for tensor in tensors if tensor.is_meta}:
            probe = torch.empty(0, dtype=dtype)
            if fn(probe) is not probe or probe.is_shared():
                raise self._refusal("can be neither moved nor cast yet")
        return type(module)._apply(module, lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse)

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(f"'{self._label}' {what}: its weights are still coded. {_REMEDY}")


class _Refusal:
    """Stands in for a method of a coded model."""

    def __init__(self, model: nn.Module, name: str, label: str) -> None:
        self._model, self.name, self._label = model, name, label
        self.is_over = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_over:
            raise RuntimeError(f"'{self.name}' is refused: the weights of '{self._label}' are still coded. {_REMEDY}")
        if vars(self._model).get(self.name) is self:  # put back by what stood before it
            del vars(self._model)[self.name]
        return getattr(self._model, self.name)(*args, **kwargs)


def _guard_of(hook: Any) -> Any:
    """The guard that a hook belongs to; torch wraps some."""
    hook = getattr(hook, "hook", hook)
    return getattr(hook, "__self__", hook)
