# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the methods that users call on pipelines and models. Must not do the work: `api.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from .api import OffloadHandle, apply_distributed_layerwise_offload, enable, remove_distributed_layerwise_offload
from .attachment import HANDLE, get_handle
from .config import DistributedLayerwiseOffloadConfig
from .loader_guards import LoaderGuard, PipelineLoaderGuards
from .pipeline_guards import PipelineGuards
from .selection import select


class DistributedLayerwiseOffloadMixin:
    """
    The methods that `import diffusers_dlo` adds to every `DiffusionPipeline` and `ModularPipeline`. A pipeline class
    of your own may also inherit from it.
    """

    components: dict[str, Any]

    def enable_distributed_layerwise_offload(
        self,
        config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None = None,
        *,
        components: Sequence[str] | None = None,
        **overrides: Any,
    ) -> OffloadHandle:
        r"""
        Streams the transformers and large text encoders of this pipeline from host memory, one copy per host, and
        places everything else on the device. All ranks call it; `pipe(...)` then works as before, on each rank for
        itself.

        Args:
            config (`DistributedLayerwiseOffloadConfig`, *optional*):
                The options; keyword arguments of the same names override it.
            components (`Sequence[str]`, *optional*):
                Names of the components that stream. Defaults to the transformers, and the text encoders larger than
                the largest block of a transformer.

        Returns:
            `OffloadHandle`: with the plan, the report, and `remove`.

        Raises:
            `ValueError` or `TypeError`: an option or a component cannot be used, with the remedy. `RuntimeError`:
            memory or another rank failed. The same on every rank, and the pipeline is as it was.
        """
        handle = enable(lambda resolved: select(self, resolved, components), config, overrides)
        handle.on_removal(PipelineGuards(self, handle.device).remove)
        handle.on_removal(PipelineLoaderGuards(self, _loaders_of).remove)
        vars(self)[HANDLE] = handle  # also when the component is exchanged for another meanwhile
        return handle

    def disable_distributed_layerwise_offload(self) -> None:
        """
        Gives every component ordinary parameters on the CPU again. All ranks call it; it waits for those still at
        work. Does nothing where nothing is enabled.
        """
        while (handle := self.distributed_layerwise_offload) is not None:
            handle.remove()

    @property
    def distributed_layerwise_offload(self) -> OffloadHandle | None:
        """The handle of the offload in force, or None."""
        own: OffloadHandle | None = vars(self).get(HANDLE)
        if own is not None and own.enabled:
            return own
        for component in self.components.values():
            handle = get_handle(component) if isinstance(component, nn.Module) else None
            if handle is not None:
                return handle
        return None


def _loaders_of(module: nn.Module) -> LoaderGuard | None:
    handle: OffloadHandle | None = get_handle(module)
    return None if handle is None else handle.loaders_of(unwrap_module(module))


def _enable_on_model(
    self: nn.Module,
    config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> OffloadHandle:
    """Streams the blocks of this model; see `diffusers_dlo.apply_distributed_layerwise_offload`."""
    return apply_distributed_layerwise_offload(self, config, **overrides)


def _disable_on_model(self: nn.Module) -> None:
    """Gives this model ordinary parameters on the CPU again. Does nothing where nothing is enabled."""
    if get_handle(self) is not None:
        remove_distributed_layerwise_offload(self)


def install(pipeline_classes: Sequence[type], model_class: type) -> None:
    """Adds the methods to diffusers' base classes, so that every pipeline and model has them."""
    for name in (
        "enable_distributed_layerwise_offload",
        "disable_distributed_layerwise_offload",
        "distributed_layerwise_offload",
    ):
        for pipeline_class in pipeline_classes:
            setattr(pipeline_class, name, vars(DistributedLayerwiseOffloadMixin)[name])
    for name, value in {
        "enable_distributed_layerwise_offload": _enable_on_model,
        "disable_distributed_layerwise_offload": _disable_on_model,
        "distributed_layerwise_offload": property(get_handle),
    }.items():
        setattr(model_class, name, value)
