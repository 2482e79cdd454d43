# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Shared memory that a device cannot read, copied through page-locked buffers: bits and order under delays, what it takes
and gives back, who takes it, and what becomes of it when a rank is lost.
"""

import concurrent.futures.thread
import gc
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.dummy import DummyProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from diffusers_dlo import DistributedLayerwiseOffloadConfig as Config
from diffusers_dlo import OffloadHandle, api, apply_distributed_layerwise_offload, lap_lane
from diffusers_dlo import plan_distributed_layerwise_offload as make_plan
from diffusers_dlo.block_discovery import Selection
from diffusers_dlo.device import pinned_ring
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.device.pinned_ring import BUFFERS, PinnedRing
from diffusers_dlo.device.ring import Copy
from diffusers_dlo.distributed.control import RankLost
from diffusers_dlo.host.offer import Offer, rank_plans
from tests import toys
from tests.distributed.test_faults import Heard, in_block, left_behind
from tests.doubles import Mark, Unregistering
from tests.ranks import run_ranks
from tests.test_call_budget import CountingPlatform
from tests.test_stream_order import LateBlock, LateStack
from tests.toys import feed, toy
from tests.zoo import MODELS, build, run


CPU = torch.device("cpu")
CHUNK = 1000
"""Bytes of a buffer in these tests: a block needs more of them than there are, and the last chunk is smaller."""
FIVE = (24, 40, 8, 24, 16)
SEVEN = (24, 40, 8, 24, 16, 32, 24)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_ring, "MOST_NBYTES", CHUNK)
    monkeypatch.setattr(pinned_ring, "_PART_NBYTES", CHUNK // 4)  # each thread's, and one more


class Linked(Platform):
    """A device without streams that reads only memory which it allocated; or that locks other memory for a while."""

    def __init__(self, locks: bool = False) -> None:
        super().__init__(CPU)
        self.locks = self.may_lock = locks
        self.pinned_nbytes = 0

    @property
    def registers_host_memory(self) -> bool:
        return self.locks

    @property
    def has_host_link(self) -> bool:
        return True

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        self.pinned_nbytes += nbytes
        return super().pinned_empty(nbytes)

    def register_host_memory(self, address: int, nbytes: int) -> None:
        if not self.may_lock:
            raise RuntimeError("the driver refused")


def enable(model: nn.Module, platform: Platform, **options: Any) -> OffloadHandle:
    with patch.object(api, "get_platform", lambda device: platform):
        return apply_distributed_layerwise_offload(model, **{"host": "packed", **options})


def late(model: nn.Module, platform: Unregistering, value: torch.Tensor) -> torch.Tensor:
    """A forward whose blocks compute on the double's compute stream."""
    LateBlock.stream = platform.compute
    try:
        with torch.no_grad():
            return model(value)
    finally:
        LateBlock.stream = None


def count_wrong(platform: Unregistering, rank: int = 0, widths: Sequence[int] = FIVE, **options: Any) -> int:
    """How many forwards in varying orders differ from those without offload; all that was taken is given back."""
    orders = [range(len(widths)), (0, 2, 2, 4, 1), range(len(widths))]
    model, reference = toy(LateStack, widths), toy(LateStack, widths)
    handle = enable(model, platform, **options)
    wrong = 0
    try:
        assert handle.report().host_kind == "packed" and platform.pinned_nbytes
        assert handle.report().host_private_bytes == platform.pinned_nbytes
        for step, order in enumerate(orders):
            model.order = reference.order = order
            got = late(model, platform, feed(step + rank))
            with torch.no_grad():
                wrong += not torch.equal(got, reference(feed(step + rank)))
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
    finally:
        handle.remove()
    gc.collect()
    assert platform.pinned_nbytes == 0, "buffers are left"
    return wrong


# ------------------------------------------------------------------------------------------------------- the ring


