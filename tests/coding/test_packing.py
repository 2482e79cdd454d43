# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
`diffusers-dlo pack --codec` and `--decode`: what is coded comes back as what it was, byte for byte, and what is
damaged, cut off or in the way is refused and leaves nothing.
"""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, WanTransformer3DModel

from diffusers_dlo.block_discovery import find_units
from diffusers_dlo.block_layout import lay_out
from diffusers_dlo.checkpoint.container import chunk_digests, content_digest
from diffusers_dlo.checkpoint.safetensors_file import peek_header
from diffusers_dlo.cli import main
from diffusers_dlo.coding.check_sum import CheckSums, as_text
from diffusers_dlo.coding.coded_block import CodedShard
from diffusers_dlo.coding.coded_file import CodedFile, is_shard_key, read_coded_file, shard_key
from diffusers_dlo.coding.loading import coded_file_of, release
from diffusers_dlo.coding.packing import write_coded
from diffusers_dlo.coding.unpacking import FileDecoder
from diffusers_dlo.coding.zstd import ZstdCodec
from diffusers_dlo.pack import decode_checkpoint, pack_checkpoint
from diffusers_dlo.packed_directory import mark_coded
from tests import zoo
from tests.coding import checkpoints
from tests.coding.checkpoints import WEIGHTS, flip, redescribe, rewrite
from tests.test_pack import fails


ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tiny_checkpoints  # noqa: E402


BF16 = torch.bfloat16


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def coded_file(folder: Path) -> CodedFile:
    coded = read_coded_file(str(folder / WEIGHTS))
    assert coded is not None
    return coded


@pytest.mark.parametrize("name", ("wan", "flux", "cosmos3"))
def test_a_model_comes_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = checkpoints.wan() if name == "wan" else zoo.build(name, 2)
    model.save_pretrained(tmp_path / "in")
    dtype = "float16" if name == "flux" else "bfloat16"
    source, out, plain, back = (str(tmp_path / part) for part in ("in", "out", "plain", "back"))
    assert main(["pack", source, out, "--dtype", dtype, "--codec", "zstd", "--ranks", "3"]) == 0
    said = capsys.readouterr().out
    assert main(["pack", source, plain, "--dtype", dtype]) == 0
    assert main(["pack", "--decode", out, back]) == 0
    assert tree(tmp_path / "back") == tree(tmp_path / "plain")
    assert sorted(os.listdir(tmp_path)) == ["back", "in", "out", "plain"]
    coded = coded_file(tmp_path / "out")
    assert (coded.ranks, coded.dtype, coded.codec) == (3, dtype, "zstd")
    before, after = coded.sizes[dtype]
    assert f"{after / before:.3f}" in said and after < (0.75 if dtype == "bfloat16" else 0.95) * before
    # As the model that is computed with has them.
    expected = type(model).from_pretrained(plain, dtype=getattr(torch, dtype))
    units = {unit.name: unit for unit in find_units(expected)[0] if not unit.is_leaf}
    assert coded.blocks.keys() == units.keys()
    for block_name, block in coded.blocks.items():
        layout = lay_out(block_name, units[block_name].tensors, is_leaf=False)
        assert (block.digest, block.nbytes) == (layout.digest, layout.nbytes)
    stored = {one.key: one.nbytes for one in peek_header(coded.path)}
    assert sum(stored.values()) < 0.95 * sum(one.nbytes for one in peek_header(str(tmp_path / "plain" / WEIGHTS)))
    assert {key for key in stored if not is_shard_key(key)} == expected.state_dict().keys() - coded.tensor_names


def test_odd_models_come_back(tmp_path: Path) -> None:
    """One module under two names, sizes that fit nothing, integers, buffers; and a block that cannot be coded."""
    torch.manual_seed(0)
    model = checkpoints.Odd().to(BF16)
    with torch.no_grad():
        model.blocks[0].one.weight.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), 1e-40, -0.0])
    model.save_config(tmp_path)
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    coded = write_coded(model, str(tmp_path / WEIGHTS), "odd", ZstdCodec(), 5, BF16)
    mark_coded(str(tmp_path), BF16)
    assert coded_file(tmp_path) == coded
    assert list(coded.blocks) == ["blocks.0", "blocks.1"]
    loaded = checkpoints.Odd.from_pretrained(tmp_path)
    found = coded_file_of(loaded)
    assert found == coded_file(tmp_path)
    block = loaded.blocks[0]
    assert block.one is block.same and block.one.weight.is_meta and block.table.is_meta
    assert block.codes.dtype == torch.int32 and not block.codes.requires_grad and block.one.weight.requires_grad
    assert not block.scale.is_meta and int(block.count) == 0 and loaded.blocks[1].count.tolist() == [1]
    assert not any(tensor.is_meta for tensor in (*loaded.blocks[2].parameters(), *loaded.blocks[2].buffers()))
    decoder = FileDecoder(found, ZstdCodec())
    decoded: dict[str, torch.Tensor] = {}
    for described in found.blocks.values():
        for names, data in decoder.tensors(described):
            decoded.update(dict.fromkeys(names, data))
    release(loaded)
    for key, tensor in loaded.state_dict().items():
        assert (tensor.dtype, tensor.shape) == (expected[key].dtype, expected[key].shape)
        value = decoded[key] if tensor.is_meta else tensor.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(value, expected[key].reshape(-1).view(torch.uint8)), key


def test_a_pipeline_comes_back(tmp_path: Path) -> None:
    tiny_checkpoints.build_tiny_flux(tmp_path / "in")
    source, out, plain, back = (str(tmp_path / part) for part in ("in", "out", "plain", "back"))
    written = pack_checkpoint(source, out, BF16, codec="zstd", ranks=2)
    assert [read_coded_file(path) is not None for path in written] == ["transformer" in path for path in written]
    pack_checkpoint(source, plain, BF16)
    pipe = DiffusionPipeline.from_pretrained(out, dtype=BF16)
    assert type(pipe) is FluxPipeline
    assert coded_file_of(pipe.transformer) == coded_file(tmp_path / "out" / "transformer")
    expected = FluxPipeline.from_pretrained(plain, dtype=BF16)
    for name in ("text_encoder", "text_encoder_2", "vae"):
        assert all(map(torch.equal, getattr(pipe, name).parameters(), getattr(expected, name).parameters()))
    assert decode_checkpoint(out, back) == [str(tmp_path / "back" / "transformer" / WEIGHTS)]
    assert tree(tmp_path / "back") == tree(tmp_path / "plain")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A coded checkpoint, its source beside it."""
    folder = tmp_path_factory.mktemp("coded")
    checkpoints.wan().save_pretrained(folder / "in")
    pack_checkpoint(str(folder / "in"), str(folder / "out"), BF16, codec="zstd", ranks=2)
    return folder / "out"


