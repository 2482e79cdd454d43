# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Ranks with unequal work, and ranks that are lost, on real devices: never another picture, never a hang."""

import faulthandler
import logging
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from diffusers_dlo import apply_distributed_layerwise_offload
from tests import toys
from tests.ranks import run_ranks


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def wide(num_blocks: int = 6) -> torch.nn.Module:
    """Blocks of 64 MiB, so that copies and gathers take their time."""
    torch.manual_seed(0)
    return toys.Stack(num_blocks, dim=1024, widths=(8192,)).eval()


def make_inputs(rank: int, count: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(rank)
    return [torch.randn(2048, 1024, device=device, generator=generator) for _ in range(count)]


def _eight_against_four(rank: int, size: int, synchronizes: bool) -> tuple[int, int]:
    device = torch.device("cuda", torch.cuda.current_device())
    model, reference = wide(), wide().to(device)
    inputs = make_inputs(rank, 8 if rank == 0 else 4, device)
    with torch.inference_mode():
        expected = [reference(x) for x in inputs]
        handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
        outputs = []
        for x in inputs:
            outputs.append(model(x))
            if synchronizes:
                torch.cuda.synchronize()
        dist.barrier()  # NCCL's, on the communicator of the user, while the others' gathers go on
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected))
    handle.join()
    report = handle.report()
    handle.remove()
    return report.passes, report.ghost_passes


@pytest.mark.parametrize("synchronizes", (True, False))
def test_eight_steps_against_four_and_a_barrier(synchronizes: bool) -> None:
    size = torch.cuda.device_count()
    results = run_ranks(size, _eight_against_four, synchronizes, backend="nccl", timeout=150)
    assert results[0][0] == 8 and results[0][1] == 0
    assert all(passes == 4 and ghosts == 4 for passes, ghosts in results[1:])


def fail_once(module: torch.nn.Module, kind: type[BaseException]) -> None:
    """Has the next call of a module raise."""

    def fail(*_: object) -> None:
        hook.remove()
        raise kind

    hook = module.register_forward_pre_hook(fail)


def _interrupted(rank: int, size: int) -> None:
    """Exceptions and interrupts in a block on one rank; the others' outputs stand, and its own do after."""
    device = torch.device("cuda", torch.cuda.current_device())
    model, reference = wide(), wide().to(device)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    inputs = make_inputs(rank, 6, device)
    with torch.inference_mode():
        for step, x in enumerate(inputs):
            if rank == 1:
                kind = KeyboardInterrupt if step % 2 else ZeroDivisionError
                fail_once(model.blocks[step].up, kind)
                with pytest.raises(kind):
                    model(x)
            assert torch.equal(model(x), reference(x)), step
    handle.join()
    handle.remove()


def test_exceptions_and_interrupts_on_one_rank() -> None:
    run_ranks(torch.cuda.device_count(), _interrupted, backend="nccl", timeout=150)


def _killed(rank: int, size: int, idle: bool) -> tuple[list[str], str, float]:
    """
    Rank 1 is killed while the devices are idle, or at work with the host far ahead of them. The others either finish
    with the right outputs, or hear that what they have is not to be trusted; a device may even fail for good.
    """
    faulthandler.dump_traceback_later(60)
    heard: list[str] = []
    logging.getLogger("diffusers_dlo.ranks").addFilter(lambda record: heard.append(record.getMessage()) or True)
    device = torch.device("cuda", torch.cuda.current_device())
    model, reference = wide(), wide().to(device)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather", host="packed", timeout=60.0, grace=0.2)
    inputs = make_inputs(rank, 12, device)
    with torch.inference_mode():
        expected = [reference(x).cpu() for x in inputs]
        model(inputs[0])
        torch.cuda.synchronize()
        if rank == 1:
            if not idle:
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
                while True:
                    model(inputs[0])
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            got = [model(x) for _ in range(10) for x in inputs]
            got = [output.cpu() for output in got]
        except RuntimeError as error:
            assert not idle, error
            return heard, str(error), time.monotonic() - start
        taken = time.monotonic() - start
        assert all(torch.equal(a, b) for a, b in zip(got, 10 * expected))
        assert handle.report().transfer == "local"
        handle.remove()
        assert torch.equal(model.to(device)(inputs[0]).cpu(), expected[0])
    return heard, "", taken


@pytest.mark.parametrize("idle", (True, False))
def test_a_killed_rank(idle: bool) -> None:
    results = run_ranks(torch.cuda.device_count(), _killed, idle, backend="nccl", timeout=90, expect_death=(1,))
    heard, text, taken = results[0]
    print(f"idle {idle}: {taken:.1f} s, {text or 'finished'}; log: {heard}")
    assert taken < 15
    if text:
        assert "rank 1" in text or "CUDA" in text
        assert any("rank 1" in said and "may be wrong" in said for said in heard)
    else:
        assert any("rank 1" in said and "goes on by itself" in said for said in heard)
