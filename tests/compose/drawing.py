# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Inputs that depend on a seed alone."""

from __future__ import annotations

from collections.abc import Callable

import torch


def draw(seed: int) -> Callable[..., torch.Tensor]:
    """A normal sampler: `normal(*shape)` depends on the seed and on the draws before it."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def uniform(seed: int, low: float, high: float) -> torch.Tensor:
    """One timestep, `(1,)`, from a stream of its own."""
    return low + (high - low) * torch.rand(1, generator=torch.Generator().manual_seed(seed + 1_000_003))


def integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    """Whole numbers from `low` up to, and without, `high`."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
