# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Four and eight ranks, in groups of two, four and eight: the bits of the model without offload, and what each rank
moves: 1/N of every block over its host link, (N-1)/N of it from the other ranks.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from tests import toys
from tests.checks import assert_equal
from tests.ranks import run_ranks
from tests.toys import feed, toy
from tests.zoo import MODELS, build, run


WIDTHS = (24, 41, 9)
"""Unequal blocks. The smallest is ten units of 256 bytes: of eight shards of two, three hold nothing but padding."""
BLOCKS = 5
PATIENT = 60.0
"""Seconds of grace: no rank that still computes is taken for one that is away, however slow the machine."""
Counts = tuple[int, int]
"""Bytes from the host, and from other ranks."""


def stack(seed: int) -> nn.Module:
    return toy(toys.Stack, BLOCKS, toys.Block, 16, WIDTHS, seed=seed)


def shards_of(model: nn.Module, group: int) -> list[int]:
    """Bytes of one rank's share of each block: tensors, shards and the image are multiples of 256 bytes."""

    def units(nbytes: int) -> int:
        return -(-nbytes // 256)

    images = [256 * sum(units(p.nbytes) for p in block.parameters()) for block in model.blocks]
    return [256 * units(-(-image // group)) for image in images]


def mesh_of(group: int, size: int, strided: bool) -> DeviceMesh:
    """Rows of `group` ranks: neighbours, or ranks that are `size / group` apart."""
    ranks = torch.arange(size).view(group, -1).t() if strided else torch.arange(size).view(-1, group)
    return DeviceMesh("cpu", ranks.contiguous())


def counts(handle: OffloadHandle) -> Counts:
    report = handle.report()
    return report.h2d_bytes, report.gather_bytes


def passes_of(handle: OffloadHandle, model: nn.Module, reference: nn.Module, rank: int, count: int) -> list[Counts]:
    """Passes on inputs of this rank's own, bit-equal; what each of them moved."""
    moved, before = [], counts(handle)
    with torch.no_grad():
        for step in range(count):
            assert torch.equal(model(feed(10 * rank + step)), reference(feed(10 * rank + step))), step
            now = counts(handle)
            moved.append((now[0] - before[0], now[1] - before[1]))
            before = now
    return moved


def _moves_its_share(rank: int, size: int, group: int, num_slots: int, host: str, strided: bool) -> None:
    """Each row has weights of its own, so bytes of another row would show in the outputs."""
    mesh = None if group == size else mesh_of(group, size, strided)
    row = 0 if mesh is None else min(dist.get_process_group_ranks(mesh.get_group(1)))
    model, reference = stack(row), stack(row)
    shards = shards_of(model, group)
    handle = apply_distributed_layerwise_offload(
        model, transfer="all_gather", mesh=mesh, num_slots=num_slots, host=host, grace=PATIENT
    )
    assert handle.plan.group_size == group and handle.report().host_kind == host
    moved = passes_of(handle, model, reference, rank, 4)
    handle.join()
    h2d, gathered = counts(handle)
    handle.remove()
    # In the steady state, exactly its share of every block; at first also what is ahead for the next pass.
    assert moved[2:] == [(sum(shards), (group - 1) * sum(shards))] * 2, (moved, shards)
    ahead = shards[: num_slots - 1]
    assert gathered == (group - 1) * (4 * sum(shards) + sum(ahead))
    assert h2d in (4 * sum(shards) + sum(ahead), 4 * sum(shards) + sum(shards[:num_slots]))


def _copies_all(rank: int, size: int) -> None:
    """`local` beside it: the same ranks, each copying every block whole, and nothing between them."""
    model, reference = stack(0), stack(0)
    blocks = sum(shards_of(model, 1))
    handle = apply_distributed_layerwise_offload(model, transfer="local")
    moved = passes_of(handle, model, reference, rank, 3)
    handle.remove()
    assert moved[1:] == [(blocks, 0)] * 2


def _stays(rank: int, size: int) -> None:
    """Shards that stay are gathered from all ranks, and nothing crosses the host link."""
    for gather in ("collective", "pull"):
        model, reference = stack(0), stack(0)
        shards = sum(shards_of(model, size))
        handle = apply_distributed_layerwise_offload(model, device_budget=shards, gather=gather, grace=PATIENT)
        moved = passes_of(handle, model, reference, rank, 3)
        handle.join()
        assert handle.report().resident_bytes == shards
        handle.remove()
        assert moved[2] == (0, (size - 1) * shards), (gather, moved)


def _uneven(rank: int, size: int, group: int) -> tuple[int, int, Counts]:
    """From no forward on the first rank of a row to as many as there are others; whoever has none ghosts."""
    place = rank % group
    model, reference = stack(rank // group), stack(rank // group)
    mesh = None if group == size else mesh_of(group, size, False)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather", mesh=mesh, grace=PATIENT)
    passes_of(handle, model, reference, rank, place)
    handle.join()
    moved, report = counts(handle), handle.report()
    handle.remove()
    return report.passes, report.ghost_passes, moved


def _real_model(rank: int, size: int, folder: Path) -> None:
    """A transformer of diffusers, from the page cache of its checkpoint, which all ranks map."""
    reference, model = build("flux", 3), FluxTransformer2DModel.from_pretrained(folder).eval()
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather", grace=PATIENT)
    assert handle.report().host_kind == "mapped"
    for seed in (rank, rank + size):
        inputs = MODELS["flux"].inputs(seed)
        assert_equal(run(model, inputs), run(reference, inputs), f"seed {seed}")
    handle.remove()


def _everything(rank: int, size: int, folder: Path) -> list[tuple[int, int, Counts]]:
    for group in (2, 4, 8):
        if group <= size:
            _moves_its_share(rank, size, group, 2, "packed", strided=False)
    _moves_its_share(rank, size, size // 2, 3, "pinned", strided=True)
    _copies_all(rank, size)
    _stays(rank, size)
    _real_model(rank, size, folder)
    return [_uneven(rank, size, group) for group in (size // 2, size)]


def check_ranks(size: int, folder: Path) -> None:
    """All of it on `size` ranks, which cost most to start."""
    build("flux", 3).save_pretrained(folder)
    for group, seen in zip((size // 2, size), zip(*run_ranks(size, _everything, folder, timeout=240))):
        assert [passes for passes, _, _ in seen] == [rank % group for rank in range(size)]
        assert {passes + ghosts for passes, ghosts, _ in seen} == {group - 1}
        # A ghost moves what a rank that computes moves, but for the next pass's second shard, which only that copies.
        total = (group - 1) * sum(shards_of(stack(0), group))
        first, second, *_ = shards_of(stack(0), group)
        assert {moved[1] for _, _, moved in seen} == {(group - 1) * (total + first)}
        assert {moved[0] for _, _, moved in seen} <= {total + first, total + first + second}, seen


def test_four_ranks(tmp_path: Path) -> None:
    check_ranks(4, tmp_path)


def test_eight_ranks(tmp_path: Path) -> None:
    check_ranks(8, tmp_path)
