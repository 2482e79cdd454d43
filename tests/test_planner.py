# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
`diffusers-dlo plan`: what it says of a checkpoint is what loading and planning it gives; it reads headers alone.
"""

import functools
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, WanPipeline
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3VLTextMoTDecoderLayer
from torch import nn

import diffusers_dlo
from diffusers_dlo import plan_distributed_layerwise_offload
from diffusers_dlo.block_layout import BlockLayout
from diffusers_dlo.cli import main
from diffusers_dlo.compute_estimate import Tokens, activation_nbytes, block_flops
from diffusers_dlo.offload_plan import OffloadPlan
from diffusers_dlo.outline import open_outline
from diffusers_dlo.planner import predict
from diffusers_dlo.prediction import MARGIN, Machine, Work
from diffusers_dlo.simulation import Links
from tests import zoo


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tiny_checkpoints  # noqa: E402


BF16 = torch.bfloat16
GIB = 1 << 30
LAYER = {
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
}
LAYER_PARAMETERS = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)  # two towers, matrices only


class Stack(nn.Module):
    """Layers of Cosmos3-Nano's size."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cosmos3VLTextMoTDecoderLayer(**LAYER) for _ in range(count)])
        self.rest = nn.Linear(8, 8)


@functools.cache
def stack_plan(count: int = 24, ranks: int = 2) -> OffloadPlan:
    with torch.device("meta"):
        return plan_distributed_layerwise_offload(Stack(count).to(BF16), group_size=ranks)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("wan", "flux", "cosmos3"):
        getattr(tiny_checkpoints, f"build_tiny_{name}")(folder / name)
    return folder


