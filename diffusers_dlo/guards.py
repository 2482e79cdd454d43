# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what stands between users and weights that are not there: methods that would read, cast or save placeholders are
served from the host store or refused with a reason, and operations on a placeholder are noticed. Must not move
weights.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .managed_tensor import ManagedTensor
from .tensor_utils import of_kind
from .units import Component, Unit
from .wrapped_tensor import inner_tensors, is_wrapper, plain_tensors, rewrap


_REFUSED_ON_MODEL = {
    "fuse_qkv_projections": "it would fuse placeholders. Fuse before enabling",
    "unfuse_qkv_projections": "the fused weights are streamed. Disable first",
    "fuse_lora": "it would add to weights that are not on the device. Fuse before enabling",
    "unfuse_lora": "it would change weights that are not on the device. Disable first",
    "enable_group_offload": "both would move the same weights. Use one of them",
    "enable_layerwise_casting": "it would cast weights in the slots. Use one of them",
    "dequantize": "it would dequantize placeholders. Dequantize before enabling, or disable first",
    "load_state_dict": "it would load into placeholders. Disable first, or load before enabling",
    "__deepcopy__": "the copy would hold placeholders. Disable first",
    "__reduce_ex__": "what is pickled would hold placeholders. Save with save_pretrained, or disable first",
}
_REFUSED_ON_PIPELINE = {
    "enable_model_cpu_offload": "the pipeline's models are placed already",
    "enable_sequential_cpu_offload": "both would move the same weights",
    "enable_group_offload": "both would move the same weights",
    "fuse_lora": "it would add to weights that are not on the device. Fuse before enabling",
    "unfuse_lora": "it would change weights that are not on the device",
    "fuse_qkv_projections": "it would fuse placeholders. Fuse before enabling",
}


_RE_POINTING = frozenset({torch.ops.aten._has_compatible_shallow_copy_type.default})
"""What `.data =` dispatches: it reads no value."""
_SAVING = _RE_POINTING | {torch.ops.aten.detach.default}
_CONVERTED = "while it is saved, by a class that converts it. Disable the offload first"
_OUTSIDE = (
    "outside its block's turn, when its weights are not on the device. Name the ModuleLists that can stream with "
    "blocks=[...], or leave this component out with components=[...]"
)


class Guards:
    """
    The guards on one component, all taken back together.

    Args:
        component (`Component`): its state.
        root (`nn.Module`): the component's module.
        device (`torch.device`): the onload device.
    """

    def __init__(self, component: Component, root: nn.Module, device: torch.device) -> None:
        self._component = component
        self._root = root
        self._device = device
        self._shadows: list[tuple[nn.Module, str, Any]] = []
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Puts them on."""
        component, root, device = self._component, self._root, self._device
        for name, reason in _REFUSED_ON_MODEL.items():
            if name.startswith("__") or callable(getattr(root, name, None)):
                self._shadow(root, name, _refusal(f"'{component.name}'", name, reason))
        files = component.store.plan.files
        if files and callable(getattr(root, "save_pretrained", None)):
            self._shadow(root, "save_pretrained", _save_guard(component.name, root, files))
        owned: dict[int, tuple[nn.Module, list[ManagedTensor]]] = {}
        for unit in component.units:
            for tensor in unit.tensors:
                for owner in tensor.owners:
                    owned.setdefault(id(owner.module), (owner.module, []))[1].append(tensor)
        everything = [tensor for unit in component.units for tensor in unit.tensors]
        serve, saving = _serve_state_dict(component), PlaceholderGuard(component, _SAVING, _CONVERTED)
        self._shadow(root, "_apply", _apply_guard(component.name, root, everything, device, is_root=True))
        for module, tensors in owned.values():
            if module is not root:
                self._shadow(module, "_apply", _apply_guard(component.name, module, tensors, device, is_root=False))
                for name in ("__deepcopy__", "__reduce_ex__"):
                    self._shadow(module, name, _refusal(f"'{component.name}'", name, _REFUSED_ON_MODEL[name]))
            if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
                self._shadow(module, "_save_to_state_dict", _save_guarded(module, saving))
            self._handles.append(module.register_state_dict_post_hook(serve))

    def remove(self) -> None:
        """Takes every guard back. Idempotent."""
        while self._shadows:
            module, name, previous = self._shadows.pop()
            if previous is None:
                vars(module).pop(name, None)
            else:
                object.__setattr__(module, name, previous)
        while self._handles:
            self._handles.pop().remove()

    def _shadow(self, module: nn.Module, name: str, replacement: Callable) -> None:
        # An instance attribute, which is found before the class's method; classes stay as they are.
        self._shadows.append((module, name, vars(module).get(name)))
        object.__setattr__(module, name, replacement)


def is_guarded(module: nn.Module) -> bool:
    """Whether a module is part of a component that is offloaded."""
    return getattr(vars(module).get("_apply"), "guards_offload", False)


class PipelineGuards:
    """The refusals on a pipeline object, taken back together."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._names = [name for name in _REFUSED_ON_PIPELINE if callable(getattr(pipeline, name, None))]
        for name in self._names:
            object.__setattr__(pipeline, name, _refusal("this pipeline", name, _REFUSED_ON_PIPELINE[name]))

    def remove(self) -> None:
        """Takes every refusal back. Idempotent."""
        while self._names:
            vars(self._pipeline).pop(self._names.pop(), None)


