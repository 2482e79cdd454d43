# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Quantized models as their libraries load and save them, text encoders and pipelines of them, compiled or with adapters:
equal to the same without the offload.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.outline import open_outline
from diffusers_dlo.pack import pack_checkpoint
from tests.zoo import MODELS, TEXT_ENCODERS, build, run


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


BF16 = torch.bfloat16


def outputs(model: nn.Module, name: str = "flux", seed: int = 0) -> list[torch.Tensor]:
    return run(model, {**MODELS, **TEXT_ENCODERS}[name].inputs(seed), dtype=BF16)


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(a, b) and not torch.isnan(a).any() for a, b in zip(got, expected))


def check(make: Callable[[], nn.Module], name: str, **options) -> str:
    """Three passes beside the same model without offload, and one after; the kind of host store that was used."""
    reference, model = make(), make()
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for seed in range(3):
            assert_equal(outputs(model, name, seed), outputs(reference, name, seed))
        return handle.report().host_kind
    finally:
        handle.remove()
        assert_equal(outputs(model, name, 3), outputs(reference, name, 3))


def load_torchao(path: str, **options) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(path, dtype=BF16, **options)


@pytest.fixture(scope="module")
def torchao_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Flux, quantized while it is loaded, which is refused to shard, and saved so."""
    pytest.importorskip("torchao")
    from diffusers import TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig

    folder = tmp_path_factory.mktemp("torchao")
    build("flux", 3, dtype=BF16).save_pretrained(folder / "plain")
    model = load_torchao(str(folder / "plain"), quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    expected = outputs(model)
    with pytest.raises(ValueError, match=r"quantized while it was loaded \(TorchAoHfQuantizer\).*Save it quantized"):
        apply_distributed_layerwise_offload(model, transfer="all_gather")
    handle = apply_distributed_layerwise_offload(model, transfer="local")
    assert_equal(outputs(model), expected)
    handle.remove()
    model.save_pretrained(folder / "quantized")
    return str(folder / "quantized")


def test_a_torchao_checkpoint_streams_from_its_file(torchao_checkpoint: str, tmp_path: Path) -> None:
    for transfer in ("all_gather", "local"):
        assert check(lambda: load_torchao(torchao_checkpoint), "flux", transfer=transfer, host="mapped") == "mapped"
    model = load_torchao(torchao_checkpoint)
    expected = outputs(model)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    model.save_pretrained(tmp_path)
    assert_equal(outputs(load_torchao(str(tmp_path))), expected)
    for refused, text in (
        (model.dequantize, "'dequantize' is refused while 'model'.*Dequantize before enabling, or disable first"),
        (model.transformer_blocks[0].half, "changing its dtype would cast placeholders"),
        (lambda: model.to(torch.float16), "Casting a quantized model to a new `dtype` is unsupported"),
    ):
        with pytest.raises(ValueError, match=text):
            refused()
    model.to("cpu")
    assert_equal(outputs(model), expected)
    handle.remove()


def test_tools_refuse_a_quantized_directory(torchao_checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is quantized .a Int8Tensor.*enable the quantized checkpoint as it is"):
        pack_checkpoint(torchao_checkpoint, str(tmp_path / "packed"), BF16)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="is quantized; sizes are known for weights as they are computed with only"):
        open_outline(torchao_checkpoint)


def test_hooks_of_a_device_map_are_refused_until_they_are_off(torchao_checkpoint: str) -> None:
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_module

    model = dispatch_model(load_torchao(torchao_checkpoint), {"": "cpu"}, force_hooks=True)
    expected = outputs(model)
    with pytest.raises(ValueError, match="accelerate moves its weights.*AlignDevicesHook.*remove_all_hooks"):
        apply_distributed_layerwise_offload(model)
    remove_hook_from_module(model, recurse=True)
    handle = apply_distributed_layerwise_offload(model)
    assert_equal(outputs(model), expected)
    handle.remove()


def test_compiled_blocks(torchao_checkpoint: str) -> None:
    models = [load_torchao(torchao_checkpoint) for _ in range(2)]
    for model in models:
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    handle = apply_distributed_layerwise_offload(models[1])
    for seed in range(2):
        assert_equal(outputs(models[1], seed=seed), outputs(models[0], seed=seed))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(2):
            assert_equal(outputs(models[1], seed=seed), outputs(models[0], seed=seed))
    handle.remove()
    torch._dynamo.reset()


def test_an_adapter_on_quantized_weights(torchao_checkpoint: str) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["to_q", "ff.net.0.proj"], init_lora_weights=False)

    def make() -> nn.Module:
        model = load_torchao(torchao_checkpoint)
        torch.manual_seed(1)
        model.add_adapter(config)
        return model.eval()

    check(make, "flux", transfer="all_gather")


def test_a_gguf_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from diffusers import GGUFQuantizationConfig

    source = build("flux", 3, dtype=BF16)
    source.save_config(tmp_path)
    writer, q8 = gguf.GGUFWriter(str(tmp_path / "flux.gguf"), "flux"), gguf.GGMLQuantizationType.Q8_0
    for name, value in source.state_dict().items():
        array = value.float().numpy()
        if "block" in name and array.ndim == 2 and array.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(array, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def make() -> nn.Module:
        return FluxTransformer2DModel.from_single_file(
            str(tmp_path / "flux.gguf"),
            config=str(tmp_path),
            quantization_config=GGUFQuantizationConfig(compute_dtype=BF16),
            dtype=BF16,
        )

    model = make()
    kinds = {name: type(parameter).__name__ for name, parameter in model.named_parameters()}
    assert "GGUFParameter" in kinds.values() and model.hf_quantizer.pre_quantized
    for transfer in ("all_gather", "local"):
        check(make, "flux", transfer=transfer)


def text_encoder_config(kind: str):
    import transformers

    if kind == "bnb_int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if kind == "bnb_nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BF16, bnb_4bit_use_double_quant=True
        )
    if kind == "quanto":
        return transformers.QuantoConfig(weights="int8")
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


TEXT_ENCODER_KINDS = {"bnb_int8": "bitsandbytes", "bnb_nf4": "bitsandbytes", "quanto": "optimum", "torchao": "torchao"}


def keep_as_loaded(model: nn.Module) -> nn.Module:
    """Layers of bitsandbytes that do not pack their weights anew for a CPU that has instructions for it."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


