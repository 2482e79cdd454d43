# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""A tiny UNet."""

import torch
from diffusers import UNet2DConditionModel
from torch import nn


def build_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return unet.eval()


def run_unet(unet: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sample, states = (torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 5, 16)))
    if unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last):
        sample = sample.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        return [unet(sample, torch.tensor([500]), states).sample]
