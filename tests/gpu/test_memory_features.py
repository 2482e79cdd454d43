# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What moves components between devices, where there are two kinds of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import diffusers_dlo  # noqa: F401  gives pipelines their methods
from tests.compose.pipelines import build, call, load, same


pytestmark = pytest.mark.gpu


def devices(module: torch.nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def test_model_offload_after_enabling(tmp_path: Path) -> None:
    """Components that do not stream are on the device in turn: the VAE is not, while the transformer computes."""
    path = build(tmp_path)["flux"]
    plain = call(load(path).to("cuda"))
    pipe = load(path)
    handle = pipe.enable_distributed_layerwise_offload()
    assert same(call(pipe), plain)
    pipe.enable_model_cpu_offload()
    seen = []
    pipe.transformer.register_forward_pre_hook(lambda module, args: seen.append((devices(module), devices(pipe.vae))))
    for _ in range(2):
        assert same(call(pipe), plain)
        assert devices(pipe.vae) == devices(pipe.text_encoder) == {"cpu"}
    assert len(seen) == 4 and all(pair == ({"cuda"}, {"cpu"}) for pair in seen)
    pipe.remove_all_hooks()
    handle.remove()
    assert devices(pipe.transformer) == {"cpu"}
    assert same(call(pipe.to("cuda")), plain)


def test_moves_away_leave_what_streams(tmp_path: Path) -> None:
    path = build(tmp_path)["flux"]
    plain = call(load(path).to("cuda"))
    pipe = load(path)
    pipe.enable_distributed_layerwise_offload()
    pipe.to("cpu")
    assert devices(pipe.transformer) == {"cuda"} and devices(pipe.vae) == {"cpu"}
    pipe.to("cuda")
    assert devices(pipe.vae) == {"cuda"} and same(call(pipe), plain)
    pipe.disable_distributed_layerwise_offload()
