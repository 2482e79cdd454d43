# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Coded checkpoints that a device has coded: they come back as what they were, byte for byte."""

from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from diffusers_dlo.coding.coded_file import read_coded_file
from diffusers_dlo.pack import decode_checkpoint, pack_checkpoint
from tests.coding import checkpoints


pytestmark = pytest.mark.gpu


@torch.no_grad()
@pytest.mark.parametrize("ranks", (1, 3))
def test_a_model_comes_back(ranks: int, tmp_path: Path) -> None:
    checkpoints.wan(blocks=2, heads=8).save_pretrained(tmp_path / "in")
    source, out, plain, back = (str(tmp_path / part) for part in ("in", "out", "plain", "back"))
    (path,) = pack_checkpoint(source, out, torch.bfloat16, codec="ans", ranks=ranks)
    coded = read_coded_file(path)
    assert coded is not None and (coded.codec, coded.ranks, len(coded.blocks)) == ("ans", ranks, 2)
    before, after = coded.sizes["bfloat16"]
    assert after < 0.75 * before
    pack_checkpoint(source, plain, torch.bfloat16)
    decode_checkpoint(out, back)
    for file in Path(plain).iterdir():
        assert file.read_bytes() == (Path(back) / file.name).read_bytes(), file.name
    expected = WanTransformer3DModel.from_pretrained(plain, dtype=torch.bfloat16).to("cuda")
    model = WanTransformer3DModel.from_pretrained(out)
    handle = model.enable_distributed_layerwise_offload()
    inputs = {
        name: value.to("cuda") if isinstance(value, torch.Tensor) else value
        for name, value in checkpoints.wan_inputs().items()
    }
    assert torch.equal(model(**inputs)[0], expected(**inputs)[0])
    handle.remove()
