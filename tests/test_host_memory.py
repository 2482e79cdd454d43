# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What ranks take of the host's memory, as the kernel accounts for it: one copy of the weights for all of them."""

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import nn

import diffusers_dlo
from tests.ranks import run_ranks


LAYERS, DIM = 56, 384
FIXED_NBYTES = 64 << 20
"""What a rank may take beside weights: its objects, and pages of libraries that are touched for the first time."""


def large_model(layers: int = LAYERS) -> nn.Module:
    """A real model of half a gigabyte."""
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=DIM // 4,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=4 * DIM,
        num_layers=layers,
        rope_max_seq_len=32,
    ).eval()


def inputs(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 4, 1, 4, 4, generator=generator),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 3, 16, generator=generator),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    large_model().save_pretrained(path)
    return path


def nbytes_of(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def warm_up() -> None:
    """Once through everything: forked processes unshare memory, and libraries are loaded, as they are first used."""
    model = large_model(2)
    model.enable_distributed_layerwise_offload(onload_device="cpu")
    with torch.no_grad():
        model(**inputs(0))
    model.disable_distributed_layerwise_offload()


def account() -> dict[str, int]:
    """The kernel's account of this process, bytes by kind, and its mappings; without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = {}
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup.readlines()[1:]:
            kind, amount = line.split()[:2]
            found[kind.rstrip(":")] = int(amount) << 10
    with open("/proc/self/maps") as maps:
        found["mappings"] = sum(1 for _ in maps)
    return found


def anonymous_now() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@contextlib.contextmanager
def watching() -> Iterator[list[int]]:
    """The most anonymous memory that this process held meanwhile, looked at every millisecond."""
    peak, stop = [anonymous_now()], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], anonymous_now())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()


def load_and_run(rank: int, size: int, path: str) -> tuple[dict[str, int], dict[str, int], dict[str, int], Any]:
    warm_up()
    before = account()
    dist.barrier()
    model = WanTransformer3DModel.from_pretrained(path, dtype=torch.float32)
    loaded = account()
    handle = model.enable_distributed_layerwise_offload(onload_device="cpu")
    with torch.no_grad():
        model(**inputs(rank))
    handle.join()  # the lap is complete
    dist.barrier()
    after = account()  # while all ranks hold everything
    dist.barrier()
    report = handle.report()
    handle.remove()
    return before, loaded, after, report


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_all_ranks_share_one_copy_and_have_next_to_none_of_their_own(checkpoint: Path, size: int) -> None:
    nbytes = nbytes_of(checkpoint)
    assert nbytes > 400e6
    results = run_ranks(size, load_and_run, str(checkpoint))
    pss = sum(after["Pss"] - before["Pss"] for before, _, after, _ in results)
    assert 0.9 * nbytes < pss <= 1.05 * nbytes + FIXED_NBYTES * size
    for _, loaded, after, report in results:
        assert report.host_kind == "mapped" and report.host_private_bytes == 0
        # The slots are the device's, which here is the CPU, and gloo keeps copies of the blocks that it gathered last;
        # there are two gathers at a time, and up to five copies were seen.
        own = after["Anonymous"] - loaded["Anonymous"] - 4 * report.device_slot_bytes
        assert own < 0.03 * nbytes


def many_rounds(rank: int, size: int, path: str) -> tuple[list[dict[str, int]], int]:
    warm_up()
    model = WanTransformer3DModel.from_pretrained(path, dtype=torch.float32)
    accounts = []
    for number in range(20):
        handle = model.enable_distributed_layerwise_offload(onload_device="cpu", num_slots=2 + number % 2)
        block_nbytes = max(block.padded_nbytes(size) for block in handle.plan.blocks)
        if number in (0, 9, 19):
            with torch.no_grad():
                model(**inputs(rank))
        model.disable_distributed_layerwise_offload()
        accounts.append(account())
    return accounts, block_nbytes


def test_enabling_again_and_again_takes_no_more(tmp_path: Path) -> None:
    large_model(20).save_pretrained(tmp_path)
    for accounts, block_nbytes in run_ranks(2, many_rounds, str(tmp_path)):
        first, last = accounts[1], accounts[-1]
        # Without a forward between them, nothing at all; after one, gloo keeps copies of what it gathered.
        assert accounts[8]["Anonymous"] - first["Anonymous"] < 1 << 20
        assert accounts[18]["Anonymous"] - accounts[10]["Anonymous"] < 1 << 20
        assert last["Anonymous"] - first["Anonymous"] < (2 << 20) + 6 * block_nbytes
        assert last["mappings"] - first["mappings"] < 10


def load_with_cast(rank: int, size: int, path: str) -> tuple[int, int, str]:
    warm_up()
    before = anonymous_now()
    with watching() as peak:
        with diffusers_dlo.mapped_loading():
            model = WanTransformer3DModel.from_pretrained(path, dtype=torch.bfloat16)
        handle = model.enable_distributed_layerwise_offload(onload_device="cpu")
        kind = handle.report().host_kind
    plan = handle.plan
    handle.remove()
    own = plan.device_slot_nbytes + plan.device_placed_nbytes
    return peak[0] - before, own, kind


@pytest.mark.parametrize("size", (1, 2))
def test_a_cast_takes_the_slots_and_the_weights_that_stay_and_little_else(checkpoint: Path, size: int) -> None:
    nbytes = nbytes_of(checkpoint)
    for peak, own, kind in run_ranks(size, load_with_cast, str(checkpoint)):
        assert kind.endswith("packed")
        # A piece that is being cast, in both dtypes, and what loading takes for names and headers.
        assert peak < own + 0.03 * nbytes + (48 << 20)
