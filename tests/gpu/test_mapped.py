# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Streaming from the page cache of files on real devices: equality, registration, and what is read on demand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import diffusers_dlo
from tests import toys
from tests.ranks import run_ranks
from tests.zoo import MODELS, TEXT_ENCODERS, build, run


pytestmark = pytest.mark.gpu
ALL = {**MODELS, **TEXT_ENCODERS}


def check_zoo(rank: int, folder: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in ("cosmos3", "wan", "flux", "sd3", "t5", "qwen2_5_vl"):
        cls = type(build(name, 3))
        for dtype, options in (
            (torch.float32, {}),
            (torch.bfloat16, {"transfer": "local"}),
            (torch.bfloat16, {"transfer": "all_gather", "cache_dir": f"{folder}/cache", "num_slots": 3}),
        ):
            reference = cls.from_pretrained(f"{folder}/{name}", dtype=dtype).to(device)
            with diffusers_dlo.mapped_loading():
                model = cls.from_pretrained(f"{folder}/{name}", dtype=dtype)
            handle = diffusers_dlo.apply_distributed_layerwise_offload(model, **options)
            kind = handle.report().host_kind
            assert "mapped" in kind or (dtype == torch.bfloat16 and "cache_dir" not in options), kind
            for step in range(4):
                inputs = ALL[name].inputs(10 * rank + step)
                got, expected = run(model, inputs, device=device), run(reference, inputs, device=device)
                assert all(torch.equal(a, b) for a, b in zip(got, expected)), f"{name} {options} step {step}"
            handle.remove()
            for key, value in reference.state_dict().items():
                assert torch.equal(value.cpu(), model.state_dict()[key]), key


def save_zoo(folder: Path) -> None:
    for name in ALL:
        build(name, 3).save_pretrained(folder / name)


def test_one_gpu(tmp_path: Path) -> None:
    save_zoo(tmp_path)
    check_zoo(0, str(tmp_path))


def on_rank(rank: int, size: int, folder: str) -> None:
    check_zoo(rank, folder)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_all_gpus_of_the_host(tmp_path: Path) -> None:
    save_zoo(tmp_path)
    run_ranks(torch.cuda.device_count(), on_rank, str(tmp_path), backend="nccl", timeout=280)


class WithLeaf(toys.Stack):
    """Blocks beside a vocabulary that is larger than they are, and one that no forward calls."""

    def __init__(self) -> None:
        super().__init__(4, dim=1000, widths=(1500, 1300))
        self.vocabulary = nn.Embedding(4001, 1000)
        self.unused = nn.Embedding(4003, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(self.vocabulary(tokens))


def from_file(model: nn.Module, path: Path) -> nn.Module:
    for name, tensor in load_file(path).items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
    return model.eval()


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_odd_sizes_and_leaves(tmp_path: Path, transfer: str) -> None:
    """Rows of 4000 bytes: nothing in the file is aligned for the device, and leaves share pages with neighbours."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = WithLeaf()
    save_file({name: p.data for name, p in model.named_parameters()}, tmp_path / "weights.safetensors")
    reference = from_file(WithLeaf(), tmp_path / "weights.safetensors").to(device)
    for _ in range(2):
        model = from_file(WithLeaf(), tmp_path / "weights.safetensors")
        handle = diffusers_dlo.apply_distributed_layerwise_offload(model, transfer=transfer)
        report = handle.report()
        assert report.host_kind == "mapped" and report.extents_per_block <= 3
        assert all(tensor.offset % 256 == 0 for block in handle.plan.blocks for tensor in block.tensors)
        tokens = torch.randint(0, 4001, (64,), device=device)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(tokens), reference(tokens))
        handle.remove()
    torch.ones(1, device="cuda").add_(1)  # no error of a registration is left
    torch.cuda.synchronize()
