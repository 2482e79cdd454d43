# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Tiny Flux and Wan pipelines from disk, called as users do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxPipeline, WanPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

import diffusers_dlo  # noqa: F401  # adds the methods that these tests call


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


def build(folder: Path) -> dict[str, str]:
    """The paths of the checkpoints, by name."""
    return {
        "flux": str(tiny_checkpoints.build_tiny_flux(folder / "flux")),
        "wan": str(tiny_checkpoints.build_tiny_wan(folder / "wan")),
    }


def load(path: str) -> DiffusionPipeline:
    """A pipeline of its own, in the dtype of its files."""
    cls = WanPipeline if Path(path).name == "wan" else FluxPipeline
    with no_bars():
        return quiet(cls.from_pretrained(path, dtype=torch.bfloat16))


@contextmanager
def no_bars() -> Iterator[None]:
    """Loading shows no bars in it; they are switched for the whole process, and other tests look at them."""
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()


def quiet(pipe: Any) -> Any:
    """The same pipeline, without bars."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: DiffusionPipeline, seed: int = 0, **options: Any) -> np.ndarray:
    """What a pipeline makes of a prompt and a seed."""
    common: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np"}
    common["max_sequence_length"] = 16
    if isinstance(pipe, WanPipeline):
        common["num_frames"] = 5
    if "prompt_embeds" not in options:
        common["prompt"] = "a fox in the snow"
    generator = torch.Generator().manual_seed(seed)
    output = np.asarray(pipe(**{**common, "generator": generator, **options})[0])
    assert np.isfinite(output).all() and output.std() > 0
    return output


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two outputs are equal in every bit."""
    return got.shape == expected.shape and np.array_equal(got, expected)