def test_a_checkpoint_for_one_rank_holds_the_same(sound: Path, tmp_path: Path) -> None:
    pack_checkpoint(str(sound.parent / "in"), str(tmp_path / "one"), BF16, codec="zstd")
    one, two = coded_file(tmp_path / "one"), coded_file(sound)
    assert (one.ranks, two.ranks) == (1, 2)
    for name, block in one.blocks.items():
        image = FileDecoder(one, ZstdCodec()).image(block)
        assert torch.equal(image, FileDecoder(two, ZstdCodec()).image(two.blocks[name])) and image.any()


# ------------------------------------------------------------------------------------------------- what is damaged


def damaged_shard(path: Path) -> CodedShard:
    """The coded shard that tests damage."""
    return coded_file(path.parent).blocks["blocks.1"].shards[1]


def forge_content(path: Path) -> None:
    """Makes the digest of the content fit it."""
    start = min(one.offset for one in peek_header(str(path)))
    with open(path, "rb") as file:
        content = content_digest(dict(chunk_digests(file.fileno(), start, 0, 1, lambda count: None)))
    redescribe(path, lambda described: described.update(content=content))


def forge_sums(path: Path) -> None:
    """Makes the check sum of the shard that tests damage fit it too."""
    place = damaged_shard(path).place
    data = torch.frombuffer(
        bytearray(path.read_bytes()[place.offset : place.offset + place.nbytes]), dtype=torch.uint8
    )
    total = as_text(CheckSums(torch.device("cpu")).queue(data))
    redescribe(path, lambda described: described["blocks"][1]["shards"][1].update(sum=total))
    forge_content(path)


def in_shard(path: Path) -> None:
    flip(path, damaged_shard(path).place.offset + 40_000)


def in_shard_forged(path: Path) -> None:
    in_shard(path)
    forge_content(path)


def in_a_run_forged(path: Path, place: Callable[[int], int]) -> None:
    """At the `place` of a coded run of so many bytes, with check sums that fit."""
    shard = damaged_shard(path)
    segment = next(segment for segment in shard.segments if segment.is_coded)
    flip(path, shard.place.offset + segment.coded_offset + place(segment.nbytes), 0xFF)
    forge_sums(path)