def _refusal(what: str, name: str, reason: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"'{name}' is refused while {what} is under distributed layerwise offload: {reason}.")

    return refuse


def _apply_guard(
    name: str, module: nn.Module, tensors: Sequence[ManagedTensor], device: torch.device, is_root: bool
) -> Callable:
    """
    A stand-in for `nn.Module._apply`, through which `.to`, `.cuda`, `.half` and their like all go. A change of a
    managed dtype is refused. A move between devices leaves managed weights where the offload put them, and moves the
    rest.
    """
    original = type(module)._apply
    held = [tensor.born for tensor in tensors]
    held += [o.wrapper.current for tensor in tensors for o in tensor.owners if o.wrapper is not None]
    dtypes = sorted({tensor.dtype for tensor in held}, key=str)
    managed = {id(tensor) for tensor in held}

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dtypes:
            if fn(torch.empty(1, dtype=dtype, device=device)).dtype != dtype:
                raise ValueError(
                    f"'{name}' is under distributed layerwise offload, and changing its dtype would cast "
                    "placeholders. Cast before enabling, or load with the dtype you want."
                )
        if is_root:
            return original(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in managed:
                    tensor.data = fn(tensor)
        return module

    apply.guards_offload = True  # type: ignore[attr-defined]
    return apply


def _save_guard(name: str, root: nn.Module, files: Sequence[str]) -> Callable:
    """A `save_pretrained` that does not write over the files that weights stream from; else the class's own."""
    original = type(root).save_pretrained  # type: ignore[attr-defined]

    @functools.wraps(original)
    def save_pretrained(save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if os.path.isdir(save_directory):
            for entry in os.scandir(os.fspath(save_directory)):
                if os.path.realpath(entry.path) in files:  # also through a link, as the Hub's cache has
                    raise ValueError(
                        f"'{name}' streams from '{entry.path}', and saving there would write over the weights it "
                        "reads. Save to another directory, or disable the offload first."
                    )
        return original(root, save_directory, *args, **kwargs)

    return save_pretrained


def _placeholders(component: Component) -> dict[int, tuple[Unit, int]]:
    """What each placeholder of a component stands for, by its storage."""
    return {
        tensor.placeholder.untyped_storage()._cdata: (unit, index)
        for unit in component.units
        for index, tensor in enumerate(unit.tensors)
    }


def _serve_state_dict(component: Component) -> Callable:
    """
    A `state_dict` hook that puts values from the host store in place of placeholders, under whatever names a module
    saves them; without a copy, and not to be written to.
    """
    placeholders = _placeholders(component)

    def find(tensor: torch.Tensor) -> tuple[Unit, int] | None:
        return placeholders.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None

    def serve(module: nn.Module, state_dict: dict, prefix: str, local_metadata: Mapping) -> None:
        # What this module and those in it have saved comes last.
        for key in list(itertools.takewhile(lambda key: key.startswith(prefix), reversed(state_dict))):
            value = state_dict[key]
            if not isinstance(value, torch.Tensor):
                continue
            inner = {
                path: (tensor, find(tensor)) for path, tensor in (inner_tensors(value) if is_wrapper(value) else ())
            }
            if any(found is not None for _, found in inner.values()):
                cpu = torch.device("cpu")
                values = {
                    p: tensor.detach().to(cpu) if at is None else at[0].value(at[1])
                    for p, (tensor, at) in inner.items()
                }
                state_dict[key] = rewrap(value, values)
            elif not inner:
                at = find(value)
                if at is not None:
                    state_dict[key] = of_kind(value, at[0].value(at[1]))

    return serve


def _save_guarded(module: nn.Module, guard: PlaceholderGuard) -> Callable:
    """A `_save_to_state_dict` of a class that has its own: it may save weights, but not compute with them."""
    original = type(module)._save_to_state_dict

    def save(*args: Any, **kwargs: Any) -> None:
        with guard:
            original(module, *args, **kwargs)

    return save


class PlaceholderGuard(TorchDispatchMode):
    """
    Raises when an operation reads the placeholder of a managed tensor, naming it. NaNs are no reliable alarm: a
    comparison swallows them, an integer has none.

    Args:
        allowed (`Collection`): operations that read no value.
        when (`str`): the end of the message: when it was read, and the way out.
    """

    def __init__(self, component: Component, allowed: Collection[Any] = _RE_POINTING, when: str = _OUTSIDE) -> None:
        super().__init__()
        self._component = component
        self._allowed = allowed
        self._when = when
        self._placeholders = _placeholders(component)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)) if func not in self._allowed else ():
            if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
                continue
            for plain in plain_tensors(leaf):
                found = self._placeholders.get(plain.untyped_storage()._cdata)
                if found is not None:
                    name = found[0].tensors[found[1]].name
                    raise RuntimeError(f"'{name}' of '{self._component.name}' was read {self._when} ({func}).")
        return func(*args, **(kwargs or {}))