def run(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    (_, message) = error.split("diffusers-dlo: error: ")
    assert "Traceback" not in error
    return message


def code_of(out: str) -> str:
    return out.partition("Recommended:\n\n")[2]


# Outlines


@pytest.mark.parametrize("dtype", (None, torch.float16, torch.float32))
@pytest.mark.parametrize("name", ("wan", "flux", "cosmos3"))
def test_an_outline_plans_as_the_loaded_pipeline_does(checkpoints: Path, name: str, dtype: torch.dtype | None) -> None:
    outline = open_outline(str(checkpoints / name), dtype)
    pipe = DiffusionPipeline.from_pretrained(checkpoints / name, dtype=dtype or BF16)
    plan, expected = (plan_distributed_layerwise_offload(one, group_size=2) for one in (outline, pipe))
    assert plan.digest == expected.digest and plan.host_nbytes_per_rank == expected.host_nbytes_per_rank
    assert [c.placed_nbytes for c in plan.components] == [c.placed_nbytes for c in expected.components]
    assert {(name, cls) for name, cls, _ in plan.placed} == {(name, cls) for name, cls, _ in expected.placed}
    assert outline.dtype == (dtype or BF16) and outline.class_name == type(pipe).__name__
    assert all(parameter.is_meta for module in outline.components.values() for parameter in module.parameters())


@pytest.mark.parametrize("name", ("wan", "flux", "t5", "qwen2_5_vl"))
def test_an_outline_of_a_single_model(name: str, tmp_path: Path) -> None:
    model = zoo.build(name, 3)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    outline = open_outline(str(tmp_path))
    expected = plan_distributed_layerwise_offload(type(model).from_pretrained(tmp_path))
    assert plan_distributed_layerwise_offload(outline.components["model"]).digest == expected.digest
    assert (outline.is_pipeline, outline.dtype, outline.cast_nbytes) == (False, torch.float32, 0)
    half = open_outline(str(tmp_path), torch.float16)
    kept = sum(p.numel() for p in half.components["model"].parameters() if p.dtype == torch.float32)
    assert half.cast_nbytes == 2 * (sum(p.numel() for p in half.components["model"].parameters()) - kept)


def hollow(folder: Path, model: nn.Module, names: slice = slice(None)) -> None:
    """Writes a checkpoint whose file has a header and a hole where the weights would be."""
    model.save_config(folder)
    header, end = {}, 0
    for name, parameter in list(model.named_parameters())[names]:
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [end, end + 2 * parameter.numel()],
        }
        end += 2 * parameter.numel()
    text = json.dumps(header).encode()
    with open(folder / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_no_weights_are_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with torch.device("meta"):
        model = FluxTransformer2DModel()  # 12 billion parameters
    hollow(tmp_path, model)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    target = tmp_path / "plan.json"
    out = run(capsys, tmp_path, "--device-memory", "24GiB", "--host-memory", "64GiB", "--json", target)
    assert file.stat().st_size > 22 * GIB and file.stat().st_blocks * 512 < 1 << 20
    values = json.loads(target.read_text())
    blocks = [block for name, block in model.named_modules() if type(block).__name__.endswith("TransformerBlock")]
    assert values["dtype"] == "bfloat16" and values["cast_bytes"] == 0
    assert values["components"][0]["blocks"] == len(blocks) == 57
    streamed = sum(2 * parameter.numel() for block in blocks for parameter in block.parameters())
    assert 0 <= values["components"][0]["streamed_bytes"] - streamed < 57 * 40 * 256
    best = values["options"][values["recommended"]]
    assert best["device_memory"]["total"] <= 24 * GIB * (1 - MARGIN) and best["fits"]
    assert "FluxTransformer2DModel.from_pretrained(" in code_of(out)


# Estimates


def test_operations_of_a_block_with_two_towers() -> None:
    (block, *_) = stack_plan(1).blocks
    video, text = 26_000, 256
    found = block_flops(block, Tokens(video, text))
    matrices = LAYER_PARAMETERS * (video + text)
    attention = 4 * 4096 * (video * (video + text) + text * text)
    assert found == matrices + attention
    # 36 of them took 1,499 ms resident: 512 TFLOP/s, which is where the default of 500 comes from
    assert 36 * found / 1.499 / 1e12 == pytest.approx(Work().tflops, rel=0.03)


def test_the_allowance_for_activations_is_what_was_measured() -> None:
    """docs/benchmarks.md: a peak of 4.67 GiB with 1.47 of weights, and 1.61 with 1.47."""
    (block, *_) = stack_plan(1).blocks
    assert activation_nbytes(block, Tokens(26_000, 256)) / GIB == pytest.approx(4.67 - 1.47, rel=0.1)
    assert activation_nbytes(block, Tokens(1024, 256)) / GIB == pytest.approx(1.61 - 1.47, rel=0.15)


def block_of(name: str, index: int = 0) -> BlockLayout:
    return plan_distributed_layerwise_offload(zoo.build(name, 1)).blocks[index]


def matrices(block: BlockLayout, *skipped: str) -> int:
    return sum(
        math.prod(tensor.shape)
        for tensor in block.tensors
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight") and not any(s in tensor.name for s in skipped)
    )


def test_which_tokens_a_layer_sees() -> None:
    wan = block_of("wan")  # self-attention, attention to the text, MLP: the text's keys and values alone see the text
    keys = 2 * 24 * 24
    expected = 2 * ((matrices(wan) - keys) * 100 + keys * 10) + 4 * 24 * (100 * 100 + 100 * 10)
    assert block_flops(wan, Tokens(100, 10)) == expected
    double, single = block_of("flux"), block_of("flux", 1)
    tower = matrices(double, "norm") // 2
    modulation = matrices(double) - 2 * tower
    assert block_flops(double, Tokens(100, 10)) == 2 * (tower * 110 + modulation) + 4 * 32 * 110 * 110
    row = matrices(single, "norm")
    assert block_flops(single, Tokens(100, 10)) == 2 * (row * 110 + 96 * 32) + 4 * 32 * 110 * 110
    refiner = block_of("minimaxh3")  # sees the text alone
    assert block_flops(refiner, Tokens(0, 10)) == block_flops(refiner, Tokens(9999, 10)) > 0


# Predictions


@pytest.mark.parametrize(
    "count,ranks,tokens,resident,measured",
    (
        (24, 2, 1024, 50, 170),
        (24, 2, 26_000, 1004, 1041),
        (24, 1, 1024, 43, 334),
        (24, 1, 26_000, 984, 988),
        (36, 2, 1024, 61, 257),
        (36, 2, 26_000, 1513, 1568),
    ),
)
def test_what_was_measured_is_predicted(count: int, ranks: int, tokens: int, resident: int, measured: int) -> None:
    """The rows of docs/benchmarks.md, with the resident time given and with it estimated."""
    for compute in (resident / 1e3, None):
        (option, *_) = predict(stack_plan(count, ranks), work=Work(tokens, 256, compute)).options
        assert option.seconds * 1e3 == pytest.approx(measured, rel=0.05)


def test_memory_is_the_plans_and_what_stays() -> None:
    plan = stack_plan()
    shards = sum(block.shard_nbytes(2) for block in plan.blocks)
    for budget in (0, shards // 2, shards, plan.streamed_nbytes + GIB):
        for option in predict(plan, work=Work(1024, 256), device_budget=budget).options:
            memory = option.memory
            assert memory.slots == (3 if budget else 2) * option.plan.slot_nbytes(option.transfer)
            assert memory.placed == plan.device_placed_nbytes and memory.residents <= budget
            assert memory.activations == activation_nbytes(plan.blocks[0], Tokens(1024, 256))
            assert option.host_nbytes == pytest.approx(plan.streamed_nbytes, rel=1e-3)
            assert option.pinned_nbytes == pytest.approx(
                plan.streamed_nbytes * (2 if option.transfer == "local" else 1), rel=1e-3
            )
    half = next(iter(predict(plan, work=Work(1024, 256), device_budget=shards // 2).options))
    assert half.seconds == pytest.approx(shards / 2 / 55e9, rel=0.02) and half.residents.count == 12
    gathers = [one.gather for one in predict(plan, work=Work(1024, 256), device_budget=shards).options]
    assert gathers == ["collective", "pull", ""]


def test_auto_is_what_the_device_leaves() -> None:
    plan = stack_plan()
    machine = Machine(device_nbytes=8 * GIB)
    (option, *_) = predict(plan, machine, Work(1024, 256), device_budget="auto").options
    usable = 8 * GIB * (1 - MARGIN)
    assert option.fits and option.budget is not None and option.budget % (1 << 20) == 0
    rest = usable - (option.memory.total - option.memory.residents)
    assert rest - (1 << 20) <= option.budget <= rest
    with pytest.raises(ValueError, match="device's memory"):
        predict(plan, device_budget="auto")


def test_the_recommended_option() -> None:
    plan = stack_plan()
    roomy = predict(plan, Machine(device_nbytes=140 * GIB), Work(1024, 256))
    assert roomy.best is not None and roomy.best.budget is not None and not roomy.shortfalls
    assert roomy.best.seconds == pytest.approx(min(option.seconds for option in roomy.options), rel=0.02)
    assert not any(
        option.memory.total < 0.99 * roomy.best.memory.total and option.seconds <= roomy.best.seconds
        for option in roomy.options
    )
    tight = predict(plan, Machine(device_nbytes=8 * GIB), Work(1024, 256))
    assert tight.best is not None  # the third slot's bytes are worth more as shards that stay
    assert tight.best.plan.num_slots == 2 and tight.best.residents.staging_nbytes
    assert tight.best.seconds < 0.9 * min(option.seconds for option in tight.options if option.plan.num_slots == 3)
    busy = predict(plan, Machine(device_nbytes=140 * GIB), Work(26_000, 256))
    assert busy.best is not None  # nothing is gained by a budget where computing takes longest
    assert (busy.best.budget, busy.best.plan.num_slots, busy.best.transfer) == (None, 2, "all_gather")
    slow_gather = predict(plan, Machine(links=Links(gather=20e9)), Work(1024, 256))
    assert slow_gather.best is not None and slow_gather.best.transfer == "local"


def test_other_numbers_of_devices() -> None:
    scaling = predict(stack_plan(), work=Work(1024, 256)).scaling
    assert [(s.devices, s.hosts, s.option.plan.group_size) for s in scaling] == [
        (1, 1, 1),
        (2, 1, 2),
        (4, 1, 4),
        (8, 1, 8),
        (64, 8, 8),
    ]
    one, two, four, eight, many = (s.option.seconds for s in scaling)
    assert one == pytest.approx(2 * two, rel=0.01) and two == pytest.approx(2 * four, rel=0.01)
    assert eight < four and many == eight


def test_one_slot_or_no_tokens_make_no_sense() -> None:
    for make in (
        lambda: predict(stack_plan(1), num_slots=1),
        lambda: Work(tokens=0),
        lambda: Work(tflops=0),
        lambda: Work(compute_seconds=-1),
    ):
        with pytest.raises(ValueError):
            make()


# The command


def test_a_pipeline(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "plan.json"
    out = run(
        capsys, checkpoints / "wan", "--ranks", 2, "--device-memory", "64MiB", "--host-memory", "16GiB",
        "--dtype", "float16", "--h2d", 0.01, "--gather", 100, "--compute", 1, "--json", target,
    )  # fmt: skip
    values = json.loads(target.read_text())
    pipe = WanPipeline.from_pretrained(checkpoints / "wan", dtype=torch.float16)
    plan = plan_distributed_layerwise_offload(pipe, group_size=2)
    assert [c["name"] for c in values["components"]][:3] == [c.name for c in plan.components]
    for component, values_of in zip(plan.components, values["components"]):
        assert values_of["streamed_bytes"] == component.streamed_nbytes
        assert values_of["placed_bytes"] == component.placed_nbytes
    option = next(o for o in values["options"] if o["transfer"] == "all_gather" and not o["device_budget"])
    assert option["device_memory"]["slots"] == plan.device_slot_nbytes
    for name in ("transformer", "transformer_2"):  # at 10 MB/s the link sets the time
        (component,) = (c for c in plan.components if c.name == name)
        forward = option["forwards"][name]
        assert forward["seconds"] == pytest.approx(component.streamed_nbytes / 2 / 1e7, rel=0.02)
        assert forward["compute_seconds"] == pytest.approx(1e-3)
    encoder = option["forwards"]["text_encoder"]
    assert encoder["seconds"] == pytest.approx(plan.components[2].streamed_nbytes / 1e7, rel=0.02)
    assert values["cast_bytes"] > 0 and "in another dtype in the files" in out
    assert "simulated" in out and [row["devices"] for row in values["simulated"]] == [1, 2, 4, 8, 64]
    code = code_of(out)
    assert code == values["code"] and "with diffusers_dlo.mapped_loading():\n    pipe = WanPipeline" in code
    assert "# torchrun --nproc_per_node 2" in code


def test_the_code_to_paste_runs(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    out = run(capsys, checkpoints / "flux", "--num-slots", 3, "--components", "transformer", "text_encoder_2")
    scope: dict[str, Any] = {}
    exec(compile(code_of(out), "code", "exec"), scope)
    try:
        plan = scope["pipe"].distributed_layerwise_offload.plan
        assert plan.num_slots == 3 and [c.name for c in plan.components] == ["transformer", "text_encoder_2"]
    finally:
        scope["pipe"].disable_distributed_layerwise_offload()


def test_the_code_names_the_budget(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    out = code_of(run(capsys, checkpoints / "cosmos3", "--device-memory", "1GiB", "--device-budget", "1MiB"))
    compile(out, "code", "exec")
    assert 'enable_distributed_layerwise_offload(device_budget="1MiB")' in out
    out = code_of(run(capsys, checkpoints / "cosmos3", "--device-budget", "1000000", "--num-slots", 2))
    assert "enable_distributed_layerwise_offload(num_slots=2, device_budget=1000000)" in out


def test_the_code_for_a_single_text_encoder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    zoo.build("t5", 3).save_pretrained(tmp_path / 'with "quotes" and \\')
    out = code_of(run(capsys, tmp_path / 'with "quotes" and \\'))
    scope: dict[str, Any] = {}
    exec(compile(out, "code", "exec"), scope)
    try:
        assert diffusers_dlo.is_distributed_layerwise_offload_enabled(scope["model"])
    finally:
        diffusers_dlo.remove_distributed_layerwise_offload(scope["model"])


def test_a_picture(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, checkpoints / "cosmos3", "--ranks", 2, "--plot", tmp_path / "forward.png")
    assert (tmp_path / "forward.png").read_bytes().startswith(b"\x89PNG")


def test_components_are_chosen(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    out = run(capsys, checkpoints / "wan", "--components", "transformer", "--tokens", 10)
    assert 'components=["transformer"]' in code_of(out)
    assert "'unet' is not a component" in fails(capsys, checkpoints / "wan", "--components", "unet")


def test_a_checkpoint_in_the_cache_of_the_hub(
    checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--someone--tiny-flux"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    os.symlink(checkpoints / "flux", repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert 'FluxPipeline.from_pretrained("someone/tiny-flux"' in code_of(run(capsys, "someone/tiny-flux"))
    assert "not to be had from the Hub" in fails(capsys, "someone/nothing")
    os.unlink(repository / "snapshots" / ("0" * 40))
    shutil.copytree(checkpoints / "flux", repository / "snapshots" / ("0" * 40))
    for path in (repository / "snapshots" / ("0" * 40) / "transformer").glob("*.safetensors*"):
        path.unlink()
    line = fails(capsys, "someone/tiny-flux")
    assert "'someone/tiny-flux/transformer' has no safetensors files in the cache" in line
    assert "try again online" in line


def test_what_does_not_fit_is_said(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flux = checkpoints / "flux"
    line = fails(capsys, flux, "--device-memory", "2MiB", "--tokens", 4)
    assert (
        "The device memory does not suffice: " in line and "of 2 MiB" in line and "a device with more memory" in line
    )
    assert "2 slots, the largest of 1.13 MiB" in line
    line = fails(capsys, flux, "--host-memory", "1GiB", "--ranks", 2, "--json", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["code"] == ""
    assert "The host memory does not suffice: 4 GiB are needed" in line and "there are 1 GiB" in line
    line = fails(capsys, flux, "--device-memory", "8MiB", "--device-budget", "12MiB", "--tokens", 4)
    assert "a 'device_budget' of " in line and "at most" in line and "'num_slots' of 2" in line


@pytest.mark.parametrize(
    "option,value,said",
    (
        ("--ranks", "0", "must be a whole number, 1 or more, got '0'"),
        ("--ranks", "two", "got 'two'"),
        ("--device-memory", "64GO", "write a number and one of KiB, MiB, GiB"),
        ("--host-memory", "much", "got 'much'"),
        ("--device-budget", "-3GiB", "expected one argument"),
        ("--device-budget", "most", "got 'most'"),
        ("--h2d", "0", "must be a number above 0"),
        ("--tflops", "nan", "must be a number above 0"),
        ("--text-tokens", "1.5", "must be a whole number, 0 or more"),
        ("--dtype", "int3", "invalid choice"),
    ),
)
def test_arguments_that_make_no_sense(option: str, value: str, said: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "anything", option, value])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and option in error


def test_what_is_no_checkpoint(checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert "is not a directory" in fails(capsys, tmp_path / "nowhere")
    assert "neither a model_index.json nor a config.json" in fails(capsys, tmp_path)
    assert "at least 2" in fails(capsys, checkpoints / "flux", "--num-slots", 1)
    assert "say how much there is" in fails(capsys, checkpoints / "flux", "--device-budget", "auto")
    model = zoo.build("flux", 2)
    model.save_pretrained(tmp_path / "bin", safe_serialization=False)
    assert any(path.suffix == ".bin" for path in (tmp_path / "bin").iterdir())
    assert "has no safetensors files" in fails(capsys, tmp_path / "bin")
    model.save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    min((tmp_path / "cut").glob("*.safetensors")).unlink()
    assert "has no file" in fails(capsys, tmp_path / "cut")
    index = tmp_path / "cut" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../bin/model.safetensors"}}))
    assert "leads out of it" in fails(capsys, tmp_path / "cut")
    (tmp_path / "part").mkdir()
    hollow(tmp_path / "part", model, slice(0, 20))
    assert "Download the checkpoint again, with all of its files" in fails(capsys, tmp_path / "part")
    (tmp_path / "other").mkdir()
    hollow(tmp_path / "other", zoo.build("flux", 2))
    model.register_to_config(in_channels=20)
    model.save_config(tmp_path / "other")
    assert "They do not belong together" in fails(capsys, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"_class_name": "NoSuchModel"}')
    assert "holds a 'NoSuchModel'" in fails(capsys, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text("{")
    assert "is no configuration" in fails(capsys, tmp_path / "other")
    file = tmp_path / "part" / "diffusion_pytorch_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert "cannot be used: it has " in fails(capsys, tmp_path / "part")
    for damage in (b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {}}'):
        file.write_bytes(damage)
        assert "cannot be used" in fails(capsys, tmp_path / "part")
