# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what stands between users and weights that are not there: methods that would read, cast or save placeholders are
served from the host store or refused with a reason. Must not move weights.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers import TensorParallelConfig
from torch import nn
from torch.utils.hooks import RemovableHandle

from .loader_guards import LoaderGuard
from .managed_tensor import ManagedTensor
from .placeholder_guard import RE_POINTING, PlaceholderGuard, find_placeholders
from .shadows import Shadows, refusal
from .tensor_utils import of_kind
from .units import Component, Unit
from .wrapped_tensor import inner_tensors, is_wrapper, rewrap


_REFUSED_ON_MODEL = {
    "fuse_qkv_projections": "it would fuse placeholders. Fuse before enabling",
    "unfuse_qkv_projections": "the fused weights are streamed. Disable first",
    "fuse_lora": "it would add to weights that are not on the device. Fuse before enabling",
    "unfuse_lora": "it would change weights that are not on the device. Disable first",
    "enable_group_offload": "both would move the same weights. Use one of them",
    "enable_layerwise_casting": "it would cast weights in the slots. Use one of them",
    "dequantize": "it would dequantize placeholders. Dequantize before enabling, or disable first",
    "__deepcopy__": "the copy would hold placeholders. Disable first",
    "__reduce_ex__": "what is pickled would hold placeholders. Save with save_pretrained, or disable first",
}

_SAVING = RE_POINTING | {torch.ops.aten.detach.default}
_CONVERTED = "while it is saved, by a class that converts it. Disable the offload first"


