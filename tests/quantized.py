# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Models whose linear layers are quantized in place, by each library that does it on a CPU, and what is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from tests import toys


WIDTHS = (96, 160, 32)


class Stack(toys.Stack):
    """Does not ask its weights for a dtype to compute in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.out(x)


def stack(num_blocks: int = 3, seed: int = 0) -> Stack:
    """A bf16 toy with features enough for groups of 32 and 64."""
    torch.manual_seed(seed)
    model = Stack(num_blocks, dim=64, widths=WIDTHS).eval()
    return model.to(torch.bfloat16).requires_grad_(False)


def feed(seed: int) -> torch.Tensor:
    """An input of `stack`, `(4, 64)`."""
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _torchao(config: Callable[[], object]) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        from torchao.quantization import quantize_

        quantize_(model, config())

    return quantize


def _int8() -> object:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _float8() -> object:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig()


def _int4() -> object:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))


def _quanto(qtype: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        import optimum.quanto

        optimum.quanto.quantize(model, weights=getattr(optimum.quanto, qtype))
        optimum.quanto.freeze(model)

    return quantize


def _replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child))


def bnb_int8(model: nn.Module) -> None:
    """LLM.int8() layers, quantized, which have not run yet."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    def make(linear: nn.Linear) -> nn.Module:
        made = Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
        made.weight = Int8Params(linear.weight.data.float().cpu(), requires_grad=False, has_fp16_weights=False)
        made.bias = linear.bias
        return made.to(linear.weight.device).eval()

    _replace_linears(model, make)


def _bnb_4bit(quant_type: str) -> Callable[[nn.Module], None]:
    def quantize(model: nn.Module) -> None:
        from bitsandbytes.nn import Linear4bit, Params4bit

        def make(linear: nn.Linear) -> nn.Module:
            kind = {"quant_type": quant_type, "compress_statistics": True}
            made = Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, torch.bfloat16, **kind)
            made.weight = Params4bit(linear.weight.data.float().cpu(), requires_grad=False, module=made, **kind)
            made.bias = linear.bias
            made.support_avx512bf16_for_cpu = False  # CPUs that have it pack the weights anew in the first forward
            return made.to(linear.weight.device).eval()

        _replace_linears(model, make)

    return quantize


def gguf_q8(model: nn.Module) -> None:
    """Layers as a GGUF file gives them."""
    import gguf
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    def make(linear: nn.Linear) -> nn.Module:
        made = GGUFLinear(
            linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=torch.bfloat16
        )
        kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quants.quantize(linear.weight.detach().float().numpy(), kind)
        made.weight = GGUFParameter(torch.from_numpy(data.copy()), quant_type=kind)
        made.bias = linear.bias
        return made

    _replace_linears(model, make)


class Scaled(torch.Tensor):
    """
    A wrapper as quantizers make them: `q * scale`, with an empty tensor and a single number beside. `q` may be a
    wrapper itself.
    """

    @staticmethod
    def __new__(cls, q: torch.Tensor, scale: torch.Tensor, empty: torch.Tensor, one: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.bfloat16, device=q.device)

    def __init__(self, q: torch.Tensor, scale: torch.Tensor, empty: torch.Tensor, one: torch.Tensor) -> None:
        self.q, self.scale, self.empty, self.one = q, scale, empty, one

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale", "empty", "one"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, context: None, size: torch.Size, stride: tuple[int, ...]) -> Scaled:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = cls(*(func(part) for part in (args[0].q, args[0].scale, args[0].empty, args[0].one)))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        return func(*tree_map_only(Scaled, _value, args), **tree_map_only(Scaled, _value, kwargs or {}))


def _value(scaled: Scaled) -> torch.Tensor:
    q = _value(scaled.q) if isinstance(scaled.q, Scaled) else scaled.q
    return (q * scaled.scale * scaled.one).to(torch.bfloat16)


def scale_weights(model: nn.Module) -> None:
    """
    Wrappers of every shape: around a wrapper, around columns, with a scale that two of a block have in common, or two
    blocks, and one weight under two names.
    """

    def scaled(weight: torch.Tensor, scale: torch.Tensor | None = None, inner: bool = False) -> Scaled:
        scale = weight.abs().amax(1, keepdim=True) / 127 if scale is None else scale
        q = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        q = scaled(q.float()) if inner else q.t().contiguous().t()
        return Scaled(q, scale, torch.empty(0, 3, device=weight.device), torch.ones((), device=weight.device))

    common = torch.full((1, 64), 0.01, device=model.inp.weight.device)
    for index, block in enumerate(model.blocks):
        up, down = block.up.weight.detach(), block.down.weight.detach()
        shared = common if index > 1 else torch.full((1, 64), 0.02, device=up.device)
        block.up.weight = nn.Parameter(scaled(up, shared), requires_grad=False)
        block.gate = nn.Linear(64, 64, bias=False, device=up.device)
        block.gate.weight = nn.Parameter(scaled(up[:1].expand(64, 64), shared), requires_grad=False)
        block.up.weight.scale = block.gate.weight.scale = shared  # which a parameter has a view of
        block.down.weight = nn.Parameter(scaled(down, inner=index == 1), requires_grad=False)
        block.register_parameter("again", block.down.weight)
        block.register_forward_hook(lambda block, args, output: block.gate(output))
    model.out.weight = nn.Parameter(scaled(model.out.weight.detach()), requires_grad=False)


KINDS: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    "wrappers": ("torch", scale_weights),
    "torchao_int8": ("torchao", _torchao(_int8)),
    "torchao_int4": ("torchao", _torchao(_int4)),
    "torchao_float8": ("torchao", _torchao(_float8)),
    "quanto_int8": ("optimum.quanto", _quanto("qint8")),
    "quanto_int4": ("optimum.quanto", _quanto("qint4")),
    "quanto_float8": ("optimum.quanto", _quanto("qfloat8")),
    "bnb_int8": ("bitsandbytes", bnb_int8),
    "bnb_nf4": ("bitsandbytes", _bnb_4bit("nf4")),
    "bnb_fp4": ("bitsandbytes", _bnb_4bit("fp4")),
    "gguf_q8": ("gguf", gguf_q8),
}
"""By name: the library that it needs, and what quantizes a model in place."""


def quantized(kind: str, model: nn.Module) -> nn.Module:
    """`model`, with its linear layers quantized in place."""
    KINDS[kind][1](model)
    return model
