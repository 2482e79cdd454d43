# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
`transfer="auto"`: all ranks take what is faster for the slowest of them, on links whose speed the test sets, and
nothing of the timing is left. The CPU has no link, so each test gives it one.
"""

import gc
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffusers_dlo import (
    OffloadHandle,
    api,
    apply_distributed_layerwise_offload,
    plan_distributed_layerwise_offload,
    process_engine,
)
from diffusers_dlo.block_discovery import Selection
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.device.platform import AcceleratorPlatform
from diffusers_dlo.distributed.gather import ShardGather
from tests import toys
from tests.distributed.test_agreement import state, unchanged
from tests.distributed.test_faults import Heard, left_behind
from tests.distributed.test_rules import once
from tests.doubles import DelayedPlatform, Worker
from tests.ranks import run_ranks
from tests.test_stream_order import LateBlock, LateStack
from tests.toys import feed, toy


pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
BLOCK_NBYTES = 6144
"""Of the largest block of a `Stack`, padded."""


class Sources(TorchDispatchMode):
    """Notes the memory that copies read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.ranges.append((args[1].data_ptr(), args[1].data_ptr() + args[1].nbytes))
        return func(*args, **(kwargs or {}))


class Link(Platform):
    """
    The CPU behind a link over which a block of `BLOCK_NBYTES` takes `seconds`, with gathers that take `gather_seconds`
    beside that. Copies that cross a border between two registered ranges are refused, as drivers do.
    """

    def __init__(self, seconds: float = 0.0, gather_seconds: float = 0.0) -> None:
        super().__init__(CPU)
        self.seconds, self.gather_seconds = seconds, gather_seconds
        self.copied_nbytes = 0
        self.gathers = 0
        self.at_copy: Callable[[int], None] = lambda number: None
        self.copies = 0
        self.registered: dict[int, int] = {}
        self.most_nbytes = float("inf")

    @property
    def has_host_link(self) -> bool:
        return True

    def new_stream(self, high_priority: bool = False) -> str:
        return "gathers" if high_priority else "copies"

    def submit(
        self,
        stream: str,
        work: Callable[[], None],
        after: Sequence = (),
        record: object = None,
        timed: object = None,
    ) -> None:
        if stream == "gathers":
            self.gathers += 1
            sleep(self.gather_seconds)
            work()
            return
        self.copies += 1
        self.at_copy(self.copies)
        with Sources() as sources:
            work()
        for start, stop in sources.ranges:
            assert not self.registered or any(
                low <= start and stop <= low + nbytes for low, nbytes in self.registered.items()
            ), "a copy from memory that is not page-locked, or not in one piece"
        nbytes = sum(stop - start for start, stop in sources.ranges)
        self.copied_nbytes += nbytes
        sleep(self.seconds * nbytes / BLOCK_NBYTES)

    def register_host_memory(self, address: int, nbytes: int) -> None:
        if sum(self.registered.values()) + nbytes > self.most_nbytes:
            raise RuntimeError("the driver refused")
        assert all(address + nbytes <= low or low + size <= address for low, size in self.registered.items())
        self.registered[address] = nbytes

    def unregister_host_memory(self, address: int) -> None:
        del self.registered[address]


def use(platform: Platform) -> Platform:
    api.get_platform = lambda device: platform  # in a process of its own
    return platform


def enabled(count: int = 5, *shape: Any, **options: Any) -> tuple[nn.Module, nn.Module, OffloadHandle]:
    model, reference = toy(toys.Stack, count, *shape), toy(toys.Stack, count, *shape)
    return model, reference, apply_distributed_layerwise_offload(model, **{"grace": 0.05, "timeout": 30.0, **options})


def run(model: nn.Module, reference: nn.Module, *seeds: int) -> None:
    with torch.no_grad():
        for seed in seeds:
            assert torch.equal(model(feed(seed)), reference(feed(seed))), seed


