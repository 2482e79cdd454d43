# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Plans of coded checkpoints, from headers alone: link bytes, memory and times are those of the coded shards; and what
coding is said to bring to others.
"""

import functools
import http.server
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from huggingface_hub import constants

from diffusers_dlo import plan_distributed_layerwise_offload
from diffusers_dlo.block_layout import align
from diffusers_dlo.checkpoint.container import Container, Entry
from diffusers_dlo.checkpoint.mapped import FileRange
from diffusers_dlo.cli import main
from diffusers_dlo.coding.coded_block import CodedBlock, CodedShard, CodedTensor, Segment
from diffusers_dlo.coding.coded_file import CodedFile, read_coded_file, shard_key
from diffusers_dlo.coding.packing import metadata_of, write_header
from diffusers_dlo.coding.shard_coding import shard_bounds
from diffusers_dlo.hub_files import CheckpointFolder
from diffusers_dlo.offload_plan import OffloadPlan
from diffusers_dlo.outline import open_outline
from diffusers_dlo.pack import pack_checkpoint
from diffusers_dlo.planned_coding import assume_coded, with_coded_blocks
from diffusers_dlo.planner import predict
from diffusers_dlo.prediction import Machine, Work
from diffusers_dlo.simulation import Links
from tests.coding import checkpoints
from tests.test_planner import hollow


NAME = "diffusion_pytorch_model.safetensors"
RANKS = 2
FEW, MANY = 64, 100_000
"""Tokens with which the link sets the time, and with which computing does."""


@functools.cache
def model() -> FluxTransformer2DModel:
    with torch.device("meta"):
        return FluxTransformer2DModel(num_layers=2, num_single_layers=6).to(torch.bfloat16)


@functools.cache
def plain_plan(ranks: int = RANKS) -> OffloadPlan:
    return plan_distributed_layerwise_offload(model(), group_size=ranks)


def coded_nbytes(block: int, shard: int, nbytes: int) -> int:
    """What a shard is coded to: of each block and rank something else, two thirds and less."""
    return align(nbytes * 2 // 3) - 256 * (100 * block + 1000 * shard)


def hollow_coded(folder: Path, codec: str = "ans", last: int = 2, digest: str = "") -> CodedFile:
    """
    Writes a coded checkpoint whose file has a header and a hole for the rest; the `last` blocks are not coded in it.
    """
    folder.mkdir(exist_ok=True)
    model().save_config(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "dlo_coded", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    blocks, runs = {}, []
    for number, layout in enumerate(plain_plan().blocks[:-last]):
        shards = []
        for rank in range(RANKS):
            start, stop = shard_bounds(layout.nbytes, RANKS, rank)
            nbytes = coded_nbytes(number, rank, stop - start)
            runs.append((shard_key(layout.name, rank), nbytes))
            segments = (Segment(0, stop - start, 0, nbytes),)
            shards.append(CodedShard(layout.name, start, stop - start, FileRange("", 0, nbytes), "0" * 16, segments))
        tensors = tuple(CodedTensor((one.name,), one.dtype, one.shape) for one in layout.tensors)
        blocks[layout.name] = CodedBlock(layout.name, digest or layout.digest, layout.nbytes, tensors, tuple(shards))
    said = CodedFile("", codec, "6.0.0", RANKS, "bfloat16", blocks, "0" * 64)
    rest = [Entry(name, one) for name, one in model().named_parameters() if name not in said.tensor_names]
    container = Container([rest], metadata_of(said), runs)
    path = str(folder / NAME)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, container.nbytes)
        write_header(container, fd, path, said)
    finally:
        os.close(fd)
    found = read_coded_file(path)
    assert found is not None and os.stat(path).st_blocks * 512 < 1 << 20
    return found


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded") / "model"
    hollow_coded(folder)
    return folder


def plan_of(capsys: pytest.CaptureFixture, folder: Path, *arguments: object) -> tuple[str, dict]:
    target = folder.parent / "plan.json"
    capsys.readouterr()
    assert main(["plan", str(folder), "--json", str(target), *map(str, arguments)]) == 0
    return capsys.readouterr().out, json.loads(target.read_text())


def fails(capsys: pytest.CaptureFixture, folder: Path, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["plan", str(folder), *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.partition("diffusers-dlo: error: ")[2]


# Coded checkpoints


def test_every_figure_is_that_of_the_coded_shards(coded: Path, capsys: pytest.CaptureFixture) -> None:
    out, values = plan_of(capsys, coded, "--ranks", RANKS, "--tokens", FEW, "--h2d", 10, "--decode", 100)
    layouts = plain_plan().blocks
    halves = [layout.shard_nbytes(RANKS) for layout in layouts]
    sizes = [[coded_nbytes(number, rank, half) for rank in range(RANKS)] for number, half in enumerate(halves)]
    raw = layouts[-2:]
    (component,) = values["components"]
    assert (component["codec"], component["coded_ranks"]) == ("ans", RANKS)
    assert component["coded_bytes"] == sum(map(sum, sizes[:-2]))
    assert component["streamed_bytes"] == sum(layout.nbytes for layout in layouts)
    gathered, local = values["options"]
    assert (gathered["transfer"], local["transfer"]) == ("all_gather", "local")
    own = [max(of_block) for of_block in sizes[:-2]] + [layout.nbytes / RANKS for layout in raw]
    whole = [sum(of_block) for of_block in sizes[:-2]] + [layout.nbytes for layout in raw]
    for option, copied, shares in ((gathered, own, RANKS), (local, whole, 1)):
        forward = option["forwards"]["model"]
        assert forward["h2d_bytes"] == sum(copied)
        assert forward["copy_seconds"] == pytest.approx(sum(copied) / 10e9)
        assert forward["decode_seconds"] == pytest.approx(sum(x.nbytes for x in layouts[:-2]) / shares / 100e9)
        assert forward["copy_seconds"] < forward["seconds"] < 1.02 * forward["copy_seconds"], "the link sets the time"
        most = layouts[0].shard_nbytes(RANKS)  # two buffers, and 32 bytes for each 256 KiB of the largest shard
        expected = 2 * max(map(max, sizes[:-2])) + 4 * align(8 * -(-most // (256 << 10))) + 256
        assert option["device_memory"]["decoding"] == expected
        assert option["host_weights_bytes"] == sum(map(sum, sizes[:-2])) + sum(x.padded_nbytes(RANKS) for x in raw)
    assert gathered["host_pinned_bytes"] == pytest.approx(sum(layout.nbytes for layout in layouts), rel=1e-3)
    assert "coded:  'model' by 'ans' for 2 ranks" in out and "decoding (at most)" in out and "coded, once" in out
    assert "coded weights help, since copies set the time" in out and "diffusers-dlo pack" not in out
    assert "ms of decoding, at 100 GB/s of weights" in out
    assert values["coding"]["is_coded"] and values["coding"]["plain"]["forwards"]["model"]["decode_seconds"] == 0
    plain = values["coding"]["plain"]["seconds"]
    assert plain == pytest.approx(sum(x.nbytes for x in layouts) / RANKS / 10e9, rel=0.01)
    files = (coded / NAME).stat().st_size
    assert files - (2 << 20) < open_outline(str(coded)).file_nbytes <= files


def test_an_outline_is_that_of_the_decoded_model(coded: Path) -> None:
    outline = open_outline(str(coded))
    assert (outline.dtype, outline.cast_nbytes) == (torch.bfloat16, 0) and list(outline.coded) == ["model"]
    plan = plan_distributed_layerwise_offload(outline.components["model"], group_size=RANKS)
    assert plan.digest == plain_plan().digest


def test_what_is_planned_is_what_enabling_does(tmp_path: Path) -> None:
    """A checkpoint that was packed, with modules that are kept in float32: bytes copied, decoded and held."""
    checkpoints.wan(blocks=5).save_pretrained(tmp_path / "in")
    pack_checkpoint(str(tmp_path / "in"), str(tmp_path / "out"), torch.bfloat16, codec="zstd", ranks=2)
    outline = open_outline(str(tmp_path / "out"))
    plan = with_coded_blocks(plan_distributed_layerwise_offload(outline.components["model"]), outline.coded)
    (option,) = predict(plan, work=Work(FEW)).options
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    handle = loaded.enable_distributed_layerwise_offload()
    try:
        with torch.no_grad():
            loaded(**checkpoints.wan_inputs())
            before = handle.report()
            loaded(**checkpoints.wan_inputs())
        after = handle.report()
        assert after.host_kind == "coded"
        assert after.h2d_bytes - before.h2d_bytes == option.forwards[0].simulation.h2d_nbytes
        assert after.decoded_bytes - before.decoded_bytes == sum(align(block.nbytes) for block in plan.blocks)
        assert after.host_shared_bytes == option.host_nbytes
        scratch = 4 * align(8) + 256  # for one chunk, which the codec of the host does without
        assert after.device_slot_bytes == option.memory.slots + option.memory.decoding - scratch
    finally:
        handle.remove()


@pytest.mark.parametrize("ranks", (1, 4))
def test_other_numbers_of_ranks_copy_whole_blocks(coded: Path, capsys: pytest.CaptureFixture, ranks: int) -> None:
    out, values = plan_of(capsys, coded, "--ranks", ranks, "--tokens", FEW)
    assert {option["transfer"] for option in values["options"]} == {"local"}
    shards = [(scale["devices"], scale["transfer"]) for scale in values["simulated"]]
    assert shards == [(1, "local"), (2, "all_gather"), (4, "local"), (8, "local"), (64, "local")]
    told = "diffusers-dlo pack --decode MODEL PLAIN" in out and f"--codec ans --ranks {ranks}" in out
    assert told == (ranks == 4)


def test_computing_that_sets_the_time_gains_nothing(coded: Path, capsys: pytest.CaptureFixture) -> None:
    out, values = plan_of(capsys, coded, "--ranks", RANKS, "--tokens", MANY)
    assert "coded weights make no forward faster, since computing sets the time" in out
    plain, found = values["coding"]["plain"], values["options"][values["recommended"]]
    decoding = found["forwards"]["model"]["decode_seconds"]
    assert found["seconds"] == pytest.approx(plain["seconds"] + decoding, rel=1e-6) and decoding > 0
    assert found["device_memory"]["total"] > plain["device_memory"]["total"]


def test_what_only_the_host_decodes_streams_from_memory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    hollow_coded(tmp_path / "model", codec="zstd")
    out, values = plan_of(capsys, tmp_path / "model", "--ranks", 4, "--tokens", FEW)
    gathered, local = values["options"]
    assert (gathered["transfer"], local["transfer"]) == ("all_gather", "local"), "shards are cut for any group"
    for option, shares in ((gathered, 4), (local, 1)):
        assert option["device_memory"]["decoding"] == 0
        assert option["forwards"]["model"]["h2d_bytes"] == plain_plan().streamed_nbytes // shares
        assert option["host_weights_bytes"] >= plain_plan().streamed_nbytes
    assert "cannot share its shards" not in out
    assert main(["card", str(tmp_path / "model"), "--dry-run"]) == 0
    assert "by `zstd`; accelerators do not decode it, so they are decoded into host memory" in capsys.readouterr().out
    assert "as no device decodes it, blocks are decoded into shared memory (packed)" in out
    assert values["coding"] is None and "(packed)" in out.partition("host:")[2].splitlines()[0]


def test_a_card_of_a_coded_checkpoint(coded: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["card", str(coded), "--name", "someone/coded", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert 'FluxTransformer2DModel.from_pretrained("someone/coded", dtype=torch.bfloat16)' in text
    assert text.index("import diffusers_dlo") < text.index("from_pretrained")
    assert "coded without loss, by `ans` and for 2 ranks" in text and 'pip install "diffusers-dlo[coded]"' in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert [row[2].strip(" `") for row in rows] == ["local", "all_gather", "local", "local"]
    assert "940 GB/s of weights decoded" in text
    _, values = plan_of(capsys, coded, "--tokens", FEW)
    assert main(["card", str(coded), "--dry-run", "--plan", str(coded.parent / "plan.json")]) == 0
    assert values["coding"] and "64 tokens" in capsys.readouterr().out


# What is refused


def test_what_does_not_belong_together(coded: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    said = fails(capsys, coded, "--dtype", "float16")
    assert "is coded in bfloat16, and coded weights cannot be cast to float16" in said and "pack --decode" in said
    hollow_coded(tmp_path / "other", digest="0" * 16)
    assert "is not a block of this model" in fails(capsys, tmp_path / "other")
    file = read_coded_file(str(coded / NAME))
    assert file is not None
    with pytest.raises(ValueError, match="'transformer' is coded, so it can only stream"):
        with_coded_blocks(plain_plan(), {"transformer": file})
    lost = {f"lost.{name}": block for name, block in file.blocks.items()}
    with pytest.raises(ValueError, match=r"block 'lost\."):
        with_coded_blocks(plain_plan(), {"model": replace(file, blocks=lost)})
    config = json.loads((coded / "config.json").read_text())
    plain = tmp_path / "plain"
    plain.mkdir()
    hollow(plain, model())
    (plain / "config.json").write_text(json.dumps(config))
    assert "is coded by its config.json, and its file holds no coded blocks" in fails(capsys, plain)
    for quantization in ({"quant_method": "bitsandbytes"}, {"load_in_8bit": True}, "much"):
        (plain / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        assert "is quantized; sizes are known for weights as they are computed with only" in fails(capsys, plain)


# Checkpoints on the Hub


@pytest.fixture
def hub(coded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server that has the file of a repository, and answers with what is asked for of it alone; what was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            with open(coded / NAME, "rb") as file:
                file.seek(first)
                content = file.read(last - first + 1)
            self.send_response(206)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield asked
        server.shutdown()


def test_of_a_checkpoint_on_the_hub_the_header_is_enough(coded: Path, tmp_path: Path, hub: list[str]) -> None:
    (tmp_path / "config.json").write_text((coded / "config.json").read_text())
    folder = CheckpointFolder("someone/coded", str(tmp_path), frozenset([NAME]))
    here, there = CheckpointFolder(str(coded), str(coded)).coded_file(), folder.coded_file()
    assert here is not None and there is not None and there.path == f"someone/coded/{NAME}"
    assert there.as_text() == here.as_text()
    for block, other in zip(here.blocks.values(), there.blocks.values()):
        assert [s.place.offset for s in block.shards] == [s.place.offset for s in other.shards]
    assert len(hub) >= 2 and all(int(asked.partition("-")[2]) < 1 << 20 for asked in hub)


# What coding would bring


def test_what_coding_would_bring(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    hollow(tmp_path, model())
    streamed = plain_plan().streamed_nbytes
    out, values = plan_of(capsys, tmp_path, "--ranks", RANKS, "--tokens", FEW, "--coded-ratio", 0.5)
    coding, option = values["coding"], values["options"][values["recommended"]]
    assert (coding["is_coded"], coding["assumed_ratio"], coding["helps"]) == (False, 0.5, True)
    assert option["seconds"] == pytest.approx(streamed / RANKS / 55e9, rel=0.01), "what is recommended is not coded"
    assert coding["coded"]["seconds"] == pytest.approx(0.5 * streamed / RANKS / 55e9, rel=0.02)
    assert coding["coded"]["host_weights_bytes"] == pytest.approx(0.5 * streamed, rel=1e-3)
    assert "coded weights would help, since copies set the time" in out and "0.5 of the bytes, 940 GB/s" in out
    assert f"diffusers-dlo pack {tmp_path} OUT --dtype bfloat16 --codec ans --ranks 2" in out
    out, values = plan_of(capsys, tmp_path, "--ranks", RANKS, "--tokens", MANY)
    assert "coded weights would make no forward faster, since computing sets the time" in out
    assert not values["coding"]["helps"] and values["coding"]["assumed_ratio"] == 0.67
    assert "diffusers-dlo pack" not in out
    out, values = plan_of(capsys, tmp_path, "--dtype", "float32")
    assert values["coding"] is None and "coded" not in out


def test_only_floats_of_16_bits_are_assumed_to_shrink() -> None:
    plan = plain_plan()
    found = assume_coded(plan, 0.5, {"model"})
    assert found is not None
    for before, after in zip(plan.blocks, found.blocks):
        assert after.coded is not None and len(after.coded.shards) == RANKS
        assert after.coded.coded_nbytes == pytest.approx(before.nbytes / 2, rel=1e-3)
        bounds = [shard_bounds(before.nbytes, RANKS, rank) for rank in range(RANKS)]
        assert [(s.offset, s.offset + s.nbytes) for s in after.coded.shards] == bounds
    with torch.device("meta"):
        mixed = torch.nn.Module()
        mixed.layers = torch.nn.ModuleList([torch.nn.Linear(512, 512).to(torch.bfloat16) for _ in range(3)])
        mixed.layers[1].to(torch.float32)
        for layer in mixed.layers:
            layer.register_buffer("table", torch.empty(512, 512))
    plan = plan_distributed_layerwise_offload(mixed, None)
    found = assume_coded(plan, 0.5, {plan.components[0].name})
    assert found is not None and [block.coded is None for block in found.blocks] == [False, True, False]
    wide = 2 * (512 * 512 + 512)
    assert found.blocks[0].coded is not None
    assert found.blocks[0].coded.coded_nbytes == pytest.approx(plan.blocks[0].nbytes - wide / 2, rel=1e-3)
    assert assume_coded(plan, 0.5, set()) is None


def test_what_is_assumed_can_be_set() -> None:
    with pytest.raises(ValueError, match="'coded_ratio' must be above 0"):
        Machine(coded_ratio=0)
    plan = plain_plan()
    slow = Machine(links=Links(decode=1e9))
    found = predict(plan, slow, Work(FEW), coded_plan=assume_coded(plan, 0.67, {"model"})).coding
    assert found is not None and not found.helps, "decoding takes longer than copying everything"
    assert predict(plan, work=Work(FEW)).coding is None
    tight = Machine(device_nbytes=2 << 30)
    found = predict(plan, tight, Work(FEW), coded_plan=assume_coded(plan, 0.67, {"model"})).coding
    assert found is not None and found.coded.memory.total <= 2 << 30 and found.coded.memory.decoding > 0