def in_frame_forged(path: Path) -> None:
    """The compressed plane, which ends a run: what notices is the codec."""
    in_a_run_forged(path, lambda nbytes: 256 + nbytes // 2 + 300)


def longer_frame_forged(path: Path) -> None:
    in_a_run_forged(path, lambda nbytes: 5)


def in_ordinary_tensor(path: Path) -> None:
    flip(path, path.stat().st_size - 3)


def in_header(path: Path) -> None:
    flip(path, path.read_bytes().index(b'\\"sum\\":\\"') + 10)


def tensor_renamed(path: Path) -> None:
    """What holds ordinary weights says it was another one: two biases of one shape change places."""

    def swap(header: dict[str, Any]) -> None:
        one, two = "condition_embedder.text_embedder.linear_1.bias", "condition_embedder.text_embedder.linear_2.bias"
        header[one], header[two] = header[two], header[one]

    rewrite(path, swap, sealed=False)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def shards_swapped(path: Path) -> None:
    def swap(header: dict[str, Any]) -> None:
        one, two = (shard_key(f"blocks.{index}", 0) for index in range(2))
        for key in ("shape", "data_offsets"):
            header[one][key], header[two][key] = header[two][key], header[one][key]

    rewrite(path, swap)


def shard_missing(path: Path) -> None:
    def rename(header: dict[str, Any]) -> None:
        header["x"] = header.pop(shard_key("blocks.1", 1))

    rewrite(path, rename)


def name_twice(path: Path) -> None:
    data = path.read_bytes()
    start = data.index(b'"dlo_coded.blocks.1.1":')
    entry = data[start : data.index(b"}", start) + 1] + b","
    padding = data.index(b" " * len(entry), start)
    path.write_bytes(data[:start] + entry + data[start:padding] + data[padding + len(entry) :])


def described(**values: Any) -> Callable[[Path], None]:
    return lambda path: redescribe(path, lambda described: described.update(values))


def tensor_larger(path: Path) -> None:
    redescribe(path, lambda described: described["blocks"][0]["tensors"][2][2].append(2))


def tensor_unknown(path: Path) -> None:
    def change(described: dict[str, Any]) -> None:
        described["blocks"][0]["tensors"][2][0][0] += "x"

    redescribe(path, change)


def block_missing(path: Path) -> None:
    """Its shards are not described, and its weights are nowhere."""
    redescribe(path, lambda described: described["blocks"].pop())


def weight_missing(path: Path) -> None:
    rewrite(path, lambda header: header.update({"proj_out.bia": header.pop("proj_out.bias")}))


def segments_shifted(path: Path) -> None:
    def shift(described: dict[str, Any]) -> None:
        segments = described["blocks"][1]["shards"][1]["segments"]
        segments[-1][2] += 256

    redescribe(path, shift)


IN_THE_HEADER: dict[str, tuple[Callable[[Path], None], str]] = {
    "in the header": (in_header, "its header is not what was written"),
    "tensor renamed": (tensor_renamed, "its header is not what was written"),
    "shard missing": (shard_missing, "shard 1 of block 'blocks.1': it is not in the file"),
    "name twice": (name_twice, "is in it twice"),
    "other format": (described(format=2), "is in format 2 of coded checkpoints"),
    "other ranks": (described(ranks=3), "has 2 shards for 3 ranks"),
    "other dtype": (described(dtype="float16"), "config.json says torch.bfloat16"),
    "block missing": (block_missing, "'dlo_coded.blocks.1.0' is in the file, and in no block that is described"),
    "segments shifted": (segments_shifted, "'blocks.1': its segments do not follow each other"),
    "weight missing": (weight_missing, "it lacks proj_out.bias[.]"),
    "tensor larger": (tensor_larger, "in the model that config.json describes"),
    "tensor unknown": (tensor_unknown, "is not in the model that config.json describes"),
}
ELSEWHERE: dict[str, tuple[Callable[[Path], None], str]] = {
    "in a shard": (in_shard, "its content is not what was written"),
    "in a shard, forged": (in_shard_forged, "coded shard of block 'blocks.1' .* is damaged: its check sum is"),
    "in a frame, forged": (in_frame_forged, "cannot be decoded"),
    "longer frame, forged": (longer_frame_forged, "coded shard of block 'blocks.1' .* is damaged: a run says"),
    "in an ordinary tensor": (in_ordinary_tensor, "its content is not what was written"),
    "shards swapped": (shards_swapped, "coded shard of block 'blocks.[01]' .* is damaged"),
    "cut off": (cut_off, "cannot be used: it has"),
    "longer": (longer, "cannot be used"),
    "other codec": (described(codec="lz4"), "have no codec 'lz4'"),
    "other series": (described(codec_version="9.1"), "was coded by 'zstd' of version 9.1, and here is version"),
}


def test_what_is_damaged_is_refused(sound: Path, tmp_path: Path) -> None:
    for number, (name, (damage, message)) in enumerate({**IN_THE_HEADER, **ELSEWHERE}.items()):
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder)
        damage(folder / WEIGHTS)
        with pytest.raises(RuntimeError, match=message) as raised:
            decode_checkpoint(str(folder), str(tmp_path / "back"))
        assert "Traceback" not in str(raised.value)
        assert not list(tmp_path.glob("back*")), name
        if name in IN_THE_HEADER:
            with pytest.raises(RuntimeError, match=message):
                WanTransformer3DModel.from_pretrained(folder)
        elif name in ("cut off", "longer"):
            with pytest.raises(OSError, match="Unable to load weights"):
                WanTransformer3DModel.from_pretrained(folder)
        else:
            assert coded_file_of(WanTransformer3DModel.from_pretrained(folder)) is not None
        shutil.rmtree(folder)


