# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Coded checkpoints on real devices: the same bits, fewer bytes over the link, nothing that the host waits for, and
damage that is found before the device decodes it. Two ranks share one device where there is no second one.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from diffusers_dlo.coding.coded_file import CodedFile, read_coded_file
from diffusers_dlo.pack import pack_checkpoint
from tests.coding.checkpoints import WEIGHTS, flip, wan, wan_inputs
from tests.gpu.test_residents import _ranks, _share_a_device
from tests.ranks import run_ranks


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(250)]

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coded")
    wan(6, heads=24).save_pretrained(folder / "in")
    pack_checkpoint(str(folder / "in"), str(folder / "plain"), BF16)
    for ranks in (1, 2):
        pack_checkpoint(str(folder / "in"), str(folder / f"coded{ranks}"), BF16, codec="ans", ranks=ranks)
    return folder


def described(folder: Path) -> CodedFile:
    coded = read_coded_file(str(folder / WEIGHTS))
    assert coded is not None
    return coded


def make_inputs(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs = wan_inputs() | {"hidden_states": torch.randn(1, 4, 2, 16, 16, generator=generator).to(BF16)}
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def check(folders: Path, coded: str, rank: int, **options: Any) -> dict[str, int]:
    """Forwards that do not wait for each other; what the last four of them copied and decoded."""
    reference = WanTransformer3DModel.from_pretrained(folders / "plain", dtype=BF16).cuda()
    model = WanTransformer3DModel.from_pretrained(folders / coded)
    inputs = [make_inputs(10 * rank + step) for step in range(10)]
    with torch.inference_mode():
        expected = [reference(**one)[0] for one in inputs]
        handle = model.enable_distributed_layerwise_offload(**options)
        assert handle.report().host_kind == "coded"
        got = [model(**one)[0] for one in inputs[:6]]
        handle.join()
        before = handle.report()
        got += [model(**one)[0] for one in inputs[6:]]
        torch.cuda.synchronize()
        handle.join()
        after = handle.report()
    assert all(map(torch.equal, got, expected)), options
    handle.remove()
    with torch.inference_mode():
        assert torch.equal(model.cuda()(**inputs[0])[0], expected[0])
    return {
        "copied": after.h2d_bytes - before.h2d_bytes,
        "decoded": after.decoded_bytes - before.decoded_bytes,
        "resident": after.resident_bytes,
    }


@pytest.mark.parametrize("coded", ("coded1", "coded2"))
def test_one_rank(coded: str, folders: Path) -> None:
    blocks = described(folders / coded).blocks.values()
    whole = sum(shard.nbytes for block in blocks for shard in block.shards)
    for options in ({}, {"num_slots": 3}):
        seen = check(folders, coded, 0, **options)
        assert seen["copied"] == 4 * sum(block.coded_nbytes for block in blocks)
        assert seen["decoded"] == 4 * whole and seen["copied"] < 0.7 * seen["decoded"]
    seen = check(folders, coded, 0, device_budget=whole // 3)  # more streams than there are slots
    assert 0 < seen["copied"] < 0.7 * seen["decoded"] and seen["resident"] > 0
    assert check(folders, coded, 0, device_budget="auto")["copied"] == 0


def _on_two_ranks(rank: int, size: int, folders: Path) -> None:
    _share_a_device()
    blocks = described(folders / "coded2").blocks.values()
    shards = sum(block.shards[rank].nbytes for block in blocks)
    for options in ({}, {"gather_in_place": False}, {"num_slots": 3}):
        seen = check(folders, "coded2", rank, transfer="all_gather", **options)
        assert seen["copied"] == 4 * sum(block.shards[rank].place.nbytes for block in blocks)
        assert seen["decoded"] == 4 * shards
    shards = sum(block.shards[0].nbytes for block in blocks)  # the same budget on both
    for gather, fraction in (("collective", 0.9), ("pull", 1.1), ("collective", 1.5)):
        options = {"device_budget": int(fraction * shards), "gather": gather}
        seen = check(folders, "coded2", rank, transfer="all_gather", **options)
        assert seen["resident"] > 0.7 * fraction * shards
    check(folders, "coded2", rank, transfer="local")
    check(folders, "coded1", rank)
    check(folders, "coded2", rank)  # whichever is faster here


def test_two_ranks(folders: Path) -> None:
    run_ranks(2, _on_two_ranks, folders, **_ranks())


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def test_nothing_is_waited_for_or_allocated(folders: Path) -> None:
    """A forward allocates what the same one does without coding, and the host waits for nothing in it."""
    taken = {}
    for kind in ("plain", "coded2"):
        model = WanTransformer3DModel.from_pretrained(folders / kind, dtype=BF16)
        handle = model.enable_distributed_layerwise_offload()
        inputs = make_inputs(1)
        with torch.inference_mode():
            for _ in range(3):
                model(**inputs)
            torch.cuda.synchronize()
            before = _allocations()
            if kind == "coded2":
                torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(3):
                    model(**inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            taken[kind] = _allocations() - before
        handle.remove()
    assert taken["coded2"] == taken["plain"]


def test_damage_is_found_and_the_device_goes_on(folders: Path) -> None:
    damaged = folders / "damaged"
    shutil.copytree(folders / "coded2", damaged)
    block = described(damaged).blocks["blocks.3"]
    for shard, where in ((0, 0.3), (1, 0.9)):
        place = block.shards[shard].place
        offset = place.offset + int(where * place.nbytes)
        flip(damaged / WEIGHTS, offset, 0xFF)
        model = WanTransformer3DModel.from_pretrained(damaged)
        for host in ("auto", "packed"):
            with pytest.raises(RuntimeError, match="coded shard of block 'blocks.3' .* is damaged: its check sum is"):
                model.enable_distributed_layerwise_offload(host=host)
        flip(damaged / WEIGHTS, offset, 0xFF)
    torch.cuda.synchronize()
    check(folders, "damaged", 0)