def is_taken(handle: OffloadHandle, transfer: str, size: int, **options: Any) -> None:
    """Everything that shows the transfer says the same, and is as if that had been asked for."""
    assert {component.transfer for component in handle.plan.components} == {transfer}
    assert handle.report().transfer == transfer
    engine = process_engine._engine
    assert {lane.kind for lane in engine.lanes.every} == {transfer}
    assert len(left_behind()) == (transfer == "all_gather"), "its service runs where there are passes, and only there"
    if handle.plan.host != "mapped":  # whose layouts follow the file
        options = handle.config.resolve(handle.config, {"transfer": transfer})
        asked = plan_distributed_layerwise_offload(toy(toys.Stack, 5), options, size)
        assert asked.components == handle.plan.components
    assert handle.report().device_slot_bytes == handle.plan.device_slot_nbytes


def _takes_the_faster(rank: int, size: int, path: str) -> list[tuple[float, float]]:
    logging.getLogger("diffusers_dlo").setLevel(logging.INFO)
    heard, found = Heard(), []
    slow_links = {"seconds": 0.08}
    slow_gathers = {"seconds": 0.01, "gather_seconds": 0.06}
    one_slow_link = {"seconds": 0.08 if rank == 0 else 0.0}  # the others measure no time at all for a whole block
    cases = (
        ("packed", slow_gathers, "local"),
        ("packed", one_slow_link, "all_gather"),
        ("mapped", slow_gathers, "local"),
        ("mapped", slow_links, "all_gather"),
    )
    left: tuple | None = None
    for host, speed, transfer in cases:
        platform = use(Link(**speed))
        model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
        if host == "mapped":
            model.load_state_dict(load_file(path), assign=True)
        handle = apply_distributed_layerwise_offload(model, host=host, grace=0.05)
        platform.seconds = platform.gather_seconds = 0.0
        assert handle.report().host_kind == host and platform.copies == 8 and platform.gathers == 4
        is_taken(handle, transfer, size)
        timing = handle.transfer_timing
        assert timing is not None and timing.faster == transfer
        found.append((timing.all_gather_ms, timing.local_ms))
        if rank == 0:  # the only one that diffusers' loggers speak on
            figures = r"([\d.]+) ms by all_gather, ([\d.]+) ms by local"
            said = heard.saying("Transfer of a block of")[-1]
            match = re.fullmatch(rf"Transfer of a block of (?:5.81|9) KiB: {figures}; {transfer} is taken\.", said)
            assert match is not None, said
            assert [float(figure) for figure in match.groups()] == [round(figure, 1) for figure in found[-1]]
        before = platform.copied_nbytes
        dist.barrier()
        run(model, reference, rank, rank + 1)
        handle.join()
        report = handle.report()
        assert report.h2d_bytes == platform.copied_nbytes - before, "what was timed does not count"
        assert report.passes == 2 and (report.h2d_bytes > 0 or rank == 2), "the last shard may be padding alone"
        assert (report.gather_bytes > 0) == (transfer == "all_gather")
        handle.remove()
        run(model, reference, 5)
        assert not platform.registered and not left_behind() and process_engine._engine.idle
        del model, reference, handle
        gc.collect()
        now = threading.active_count(), len(os.listdir("/proc/self/fd"))
        left = left or now
        assert now[0] <= left[0] and now[1] <= left[1]
    assert len(heard.saying("Transfer of a block of")) == (len(found) if rank == 0 else 0)
    return found


@pytest.mark.parametrize("size", (2, 3))
def test_takes_the_faster(size: int, tmp_path: Path) -> None:
    save_file(toy(toys.Stack, 5).state_dict(), tmp_path / "toy.safetensors")
    figures = run_ranks(size, _takes_the_faster, str(tmp_path / "toy.safetensors"))
    assert all(other == figures[0] for other in figures), "all ranks compare the same two numbers"
    for figure, least in zip(figures[0], ((60, 10), (80 / size, 80), (60, 10), (80 / size, 80))):
        assert figure[0] >= 0.8 * least[0] and figure[1] >= 0.8 * least[1]


