# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Where shards are gathered from: their place in the slot, memory beside it, or where they stay."""

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from diffusers_dlo import (
    OffloadHandle,
    api,
    apply_distributed_layerwise_offload,
    plan_distributed_layerwise_offload,
)
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.distributed import gather as gathers
from tests.doubles import DelayedPlatform
from tests.ranks import run_ranks
from tests.test_stream_order import LateBlock, LateStack
from tests.toys import Stack, feed, toy


WIDTHS = (24, 40, 8, 24, 16, 32)
CPU = torch.device("cpu")
_gather = gathers._all_gather


class SlotsOnly(Platform):
    """The CPU as a device whose collectives want the same addresses every time."""

    @property
    def gathers_from_slots_only(self) -> bool:
        return True


class LateSlotsOnly(DelayedPlatform):
    """The same, with streams that lag."""

    @property
    def gathers_from_slots_only(self) -> bool:
        return True


class Recorded:
    """The backend's gather, noting where outputs and inputs lie: the output, the input, whether that is part of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def __call__(self, image: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        is_part = image.data_ptr() <= shard.data_ptr() < image.data_ptr() + image.numel()
        self.calls.append((image.data_ptr(), shard.data_ptr(), is_part))
        return _gather(image, shard, **options)

    @property
    def is_inside(self) -> set[bool]:
        return {is_part for _, _, is_part in self.calls}

    @property
    def outputs(self) -> int:
        return len({image for image, _, _ in self.calls})

    @property
    def inputs(self) -> int:
        """How many inputs there are beside the outputs."""
        return len({shard for _, shard, is_part in self.calls if not is_part})


class WrongInPlace:
    """A backend that gathers wrong bytes where the input is part of the output."""

    def __call__(self, image: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        if image.data_ptr() <= shard.data_ptr() < image.data_ptr() + image.numel():
            image.zero_()
        return _gather(image, shard, **options)


def is_same(model: nn.Module, reference: nn.Module, steps: Iterable[int]) -> bool:
    with torch.no_grad():
        return all(torch.equal(model(feed(step)), reference(feed(step))) for step in steps)


def offload(platform: Platform, **options: Any) -> tuple[nn.Module, nn.Module, OffloadHandle]:
    model, reference = toy(Stack, 6), toy(Stack, 6)
    with patch.object(api, "get_platform", lambda device: platform):
        return model, reference, apply_distributed_layerwise_offload(model, num_slots=2, **options)


def _where_inputs_lie(rank: int, size: int, kind: type[Platform], options: dict[str, Any]) -> Recorded:
    """What passes in the steady state gather, of ranks with unequal work."""
    recorded = Recorded()
    model, reference, handle = offload(kind(CPU), **options)
    try:
        assert is_same(model, reference, range(2))
        with patch.object(gathers, "_all_gather", recorded):
            assert is_same(model, reference, range(rank, 2 * rank + 3))
            handle.join()
        largest = max(block.padded_nbytes(size) for block in handle.plan.blocks)
        beside = 0 if options.get("gather_in_place", True) else largest // size
        assert handle.report().device_slot_bytes == 2 * (largest + beside)
        assert bool(handle.report().resident_bytes) == ("device_budget" in options)
    finally:
        handle.remove()
    return recorded


def _cases(rank: int, size: int) -> dict[str, Recorded]:
    plan = plan_distributed_layerwise_offload(toy(Stack, 6), group_size=size)
    some = sum(block.shard_nbytes(size) for block in plan.blocks) * 4 // 5
    cases: dict[str, tuple[type[Platform], dict[str, Any]]] = {
        "in place": (Platform, {}),
        "beside": (Platform, {"gather_in_place": False}),
        "resident": (Platform, {"device_budget": some}),
        "resident, beside": (Platform, {"device_budget": some, "gather_in_place": False}),
        "resident, slots only": (SlotsOnly, {"device_budget": some}),
        "resident, slots only, beside": (SlotsOnly, {"device_budget": some, "gather_in_place": False}),
    }
    return {name: _where_inputs_lie(rank, size, *case) for name, case in cases.items()}


@pytest.mark.parametrize("size", (2, 3))
def test_where_inputs_lie(size: int) -> None:
    """
    Bit-equal in all cases. With two slots, two inputs at most, at fixed addresses, wherever the device wants that;
    elsewhere shards are gathered from where they stay.
    """
    for found in run_ranks(size, _cases):
        assert {name: recorded.outputs for name, recorded in found.items()} == dict.fromkeys(found, 2)
        assert found["in place"].is_inside == {True}
        assert found["beside"].is_inside == {False} and found["beside"].inputs == 2
        assert found["resident"].is_inside == {False} and found["resident"].inputs > 2
        assert found["resident, beside"].is_inside == {False} and found["resident, beside"].inputs > 2
        assert found["resident, slots only"].is_inside == {True}
        last = found["resident, slots only, beside"]
        assert last.is_inside == {False} and last.inputs == 2


class Linked(Platform):
    """The CPU as a device behind a link, so that both transfers are timed."""

    @property
    def has_host_link(self) -> bool:
        return True


def _timed_both_ways(rank: int, size: int) -> None:
    model, reference, handle = offload(Linked(CPU), transfer="auto", gather_in_place=False)
    assert handle.transfer_timing is not None
    assert is_same(model, reference, range(3))
    handle.remove()


def test_both_transfers_are_timed_with_inputs_beside_the_slots() -> None:
    run_ranks(2, _timed_both_ways)


def _on_late_streams(rank: int, size: int) -> None:
    """Blocks that stay whole too, which are gathered once, and what is staged where the device allows it."""
    plan = plan_distributed_layerwise_offload(toy(LateStack, WIDTHS[:5]), group_size=size)
    nbytes = sum(block.shard_nbytes(size) for block in plan.blocks)
    for seed, fraction in enumerate((0.4, 0.8, 1.5)):
        for kind in (DelayedPlatform, LateSlotsOnly):
            for in_place in (True, False):
                model, reference = toy(LateStack, WIDTHS[:5]), toy(LateStack, WIDTHS[:5])
                platform = kind(CPU, 10 * seed + rank)
                options = {"device_budget": int(fraction * nbytes), "gather_in_place": in_place}
                with patch.object(api, "get_platform", lambda device, platform=platform: platform):
                    handle = apply_distributed_layerwise_offload(model, **options)
                try:
                    for step in range(3):
                        LateBlock.stream = platform.compute
                        with torch.no_grad():
                            output = model(feed(step))
                        LateBlock.stream = None
                        with torch.no_grad():
                            assert torch.equal(output, reference(feed(step))), (kind, options)
                    assert handle.plan.residents.staging_nbytes == 0 or kind is DelayedPlatform
                finally:
                    LateBlock.stream = None
                    handle.remove()


def test_on_streams_that_lag() -> None:
    run_ranks(2, _on_late_streams)


def _with_wrong_bytes(rank: int, size: int, where: tuple[int, ...]) -> None:
    wrong = WrongInPlace() if rank in where else gathers._all_gather
    with patch.object(gathers, "_all_gather", wrong):
        with pytest.raises(RuntimeError, match="returned wrong bytes on this backend; leave 'gather_in_place' to"):
            offload(Platform(CPU), gather_in_place=True)
        model, reference, handle = offload(Platform(CPU))
        largest = max(block.padded_nbytes(size) for block in handle.plan.blocks)
        assert is_same(model, reference, range(3))
        assert handle.report().device_slot_bytes == 2 * (largest + largest // size)
        with pytest.raises(ValueError, match="'gather_in_place' is True, and other components stream already"):
            offload(Platform(CPU), gather_in_place=True)
        assert is_same(model, reference, range(3))
        handle.remove()
    model, reference, handle = offload(Platform(CPU), gather_in_place=True)
    assert is_same(model, reference, range(3)) and handle.report().device_slot_bytes == 2 * largest
    handle.remove()


def test_a_backend_that_is_wrong_in_place() -> None:
    """On all ranks or on one: all gather from beside the slots then, or refuse."""
    run_ranks(2, _with_wrong_bytes, (0, 1))
    run_ranks(2, _with_wrong_bytes, (1,))
