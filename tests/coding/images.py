# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the data that codecs are tested on: runs of bytes, and images of blocks. Must not know how it is coded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from diffusers_dlo.block_layout import BlockLayout, lay_out
from diffusers_dlo.checkpoint.safetensors_file import DTYPES
from diffusers_dlo.tensor_utils import OwnedTensor, Owner


EVERY_DTYPE = tuple(DTYPES.values())
EXTREMES = {
    torch.bfloat16: (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x807F, 0x0000, 0x8000, 0x7F7F, 0x0080),
    torch.float16: (0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001, 0x83FF, 0x0000, 0x8000, 0x7BFF, 0x0400),
}
"""Infinities, NaNs quiet, signalling and full, denormals, both zeros, the largest and the smallest normal number."""


def up(nbytes: int) -> int:
    """Rounded up to 256."""
    return (nbytes + 255) // 256 * 256


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, `(nbytes,)`."""
    return tensor.reshape(-1).view(torch.uint8)


def random_bits(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Bytes that nothing makes smaller."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def weights(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """The bytes of so many normal weights."""
    return as_bytes((0.02 * torch.randn(count, generator=torch.Generator().manual_seed(seed))).to(dtype))


def patterns() -> torch.Tensor:
    """Each 16-bit pattern once, in order, as bytes."""
    return as_bytes(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16))


def extremes(dtype: torch.dtype, count: int) -> torch.Tensor:
    """The extreme values of a dtype, over and over, as bytes."""
    values = torch.tensor(EXTREMES[dtype]).repeat(-(-count // len(EXTREMES[dtype])))[:count]
    return as_bytes(values.to(torch.int32).to(torch.int16))


def runs() -> dict[str, torch.Tensor]:
    """Runs of bytes of even length, by what is odd about them."""
    return {
        "one value": torch.tensor([0x80, 0x7F], dtype=torch.uint8),
        "an odd number of values": random_bits(2 * 101),
        "the least that is aligned": weights(128),
        "zeros": torch.zeros(1 << 16, dtype=torch.uint8),
        "ones": torch.full((1 << 16,), 0xFF, dtype=torch.uint8),
        "one NaN over and over": as_bytes(torch.full((40_001,), 0x7FA5, dtype=torch.int16)),
        "every pattern": patterns(),
        "every pattern, shuffled": patterns().view(-1, 2)[torch.randperm(1 << 16)].reshape(-1),
        "random bits": random_bits(200_000),
        "extremes of bfloat16": extremes(torch.bfloat16, 50_000),
        "extremes of float16": extremes(torch.float16, 50_000),
        "weights": weights(150_000),
        "weights of float16": weights(150_000, torch.float16),
        "weights of float32": weights(75_000, torch.float32),
        "one byte before a chunk": weights((1 << 17) - 128),
        "a chunk": weights(1 << 17),
        "a chunk and 256 bytes": weights((1 << 17) + 128),
    }


def layout_of(tensors: Sequence[torch.Tensor], name: str = "blocks.0") -> BlockLayout:
    """The layout of a block that holds these, and is in no file."""
    owned = [OwnedTensor(one, [Owner(nn.Module(), f"t{i}", f"t{i}", "parameter")]) for i, one in enumerate(tensors)]
    return lay_out(name, owned, is_leaf=False)


def image_of(layout: BlockLayout, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The image of that block: the bytes of its tensors, at their places, and zeros between them."""
    image = torch.zeros(up(layout.nbytes), dtype=torch.uint8)
    for place, tensor in zip(layout.tensors, tensors):
        image[place.offset : place.offset + place.nbytes] = as_bytes(tensor)
    return image


def tensor_of(content: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose bytes are the first of `content`."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return content[: count * dtype.itemsize].clone().view(dtype).reshape(tuple(shape))