def _nothing_to_time(rank: int, size: int) -> None:
    logging.getLogger("diffusers_dlo").setLevel(logging.INFO)
    heard = Heard()
    for platform, options, said in (
        (Platform(CPU), {}, None),
        (Link(), {"transfer": "all_gather"}, None),
        (Link(), {"transfer": "local"}, None),
        (Link(), {"host": "pinned"}, "the host store is 'pinned', with a shard of each block on each rank"),
    ):
        use(platform)
        model, reference, handle = enabled(**options)
        assert handle.transfer_timing is None and getattr(platform, "copies", 0) == 0
        is_taken(handle, options.get("transfer", "all_gather"), size)
        assert len(heard.saying(said or "without timing")) == (said is not None and rank == 0), heard.texts
        run(model, reference, rank)
        handle.remove()
    heard.texts.clear()
    # One rank may page-lock its shards, and then the largest block too, but not all that would be local.
    wide = (toys.Block, 16, (512, 1024, 512))
    for more, reason in (
        (0, "all_gather is taken without timing: whole blocks cannot be page-locked (rank 1: the driver refused)"),
        (
            80 << 10,
            "all_gather is taken, because not all blocks can be page-locked whole (rank 1: the driver refused)",
        ),
    ):
        platform = use(Link(gather_seconds=0.05))
        model, reference, handle = enabled(5, *wide, transfer="all_gather")
        platform.most_nbytes = sum(platform.registered.values()) + more if rank == 1 else platform.most_nbytes
        handle.remove()
        model, reference, handle = enabled(5, *wide)
        assert handle.report().transfer == handle.plan.components[0].transfer == "all_gather"
        assert (handle.transfer_timing is None) == (not more)
        assert len(heard.saying(reason)) == (rank == 0), heard.texts
        platform.gather_seconds = 0.0
        run(model, reference, rank)
        handle.remove()
        assert not platform.registered


def test_where_nothing_can_be_timed_all_gather_is_taken() -> None:
    assert AcceleratorPlatform.has_host_link is not Platform.has_host_link
    run_ranks(2, _nothing_to_time)


def _beside_another(rank: int, size: int) -> None:
    """While the lane serves another pipeline, two of whose blocks are in the slots: the next one, and the last."""
    for speed, transfer, order in (
        ({"gather_seconds": 0.04}, "local", range(7)),
        ({"seconds": 0.08}, "all_gather", range(7)),
        ({"seconds": 0.08}, "all_gather", (6, 5, 0)),
    ):
        platform = use(Link())
        first, first_reference, first_handle = enabled(7, transfer="all_gather")
        run(first, first_reference, *range(2 - rank))
        platform.gather_seconds, platform.seconds = speed.get("gather_seconds", 0.0), speed.get("seconds", 0.0)
        second, second_reference, second_handle = enabled(4)
        platform.gather_seconds = platform.seconds = 0.0
        assert second_handle.plan.components[0].transfer == transfer == second_handle.transfer_timing.faster
        assert first_handle.report().transfer == "all_gather" and len(left_behind()) == 1
        assert {lane.kind for lane in process_engine._engine.lanes.every} == {"all_gather", transfer}
        first.order = first_reference.order = order
        before = first_handle.report().passes
        run(first, first_reference, 0)
        assert first_handle.report().passes == before + 1 or len(order) < 7, "the lap began with the first block"
        first.order = first_reference.order = range(7)
        before = first_handle.report().gather_bytes
        dist.barrier()
        run(second, second_reference, 0)
        dist.barrier()
        assert (first_handle.report().gather_bytes == before) == (transfer == "local")
        dist.barrier()
        for seed in range(2 + rank):
            run(first, first_reference, seed)
            run(second, second_reference, seed, seed + 1)
        run(first, first_reference, 7)
        second_handle.remove()
        run(first, first_reference, 3)
        assert first_handle.report().transfer == "all_gather"
        first_handle.remove()
        assert not left_behind() and not platform.registered


