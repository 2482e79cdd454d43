# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the random parts of the inputs of tiny image models, and their position grids. Must not know any model."""

from __future__ import annotations

import torch


class Draw:
    """Everything random in one call's inputs: each value depends on the seed and the order of the draws alone."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        """Latents, embeddings."""
        return torch.randn(*shape, generator=self._generator)

    def uniform(self, low: float, high: float, count: int = 1) -> torch.Tensor:
        """Timesteps: one, for a batch of `count`."""
        return (low + (high - low) * torch.rand(1, generator=self._generator)).repeat(count)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Token ids, from 0 to below `high`."""
        return torch.randint(high, shape, generator=self._generator)


def grid(rows: int, cols: int, axes: int = 3, plane: int = 0) -> torch.Tensor:
    """Positions `(plane, row, col, 0, ...)` of the tokens of an image, one a row, as Flux's pipelines prepare them."""
    ids = torch.zeros(rows * cols, axes)
    ids[:, 0] = plane
    ids[:, 1:3] = torch.cartesian_prod(torch.arange(rows), torch.arange(cols))
    return ids
