# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns putting a loaded model under each of the ways that are compared. Must not time anything.

The peers are set up for speed as their own documentation says: group offload with streams and pinned memory, FSDP2
with each layer a unit that is fetched ahead, embeddings and heads units of their own, so that what a forward does not
call is not moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload
from sizes import BLOCKS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import diffusers_dlo  # noqa: F401  adds enable_distributed_layerwise_offload to models


def hold(model: nn.Module, family: str, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    """Puts a model on the CPU under a family's way of holding weights; what its call returns."""
    return HOLDERS[family](model, options, device, ranks)


def _resident(model: nn.Module, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    if device.type == "cpu":  # what is loaded is mapped from files; here it is to be in memory, as on a device
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.to(device)


def _dlo(model: Any, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    group = options.get("group", ranks)
    mesh = init_device_mesh(device.type, (ranks // group, group)) if group < ranks else None
    options = {name: value for name, value in options.items() if name != "group"}
    return model.enable_distributed_layerwise_offload(onload_device=device, mesh=mesh, **options)


def _group(model: Any, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    if device.type == "cpu":  # which has no streams
        options = options | {"use_stream": False, "record_stream": False}
    return model.enable_group_offload(onload_device=device, offload_device=torch.device("cpu"), **options)


def _fsdp(model: Any, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    settings = {
        "mesh": init_device_mesh(device.type, (ranks,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),
        "reshard_after_forward": True,
    }
    layers = list(getattr(model, BLOCKS))
    for unit in (*layers, model.embed_tokens, model.lm_head, model.time_embedder):
        fully_shard(unit, **settings)
    fully_shard(model, **settings)
    for layer, following in zip(layers, layers[1:]):
        layer.set_modules_to_forward_prefetch([following])
    return model


def _sequential(model: nn.Module, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    """As `enable_sequential_cpu_offload` of a pipeline does with each of its models."""
    return cpu_offload(model, device, offload_buffers=len(model._parameters) > 0)


class LayerByLayer:
    """The reference: the rest of a model on the device, and each layer there for as long as it computes."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._layers = list(getattr(model, BLOCKS))
        self._device = device
        self._homes: dict[nn.Parameter, torch.Tensor] = {}
        kept = {parameter for layer in self._layers for parameter in layer.parameters()}
        for parameter in kept:
            self._homes[parameter] = parameter.data
        for parameter in model.parameters():
            if parameter not in kept:
                parameter.data = parameter.data.to(device, copy=True)
        for name, buffer in model.named_buffers():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer.to(device))
        self._hooks = []
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(lambda layer, args: self._bring(layer)))
            self._hooks.append(layer.register_forward_hook(lambda layer, args, output: self._let_go(layer)))

    def _bring(self, layer: nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.data = self._homes[parameter].to(self._device, copy=True)

    def _let_go(self, layer: nn.Module) -> None:
        for parameter in layer.parameters():
            parameter.data = self._homes[parameter]

    def share_first_layer(self) -> None:
        """From now on all layers compute with the first one's weights, on the device: what computing alone takes."""
        for hook in self._hooks:
            hook.remove()
        self._bring(self._layers[0])
        for layer in self._layers[1:]:
            for parameter, first in zip(layer.parameters(), self._layers[0].parameters()):
                parameter.data = first.data


def _reference(model: nn.Module, options: dict[str, Any], device: torch.device, ranks: int) -> Any:
    return LayerByLayer(model, device)


HOLDERS: dict[str, Callable[[nn.Module, dict[str, Any], torch.device, int], Any]] = {
    "resident": _resident,
    "reference": _reference,
    "dlo": _dlo,
    "group": _group,
    "fsdp": _fsdp,
    "sequential": _sequential,
}
