# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Counters and memory of the engine: what is fetched is exactly what the plan says, and nothing grows."""

import gc
import math
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.modules.module import _global_forward_pre_hooks

from diffusers_dlo import apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


def shard_bytes(plan, size: int) -> int:
    """This rank's shards of all blocks, from the tensors' sizes alone."""
    total = 0
    for block in plan.blocks:
        end = 0
        for tensor in block.tensors:
            end = math.ceil(end / 256) * 256 + tensor.nbytes
        total += math.ceil(math.ceil(end / size) / 256) * 256
    return total


@pytest.mark.parametrize("num_blocks,num_slots", ((1, 2), (2, 2), (3, 2), (5, 2), (5, 3), (6, 4)))
@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_bytes_per_pass_one_rank(transfer: str, num_blocks: int, num_slots: int) -> None:
    model = toy(toys.Stack, num_blocks)
    handle = apply_distributed_layerwise_offload(model, transfer=transfer, num_slots=num_slots)
    try:
        moved = passes(handle, model, 4)
        assert handle.report().gather_bytes == 0
        expected = shard_bytes(handle.plan, 1)
        if transfer == "local" and num_slots >= num_blocks:
            expected = 0  # everything fits the slots, so nothing is copied again
        assert moved == [expected] * 3
        largest = max(block.padded_nbytes(1) for block in handle.plan.blocks)
        assert handle.report().device_slot_bytes == num_slots * largest == handle.plan.device_slot_nbytes
    finally:
        handle.remove()


def passes(handle, model, count: int) -> list[int]:
    """H2D bytes of each pass after the first."""
    seen = []
    for step in range(count):
        before = handle.report().h2d_bytes
        with torch.no_grad():
            model(feed(step))
        seen.append(handle.report().h2d_bytes - before)
    return seen[1:]


def _bytes_on_ranks(rank: int, size: int) -> None:
    for num_slots in (2, 3):
        model = toy(toys.Stack, 5)
        handle = apply_distributed_layerwise_offload(model, num_slots=num_slots)
        before = handle.report().gather_bytes
        assert passes(handle, model, 4) == [shard_bytes(handle.plan, size)] * 3
        tail = sum(b.shard_nbytes(size) for b in handle.plan.blocks[: num_slots - 1])
        received = handle.report().gather_bytes - before
        assert received == (size - 1) * (4 * shard_bytes(handle.plan, size) + tail)
        largest = max(block.shard_nbytes(size) * size for block in handle.plan.blocks)
        assert handle.report().device_slot_bytes == num_slots * largest
        assert handle.report().passes == 4 and handle.report().ghost_passes == 0
        handle.remove()


@pytest.mark.parametrize("size", (2, 3, 4))
def test_bytes_per_pass_on_ranks(size: int) -> None:
    run_ranks(size, _bytes_on_ranks)


def footprint() -> tuple[int, int, int]:
    """Open files, threads and live tensors of this process."""
    gc.collect()
    tensors = sum(1 for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), tensors


