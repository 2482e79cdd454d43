# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the models that are streamed: a tiny one of diffusers, and a stack as large as is wanted. No weight is read."""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel
from torch import nn


def tiny_model() -> nn.Module:
    """A Flux transformer with 3 + 2 blocks, in bf16 on the CPU; every weight matters."""
    model = FluxTransformer2DModel(
        num_layers=3,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=16,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.2).to(torch.bfloat16)
    return model.eval()


def tiny_forward(model: nn.Module, seed: int, device: torch.device) -> torch.Tensor:
    """What the tiny model makes of random inputs, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns, text = 5, 4, 7

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
    inputs = {
        "hidden_states": normal(1, rows * columns, 16),
        "timestep": torch.tensor([0.1 + 0.01 * (seed % 80)]),
        "guidance": torch.tensor([3.5]),
        "pooled_projections": normal(1, 20),
        "encoder_hidden_states": normal(1, text, 24),
        "txt_ids": torch.zeros(text, 3),
        "img_ids": torch.cat([torch.zeros(rows * columns, 1), grid], dim=1),
    }
    with torch.inference_mode():
        return model(**{name: value.to(device) for name, value in inputs.items()}, return_dict=False)[0].cpu()


class Layer(nn.Module):
    """A residual layer of two products."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Eight layers of `block_mib` MiB each, in bf16 on the CPU."""

    def __init__(self, block_mib: int) -> None:
        super().__init__()
        self.dim = max(round((block_mib * 2**20 / 16) ** 0.5 / 64) * 64, 64)
        with torch.device("meta"):
            self.layers = nn.ModuleList(Layer(self.dim) for _ in range(8))
        self.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
        # Drawing every weight would take longer than all the rest.
        noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
        for number, parameter in enumerate(self.parameters()):
            flat = parameter.detach().view(-1)
            shifted = noise.roll(number * 997)
            for at in range(0, flat.numel(), noise.numel()):
                count = min(noise.numel(), flat.numel() - at)
                flat[at : at + count] = shifted[:count]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