def test_the_host_copies_with_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers give a rank one thread to compute with, and one copies a fraction of what a link brings."""
    monkeypatch.setattr(pinned_ring, "_num_processors", lambda: 3)
    before = threading.active_count()
    ring = PinnedRing(Linked(), 5 * CHUNK)
    assert sum(isinstance(thread, DummyProcess) for thread in threading.enumerate()) == 3, "from the start"
    source = torch.randint(0, 256, (4 * CHUNK + 7,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    for piece in ring.pieces((Copy(target, source),), lambda event: None):
        piece.queue()
    assert torch.equal(target, source)
    ring.close()
    assert threading.active_count() == before


def _copies_to_the_end(rank: int, size: int) -> None:
    pinned_ring._num_processors, pinned_ring._PART_NBYTES = lambda: 3, CHUNK // 4
    ring = PinnedRing(Linked(), CHUNK)
    source = torch.randint(0, 256, (4 * CHUNK + 7,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    concurrent.futures.thread._python_exit()  # the interpreter does, before the exit handlers in which ranks serve
    for piece in ring.pieces((Copy(target, source),), lambda event: None):
        piece.queue()
    assert torch.equal(target, source)
    ring.close()


def test_a_rank_that_ends_copies_for_the_others_still() -> None:
    run_ranks(1, _copies_to_the_end)


def test_no_room_for_larger_buffers() -> None:
    """What streams already goes on through those that it has; and so it does once there is room."""
    platform = Unregistering(CPU)
    model, wide, reference = toy(LateStack, (8, 8)), toy(LateStack, (64,)), toy(LateStack, (8, 8))
    for each in (model, reference):
        each.order = (0, 1)
    pinned_ring.MOST_NBYTES = 1 << 20
    handle = enable(model, platform)
    had = platform.pinned_nbytes
    with patch.object(platform, "pinned_empty", side_effect=RuntimeError("no more page-locked memory")):
        with pytest.raises(RuntimeError, match="no more page-locked memory"):
            enable(wide, platform)
    assert handle.report().host_private_bytes == platform.pinned_nbytes == had > 0
    assert torch.equal(late(model, platform, feed(0)), late(reference, platform, feed(0)))
    other = enable(wide, platform)
    assert handle.report().host_private_bytes == platform.pinned_nbytes > had
    for each in (other, handle):
        each.remove()
    gc.collect()
    assert platform.pinned_nbytes == 0


@pytest.mark.parametrize("locks", (False, True), ids=("through buffers", "page-locked"))
def test_computing_begins_before_the_host_copies(locks: bool) -> None:
    """What comes next is fetched behind a block where that keeps the host, and before it elsewhere."""
    noted: list[int | str] = []

    class Noting(Linked):
        def submit(self, *arguments: Any, **options: Any) -> None:
            if noted[-1:] != ["copy"]:
                noted.append("copy")
            super().submit(*arguments, **options)

    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: noted.append(index))
    handle = enable(model, Noting(locks), transfer="local")
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
        noted.clear()
        assert torch.equal(model(feed(1)), reference(feed(1)))
    handle.remove()
    steady = [0, "copy", 1, "copy", 2, "copy", 3, "copy", 4, "copy"]
    assert noted == (steady if locks else [0, *steady[2:]])


@pytest.mark.parametrize("chunk", (1, 7, 1000, 4096))
def test_pieces_are_all_of_the_copies_in_order(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_ring, "MOST_NBYTES", chunk)
    sizes = [1, 7, 13, 1000] if chunk < 1000 else [1, 999, 1000, 1001, 5000]
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    copies = tuple(Copy(torch.zeros_like(source), source) for source in sources)
    platform = Unregistering(CPU)
    ring = PinnedRing(platform, max(sizes))
    assert ring.nbytes == BUFFERS * min(chunk, max(sizes)) == platform.pinned_nbytes
    waited: list[Mark] = []
    marks = []
    for number, piece in enumerate(ring.pieces(copies, waited.append)):
        assert 0 < piece.source.numel() <= chunk and len(waited) == number + 1 and waited[-1] is piece.copied
        marks.append(piece.copied)
        piece.queue()
    assert len(marks) == sum(-(-size // chunk) for size in sizes)
    assert all(a is b for a, b in zip(marks, marks[BUFFERS:])) and len(set(marks)) == min(BUFFERS, len(marks))
    assert all(torch.equal(copy.target, copy.source) for copy in copies)
    ring.close()
    del piece
    assert platform.pinned_nbytes == 0


def test_no_buffer_is_larger_than_what_is_copied() -> None:
    ring = PinnedRing(Unregistering(CPU), 300)
    assert ring.nbytes == BUFFERS * 300 and ring.fits(300) and not ring.fits(301)
    ring = PinnedRing(Unregistering(CPU), 70_000)
    assert ring.nbytes == BUFFERS * CHUNK and ring.fits(1 << 40)


def test_a_buffer_is_kept_until_it_has_been_copied() -> None:
    """Closed while a copy is under way: the memory goes when that is done."""
    platform = Unregistering(CPU, copy_seconds=0.2)
    stream, target = platform.new_stream(), torch.zeros(100, dtype=torch.uint8)
    ring = PinnedRing(platform, 100)
    for piece in ring.pieces((Copy(target, torch.ones(100, dtype=torch.uint8)),), platform.wait_on_host):
        platform.submit(stream, piece.queue, record=piece.copied)
    assert not target.any() and not platform.is_done(piece.copied)
    ring.close()
    assert target.all() and platform.is_done(piece.copied)


# ----------------------------------------------------------------------------------------------------- one rank


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_right_whatever_the_delays(transfer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, chunk in enumerate((1000, 256, 777, 1 << 20)):
        monkeypatch.setattr(pinned_ring, "MOST_NBYTES", chunk)
        assert count_wrong(Unregistering(CPU, seed), transfer=transfer, num_slots=2 + seed % 3) == 0, chunk


def test_right_where_blocks_stay() -> None:
    nbytes = make_plan(toy(LateStack, SEVEN)).streamed_nbytes
    for seed, fraction in enumerate((0.4, 0.8, 1.0)):
        assert count_wrong(Unregistering(CPU, seed), widths=SEVEN, device_budget=int(fraction * nbytes)) == 0, fraction


@pytest.mark.parametrize("drops", ("buffer", "free", "ready"))
def test_a_missing_wait_shows(drops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the streams with one chunk for a block: where the host waits often, that hides what is missing."""
    monkeypatch.setattr(pinned_ring, "MOST_NBYTES", CHUNK if drops == "buffer" else 1 << 20)
    platforms = (Unregistering(CPU, seed, drops) for seed in range(12))
    wrong = any(count_wrong(platform, 0, SEVEN, transfer="local") for platform in platforms)
    assert wrong, f"nothing notices that '{drops}' is not waited for"


