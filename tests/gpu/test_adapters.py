# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Adapters on a real device: those loaded after enabling land on it, and leave it with the model."""

from __future__ import annotations

import peft
import pytest
import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.zoo import MODELS, build, run


pytestmark = pytest.mark.gpu
TARGETS = ["to_q", "ff.net.0.proj", "x_embedder"]


def test_adapters_land_on_the_onload_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    other = build("flux", 3)
    other.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False), "x")
    state = peft.get_peft_model_state_dict(other, adapter_name="x")
    model, reference = build("flux", 3), build("flux", 3).to(device)
    for each in (model, reference):
        each.load_lora_adapter(dict(state), prefix=None, adapter_name="early")
    handle = apply_distributed_layerwise_offload(model)
    for index, low in enumerate((True, False)):
        for each in (model, reference):
            options = {"adapter_name": f"late{index}", "low_cpu_mem_usage": low}
            each.load_lora_adapter(dict(state), prefix=None, **options)
            each.set_adapters(["early", f"late{index}"], [0.5, 2.0])
        adapters = {value.device for name, value in model.named_parameters() if "lora_" in name}
        assert adapters == {device}
        inputs = MODELS["flux"].inputs(index)
        got, wanted = run(model, inputs, device=device), run(reference, inputs, device=device)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    handle.remove()
    assert {value.device.type for value in model.parameters()} == {"cpu"}
    reference.cpu()
    assert all(torch.equal(value, reference.state_dict()[key]) for key, value in model.state_dict().items())