class Guards:
    """
    The guards on one component, all taken back together.

    Args:
        component (`Component`): its state.
        root (`nn.Module`): the component's module.
        device (`torch.device`): the onload device.
        loaders (`LoaderGuard`): what its loaders of adapters go through.
    """

    def __init__(self, component: Component, root: nn.Module, device: torch.device, loaders: LoaderGuard) -> None:
        self._component = component
        self._root = root
        self._device = device
        self._loaders = loaders
        self._shadows = Shadows()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Puts them on."""
        component, root, device = self._component, self._root, self._device
        for name, reason in _REFUSED_ON_MODEL.items():
            if name.startswith("__") or callable(getattr(root, name, None)):
                self._shadows.put(root, name, refusal(f"'{component.name}'", name, reason))
        for name, replacement in self._loaders.replacements().items():
            self._shadows.put(root, name, replacement)
        self._loaders.refuse_merging()
        managed = component.stand_ins
        for module in root.modules():  # what the model's own method, and some loaders of adapters, call
            fuses = callable(getattr(module, "fuse_projections", None))
            if fuses and any(id(parameter) in managed for parameter in module.parameters()):
                reason = _REFUSED_ON_MODEL["fuse_qkv_projections"]
                self._shadows.put(
                    module, "fuse_projections", refusal(f"'{component.name}'", "fuse_projections", reason)
                )
        files = component.store.plan.files
        if files and callable(getattr(root, "save_pretrained", None)):
            self._shadows.put(root, "save_pretrained", _save_guard(component.name, root, files))
        if callable(getattr(root, "enable_parallelism", None)):
            self._shadows.put(root, "enable_parallelism", _parallelism_guard(component.name, root))
        owned: dict[int, tuple[nn.Module, list[ManagedTensor]]] = {}
        for unit in component.units:
            for tensor in unit.tensors:
                for owner in tensor.owners:
                    owned.setdefault(id(owner.module), (owner.module, []))[1].append(tensor)
        everything = [tensor for unit in component.units for tensor in unit.tensors]
        serve, saving = _serve_state_dict(component, self._loaders), PlaceholderGuard(component, _SAVING, _CONVERTED)
        self._shadows.put(root, "_apply", ApplyGuard(component.name, root, everything, device, is_root=True))
        for module, tensors in owned.values():
            if module is not root:
                self._shadows.put(module, "_apply", ApplyGuard(component.name, module, tensors, device, is_root=False))
                for name in ("__deepcopy__", "__reduce_ex__"):
                    self._shadows.put(module, name, refusal(f"'{component.name}'", name, _REFUSED_ON_MODEL[name]))
            if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
                self._shadows.put(module, "_save_to_state_dict", _save_guarded(module, saving))
            self._handles.append(module.register_state_dict_post_hook(serve))

    def remove(self) -> None:
        """Takes every guard back. Idempotent."""
        self._loaders.remove()
        self._shadows.remove()
        while self._handles:
            self._handles.pop().remove()


def find_guard(module: nn.Module) -> ApplyGuard | None:
    """What `module._apply` is, if the module is part of a component that is offloaded."""
    guard = vars(module).get("_apply")
    return guard if isinstance(guard, ApplyGuard) else None


def is_guarded(module: nn.Module) -> bool:
    """Whether a module is part of a component that is offloaded."""
    return find_guard(module) is not None


class ApplyGuard:
    """
    A stand-in for `nn.Module._apply`, through which `.to`, `.half` and their like all go. What would change
    the dtype or the memory format of managed tensors is refused. A move to another device leaves the module as it is,
    since the offload decides where it is; one to the onload device brings what was added to it since.

    Args:
        name (`str`): the component's.
        module (`nn.Module`): whose method it is; the component's own, or one that holds some of `tensors`.
        tensors (`Sequence[ManagedTensor]`): those it speaks for.
        device (`torch.device`): the onload device.
        is_root (`bool`): whether `module` is the whole component.
    """

    def __init__(
        self, name: str, module: nn.Module, tensors: Sequence[ManagedTensor], device: torch.device, is_root: bool
    ) -> None:
        self._name = name
        self._module = module
        held = {id(held): held for tensor in tensors for held in tensor.held}
        self._managed = set(held)
        self._is_root = is_root
        probes = [_probe(tensor, device) for tensor in tensors]
        probes += [torch.empty(1, dtype=tensor.dtype, device=device) for tensor in held.values() if is_wrapper(tensor)]
        self._probes = list({(p.dtype, p.shape, p.stride()): p for p in probes}.values())

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Does to the module what `fn` does to a tensor, as far as it may be done."""
        module = self._module
        if self.check(fn):
            return module
        if self._is_root:
            return type(module)._apply(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in self._managed:
                    tensor.data = fn(tensor)
        return module

    def check(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """
        Whether `fn` moves tensors away from the onload device.

        Raises:
            `ValueError`: it would change a managed tensor.
        """
        leaves = False
        for probe in self._probes:
            result = fn(probe)
            if result.dtype != probe.dtype:
                raise ValueError(
                    f"'{self._name}' is under distributed layerwise offload, and changing its dtype would cast "
                    "placeholders. Cast before enabling, or load with the dtype you want; from_pipe casts to float32 "
                    "unless it is given dtype=."
                )
            if any(size > 1 and a != b for size, a, b in zip(probe.shape, probe.stride(), result.stride())):
                raise ValueError(
                    f"'{self._name}' is under distributed layerwise offload, and changing the memory format of its "
                    "weights would rearrange placeholders. Do it before enabling."
                )
            leaves |= result.device != probe.device
        return leaves


def _probe(tensor: ManagedTensor, device: torch.device) -> torch.Tensor:
    """What stands for a managed tensor where somebody is asked what he would do to it: as it, but small."""
    shape = [min(size, 2) for size in tensor.born.shape]
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: tensor.stride[dim]):
        stride[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, stride, dtype=tensor.born.dtype, device=device)


def _parallelism_guard(name: str, root: nn.Module) -> Callable:
    """An `enable_parallelism` that splits no weights; else the class's own."""
    original = type(root).enable_parallelism  # type: ignore[attr-defined]

    @functools.wraps(original)
    def enable_parallelism(*args: Any, config: Any, **kwargs: Any) -> Any:
        if isinstance(config, TensorParallelConfig) or getattr(config, "tensor_parallel_config", None) is not None:
            raise ValueError(
                f"'enable_parallelism' is refused while '{name}' is under distributed layerwise offload: tensor "
                "parallelism would split placeholders. Use one of the two; context parallelism goes with it."
            )
        return original(root, *args, config=config, **kwargs)

    return enable_parallelism


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


def _serve_state_dict(component: Component, loaders: LoaderGuard) -> Callable:
    """
    A `state_dict` hook that puts values from the host store in place of placeholders, under whatever names a module
    saves them; without a copy, and not to be written to.
    """
    placeholders = find_placeholders(component)

    def find(tensor: torch.Tensor) -> tuple[Unit, int] | None:
        at = placeholders.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if at is not None and loaders.loading and not at[0].store.is_whole(at[0].key):
            return None
        return at

    def serve(module: nn.Module, state_dict: dict, prefix: str, local_metadata: Mapping) -> None:
        if loaders.names_only:
            return
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