class Counting(CountingPlatform, Unregistering):
    """The counting double, of a device that reads only its own memory."""


def test_what_a_forward_asks_of_the_device() -> None:
    """Each chunk is one copy and one event more; nothing is made, and of the host's waits each is for a buffer."""
    model, platform = toy(LateStack, SEVEN), Counting(CPU)
    model.order = range(len(SEVEN))
    handle = enable(model, platform, transfer="local")
    try:
        for step in range(2):
            late(model, platform, feed(step))
        chunks = sum(-(-block.padded_nbytes(1) // CHUNK) for block in handle.plan.blocks)
        before, pinned, copied = Counter(platform.calls), len(platform.pinned), handle.report().h2d_bytes
        late(model, platform, feed(2))
        asked = {name: count - before[name] for name, count in platform.calls.items() if count != before[name]}
        assert asked == {
            "switch to a stream": chunks + len(SEVEN),
            "wait on a stream": len(SEVEN),
            "record on a stream": chunks + len(SEVEN),
            "wait in computing": len(SEVEN),
            "record in computing": len(SEVEN),
        }
        assert len(platform.pinned) == pinned == BUFFERS
        assert handle.report().h2d_bytes - copied == sum(block.padded_nbytes(1) for block in handle.plan.blocks)
    finally:
        handle.remove()


def test_copies_are_timed_from_their_first_chunk_to_their_last() -> None:
    """A block of several chunks has one span: as many chunks as it has take their time in it."""
    platform = Unregistering(CPU, copy_seconds=0.004)
    model = toy(LateStack, SEVEN)
    model.order = range(len(SEVEN))
    handle = enable(model, platform, transfer="local")
    try:
        late(model, platform, feed(0))
        with handle.timing():
            for step in range(3):
                late(model, platform, feed(step))
        blocks = {block.name: block.h2d_ms for block in handle.report().blocks}
        assert len(blocks) == len(SEVEN)
        for layout in handle.plan.blocks:
            assert blocks[layout.name] >= 4 * -(-layout.nbytes // CHUNK), layout.name
    finally:
        handle.remove()


def test_leaves_and_what_is_saved(tmp_path: Path) -> None:
    platform = Linked()
    model, reference = toy(toys.Leafy), toy(toys.Leafy)
    handle = enable(model, platform, transfer="local")
    try:
        assert {leaf.name for leaf in handle.plan.components[0].leaves} == {"embed", "lm_head"}
        assert handle.report().host_private_bytes == platform.pinned_nbytes == 2 * BUFFERS * CHUNK, "blocks, leaves"
        with torch.no_grad():
            for step in range(3):
                assert torch.equal(model(feed(step)), reference(feed(step)))
        assert handle.report().on_demand_bytes == 3 * 400 * 16 * 4
        assert platform.pinned_nbytes == 2 * BUFFERS * CHUNK, "buffers are made once"
    finally:
        handle.remove()
    model, reference = build("wan", 3), build("wan", 3)
    handle = enable(model, Linked())
    try:
        inputs = MODELS["wan"].inputs(0)
        assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), run(reference, inputs)))
        model.save_pretrained(tmp_path)
    finally:
        handle.remove()
    saved, expected = load_file(next(tmp_path.glob("*.safetensors"))), reference.state_dict()
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)


