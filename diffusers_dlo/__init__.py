# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Distributed Layerwise Offload for Hugging Face diffusers: models far larger than the accelerator, exact, on one or
several ranks. Importing this package adds `enable_distributed_layerwise_offload` to every pipeline and model, and
has diffusers know coded checkpoints.
"""

# ruff: noqa: E402

from .device.backend_package import import_torch


import_torch()  # first, for what torch does not say where a backend fails that it loads by itself

from .device.platform import load_device_backends


load_device_backends()  # before diffusers does

from diffusers import DiffusionPipeline, ModelMixin, ModularPipeline

from ._version import __version__
from .api import (
    OffloadHandle,
    apply_distributed_layerwise_offload,
    is_distributed_layerwise_offload_enabled,
    remove_distributed_layerwise_offload,
)
from .block_discovery import get_blocks_attr_names, get_blocks_from_dit, set_blocks_attr_names
from .block_layout import BlockLayout
from .checkpoint.loading import mapped_loading
from .checkpoint.remap import load_mapped_checkpoint
from .coding.loading import register
from .concurrency import ConcurrentGenerationError, generate_concurrently
from .config import DistributedLayerwiseOffloadConfig
from .offload_plan import OffloadPlan, plan_distributed_layerwise_offload
from .pipeline_mixin import DistributedLayerwiseOffloadMixin, install
from .report import OffloadReport
from .selection import supports_mmap_loading
from .transfer_choice import TransferTiming
from .weight_value import host_view


install((DiffusionPipeline, ModularPipeline), ModelMixin)
register()

__all__ = [
    "BlockLayout",
    "ConcurrentGenerationError",
    "DistributedLayerwiseOffloadConfig",
    "DistributedLayerwiseOffloadMixin",
    "OffloadHandle",
    "OffloadPlan",
    "OffloadReport",
    "TransferTiming",
    "__version__",
    "apply_distributed_layerwise_offload",
    "generate_concurrently",
    "get_blocks_attr_names",
    "get_blocks_from_dit",
    "host_view",
    "is_distributed_layerwise_offload_enabled",
    "load_mapped_checkpoint",
    "mapped_loading",
    "plan_distributed_layerwise_offload",
    "remove_distributed_layerwise_offload",
    "set_blocks_attr_names",
    "supports_mmap_loading",
]
