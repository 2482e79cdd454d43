# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the rows about computing: what bit-equality rests on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from diffusers_dlo.tensor_utils import typed_view

from .context import Context, demand
from .outcome import Finding


_OFFSETS = (0, 256, 512, 768, 1024, 4096 + 256, 65_536 + 512, 1_048_576 + 768)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHAPES = ((512, 1024, 96), (1000, 640, 33), (64, 4096, 1))
"""Outputs and inputs of a layer, and tokens."""


def slots(context: Context) -> Finding:
    """Products with one weight at several places of several buffers, compared with the weight by itself."""
    products = 0
    for dtype in _DTYPES:
        for outputs, inputs, tokens in _SHAPES:
            generator = torch.Generator().manual_seed(outputs)
            weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
            x = torch.randn(tokens, inputs, generator=generator).to(dtype).to(context.device)
            nbytes = weight.numel() * weight.element_size()
            own = context.platform.empty(nbytes).view(dtype).view(outputs, inputs)
            own.copy_(weight)
            expected = F.linear(x, own)
            demand(not expected.isnan().any(), f"a product of {dtype} is NaN")
            for _ in range(2):
                buffer = context.platform.empty(max(_OFFSETS) + nbytes)
                for offset in _OFFSETS:
                    view = typed_view(buffer, offset, nbytes, dtype, weight.shape, weight.stride())
                    view.copy_(weight)
                    same = torch.equal(F.linear(x, view), expected)
                    demand(same, f"{dtype}, {outputs} x {inputs}, {tokens} tokens: other bits at offset {offset}")
                    products += 1
    return Finding(f"{products} products", {"products": products})


def repeated(context: Context) -> Finding:
    """A layer with attention, ten times."""
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        x = torch.randn(2, 200, 256, generator=generator).to(dtype).to(context.device)
        weights = [(torch.randn(256, 256, generator=generator) / 16).to(dtype).to(context.device) for _ in range(4)]

        def forward(x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> torch.Tensor:
            normed = F.layer_norm(x, (256,))
            query, key, value = (F.linear(normed, w).unflatten(-1, (4, 64)).transpose(1, 2) for w in weights[:3])
            mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
            return x + F.gelu(F.linear(mixed, weights[3]), approximate="tanh")

        with torch.inference_mode():
            first = forward()
            demand(not first.isnan().any(), f"a forward in {dtype} is NaN")
            for turn in range(1, 10):
                demand(torch.equal(forward(), first), f"{dtype}: forward {turn + 1} differs from the first")
    return Finding("10 forwards in each of 3 dtypes")
