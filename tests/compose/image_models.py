# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the registry of tiny image transformers: one for each class that diffusers exports, by the name of the class.
Flux, Qwen-Image and SD3 are in `tests/zoo.py`. Must not run anything.
"""

from __future__ import annotations

from tests.compose.image_models_joint import JOINT
from tests.compose.image_models_single import SINGLE
from tests.zoo import Tiny


MODELS: dict[str, Tiny] = {tiny.name: tiny for tiny in (*JOINT, *SINGLE)}

# Classes that cannot stream, and why: none of these.
REASONS: dict[str, str] = {}