def settled(limit: tuple[int, int, int]) -> tuple[int, int, int]:
    """The footprint, once gloo's threads have let go of the tensors of collectives that are over."""
    deadline = time.monotonic() + 5
    while any(now > then for now, then in zip(footprint(), limit)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return footprint()


def resident_set() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _nothing_grows(rank: int, size: int) -> None:
    model = toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        model(feed(0))
        model(feed(0))
        start, memory = footprint(), resident_set()
        for step in range(50):
            model(feed(step))
    assert all(now <= then for now, then in zip(settled(start), start)), (start, footprint())
    assert resident_set() - memory < 4 << 20
    handle.remove()
    first = None
    for _ in range(20):
        handle = apply_distributed_layerwise_offload(model)
        with torch.no_grad():
            model(feed(0))
        handle.remove()
        first = first or footprint()
    last = settled(first)
    grown = [now for now, then in zip(last, first) if now > then]  # gloo closes files of its set-up when it likes
    assert not grown, f"enabling and disabling leaves something behind: {first}, then {last}"


@pytest.mark.parametrize("size", (1, 2))
def test_nothing_grows(size: int) -> None:
    run_ranks(size, _nothing_grows)


def test_a_second_thread_is_refused_while_one_computes() -> None:
    model = toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with torch.no_grad():
                model(feed(0))
        except RuntimeError as error:
            errors.append(error)

    def in_the_middle(*_: object) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = model.blocks[1].up.register_forward_pre_hook(in_the_middle)
    try:
        with torch.no_grad():
            got = model(feed(0))
            hook.remove()
            assert "second thread" in str(errors[0])
            assert torch.equal(got, toy(toys.Stack, 3)(feed(0)))
        errors.clear()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not errors, "a thread of its own is fine when nobody else computes"
    finally:
        handle.remove()


def test_blocks_inside_each_other_need_slots() -> None:
    """Blocks that call blocks: an error with the remedy, and right with the slots it asks for."""

    class Chain(toys.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            handles = [
                self.blocks[i].norm.register_forward_pre_hook(lambda m, a, i=i: (self.blocks[i + 1](a[0]),))
                for i in range(2)
            ]
            try:
                return self.blocks[0](x)
            finally:
                for handle in handles:
                    handle.remove()

    for transfer in ("local", "all_gather"):
        expected = toy(Chain, 3)
        model = toy(Chain, 3)
        handle = apply_distributed_layerwise_offload(model, transfer=transfer)
        with torch.no_grad(), pytest.raises(RuntimeError, match="Raise 'num_slots' to 3"):
            model(feed(0))
        handle.remove()
        handle = apply_distributed_layerwise_offload(model, transfer=transfer, num_slots=3)
        with torch.no_grad():
            assert torch.equal(model(feed(0)), expected(feed(0)))
            assert torch.equal(model(feed(1)), expected(feed(1)))
        handle.remove()


def test_a_dropped_model_gives_its_memory_back() -> None:
    """Also when it is collected in the middle of another model's forward, whose slots it shares."""
    keeper, reference = toy(toys.Stack, 4), toy(toys.Stack, 4)
    handle = apply_distributed_layerwise_offload(keeper)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    dropped = [toy(toys.Stack, 3)]
    apply_distributed_layerwise_offload(dropped[0], num_slots=4)
    assert len(os.listdir("/proc/self/fd")) > files

    def drop(*_: object) -> None:
        dropped.clear()
        gc.collect()

    hook = keeper.blocks[1].up.register_forward_pre_hook(drop)
    with torch.no_grad():
        assert torch.equal(keeper(feed(0)), reference(feed(0)))
        hook.remove()
        assert len(os.listdir("/proc/self/fd")) == files
        assert torch.equal(keeper(feed(1)), reference(feed(1)))
    handle.remove()


def test_writing_to_a_weight_outside_its_turn_is_an_error_and_not_lost_in_silence() -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            model.blocks[1].up.weight.add_(1)
        assert torch.equal(model(feed(0)), reference(feed(0)))
        model.blocks[1].up.weight.zero_()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="'blocks.1.up.weight' was written to while its block was not"):
                model(feed(0))
        handle.remove()
        assert torch.equal(model(feed(0)), reference(feed(0)))


def test_two_models_share_the_slots_and_leave_in_any_order() -> None:
    models = [toy(toys.Stack, n, seed=n) for n in (2, 5, 3)]
    references = [toy(toys.Stack, n, seed=n) for n in (2, 5, 3)]
    handles = [apply_distributed_layerwise_offload(m, num_slots=2 + i) for i, m in enumerate(models)]
    largest = max(block.padded_nbytes(1) for handle in handles for block in handle.plan.blocks)
    assert handles[0].report().device_slot_bytes == 4 * largest
    with torch.no_grad():
        for which in (0, 1, 2, 2, 1, 0, 1):
            assert torch.equal(models[which](feed(which)), references[which](feed(which)))
        for gone in (1, 0, 2):
            handles[gone].remove()
            for which in range(3):
                assert torch.equal(models[which](feed(which)), references[which](feed(which)))


class Interrupting:
    """Sends SIGINT at the `count`-th line that runs in some files, by default those of the engine."""

    FILES = ("/lane.py", "/local_lane.py", "/gather_lane.py", "/units.py", "/managed_tensor.py", "/ring.py")

    def __init__(self, count: int, files: tuple[str, ...] = FILES) -> None:
        self.left = count
        self._files = files

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def run(model: torch.nn.Module, reference: torch.nn.Module, steps: range) -> None:
    with torch.no_grad():
        for step in steps:
            assert torch.equal(model(feed(step)), reference(feed(step))), step


@pytest.mark.parametrize(
    "transfer,fraction",
    (
        ("local", None),
        ("all_gather", 0.5),
        pytest.param("local", 0.5, marks=pytest.mark.slow),
        pytest.param("all_gather", None, marks=pytest.mark.slow),
    ),
)
def test_an_interrupt_at_any_line_leaves_the_next_forward_right(transfer: str, fraction: float | None) -> None:
    model, reference = toy(toys.Stack, 4), toy(toys.Stack, 4)
    every = shard_bytes(plan_distributed_layerwise_offload(model), 1)
    budget = int(fraction * every) if fraction is not None else None
    handle = apply_distributed_layerwise_offload(model, transfer=transfer, device_budget=budget)
    run(model, reference, range(2))
    trace = sys.gettrace()
    for count in range(1, 2000):
        interrupting = Interrupting(count)
        try:
            sys.settrace(interrupting)
            with torch.no_grad():
                model(feed(0))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(trace)
        run(model, reference, range(count, count + 1))
        if interrupting.left > 0:
            break
    assert count > 100
    handle.remove()


def test_an_interrupt_where_the_first_forward_begins_leaves_nothing_behind() -> None:
    """Without any budget: the global hook and the guard of the first forward are put on and taken off in steps."""
    broken: list[str] = []
    for count in range(1, 130, 2):
        model, reference = toy(toys.Stack, 1), toy(toys.Stack, 1)
        handle = apply_distributed_layerwise_offload(model, transfer="local")
        try:
            sys.settrace(Interrupting(count, ("diffusers_dlo/hooks.py", "diffusers_dlo/first_forward.py")))
            with torch.no_grad():
                model(feed(0))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        try:
            handle.remove()
            run(model, reference, range(1))
        except Exception as error:
            broken.append(f"line {count}: {error!r}")
            handle.remove()  # the second time comes through
        finally:
            _global_forward_pre_hooks.clear()
    assert not broken