def test_a_codec_that_does_not_give_back_what_it_was_given(sound: Path, tmp_path: Path) -> None:
    class Lying(ZstdCodec):
        def decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
            super().decode(coded, out, scratch)
            out[-1] ^= 1

    model = WanTransformer3DModel.from_pretrained(sound.parent / "in", dtype=BF16)
    with pytest.raises(RuntimeError, match="of block 'blocks.0' do not decode to what they were with 'zstd'"):
        write_coded(model, str(tmp_path / WEIGHTS), "wan", Lying(), 2, BF16)


# ---------------------------------------------------------------------------------- what cannot be packed or decoded


def test_what_is_refused(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, coded, out = str(sound.parent / "in"), str(sound), str(tmp_path / "out")
    assert "'ranks' is for coded checkpoints alone" in fails(capsys, source, out, "--ranks", "2")
    assert "from 1 to 64, got 65" in fails(capsys, source, out, "--ranks", "65", "--codec", "zstd")
    line = fails(capsys, source, out, "--codec", "zstd", "--dtype", "float32")
    assert "'torch.float32' is not made smaller by coding" in line and "Pack with dtype bfloat16" in line
    for more in ([], ["--codec", "zstd"]):
        assert "is coded. Decode it with `diffusers-dlo pack --decode`" in fails(capsys, coded, out, *more)
    assert "has nothing that is coded" in fails(capsys, "--decode", source, out)
    assert "'--codec' does not go with --decode" in fails(capsys, "--decode", coded, out, "--codec", "zstd")
    assert "'--dtype' does not go with --decode" in fails(capsys, "--decode", coded, out, "--dtype", "bfloat16")
    assert "is there already" in fails(capsys, "--decode", coded, str(tmp_path))
    assert "lies inside of" in fails(capsys, "--decode", coded, f"{coded}/out")
    with pytest.raises(ValueError, match="from 1 to 64, got True"):
        pack_checkpoint(source, out, BF16, "zstd", True)
    zoo.build("wan", 1).save_pretrained(tmp_path / "small")
    assert "no block" in fails(capsys, str(tmp_path / "small"), out, "--codec", "zstd")
    zoo.build("t5", 1).save_pretrained(tmp_path / "t5")
    assert "no model of diffusers to code (only T5" in fails(capsys, str(tmp_path / "t5"), out, "--codec", "zstd")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        for arguments in ((source, out, "--codec", "zstd"), ("--decode", coded, out)):
            assert 'pip install "diffusers-dlo[coded]"' in fails(capsys, *arguments)
    if not torch.accelerator.is_available():
        assert "have no codec 'ans'" in fails(capsys, source, out, "--codec", "ans")
    plain = tmp_path / "plain"
    shutil.copytree(sound, plain)
    shutil.copyfile(sound.parent / "in" / WEIGHTS, plain / WEIGHTS)
    assert "says that it is coded, and it is not" in fails(capsys, "--decode", str(plain), out)
    assert sorted(os.listdir(tmp_path)) == ["plain", "small", "t5"]


def stopping_after(writes: int, error: BaseException) -> Callable[..., int]:
    """`os.pwrite`, which raises instead once it was called so often."""
    write, calls = os.pwrite, iter(range(writes))

    def pwrite(*given: Any) -> int:
        if next(calls, None) is None:
            raise error
        return write(*given)

    return pwrite


def test_nothing_is_left_of_what_does_not_end(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gets full, and Ctrl-C: before the first write, and between later ones."""
    source, coded, out = str(sound.parent / "in"), str(sound), str(tmp_path / "out")
    for command in ((source, out, "--codec", "zstd", "--ranks", "2"), ("--decode", coded, out)):
        for writes in (0, 3):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", stopping_after(writes, full))
                line = fails(capsys, *command)
            assert "cannot be written (No space left on device); nothing is left" in line
            assert not os.listdir(tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", stopping_after(writes, KeyboardInterrupt()))
                assert main(["pack", *command]) == 130
            assert not os.listdir(tmp_path)
