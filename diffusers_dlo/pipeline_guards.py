# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what stands between users and a pipeline whose components stream: methods of the pipeline that would move or
change them, and casts of the whole pipeline. Must not guard the components themselves: `guards.py` does.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any, TypeAlias

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from .device.onload import is_same_device
from .guards import find_guard
from .shadows import Shadows, refusal


_REFUSED = {
    "enable_sequential_cpu_offload": "both would move the same weights",
    "enable_group_offload": "both would move the same weights. Components that do not stream may have it of their own",
    "fuse_lora": "it would add to weights that are not on the device. Fuse before enabling",
    "unfuse_lora": "it would change weights that are not on the device",
    "fuse_qkv_projections": "it would fuse placeholders. Fuse before enabling",
}
_CASTS = {DiffusionPipeline.to.__code__, ModularPipeline.to.__code__}
_PassedOver: TypeAlias = list[tuple[weakref.ref, weakref.ref]]
"""Hooks of accelerate, each with the one before it, whose component streams."""
_DEPTH = 12
"""How many calls lie between a pipeline's `to` and a component's `_apply`, at most; wrappers of users included."""


class PipelineGuards:
    """
    What guards a pipeline object and the components of it that do not stream, all taken back together.

    Args:
        pipeline (`DiffusionPipeline` or `ModularPipeline`): the pipeline.
        device (`torch.device`): the onload device.
    """

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self._shadows = Shadows()
        self._passed_over: _PassedOver = []
        for name, reason in _REFUSED.items():
            if callable(getattr(pipeline, name, None)):
                self._shadows.put(pipeline, name, refusal("this pipeline", name, reason))
        if callable(getattr(pipeline, "enable_model_cpu_offload", None)):
            offload = _model_offload(pipeline, device, self._passed_over)
            self._shadows.put(pipeline, "enable_model_cpu_offload", offload)
        for component in _modules(pipeline):
            if not _streams(component) and "_apply" not in vars(component):
                # A bound method, so that a copy of the component has its own, and what is pickled the class's.
                self._shadows.put(component, "_apply", MethodType(_apply, component))

    def remove(self) -> None:
        """Takes every guard back. Idempotent."""
        self._shadows.remove()
        while self._passed_over:
            find_hook, find_previous = self._passed_over.pop()
            hook, previous = find_hook(), find_previous()
            if hook is not None and previous is not None:
                hook.prev_module_hook = previous


def _model_offload(pipeline: Any, onload_device: torch.device, passed_over: _PassedOver) -> Callable:
    """
    The class's `enable_model_cpu_offload`, to the device that the offload streams to. What streams ignores its moves,
    and its other components are on the device in turn. `passed_over` is what is to be put back when nothing streams.
    """
    original = type(pipeline).enable_model_cpu_offload

    @functools.wraps(original)
    def enable_model_cpu_offload(gpu_id: int | None = None, device: torch.device | str | None = None) -> None:
        wanted = torch.device(onload_device.type if device is None else device)
        index = wanted.index if gpu_id is None else gpu_id
        same = index is None or is_same_device(torch.device(wanted.type, index), onload_device)
        if wanted.type != onload_device.type or not same:
            raise ValueError(
                f"'enable_model_cpu_offload' to '{wanted}' is refused: this pipeline streams to '{onload_device}', "
                "and its components work together on one device. Leave 'device' and 'gpu_id' out."
            )
        original(pipeline, device=onload_device)
        # Else each forward after a component that streams would offload it anew, and empty the device's cache.
        passed_over.clear()
        for user_hook in getattr(pipeline, "_all_hooks", ()):
            hook = user_hook.hook
            if hook.prev_module_hook is not None and _streams(hook.prev_module_hook.model):
                passed_over.append((weakref.ref(hook), weakref.ref(hook.prev_module_hook)))
            while hook.prev_module_hook is not None and _streams(hook.prev_module_hook.model):
                hook.prev_module_hook = hook.prev_module_hook.hook.prev_module_hook

    return enable_model_cpu_offload


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """
    The class's `_apply`; but where a whole pipeline is cast and a component that streams will refuse it, it refuses
    before anything is changed. Also for other pipelines with the same components, such as `from_pipe` makes.
    """
    for component in _modules(_find_pipeline(sys._getframe(1))):
        guard = find_guard(component)
        if guard is not None:
            guard.check(fn)
    return type(self)._apply(self, fn, recurse)


def _find_pipeline(frame: FrameType | None) -> Any:
    """The pipeline whose `to` is running; None if none is."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code in _CASTS:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _streams(component: nn.Module) -> bool:
    return find_guard(unwrap_module(component)) is not None


def _modules(pipeline: Any) -> list[nn.Module]:
    components = getattr(pipeline, "components", {}).values()
    return [unwrap_module(component) for component in components if isinstance(component, nn.Module)]
