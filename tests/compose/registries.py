# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which tiny models there are, by class name: those of this directory, and those of `tests/zoo.py`, which
`tests/parity/test_zoo.py` checks more thoroughly. Must not run anything.
"""

from __future__ import annotations

from tests import zoo
from tests.zoo import Tiny

from . import controlnet_models, encoder_models, image_models, other_models, unet_models, video_models


TRANSFORMERS: dict[str, Tiny] = {**image_models.MODELS, **video_models.MODELS, **other_models.MODELS}
UNETS: dict[str, Tiny] = unet_models.MODELS
CONTROLNETS: dict[str, Tiny] = controlnet_models.MODELS
ENCODERS: dict[str, Tiny] = encoder_models.MODELS

MODELS: dict[str, Tiny] = {**TRANSFORMERS, **UNETS, **CONTROLNETS, **ENCODERS}

# Those of the common registry, by the name of their class.
COMMON: dict[str, Tiny] = {
    "Cosmos3OmniTransformer": zoo.MODELS["cosmos3"],
    "WanTransformer3DModel": zoo.MODELS["wan"],
    "FluxTransformer2DModel": zoo.MODELS["flux"],
    "SD3Transformer2DModel": zoo.MODELS["sd3"],
    "QwenImageTransformer2DModel": zoo.MODELS["qwenimage"],
    "LTXVideoTransformer3DModel": zoo.MODELS["ltx"],
    "HunyuanVideoTransformer3DModel": zoo.MODELS["hunyuanvideo"],
    "CogVideoXTransformer3DModel": zoo.MODELS["cogvideox"],
    "MiniMaxH3Transformer3DModel": zoo.MODELS["minimaxh3"],
    "T5EncoderModel": zoo.TEXT_ENCODERS["t5"],
    "CLIPTextModel": zoo.TEXT_ENCODERS["clip"],
    "Qwen2_5_VLForConditionalGeneration": zoo.TEXT_ENCODERS["qwen2_5_vl"],
}

# Why a class cannot stream.
REASONS: dict[str, str] = {
    **image_models.REASONS,
    **video_models.REASONS,
    **other_models.REASONS,
    **unet_models.REASONS,
    **controlnet_models.REASONS,
}

# Forwards that call blocks in another order than that in which the model registers them (all UNets do: down, middle,
# up, and the middle is registered last). The first pass of these brings some blocks twice; the next ones follow the
# order that was seen.
OWN_ORDER = frozenset(
    {
        "ConsisIDTransformer3DModel",
        "DreamLiteUNetModel",
        "DualTransformer2DModel",
        "Flux3Transformer2DModel",
        "HiDreamImageTransformer2DModel",
        "HunyuanDiT2DControlNetModel",
        "HunyuanDiT2DMultiControlNetModel",
        "I2VGenXLUNet",
        "LatteTransformer3DModel",
        "Lumina2Transformer2DModel",
        "Qwen3VLForConditionalGeneration",
        "RFD4ProteinaTransformer",
        "SparseControlNetModel",
        "StableCascadeUNet",
        "UNet1DModel",
        "UNet2DConditionModel",
        "UNet2DModel",
        "UNet3DConditionModel",
        "UNetControlNetXSModel",
        "UNetMotionModel",
        "UNetSpatioTemporalConditionModel",
        "UVit2DModel",
        "WanVACETransformer3DModel",
        "ZImageControlNetModel",
    }
)
