# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What may befall a coded model between loading and disabling: it is moved about, its process works elsewhere, ranks are
killed, files are cut off, and other offloads come beside it.
"""

import gc
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.block_layout import align
from diffusers_dlo.coding.coded_file import read_coded_file
from diffusers_dlo.coding.loading import coded_file_of
from diffusers_dlo.coding.zstd import ZstdCodec
from diffusers_dlo.host.coded import CodedStore
from diffusers_dlo.pack import pack_checkpoint
from tests import toys
from tests.coded import code_as_it_is
from tests.coding.checkpoints import WEIGHTS, wan, wan_inputs
from tests.ranks import run_ranks
from tests.toys import feed, toy


BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it is, twice, and coded for two ranks."""
    folder = tmp_path_factory.mktemp("coded")
    wan(3).save_pretrained(folder / "in")
    pack_checkpoint(str(folder / "in"), str(folder / "plain"), BF16)
    shutil.copytree(folder / "plain", folder / "copy")
    pack_checkpoint(str(folder / "in"), str(folder / "coded"), BF16, codec="zstd", ranks=2)
    return folder


def load(folder: Path | str) -> nn.Module:
    return WanTransformer3DModel.from_pretrained(folder, dtype=BF16).requires_grad_(False)


@torch.no_grad()
def output_of(model: nn.Module) -> torch.Tensor:
    return model(**wan_inputs())[0]


