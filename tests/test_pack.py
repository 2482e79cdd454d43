# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""`diffusers-dlo pack`: what it writes loads as what it was, streams from disk, and is complete or not there."""

import errno
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from safetensors import safe_open
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.checkpoint.mapped import locate_tensors
from diffusers_dlo.cli import main
from tests import zoo


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tiny_checkpoints  # noqa: E402


BF16 = torch.bfloat16


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    expected, found = one.state_dict(), other.state_dict()
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ("wan", "flux", "cosmos3", "t5", "qwen2_5_vl"))
def test_a_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    zoo.build(name, 3).save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert f"{path}: " in out and "is complete" in out
    cls = type(zoo.build(name, 1))
    expected = cls.from_pretrained(tmp_path / "in", dtype=BF16)
    model = cls.from_pretrained(tmp_path / "out", dtype=BF16)
    assert_same_weights(expected, model)
    assert len(locate_tensors(model.parameters()).ranges) == len(list(model.parameters()))
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    for copy in (expected, model):
        for tensor in (*copy.parameters(), *copy.buffers()):
            tensor.data = tensor.data.clone()
    model = cls.from_pretrained(tmp_path / "out", dtype=BF16)
    handle = apply_distributed_layerwise_offload(model, onload_device="cpu")
    report = handle.report()
    assert report.host_kind == "mapped" and report.extents_per_block <= 3
    inputs = {**zoo.MODELS, **zoo.TEXT_ENCODERS}[name].inputs(3)
    assert all(torch.equal(a, b) for a, b in zip(zoo.run(model, inputs), zoo.run(expected, inputs)))
    handle.remove()


def test_blocks_lie_in_the_order_in_which_they_stream(tmp_path: Path) -> None:
    zoo.build("flux", 12).save_pretrained(tmp_path / "in")
    assert main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    with open(tmp_path / "out" / "diffusion_pytorch_model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    places = {key: value["data_offsets"][0] for key, value in header.items() if key != "__metadata__"}
    large = sorted((place, key) for key, place in places.items() if key.endswith("ff.net.0.proj.weight"))
    assert [int(key.split(".")[1]) for _, key in large] == list(range(12))


def test_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command as `python -m` runs it."""
    tiny_checkpoints.build_tiny_wan(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["diffusers-dlo", "pack", "in", "out"])
    monkeypatch.delitem(sys.modules, "diffusers_dlo.cli")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("diffusers_dlo.cli", run_name="__main__")
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    # Also the text encoder, where transformers keeps so much of it in fp32 that it is larger than a block.
    assert len([line for line in out.splitlines() if ".safetensors: " in line]) in (2, 3)
    expected = WanPipeline.from_pretrained(tmp_path / "in", dtype=BF16)
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "out", dtype=BF16)
    assert type(pipe) is WanPipeline
    for name in ("transformer", "transformer_2", "text_encoder", "vae"):
        assert_same_weights(getattr(expected, name), getattr(pipe, name))
    assert pipe.tokenizer("a fox")["input_ids"] == expected.tokenizer("a fox")["input_ids"]
    assert pipe.scheduler.config == expected.scheduler.config
    for name in ("transformer", "transformer_2"):
        with safe_open(tmp_path / "out" / name / "diffusion_pytorch_model.safetensors", framework="pt") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16", "F32"}  # noqa: SIM118


def names_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def fails(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["pack", *arguments]) == 1
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("diffusers-dlo: error: ")]
    assert "Traceback" not in captured.err and not captured.out
    return line


def test_what_cannot_be_packed(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    model = zoo.build("flux", 1)
    model.save_pretrained(source)
    (tmp_path / "empty").mkdir()
    before = names_of(tmp_path)
    assert "is there already" in fails(capsys, str(source), str(tmp_path / "empty"))
    assert "neither a model_index.json nor a config.json" in fails(capsys, str(tmp_path / "empty"), str(out))
    assert "is not a directory" in fails(capsys, str(source / "config.json"), str(out))
    assert "is not a directory" in fails(capsys, str(tmp_path / "nowhere"), str(out))
    assert names_of(tmp_path) == before

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        assert "cannot be written (No space left on device); nothing is left" in fails(capsys, str(source), str(out))
    assert names_of(tmp_path) == before

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        assert main(["pack", str(source), str(out)]) == 130
    assert names_of(tmp_path) == before
    (source / "config.json").write_text('{"_class_name": "NoSuchModel"}')
    assert "holds a 'NoSuchModel'" in fails(capsys, str(source), str(out))
    assert names_of(tmp_path) == before


def test_only_safetensors_are_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    zoo.build("flux", 1).save_pretrained(tmp_path / "in", safe_serialization=False)
    line = fails(capsys, str(tmp_path / "in"), str(tmp_path / "out"))
    assert "cannot be loaded" in line and "only safetensors" in line
    assert sorted(os.listdir(tmp_path)) == ["in"]
