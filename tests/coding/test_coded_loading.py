# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Coded models as diffusers loads them: without values, guarded, and ordinary ones once they are released."""

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload, load_mapped_checkpoint, mapped_loading
from diffusers_dlo.coding.coded_file import METHOD
from diffusers_dlo.coding.loading import coded_file_of, release
from diffusers_dlo.coding.unpacking import FileDecoder
from diffusers_dlo.coding.zstd import ZstdCodec
from diffusers_dlo.pack import pack_checkpoint
from diffusers_dlo.validation import validate_module, validate_placed
from tests.coding import checkpoints


BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coded checkpoint in `coded`, and the same without a codec in `plain`."""
    folder = tmp_path_factory.mktemp("coded")
    checkpoints.wan().save_pretrained(folder / "in")
    pack_checkpoint(str(folder / "in"), str(folder / "plain"), BF16)
    pack_checkpoint(str(folder / "in"), str(folder / "coded"), BF16, codec="zstd", ranks=2)
    return folder


def load(folder: Path, **options: Any) -> nn.Module:
    return WanTransformer3DModel.from_pretrained(folder / "coded", **options)


def in_mapped_loading(folder: Path) -> nn.Module:
    with mapped_loading():
        return load(folder, dtype=BF16)


WAYS: dict[str, Callable[[Path], nn.Module]] = {
    "no dtype": load,
    "its dtype": lambda folder: load(folder, dtype=BF16),
    "mapped_loading": in_mapped_loading,
    "disable_mmap": lambda folder: load(folder, disable_mmap=True),
    "low_cpu_mem_usage": lambda folder: load(folder, low_cpu_mem_usage=True),
    "mismatched sizes": lambda folder: load(folder, ignore_mismatched_sizes=True),
    "loading info": lambda folder: load(folder, output_loading_info=True)[0],
}


def test_blocks_have_no_values_and_all_else_has(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = WanTransformer3DModel.from_pretrained(folder / "plain", dtype=BF16)
    plain = expected.state_dict()
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        for name, way in WAYS.items():
            model = way(folder)
            coded = coded_file_of(model)
            assert coded is not None and not caplog.records, (name, caplog.text)
            assert coded.tensor_names == {key for key in plain if key.startswith("blocks.")}
            found = dict(model.named_parameters())
            assert found.keys() == plain.keys() and not model.training
            assert {tensor.dtype for tensor in found.values()} == {BF16, torch.float32}
            for key, tensor in found.items():
                assert (tensor.dtype, tensor.shape) == (plain[key].dtype, plain[key].shape), key
                assert tensor.is_meta == key.startswith("blocks.") and tensor.requires_grad
                assert tensor.is_meta or torch.equal(tensor, plain[key])
            validate_module(model, "transformer", "all_gather")
    finally:
        logger.removeHandler(caplog.handler)


def test_what_cannot_be_asked_for_while_loading(folder: Path) -> None:
    with pytest.raises(ValueError, match="'dtype' is torch.float16, and .* coded in torch.bfloat16.*pack --decode"):
        load(folder, dtype=torch.float16)
    for device_map in ("cpu", {"": "cpu"}, "auto"):
        with pytest.raises(ValueError, match="'device_map' is .*Leave it out and enable.*pack --decode"):
            load(folder, device_map=device_map)
    with pytest.raises(ValueError, match="low_cpu_mem_usage"):
        load(folder, low_cpu_mem_usage=False)
    from diffusers.quantizers import DiffusersAutoQuantizer

    with pytest.raises(ValueError, match="pack --codec. writes a coded checkpoint"):
        DiffusersAutoQuantizer.from_config({"quant_method": METHOD, "dtype": "bfloat16"}, pre_quantized=False)
    with pytest.raises(ValueError, match="names a dtype 'brain' that there is not"):
        DiffusersAutoQuantizer.from_dict({"quant_method": METHOD, "dtype": "brain"})


def test_nothing_can_be_done_with_it_but_to_enable(folder: Path) -> None:
    model = load(folder)
    state = WanTransformer3DModel.from_pretrained(folder / "plain", dtype=BF16).state_dict()
    block = model.blocks[1]
    refused: dict[str, Callable[[], object]] = {
        "'WanTransformer3DModel' cannot compute yet": lambda: model(**checkpoints.wan_inputs()),
        "'WanTransformer3DModel.blocks.1' cannot compute yet": lambda: block(None, None, None, None),
        "'WanTransformer3DModel.blocks.1.ffn.net.2' cannot compute": lambda: block.ffn.net[2](torch.ones(1, 444)),
        "'WanTransformer3DModel' can be neither moved nor cast": lambda: model.half(),
        "can be neither moved nor cast yet": lambda: model.to(BF16),  # some are to be kept in float32
        "'WanTransformer3DModel.blocks.1' can be neither": lambda: block.float(),
        "neither moved nor": lambda: model.to("meta"),
        "nor cast": lambda: model.share_memory(),
        "'WanTransformer3DModel' has no values to read": lambda: model.state_dict(),
        "'WanTransformer3DModel.blocks.1' has no values": lambda: block.state_dict(),
        "'WanTransformer3DModel' cannot be loaded into": lambda: model.load_state_dict(state),
        "'save_pretrained' is refused": lambda: model.save_pretrained(folder / "never"),
        "'load_lora_adapter' is refused": lambda: model.load_lora_adapter({}),
        "'enable_layerwise_casting' is refused": lambda: model.enable_layerwise_casting(),
    }
    for text, call in refused.items():
        with pytest.raises(RuntimeError, match=f"{text}.*Enable the offload first, or decode.*pack --decode"):
            call()
    assert not (folder / "never").exists()
    weights = {id(tensor) for tensor in model.parameters()}
    assert model.to("cpu") is model and model.proj_out.half() is model.proj_out
    assert {id(tensor) for tensor in model.parameters()} == weights
    assert model.proj_out.weight.dtype == torch.float16 and model.blocks[0].ffn.net[2].weight.dtype == BF16
    with pytest.raises(ValueError, match="'transformer' is coded .*would not stream.*components="):
        validate_placed(model, "transformer")
    block.ffn.net[2].weight = nn.Parameter(torch.ones(96, 444, dtype=BF16))
    with pytest.raises(ValueError, match="'blocks.1.ffn.net.2.weight' of 'transformer' was given values"):
        validate_module(model, "transformer", "local")
    model.proj_out.weight = nn.Parameter(model.proj_out.weight.to("meta"))
    block.ffn.net[2].weight = nn.Parameter(block.ffn.net[2].weight.to("meta"))
    with pytest.raises(RuntimeError, match="'proj_out.weight' of 'transformer' has no values"):
        validate_module(model, "transformer", "local")


def test_an_ordinary_model_once_released(folder: Path, tmp_path: Path) -> None:
    """Also of a copy, while the original stays what it was."""
    original = load(folder)
    model = deepcopy(original)
    coded = coded_file_of(model)
    assert coded is not None and coded == coded_file_of(original)
    with pytest.raises(RuntimeError, match="cannot compute yet"):
        model(**checkpoints.wan_inputs())
    release(model)
    release(model)
    assert coded_file_of(model) is None and coded_file_of(original) is not None
    with pytest.raises(RuntimeError, match="cannot compute yet"):
        original(**checkpoints.wan_inputs())
    decoder, places = FileDecoder(coded, ZstdCodec()), dict(model.named_parameters())
    for block in coded.blocks.values():
        for names, data in decoder.tensors(block):
            meta = places[names[0]]
            owner, _, attribute = names[0].rpartition(".")
            value = data.clone().view(meta.dtype).view(meta.shape)
            setattr(model.get_submodule(owner), attribute, nn.Parameter(value))
    expected = WanTransformer3DModel.from_pretrained(folder / "plain", dtype=BF16)
    inputs = checkpoints.wan_inputs()
    assert torch.equal(model(**inputs)[0], expected(**inputs)[0])
    ordinary = ("hf_quantizer", "is_quantized", "quantization_method")
    assert not any(hasattr(part, name) for part in model.modules() for name in ordinary)
    assert model.config.keys() - {"_name_or_path"} == expected.config.keys() - {"_name_or_path"}
    assert vars(model).keys() == vars(expected).keys()
    for part, other in zip(model.modules(), expected.modules()):
        for hooks in ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"):
            assert len(getattr(part, hooks)) == len(getattr(other, hooks))
    model.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path, dtype=BF16)
    assert all(map(torch.equal, loaded.parameters(), expected.parameters()))
    assert model.half().blocks[0].ffn.net[2].weight.dtype == torch.float16


@pytest.mark.parametrize("host", ("coded", "packed"))
@torch.no_grad()
def test_an_ordinary_model_once_it_was_enabled(host: str, folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    expected = WanTransformer3DModel.from_pretrained(folder / "plain", dtype=BF16)
    inputs = checkpoints.wan_inputs()
    handle = apply_distributed_layerwise_offload(model, onload_device="cpu", host="auto" if host == "coded" else host)
    assert handle.report().host_kind == host and coded_file_of(model) is None
    assert torch.equal(model(**inputs)[0], expected(**inputs)[0])
    handle.remove()
    for part, other in zip(model.modules(), expected.modules()):
        assert vars(part).keys() == vars(other).keys()
    assert model.config == {**expected.config, "_name_or_path": folder / "coded"}
    model.save_pretrained(tmp_path)
    saved = WanTransformer3DModel.from_pretrained(tmp_path, dtype=BF16)
    assert all(map(torch.equal, saved.parameters(), expected.parameters()))
    assert all(map(torch.equal, model.half().parameters(), expected.half().parameters()))


def test_guards_that_something_else_puts_back_are_ordinary_methods(folder: Path, tmp_path: Path) -> None:
    """As something does that stood over them when the model was released, and knows nothing of that."""
    model = load(folder)
    stale = {name: vars(model)[name] for name in ("_apply", "save_pretrained")}
    release(model)
    for name, method in stale.items():
        object.__setattr__(model, name, method)
    for owner in model.modules():
        for attribute, tensor in owner._parameters.items():
            if tensor is not None and tensor.is_meta:
                owner._parameters[attribute] = nn.Parameter(torch.ones(tensor.shape, dtype=tensor.dtype))
    model.save_pretrained(tmp_path)
    assert model.to(torch.float64).blocks[1].ffn.net[2].weight.dtype == torch.float64
    assert not stale.keys() & vars(model).keys()


def test_a_meta_model_is_not_filled_from_a_coded_file(folder: Path) -> None:
    class Remapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj_out = nn.Linear(96, 16, device="meta")

        @staticmethod
        def _remap_ckpt_key(key: str) -> str | None:
            return key

    with pytest.raises((RuntimeError, ValueError), match="is coded.*pack --decode"):
        load_mapped_checkpoint(Remapped(), folder / "coded")
