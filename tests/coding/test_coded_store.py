# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Coded checkpoints under the offload: the bytes that cross the link, what fails closed on every rank before anything
computes, and what is left of the model then.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.byte_size import format_bytes
from diffusers_dlo.coding.coded_file import read_coded_file
from diffusers_dlo.coding.loading import coded_file_of
from diffusers_dlo.pack import pack_checkpoint
from diffusers_dlo.planned_coding import decoding_nbytes
from tests import zoo
from tests.coded import code_as_it_is
from tests.coding.checkpoints import WEIGHTS, flip, wan, wan_inputs
from tests.distributed.test_transfer_choice import Link, use
from tests.parity.test_toys import CASES
from tests.ranks import run_ranks
from tests.toys import feed


BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is, and coded for two ranks and for one."""
    folder = tmp_path_factory.mktemp("coded")
    wan(3).save_pretrained(folder / "in")
    pack_checkpoint(str(folder / "in"), str(folder / "plain"), BF16)
    for ranks in (1, 2):
        pack_checkpoint(str(folder / "in"), str(folder / f"coded{ranks}"), BF16, codec="zstd", ranks=ranks)
    return folder


def load(folder: Path) -> nn.Module:
    return WanTransformer3DModel.from_pretrained(folder).requires_grad_(False)


def expected_of(folders: Path) -> torch.Tensor:
    with torch.no_grad():
        return WanTransformer3DModel.from_pretrained(folders / "plain", dtype=BF16)(**wan_inputs())[0]


def coded_nbytes(folder: Path, shard: int | None = None) -> int:
    """Bytes of one coded shard of each block, or of all."""
    coded = read_coded_file(str(folder / WEIGHTS))
    assert coded is not None
    shards = (s for block in coded.blocks.values() for i, s in enumerate(block.shards) if shard in (None, i))
    return sum(one.place.nbytes for one in shards)


def image_nbytes(folder: Path, shard: int | None = None) -> int:
    coded = read_coded_file(str(folder / WEIGHTS))
    assert coded is not None
    shards = (s for block in coded.blocks.values() for i, s in enumerate(block.shards) if shard in (None, i))
    return sum(one.nbytes for one in shards)


def forwards(model: nn.Module, handle: Any, count: int) -> tuple[torch.Tensor, int, int]:
    """The last output, and what each forward but the first copied and decoded."""
    with torch.no_grad():
        model(**wan_inputs())
        handle.join()
        before = handle.report()
        for _ in range(count):
            output = model(**wan_inputs())[0]
        handle.join()
    after = handle.report()
    return output, (after.h2d_bytes - before.h2d_bytes) // count, (after.decoded_bytes - before.decoded_bytes) // count


@pytest.mark.parametrize("coded", ("coded1", "coded2"))
def test_what_crosses_the_link_on_one_rank(coded: str, folders: Path) -> None:
    model = load(folders / coded)
    handle = model.enable_distributed_layerwise_offload()
    output, copied, decoded = forwards(model, handle, 3)
    report = handle.report()
    assert torch.equal(output, expected_of(folders))
    assert (report.host_kind, report.transfer) == ("coded", "local")
    assert (copied, decoded) == (coded_nbytes(folders / coded), image_nbytes(folders / coded))
    assert copied < 0.85 * decoded  # small blocks, with fp32 parts
    assert report.host_files_bytes == coded_nbytes(folders / coded) and report.host_private_bytes == 0
    buffers = 2 * max(
        shard.place.nbytes
        for block in read_coded_file(str(folders / coded / WEIGHTS)).blocks.values()  # type: ignore[union-attr]
        for shard in block.shards
    )
    assert report.device_slot_bytes == 2 * handle.plan.slot_nbytes("local") + buffers
    # The plan allows for the tables of a device's codec too, of which the host's has none.
    assert buffers < decoding_nbytes(handle.plan) < buffers + 4096
    assert f"{format_bytes(decoding_nbytes(handle.plan))} at most for coded shards on their way" in str(handle.plan)
    with handle.timing(), torch.no_grad():
        model(**wan_inputs())
    timed = handle.report()
    assert all(block.h2d_ms > 0 and block.decode_ms > 0 for block in timed.blocks)
    (passed,) = timed.timed_passes
    assert passed.decode_ms == pytest.approx(sum(block.decode_ms for block in timed.blocks))
    assert "decoding" in str(timed) and passed.transfer_ms >= passed.decode_ms
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(**wan_inputs())[0], output)


def _on_two_ranks(rank: int, size: int, folders: Path) -> None:
    expected = expected_of(folders)
    for options, coded, host, shard in (
        ({}, "coded2", "coded", rank),
        ({"host": "coded", "gather_in_place": False}, "coded2", "coded", rank),
        ({"transfer": "local"}, "coded2", "coded", None),
        ({}, "coded1", "coded", None),
    ):
        model = load(folders / coded)
        handle = model.enable_distributed_layerwise_offload(**options)
        output, copied, decoded = forwards(model, handle, 2)
        report = handle.report()
        assert torch.equal(output, expected), options
        assert (report.host_kind, report.transfer) == (host, "all_gather" if shard is not None else "local")
        assert copied == coded_nbytes(folders / coded, shard), options
        assert decoded == image_nbytes(folders / coded, shard), options
        handle.remove()
    for options in ({"host": "packed"}, {"host": "pinned"}):
        for coded in ("coded1", "coded2"):  # decoded into memory, shards are cut as the group wants
            model = load(folders / coded)
            handle = model.enable_distributed_layerwise_offload(**options)
            output, copied, decoded = forwards(model, handle, 1)
            assert torch.equal(output, expected) and decoded == 0, options
            assert (handle.report().host_kind, handle.report().transfer) == (options["host"], "all_gather"), coded
            handle.remove()
    model = load(folders / "coded1")
    with pytest.raises(ValueError, match="was packed for groups of 1, and this one has 2 ranks.*--ranks 2"):
        model.enable_distributed_layerwise_offload(transfer="all_gather")
    assert coded_file_of(model) is not None
    # One rank's file is damaged in the shard of the other: neither computes, and both say why.
    damaged = folders / "damaged"
    model = load(damaged)
    with pytest.raises(RuntimeError, match="coded shard of block 'blocks.1' .* is damaged: its check sum is"):
        model.enable_distributed_layerwise_offload()
    assert coded_file_of(model) is not None
    # Each rank has a file of its own.
    model = load(folders / ("coded2" if rank else "copy"))
    with pytest.raises(RuntimeError, match="coded weights of 'model'|ranks differ|different files"):
        model.enable_distributed_layerwise_offload()


def test_on_two_ranks(folders: Path) -> None:
    damage(folders / "coded2", folders / "damaged", shard=1)
    shutil.copytree(folders / "coded2", folders / "copy")
    run_ranks(2, _on_two_ranks, folders)


def _timed_both_ways(rank: int, size: int, folders: Path) -> str:
    coded = read_coded_file(str(folders / "coded2" / WEIGHTS))
    assert coded is not None
    first, second = (max(block.shards[i].place.nbytes for block in coded.blocks.values()) for i in range(size))
    assert first != second, "a rank that copies whole blocks needs room for the larger"
    use(Link())
    model = load(folders / "coded2")
    handle = model.enable_distributed_layerwise_offload()
    assert handle.transfer_timing is not None and handle.report().host_kind == "coded"
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(**wan_inputs())[0], expected_of(folders))
    transfer = handle.report().transfer
    handle.remove()
    return transfer


def test_it_is_timed_both_ways(folders: Path) -> None:
    assert len(set(run_ranks(2, _timed_both_ways, folders))) == 1


def damage(source: Path, target: Path, shard: int) -> None:
    """A copy with one bit changed in the middle of a shard of block 1."""
    shutil.copytree(source, target)
    coded = read_coded_file(str(target / WEIGHTS))
    assert coded is not None
    place = coded.blocks["blocks.1"].shards[shard].place
    flip(target / WEIGHTS, place.offset + place.nbytes // 2)


def test_damage_is_found_before_anything_computes(folders: Path, tmp_path: Path) -> None:
    for shard in range(2):
        folder = tmp_path / str(shard)
        damage(folders / "coded2", folder, shard)
        model = load(folder)
        for host in ("auto", "coded", "packed", "pinned"):
            with pytest.raises(RuntimeError, match="coded shard of block 'blocks.1' .* is damaged: its check sum is"):
                model.enable_distributed_layerwise_offload(host=host)
            assert coded_file_of(model) is not None
            with pytest.raises(RuntimeError, match="still coded"):
                model(**wan_inputs())
        # What was wrong is made right: the same model can be enabled after all.
        place = read_coded_file(str(folder / WEIGHTS)).blocks["blocks.1"].shards[shard].place  # type: ignore
        flip(folder / WEIGHTS, place.offset + place.nbytes // 2)
        handle = model.enable_distributed_layerwise_offload()
        with torch.no_grad():
            assert torch.equal(model(**wan_inputs())[0], expected_of(folders))
        handle.remove()


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def touched(path: Path) -> None:
    os.utime(path, ns=(time.time_ns(), time.time_ns()))


def replaced(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("change", (cut_off, touched, replaced, os.unlink))
def test_a_file_that_changes_while_it_streams(change: Callable[[Path], None], folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "coded2", tmp_path / "c")
    model = load(tmp_path / "c")
    handle = model.enable_distributed_layerwise_offload()
    with torch.no_grad():
        model(**wan_inputs())
        change(tmp_path / "c" / WEIGHTS)
        with pytest.raises(RuntimeError, match="weights stream from it"):
            model(**wan_inputs())
    try:
        handle.remove()
    except RuntimeError as error:
        assert change in (cut_off, touched) and "weights" in str(error)


@pytest.mark.parametrize("change", (cut_off, os.unlink))
def test_a_file_that_changes_before_it_is_enabled(
    change: Callable[[Path], None], folders: Path, tmp_path: Path
) -> None:
    shutil.copytree(folders / "coded2", tmp_path / "c")
    model = load(tmp_path / "c")
    change(tmp_path / "c" / WEIGHTS)
    with pytest.raises(RuntimeError, match="cannot be used|cannot be found any more"):
        model.enable_distributed_layerwise_offload()


def test_another_file_in_its_place(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "coded2", tmp_path / "c")
    model = load(tmp_path / "c")
    shutil.copy(folders / "coded1" / WEIGHTS, tmp_path / "c" / WEIGHTS)
    with pytest.raises(RuntimeError, match="is another file than the model was loaded from"):
        model.enable_distributed_layerwise_offload()


def test_what_cannot_be_done_with_coded_weights(folders: Path) -> None:
    model = load(folders / "coded2")
    for options, error, message in (
        ({"host": "mapped"}, RuntimeError, "these are coded"),
        ({"blocks": ["blocks.0.attn1.to_out"]}, RuntimeError, "is coded in .*and would not stream"),
        ({"transfer": "all_gather"}, ValueError, "was packed for groups of 2, and this one has 1 ranks"),
    ):
        with pytest.raises(error, match=message):
            model.enable_distributed_layerwise_offload(**options)
        assert coded_file_of(model) is not None
    with pytest.raises(RuntimeError, match='host="coded" has weights stream from a coded checkpoint'):
        WanTransformer3DModel.from_pretrained(folders / "plain").enable_distributed_layerwise_offload(host="coded")
    handle = model.enable_distributed_layerwise_offload(cache_dir=folders / "cache")
    assert handle.report().host_kind == "coded" and not (folders / "cache").exists()
    handle.remove()


@pytest.mark.parametrize("name", ("cosmos3", "flux"))
def test_other_models_are_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    zoo.build(name, 3).save_pretrained(tmp_path / "in")
    pack_checkpoint(str(tmp_path / "in"), str(tmp_path / "plain"), BF16)
    pack_checkpoint(str(tmp_path / "in"), str(tmp_path / "coded"), BF16, codec="zstd", ranks=3)
    cls = type(zoo.build(name, 3))
    reference = cls.from_pretrained(tmp_path / "plain", dtype=BF16)
    model = cls.from_pretrained(tmp_path / "coded")
    handle = model.enable_distributed_layerwise_offload(num_slots=3)
    assert handle.report().host_kind == "coded"
    for seed in range(2):
        inputs = zoo.MODELS[name].inputs(seed)
        assert all(map(torch.equal, zoo.run(model, inputs), zoo.run(reference, inputs)))
    handle.remove()


def test_a_toy_with_leaves_and_a_budget(tmp_path: Path) -> None:
    model, reference = CASES["leafy"](), CASES["leafy"]()
    code_as_it_is(model, tmp_path / "a.safetensors", 1)
    handle = apply_distributed_layerwise_offload(model, device_budget="1GiB")
    with torch.no_grad():
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step)))
        before = handle.report().h2d_bytes
        model(feed(0))
        assert handle.report().h2d_bytes == before  # everything stays, decoded
    handle.remove()
