# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the comparison of a model under the offload with the same model whole on the simulated device, and the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from tests import toys
from tests.toys import feed, toy
from tests.zoo import MODELS, build, flat, place


TOYS: dict[str, Callable[[], nn.Module]] = {
    "five unequal blocks": lambda: toy(toys.Stack, 5),
    "dtypes, strides and buffers": lambda: toy(toys.Stack, 3, toys.MixedBlock),
    "buffers that are written": lambda: toy(toys.Stack, 3, toys.CountingBlock),
    "tied weights": lambda: toy(toys.Tied),
    "weights that are returned": lambda: toy(toys.Returning),
    "large leaves": lambda: toy(toys.Leafy),
}
REAL = ("cosmos3", "wan", "flux")


def device() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def compute(module: nn.Module, name: str, seed: int) -> list[torch.Tensor]:
    """The outputs of one forward on the device, on the host."""
    with torch.no_grad():
        if name in MODELS:
            dtype = next(p.dtype for p in module.parameters())
            output = module(**place(MODELS[name].inputs(seed), dtype=dtype, device=device()))
        else:
            output = module(feed(seed).to(device()))
    return [tensor.cpu() for tensor in flat(output)]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The model to offload, on the host, and the same whole on the device."""
    if name in TOYS:
        return TOYS[name](), TOYS[name]().to(device())
    return build(name, 3, dtype=torch.bfloat16), build(name, 3, dtype=torch.bfloat16).to(device())


def assert_outputs(model: nn.Module, reference: nn.Module, name: str, seed: int) -> None:
    got, expected = compute(model, name, seed), compute(reference, name, seed)
    assert got and len(got) == len(expected)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and torch.equal(a, b) and not torch.isnan(a).any(), (name, seed)


def assert_weights(model: nn.Module, expected: dict[str, torch.Tensor], kind: str) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert state[key].device.type == kind or kind == "any", (key, state[key].device)
        assert torch.equal(state[key].cpu(), value), key


def whole_life(name: str, rank: int, size: int, **options: Any) -> OffloadHandle:
    """
    A model from before enabling until after disabling: its outputs, its weights, and which objects they are.
    """
    model, reference = pair(name)
    originals = dict(model.named_parameters())
    weights = {key: value.cpu().clone() for key, value in reference.state_dict().items()}
    handle = apply_distributed_layerwise_offload(model, onload_device="npu", **options)
    try:
        born = dict(model.named_parameters())
        assert all(parameter.device == device() for parameter in born.values())
        managed = [key for key, parameter in born.items() if parameter.dim() and not any(parameter.stride())]
        assert managed and not any(born[key] is originals[key] for key in managed)
        assert all(type(born[key]) is type(originals[key]) for key in managed)
        for step in range(3):
            assert_outputs(model, reference, name, 10 * rank + step)
            assert all(parameter is born[key] for key, parameter in model.named_parameters())
            assert all(parameter.device == device() for parameter in model.parameters())
        if size == 1 and "written" not in name:
            assert_weights(model, weights, "any")
    finally:
        handle.remove()
    put_back = dict(model.named_parameters())
    other = [key for key in managed if put_back[key] is not originals[key]]
    assert not other, (name, other)
    after = {key: value.cpu().clone() for key, value in reference.state_dict().items()}
    assert_weights(model, after, "cpu")
    assert_outputs(model.to(device()), reference, name, 10 * rank)
    return handle


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = _Lines(), logging.getLogger("diffusers_dlo")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
