# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Quantized weights on real devices: those that were quantized on the CPU or on the device, and the kinds that only a GPU
computes with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.owned_tensor import owned_tensors
from diffusers_dlo.tensor_utils import move_tensors
from tests.quantized import KINDS, Stack, quantized
from tests.ranks import run_ranks


pytestmark = pytest.mark.gpu


def _torchao(name: str, **options: object) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import torchao.quantization

        torchao.quantization.quantize_(model, getattr(torchao.quantization, name)(**options))

    return quantize


ON_DEVICE: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    "torchao_int4_tiles": (
        "torchao",
        _torchao("Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d"),
    ),
    "torchao_float8_dynamic": ("torchao", _torchao("Float8DynamicActivationFloat8WeightConfig")),
    "bnb_int8": KINDS["bnb_int8"],
    "bnb_nf4": KINDS["bnb_nf4"],
}
"""Quantized on the device that they are on."""
WIDE = (512, 1024, 256)


def is_there(library: str) -> bool:
    return importlib.util.find_spec(library.partition(".")[0]) is not None


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(4, dim=256, widths=WIDE).eval().to(torch.bfloat16).requires_grad_(False)


def x(seed: int) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def placed(model: nn.Module, kind: str) -> nn.Module:
    """The model on the device; those of bitsandbytes with what is beside their weights."""
    if kind.startswith("bnb"):
        move_tensors(owned_tensors(model), torch.device("cuda", torch.cuda.current_device()), [])
        return model
    return model.cuda()


def check(model: nn.Module, reference: nn.Module, rank: int, **options) -> None:
    """Passes equal to those of `reference` on the device; all weights on the CPU after, of the classes they were."""
    classes = {name: type(parameter) for name, parameter in model.named_parameters()}
    expected = []
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for step in range(3):
            with torch.no_grad():
                expected.append(reference(x(10 * rank + step)))
                assert torch.equal(model(x(10 * rank + step)), expected[-1]), f"pass {step}"
    finally:
        handle.remove()
    assert {owned.tensor.device.type for owned in owned_tensors(model)} == {"cpu"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {name: type(parameter) for name, parameter in model.named_parameters()} == classes
    handle = apply_distributed_layerwise_offload(model, **options)
    with torch.no_grad():
        assert torch.equal(model(x(10 * rank)), expected[0])
    handle.remove()


def check_all(rank: int, size: int) -> None:
    for kind, (library, _) in KINDS.items():
        if is_there(library) and kind != "wrappers":  # which are no library's, and cannot be moved by .cuda()
            for transfer in ("all_gather", "local"):
                check(quantized(kind, stack()), placed(quantized(kind, stack()), kind), rank, transfer=transfer)
    for library, quantize in ON_DEVICE.values():
        if is_there(library):
            models = [stack().cuda() for _ in range(2)]
            for model in models:
                quantize(model)
            check(models[0], models[1], rank, transfer="all_gather")


def test_one_gpu() -> None:
    check_all(0, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_all_gpus_of_the_host() -> None:
    run_ranks(torch.cuda.device_count(), check_all, backend="nccl", timeout=280)
