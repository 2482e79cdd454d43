# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What is saved while weights stream, and after, is as large as without the offload, and in the same files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import FluxTransformer2DModel

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.compose.adapting import TWO, flux


def files_of(model: Any, folder: Path) -> dict[str, int]:
    model.save_pretrained(folder, max_shard_size="100KB")
    return {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}


def pickled(module: torch.nn.Module) -> bytes:
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    return stream.getvalue()


@pytest.mark.parametrize("host", ("mapped", "packed", "pinned"))
def test_files_and_sizes(host: str, tmp_path: Path) -> None:
    flux().save_pretrained(tmp_path / "checkpoint")
    model, reference = (FluxTransformer2DModel.from_pretrained(tmp_path / "checkpoint") for _ in range(2))
    for each in (model, reference):
        torch.manual_seed(0)
        each.add_adapter(peft.LoraConfig(r=4, target_modules=TWO, init_lora_weights=False), "x")
    wanted = files_of(reference, tmp_path / "reference")
    block = len(pickled(reference.transformer_blocks[0]))
    handle = apply_distributed_layerwise_offload(model, host=host)
    assert handle.report().host_kind == host and len(wanted) > 5
    for when in ("while enabled", "disabled"):
        assert files_of(model, tmp_path / when) == wanted, when
        saved = pickled(model.transformer_blocks[0])
        assert abs(len(saved) - block) < 1000, when  # a view of more than itself would bring all of that along
        expected = reference.transformer_blocks[0].state_dict()
        got = torch.load(io.BytesIO(saved))
        assert all(torch.equal(got[name], value) for name, value in expected.items()) and got.keys() == expected.keys()
        handle.remove()