def test_beside_another_pipeline() -> None:
    run_ranks(3, _beside_another)


def _with_an_encoder(rank: int, size: int) -> None:
    """An encoder, local in any case, shares its ring with what becomes local, as if that had been asked for."""
    shown = {}
    for transfer, platform in (("local", Link()), ("auto", Link(gather_seconds=0.03))):
        use(platform)
        models = {"transformer": toy(toys.Stack, 5), "text_encoder": toy(toys.Stack, 3)}
        selection = Selection(models, frozenset({"text_encoder"}), {})
        handle = api.enable(lambda _, chosen=selection: chosen, None, {"transfer": transfer})
        encoder = process_engine._engine.lanes.find("local").components["text_encoder"]
        shown[transfer] = (str(handle.plan), handle.plan.summary_lines(), encoder.plan.transient)
        shown[transfer] += (handle.report().device_slot_bytes,)
        assert not left_behind()
        for seed in range(2):
            run(models["text_encoder"], toy(toys.Stack, 3), seed)
            run(models["transformer"], toy(toys.Stack, 5), seed)
        shown[transfer] += (handle.report().h2d_bytes, handle.report().device_slot_bytes, handle.report().passes)
        handle.remove()
        assert not platform.registered
    assert shown["auto"] == shown["local"], shown
    use(Link(0.06))
    handle = api.enable(lambda _: selection, None, {})
    assert {c.name: (c.transfer, c.transient) for c in handle.plan.components} == {
        "transformer": ("all_gather", False),
        "text_encoder": ("local", True),
    }
    run(models["text_encoder"], toy(toys.Stack, 3), 0)
    assert handle.report().device_slot_bytes == 2 * handle.plan.slot_nbytes("all_gather"), "the encoder's are gone"
    run(models["transformer"], toy(toys.Stack, 5), 0)
    handle.remove()


def test_an_encoder_beside_what_becomes_local() -> None:
    run_ranks(2, _with_an_encoder)


class LateLink(DelayedPlatform):
    """A link and streams that lag behind, with gathers that take `gather_seconds` more."""

    def __init__(self, seed: int, gather_seconds: float) -> None:
        super().__init__(CPU, seed)
        self.gather_seconds = gather_seconds
        self.gathers: list[Worker] = []

    @property
    def has_host_link(self) -> bool:
        return True

    def new_stream(self, high_priority: bool = False) -> Worker:
        stream = super().new_stream(high_priority)
        self.gathers += [stream] * high_priority
        return stream

    def submit(self, stream: Worker, work: Callable[[], None], *args: Any, **kwargs: Any) -> None:
        def late() -> None:
            if stream in self.gathers:
                sleep(self.gather_seconds)
            work()

        super().submit(stream, late, *args, **kwargs)


def _on_late_streams(rank: int, size: int) -> None:
    """As on a device: the host looks at events, and what it has submitted comes later."""
    for seed, (gather_seconds, other) in enumerate(((0.03, 0.0), (0.0, 0.0))):
        platform = use(LateLink(10 * seed + rank, gather_seconds))
        model, reference = toy(LateStack), toy(LateStack)
        handle = apply_distributed_layerwise_offload(model, grace=0.05)
        assert handle.transfer_timing.all_gather_ms >= 1000 * gather_seconds
        transfer = handle.transfer_timing.faster
        assert handle.report().transfer == transfer and (transfer == "local" or not gather_seconds)
        platform.gather_seconds = other
        with torch.no_grad():
            for step in range(3):
                LateBlock.stream = platform.compute
                got = model(feed(step + rank))
                LateBlock.stream = None
                assert torch.equal(got, reference(feed(step + rank))), (seed, step)
        handle.remove()


def test_on_streams_that_lag() -> None:
    run_ranks(2, _on_late_streams)


def _refuse_copies(platform: Link) -> None:
    def refuse(number: int) -> None:
        if number == 3:
            raise MemoryError("no more")

    platform.at_copy = refuse