@pytest.mark.parametrize("kind", TEXT_ENCODER_KINDS)
def test_a_text_encoder(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(TEXT_ENCODER_KINDS[kind])
    plain = build("t5", 3, dtype=BF16)
    plain.save_pretrained(tmp_path / "plain")

    def quantize() -> nn.Module:
        config = text_encoder_config(kind)
        return keep_as_loaded(type(plain).from_pretrained(tmp_path / "plain", quantization_config=config, dtype=BF16))

    check(quantize, "t5", transfer="local")
    if kind == "quanto":  # which transformers does not save
        return
    quantize().save_pretrained(tmp_path / "quantized")
    saved = check(
        lambda: keep_as_loaded(type(plain).from_pretrained(tmp_path / "quantized", dtype=BF16)),
        "t5",
        transfer="all_gather",
    )
    assert saved == "mapped"


def test_a_pipeline(torchao_checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import T5EncoderModel

    path = str(tiny_checkpoints.build_tiny_flux(tmp_path / "flux"))

    def load() -> FluxPipeline:
        encoder = T5EncoderModel.from_pretrained(
            f"{path}/text_encoder_2", quantization_config=text_encoder_config("bnb_int8"), dtype=BF16
        )
        pipe = FluxPipeline.from_pretrained(path, text_encoder_2=encoder, dtype=BF16)
        quantize_in_place(pipe.transformer)
        quantize_in_place(pipe.text_encoder)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(pipe: FluxPipeline, seed: int) -> np.ndarray:
        generator = torch.Generator().manual_seed(seed)
        options = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np", "generator": generator}
        return np.asarray(pipe("a fox in the snow", **options).images)

    reference, pipe = load(), load()
    pipe.enable_distributed_layerwise_offload(transfer="all_gather")
    try:
        for seed in range(2):
            got, expected = call(pipe, seed), call(reference, seed)
            assert np.isfinite(got).all() and got.std() > 0 and np.array_equal(got, expected)
    finally:
        pipe.disable_distributed_layerwise_offload()
    assert np.array_equal(call(pipe, 2), call(reference, 2))


def quantize_in_place(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
