# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Small modules for what no real model has all of: odd block counts, shapes, dtypes, buffers, ties and calling orders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Block(nn.Module):
    """A residual layer; `width` inner features make blocks unequal."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, width)
        self.down = nn.Linear(width, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class MixedBlock(Block):
    """fp32 parameters in a bf16 block, a column-major weight, an integer and a boolean buffer, a scalar parameter."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__(dim, width)
        self.to(torch.bfloat16)
        self.norm.float()
        self.up.weight = nn.Parameter(torch.randn(dim, width, dtype=torch.bfloat16).mul_(0.1).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.arange(dim, dtype=torch.int64))
        self.register_buffer("mask", torch.arange(dim) % 3 != 0)
        self.register_buffer("table", torch.linspace(-1, 1, dim, dtype=torch.float64), persistent=False)
        self.odd = nn.Parameter(torch.randn(3, 7, 5).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.float()).to(torch.bfloat16)
        y = self.down(torch.tanh(self.up(y))) * self.scale.to(torch.bfloat16) + self.odd.sum().to(torch.bfloat16)
        return torch.where(self.mask, x + y, x - y) + (self.shift * self.table).to(x.dtype)


class CountingBlock(Block):
    """Writes to its buffers in forward: one in place, one by assigning a new tensor."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__(dim, width)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("last", torch.zeros(dim), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x.mean(dim=0)
        return super().forward(x) * self.calls[0] + self.last


class NormingBlock(Block):
    """
    A batch norm, which in training mode writes to its buffers without a trace, and a buffer written through `.data`.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__(dim, width)
        self.batch = nn.BatchNorm1d(dim)
        self.register_buffer("total", torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.data.add_(x.sum(dim=0))
        return super().forward(self.batch(x)) + self.total + self.batch.running_mean


class ReturningBlock(Block):
    """Returns a weight, and a view of one, beside its result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return super().forward(x), {"bias": self.down.bias, "row": self.up.weight[1].expand(4, -1)}


class Stack(nn.Module):
    """Blocks between two layers; `order` says which are called, and in what order."""

    def __init__(
        self, num_blocks: int, block: type[Block] = Block, dim: int = 16, widths: Sequence[int] = (24, 40, 8)
    ) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block(dim, widths[i % len(widths)]) for i in range(num_blocks))
        self.out = nn.Linear(dim, dim)
        self.order: Sequence[int] = range(num_blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        dtype = torch.bfloat16 if isinstance(self.blocks[0], MixedBlock) else x.dtype
        x = x.to(dtype)
        for index in self.order:
            x = self.blocks[index](x)
        return self.out(x.to(self.out.weight.dtype))


class Failing(Stack):
    """Raises before, in, or after the block called `fail_at`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.fail_at: int | None = None
        self.fail_with: type[BaseException] = ZeroDivisionError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index in self.order:
            block = self.blocks[index]
            if self.fail_at == index:
                handle = block.up.register_forward_pre_hook(self._fail)
                try:
                    x = block(x)
                finally:
                    handle.remove()
            x = block(x)
        if self.fail_at is not None:
            raise self.fail_with
        return self.out(x)

    def _fail(self, *_: object) -> None:
        raise self.fail_with


class Nested(nn.Module):
    """A `ModuleList` of `ModuleList`s of blocks, a block inside a block, and a list with members without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block(16, 24) for _ in range(2)) for _ in range(2))
        outer = Block(16, 24)
        outer.inner = nn.ModuleList([Block(16, 8)])
        self.outers = nn.ModuleList([outer])
        self.acts = nn.ModuleList([nn.Tanh(), nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block, act in zip(stage, self.acts):
                x = act(block(x))
        for outer in self.outers:
            x = outer.inner[0](outer(x))
        return x


class Tied(Stack):
    """A weight shared by two blocks, one shared with the rest, and one shared within a block."""

    def __init__(self) -> None:
        super().__init__(3, widths=(16,))
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = self.out.weight
        self.blocks[0].down.bias = self.blocks[0].norm.bias


class Returning(nn.Module):
    """Uses what its blocks return of their weights only at the end, when their slots hold other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturningBlock(16, width) for width in (24, 40, 8, 16, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.blocks:
            x, weights = block(x)
            kept.append(weights)
        return x + sum(weights["bias"] + weights["row"] for weights in kept)


def _add_one(module: nn.Module, args: tuple) -> None:
    module.whole.add_(1.0)


class Aliased(Stack):
    """Parameters and buffers of a block that are views of each other; forward writes to one and reads the other."""

    def __init__(self) -> None:
        super().__init__(3)
        for block in self.blocks:
            block.register_buffer("whole", torch.arange(300_000, dtype=torch.float32))
            block.register_buffer("part", block.whole[:16])
            block.register_forward_pre_hook(_add_one)
            block.norm.weight = nn.Parameter(block.part.clone())
            block.norm.bias = nn.Parameter(block.norm.weight.data)
            block.register_forward_hook(lambda module, args, output: output + module.part)


class Repeated(Stack):
    """One block listed three times, and one called twice in a row."""

    def __init__(self) -> None:
        super().__init__(2)
        first, second = self.blocks
        self.blocks = nn.ModuleList([first, second, first, second, first])
        self.order = (0, 0, 1, 2, 3, 3, 4)


class Borrowing(Stack):
    """Calls a submodule of a block outside the block's turn, before and after it."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.blocks[0].norm(x)) + self.blocks[2].up(x)[:, :16].sum() + self.blocks[0].norm(x)


class Peeking(Stack):
    """Reads a weight of a block outside the block's turn."""

    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.blocks[1].up.weight.sum()


class Leafy(Stack):
    """A large embedding that is called, and a large head that is not."""

    def __init__(self) -> None:
        super().__init__(2)
        self.embed = nn.Embedding(400, 16)
        self.lm_head = nn.Linear(16, 400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.embed((x * 50).long().abs() % 400).mean(dim=1))


class Uncalled(Leafy):
    """Reads the weights of its head without calling it, and those of its embedding where it calls that too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.linear(super().forward(x), self.lm_head.weight, self.lm_head.bias)
        return nn.functional.linear(logits.softmax(dim=-1), self.embed.weight.t())


def toy(cls: type[nn.Module], *args: object, seed: int = 0) -> nn.Module:
    """A toy with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    return cls(*args).eval()


def feed(seed: int) -> torch.Tensor:
    """An input, `(4, 16)`, that depends on `seed` alone."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