def test_no_ring_where_memory_is_page_locked_or_there_is_no_link() -> None:
    for platform, host in ((Linked(locks=True), "packed"), (Linked(), "pinned"), (Platform(CPU), "packed")):
        model = toy(toys.Leafy)
        handle = enable(model, platform, host=host)
        private = handle.plan.host_nbytes_per_rank if host == "pinned" else 0
        assert handle.report().host_private_bytes == private == getattr(platform, "pinned_nbytes", 0)
        handle.remove()


# ------------------------------------------------------------------------------------------------------ the choice


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged for users who want to know."""
    logger = logging.getLogger("diffusers_dlo.host.offer")
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield texts
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_what_is_tried_and_why(said: list[str]) -> None:
    def tried(host: str, transfer: str, size: int) -> list[str]:
        plan = make_plan(toy(toys.Stack, 5, toys.Block, 64, (512,)), Config(host=host, transfer=transfer), size)
        plans = rank_plans(host, plan, Offer(None, {}, 1.0, "they are in no file"), [None] * size, Linked())
        assert all(replace(found, host=host) == plan for found in plans)
        return [found.host for found in plans]

    assert tried("pinned", "local", 2) == ["pinned"] and tried("packed", "local", 2) == ["packed"] and not said
    with pytest.raises(RuntimeError, match="""host='mapped' needs a device .* Use host="pinned", or host="packed","""):
        tried("mapped", "local", 1)
    assert tried("auto", "all_gather", 2) == ["pinned", "packed"]
    assert tried("auto", "local", 1) == ["pinned", "packed"]
    assert tried("auto", "local", 2) == ["packed", "pinned"]
    why = "'cpu' devices copy only from memory that they allocated; pinned memory takes"
    pinned = "Pinned memory is taken, which needs no second copy on the host"
    packed = "One shared copy ('packed') is taken, and copied through page-locked buffers"
    assert said == [
        f"{pinned}: {why} 1.26 MiB on 2 ranks together, one shared copy 1.26 MiB",
        f"{pinned}: {why} 1.26 MiB on one rank, one shared copy 1.26 MiB",
        f"{packed}: {why} 2.53 MiB on 2 ranks together, one shared copy 1.26 MiB",
    ]


# --------------------------------------------------------------------------------------------------------- ranks


def _on_ranks(rank: int, size: int) -> None:
    pinned_ring.MOST_NBYTES = CHUNK
    logging.getLogger("diffusers_dlo").setLevel(logging.INFO)
    heard = Heard()
    for seed, (chunk, transfer) in enumerate(((1000, "all_gather"), (333, "local"), (777, "all_gather"))):
        pinned_ring.MOST_NBYTES = chunk
        options = {"transfer": transfer, "num_slots": 2 + seed % 2}
        assert count_wrong(Unregistering(CPU, 10 * rank + seed), rank, **options) == 0, (chunk, options)
    pinned_ring.MOST_NBYTES = CHUNK
    # Shards that stay, with staging; pulled; and blocks that stay whole beside them.
    plan = make_plan(toy(LateStack, SEVEN), group_size=size)
    shards = sum(block.shard_nbytes(size) for block in plan.blocks)
    for seed, (fraction, gather) in enumerate(((0.9, "collective"), (1.0, "pull"), (1.5, "pull"))):
        options = {"transfer": "all_gather", "device_budget": int(fraction * shards), "gather": gather}
        assert count_wrong(Unregistering(CPU, 20 * rank + seed), rank, SEVEN, **options) == 0, options
    # Timed both ways, as from memory that the device can read.
    assert count_wrong(Unregistering(CPU, rank), rank) == 0
    assert len(heard.saying("Transfer of a block of")) == (rank == 0)
    # An encoder, which each rank copies whole: pinned memory would hold it once for each of them.
    models = {"transformer": toy(toys.Stack, 2), "text_encoder": toy(toys.Stack, 7)}
    selection = Selection(models, frozenset({"text_encoder"}), {})
    heard.texts.clear()
    for blocks, host in ((7, "packed"), (1, "pinned")):
        models["text_encoder"] = toy(toys.Stack, blocks)
        models["transformer"] = toy(toys.Stack, 8 - blocks)
        platform = Linked()
        with patch.object(api, "get_platform", lambda device, platform=platform: platform):
            handle = api.enable(lambda _: selection, None, {"transfer": "all_gather"})
        assert handle.plan.host == handle.report().host_kind == host
        assert len(heard.saying("is taken, ")) == (rank == 0), heard.texts
        heard.texts.clear()
        with torch.no_grad():
            for name, model in models.items():
                reference = toy(toys.Stack, len(model.blocks))
                assert torch.equal(model(feed(rank)), reference(feed(rank))), name
        handle.remove()
    assert not left_behind()


def test_on_ranks() -> None:
    run_ranks(2, _on_ranks)


def _survives(rank: int, size: int) -> int:
    """The last rank is killed. One of the others never locks memory, and one cannot lock what is whole."""
    pinned_ring.MOST_NBYTES = CHUNK
    heard = Heard()
    platform = Linked(locks=rank == 0)  # on which alone diffusers' loggers speak
    model, reference = toy(toys.Leafy), toy(toys.Leafy)
    handle = enable(model, platform, transfer="all_gather", grace=0.2)
    platform.may_lock = False
    assert (platform.pinned_nbytes > 0) == (rank != 0)
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
        if rank == size - 1:
            in_block(model, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step))), step
        report = handle.report()
        assert report.transfer == "local" and report.host_kind == "packed"
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
        handle.remove()
        assert torch.equal(model(feed(9)), reference(feed(9)))
    assert len(heard.saying("goes on by itself")) == 1
    assert len(heard.saying("comes from pageable memory")) == (rank == 0)
    return report.host_private_bytes


def test_survivors_go_on() -> None:
    """Each with buffers of its own lane; the one whose driver had refused has none for leaves, which it had locked."""
    assert run_ranks(3, _survives, expect_death=(2,))[:2] == [BUFFERS * CHUNK, 2 * BUFFERS * CHUNK]


class Hanging(Unregistering):
    """Collectives that fail hang instead, and whatever is behind them, until the group is ended."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.let_go = threading.Event()
        self.hung = 0

    def submit(self, stream: Any, work: Callable[[], None], *args: Any, **kwargs: Any) -> None:
        def hang() -> None:
            try:
                work()
            except (RuntimeError, ValueError):
                self.hung += 1
                self.let_go.wait(40)

        super().submit(stream, hang, *args, **kwargs)

    def abort(self, group: dist.ProcessGroup) -> None:
        self.let_go.set()
        super().abort(group)


def _waits_for_a_lost_rank(rank: int, size: int) -> None:
    """
    The host waits for a buffer behind a gather that never ends: it hears of the loss there, and does not hang. Where
    something was to compute with what that gather brings, it says so; otherwise it goes on alone, and is right.
    """
    pinned_ring.MOST_NBYTES = 256
    lap_lane._SETTLE_SECONDS = 0.2
    platform = Hanging()
    model, reference = toy(LateStack, SEVEN), toy(LateStack, SEVEN)
    model.order = reference.order = range(len(SEVEN))
    handle = enable(model, platform, transfer="all_gather", grace=0.2)
    late(model, platform, feed(0))
    if rank == 1:
        model.blocks[2].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        late(model, platform, feed(1))
    start = time.monotonic()
    try:
        got = late(model, platform, feed(1))
    except RankLost as lost:
        assert "rank 1" in str(lost) and "may be wrong" in str(lost)
    else:
        with torch.no_grad():
            assert torch.equal(got, reference(feed(1)))
    assert time.monotonic() - start < 15 and platform.hung and platform.let_go.is_set()
    handle.remove()


def test_waiting_for_a_buffer_behind_a_lost_rank() -> None:
    run_ranks(2, _waits_for_a_lost_rank, expect_death=(1,))