def _refuse_whole_copies(platform: Link) -> None:
    def refuse(number: int) -> None:
        if number == 6:
            raise MemoryError("no more")

    platform.at_copy = refuse


def _refuse_gathers(platform: Link) -> None:
    def refuse() -> None:
        raise RuntimeError("no gathers")

    def skip(number: int) -> None:
        if number == 3:
            once(ShardGather, "start", refuse)

    platform.at_copy = skip


def _refuse_slots(platform: Link) -> None:
    """When it has been timed, and the slots for what becomes local are made."""

    def refuse(nbytes: int) -> torch.Tensor:
        raise MemoryError("no more")

    def skip(number: int) -> None:
        if number == 8:
            platform.empty = refuse

    platform.gather_seconds, platform.at_copy = 0.03, skip


def _interrupt(platform: Link) -> None:
    platform.at_copy = lambda number: signal.raise_signal(signal.SIGINT) if number == 2 else None


def _fails_in_the_middle(rank: int, size: int, spoil: Callable, kinds: tuple, text: str, keeps_group: bool) -> None:
    heard = Heard()
    use(Link())
    first, first_reference, first_handle = enabled(4, transfer="all_gather")
    run(first, first_reference, 0)
    platform = use(Link())
    process_engine._engine.platform = process_engine._engine.lanes._platform = platform
    for lane in process_engine._engine.lanes.every:
        lane.transfers.platform = platform
    model = toy(toys.Stack, 5)
    before = state(model)
    if rank == 1:
        spoil(platform)
    with pytest.raises(kinds[rank == 1]) as caught:
        apply_distributed_layerwise_offload(model, timeout=30.0)
    assert text in str(caught.value) and (rank == 1 or "rank 1" in str(caught.value)), str(caught.value)
    platform.at_copy = lambda number: None
    vars(platform).pop("empty", None)
    unchanged(before, model)
    assert not platform.registered
    run(first, first_reference, 1)
    assert first_handle.report().transfer == ("all_gather" if keeps_group else "local")
    assert len(heard.saying("goes on by itself")) == (not keeps_group)
    first_handle.remove()
    assert not left_behind()
    model, reference, handle = enabled()
    assert handle.transfer_timing is not None
    run(model, reference, rank)
    handle.remove()


@pytest.mark.parametrize(
    "spoil,kinds,text,keeps_group",
    (
        (_refuse_copies, (MemoryError, MemoryError), "no more", True),
        (_refuse_whole_copies, (MemoryError, MemoryError), "no more", True),
        (_refuse_slots, (MemoryError, MemoryError), "no more", True),
        (_interrupt, (RuntimeError, KeyboardInterrupt), "", True),
        (_refuse_gathers, (RuntimeError, RuntimeError), "the gather of block 'blocks.1' of 'model#2' failed", False),
    ),
)
def test_a_failure_in_the_middle_is_undone_on_all_ranks(
    spoil: Callable, kinds: tuple, text: str, keeps_group: bool
) -> None:
    run_ranks(2, _fails_in_the_middle, spoil, kinds, text, keeps_group, timeout=30)


def _one_dies(rank: int, size: int) -> None:
    platform = use(Link())
    if rank == 1:
        platform.at_copy = lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 2 else None
    model = toy(toys.Stack, 5)
    before = state(model)
    with pytest.raises(RuntimeError, match="rank 1.* has ended"):
        apply_distributed_layerwise_offload(model, timeout=30.0)
    unchanged(before, model)
    assert not platform.registered and not left_behind()


def test_a_rank_that_dies_in_the_middle() -> None:
    run_ranks(2, _one_dies, timeout=20, expect_death=(1,))


def _asks_differently(rank: int, size: int) -> None:
    use(Link())
    with pytest.raises(RuntimeError, match="rank 0: transfer auto; rank 1: transfer all_gather"):
        enabled(transfer="auto" if rank == 0 else "all_gather")


def test_ranks_that_ask_differently() -> None:
    run_ranks(2, _asks_differently)
