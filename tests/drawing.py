# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the random parts of the inputs of tiny models, and their position grids. Must not know any model."""

from __future__ import annotations

from collections.abc import Callable

import torch


def sampler(seed: int) -> Callable[..., torch.Tensor]:
    """A normal sampler, called with a shape: what it draws depends on the seed and on its draws before alone."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def uniform(seed: int, low: float, high: float, count: int = 1) -> torch.Tensor:
    """Timesteps, `(count,)`, from a stream of their own: another normal draw does not move them."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    return low + (high - low) * torch.rand(count, generator=generator)


def integers(seed: int, low: int, high: int, *shape: int) -> torch.Tensor:
    """Token ids and the like, from `low` up to, and without, `high`."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def grid(rows: int, cols: int, axes: int = 3, plane: int = 0) -> torch.Tensor:
    """Positions `(plane, row, col, 0, ...)` of the tokens of an image, one a row, as Flux's pipelines prepare them."""
    ids = torch.zeros(rows * cols, axes)
    ids[:, 0] = plane
    ids[:, 1:3] = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    return ids