def test_the_process_works_in_another_folder_by_now(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the links that the model was loaded by, as the Hub's cache has them, lead elsewhere."""
    expected = output_of(load(folders / "plain"))
    (tmp_path / "links").mkdir()
    for name in os.listdir(folders / "coded"):
        os.symlink(folders / "coded" / name, tmp_path / "links" / name)
    monkeypatch.chdir(tmp_path)
    model = load("links")
    coded = coded_file_of(model)
    assert coded is not None and coded.path == str(folders / "coded" / WEIGHTS)
    monkeypatch.chdir("/")
    shutil.rmtree(tmp_path / "links")
    handle = model.enable_distributed_layerwise_offload()
    assert handle.report().host_kind == "coded" and handle.plan.files == [coded.path]
    monkeypatch.chdir(tmp_path)
    assert torch.equal(output_of(model), expected)
    handle.remove()
    assert torch.equal(output_of(model), expected)


def _reversed(model: nn.Module) -> None:
    model.blocks = nn.ModuleList(reversed(model.blocks))


def _without_the_first(model: nn.Module) -> None:
    del model.blocks[0]


def _exchanged(model: nn.Module) -> None:
    one, other = model.blocks[0].attn1.to_q, model.blocks[2].attn1.to_q
    one.weight, other.weight = other.weight, one.weight


def _twice(model: nn.Module) -> None:
    model.blocks[1] = model.blocks[0]


def test_blocks_that_are_others_by_now(folders: Path) -> None:
    """Their values would go by names: to blocks that they do not belong to."""
    for change in (_reversed, _without_the_first, _exchanged, _twice):
        model = load(folders / "coded")
        change(model)
        with pytest.raises(ValueError, match=r"'blocks\.[01]\.\S*' of 'model' is another tensor than when .*--decode"):
            model.enable_distributed_layerwise_offload()
        assert coded_file_of(model) is not None, change
    model, plain = load(folders / "coded"), load(folders / "plain")
    for shortened in (model, plain):
        del shortened.blocks[2]  # the names of the others are what they were
    handle = model.enable_distributed_layerwise_offload()
    assert torch.equal(output_of(model), output_of(plain))
    handle.remove()


def _appended(model: nn.Module) -> nn.Module:
    model.blocks.append(wan(1).to(BF16).blocks[0])
    model.blocks[3].attn1.to_q.weight = nn.Parameter(torch.empty(96, 96, device="meta"))
    return model


def test_other_modules_than_what_was_loaded(folders: Path) -> None:
    ways: tuple[Callable[[nn.Module], nn.Module], ...] = (nn.Sequential, lambda model: model.blocks, _appended)
    for way in ways:
        module = way(load(folders / "coded"))
        with pytest.raises(
            RuntimeError, match="has no values: it is coded, and 'model' is not the model as it was lo"
        ):
            apply_distributed_layerwise_offload(module)


def test_reading_values_keeps_no_block(folders: Path) -> None:
    model = load(folders / "coded")
    handle = model.enable_distributed_layerwise_offload()
    coded = read_coded_file(str(folders / "coded" / WEIGHTS))
    assert coded is not None
    (nbytes,) = {block.nbytes for block in coded.blocks.values()}

    def images() -> int:
        found = (obj for obj in gc.get_objects() if type(obj) is torch.Tensor)
        return sum(one.dtype == torch.uint8 and one.shape == (align(nbytes),) for one in found)

    before = images()
    state, expected = model.state_dict(), load(folders / "plain").state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert images() == before
    handle.remove()


def test_offloads_beside_each_other_share_a_decoder(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One needs more of the buffers, the other more scratch memory; a third finds no memory, and both go on."""
    monkeypatch.setattr(ZstdCodec, "scratch_nbytes", lambda self, nbytes: nbytes)
    first, reference = toy(toys.Stack, 3, toys.Block, 16, (5000,)), toy(toys.Stack, 3, toys.Block, 16, (5000,))
    code_as_it_is(first, tmp_path / "first.safetensors", 1)
    second, plain = load(folders / "coded"), load(folders / "plain")
    handles = [apply_distributed_layerwise_offload(model) for model in (first, second)]
    third = load(folders / "coded")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="memory"):
        patch.setattr(ZstdCodec, "scratch_nbytes", lambda self, nbytes: 1 << 60)
        apply_distributed_layerwise_offload(third)
    assert coded_file_of(third) is not None
    with torch.no_grad():
        for step in range(2):
            assert torch.equal(first(feed(step)), reference(feed(step)))
            assert torch.equal(output_of(second), output_of(plain))
    for handle in handles:
        handle.remove()


def _beside_files_of_each_rank(rank: int, size: int, folders: Path) -> None:
    expected = output_of(load(folders / "plain"))
    model, other = load(folders / "coded"), load(folders / ("copy" if rank else "plain"))
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": None}
    pipe = WanPipeline(transformer=model, transformer_2=other, **parts)
    handle = pipe.enable_distributed_layerwise_offload()
    # What is coded streams as it lies there, from the same file; the others are copied once for both.
    assert (handle.report().host_kind, handle.report().transfer) == ("coded+packed", "all_gather")
    for part in (model, other, model):
        assert torch.equal(output_of(part), expected)
    handle.remove()
    assert torch.equal(output_of(model), expected) and torch.equal(output_of(other), expected)


def _killed_in_a_pass(rank: int, size: int, folders: Path) -> None:
    expected = output_of(load(folders / "plain"))
    model = load(folders / "mine")
    handle = model.enable_distributed_layerwise_offload()
    assert handle.report().transfer == "all_gather" and torch.equal(output_of(model), expected)
    if rank == 1:
        model.blocks[1].ffn.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert torch.equal(output_of(model), expected)
    assert torch.equal(output_of(model), expected)
    before = handle.report()
    for _ in range(2):
        assert torch.equal(output_of(model), expected)
    after, coded = handle.report(), coded_of(folders / "mine")
    assert after.host_kind == "coded"
    assert after.h2d_bytes - before.h2d_bytes == 2 * sum(block.coded_nbytes for block in coded)
    assert after.decoded_bytes - before.decoded_bytes == 2 * sum(
        shard.nbytes for block in coded for shard in block.shards
    )
    # What is left of a file that was cut off is not read: that would end the process.
    os.truncate(folders / "mine" / WEIGHTS, 4096)
    with pytest.raises(RuntimeError, match="bytes and has 4096 now, and the weights stream from it"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="some weights are lost"):
        handle.remove()


def coded_of(folder: Path) -> list:
    coded = read_coded_file(str(folder / WEIGHTS))
    assert coded is not None
    return list(coded.blocks.values())


def _killed_while_enabling(rank: int, size: int, folders: Path) -> None:
    expected = output_of(load(folders / "plain"))
    first, second = load(folders / "coded"), load(folders / "coded")
    handle = first.enable_distributed_layerwise_offload()
    assert torch.equal(output_of(first), expected)
    if rank == 1:
        CodedStore.check_sums = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        second.enable_distributed_layerwise_offload()
    assert coded_file_of(second) is not None
    for _ in range(2):
        assert torch.equal(output_of(first), expected)
    handle.remove()
    assert torch.equal(output_of(first), expected)


def test_on_two_ranks(folders: Path) -> None:
    run_ranks(2, _beside_files_of_each_rank, folders)
    shutil.copytree(folders / "coded", folders / "mine")
    run_ranks(2, _killed_in_a_pass, folders, expect_death=(1,))
    run_ranks(2, _killed_while_enabling, folders, expect_death=(1,))
