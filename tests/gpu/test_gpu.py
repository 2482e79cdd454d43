# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The same promises on real devices: equality on one GPU and on all of the host, memory, streams and registration."""

import gc

import pytest
import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.device.platform import get_platform
from diffusers_dlo.host.registration import Registrations
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy
from tests.zoo import MODELS, TEXT_ENCODERS, build, run


pytestmark = pytest.mark.gpu
ALL = {**MODELS, **TEXT_ENCODERS}


def check_zoo(name: str, rank: int, device: torch.device, dtype: torch.dtype, **options) -> None:
    reference, model = build(name, 3, dtype=dtype).to(device), build(name, 3, dtype=dtype)
    weights = {key: value.cpu() for key, value in reference.state_dict().items()}
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for step in range(4):
            inputs = ALL[name].inputs(10 * rank + step)
            got, expected = run(model, inputs, device=device), run(reference, inputs, device=device)
            assert all(torch.equal(a, b) for a, b in zip(got, expected)), f"{name} step {step}"
    finally:
        handle.remove()
    assert all(torch.equal(value.cpu(), weights[key]) for key, value in model.state_dict().items())
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def check_all(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in ALL:
        check_zoo(name, rank, device, torch.float32, transfer="all_gather")
        check_zoo(name, rank, device, torch.bfloat16, num_slots=3, host="pinned")
        check_zoo(name, rank, device, torch.bfloat16, transfer="local", host="packed")
    check_wide(rank, size, device)
    check_times(size, device)
    if size > 1:
        check_uneven(rank, size, device)


def check_wide(rank: int, size: int, device: torch.device) -> None:
    """Blocks large enough for copies, gathers and computing to overlap, without any synchronisation between passes."""
    for num_blocks, num_slots, options in (
        (5, 2, {"transfer": "all_gather"}),
        (6, 3, {}),
        (5, 2, {"transfer": "local"}),
    ):
        torch.manual_seed(0)
        model = toys.Stack(num_blocks, dim=1024, widths=(8192, 2048, 4096)).eval()
        torch.manual_seed(0)
        reference = toys.Stack(num_blocks, dim=1024, widths=(8192, 2048, 4096)).eval().to(device)
        handle = apply_distributed_layerwise_offload(model, num_slots=num_slots, **options)
        timing = handle.transfer_timing
        assert (timing is not None) == (size > 1 and not options)
        assert timing is None or (timing.faster == handle.report().transfer and timing.local_ms > 0)
        inputs = [torch.randn(64, 1024, device=device) for _ in range(20)]
        torch.cuda.synchronize()
        weights = torch.cuda.memory_allocated()
        with torch.inference_mode():
            got = [model(x) for x in inputs]  # the host runs far ahead of the device
            expected = [reference(x) for x in inputs]
        assert all(torch.equal(a, b) for a, b in zip(got, expected)), (num_blocks, num_slots, options)
        assert torch.cuda.memory_allocated() - weights < 20 * 2 * 64 * 1024 * 4 + (1 << 20), "a pass keeps memory"
        handle.remove()


def check_times(size: int, device: torch.device) -> None:
    """Timing changes no bit, and its figures agree with each other."""
    torch.manual_seed(0)
    model = toys.Stack(6, dim=1024, widths=(8192, 2048, 4096)).eval()
    torch.manual_seed(0)
    reference = toys.Stack(6, dim=1024, widths=(8192, 2048, 4096)).eval().to(device)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    x = torch.randn(4096, 1024, device=device)
    with torch.inference_mode():
        model(x)
        with handle.timing():
            got = [model(x) for _ in range(12)]
        assert all(torch.equal(g, reference(x)) for g in got)
    report = handle.report()
    (timing,) = report.timed_passes
    assert timing.passes == 12 and timing.h2d_ms > 0 and (timing.gather_ms > 0) == (size > 1)
    assert 0 < timing.compute_ms + timing.exposed_ms <= timing.pass_ms * 1.001
    assert max(timing.h2d_ms, timing.gather_ms) <= timing.transfer_ms * 1.001
    assert 0 <= report.overlap <= 1
    assert all(block.h2d_ms > 0 and block.compute_ms > 0 for block in report.blocks) and len(report.blocks) == 6
    copies = [span for span in report.timeline.spans if span.kind == "copy"]
    assert all(a.end_ms <= b.begin_ms + 0.01 for a, b in zip(copies, copies[1:])), "one after the other, on one stream"
    handle.join()
    handle.remove()


def check_uneven(rank: int, size: int, device: torch.device) -> None:
    """
    Ranks that only transfer, and ranks that skip other blocks than their peers, may not spoil a slower rank's gathers.
    """
    torch.manual_seed(0)
    model = toys.Stack(6, dim=1024, widths=(8192, 2048, 4096)).eval()
    torch.manual_seed(0)
    reference = toys.Stack(6, dim=1024, widths=(8192, 2048, 4096)).eval().to(device)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    x = torch.randn(4096, 1024, device=device)
    orders = (range(6), (0, 5), (3, 1), (2, 4, 5))
    with torch.inference_mode():
        for turn in range(size):
            if rank == turn:
                got = [model(x) for _ in range(6)]
                assert all(torch.equal(g, reference(x)) for g in got), "while others only transfer"
            handle.join()
        for step in range(8):
            model.order = reference.order = orders[(step + rank) % 4]
            assert torch.equal(model(x), reference(x)), f"step {step}"
    handle.join()
    handle.remove()


def test_one_gpu() -> None:
    check_all(0, 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_all_gpus_of_the_host() -> None:
    run_ranks(torch.cuda.device_count(), check_all, backend="nccl", timeout=280)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_device_memory_is_that_of_the_slots(transfer: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = toys.Stack(12, dim=1024, widths=(8192,)).eval()
    gc.collect()
    before = torch.cuda.memory_allocated()
    handle = apply_distributed_layerwise_offload(model, transfer=transfer)
    used = torch.cuda.memory_allocated() - before
    slots = handle.plan.device_slot_nbytes
    rest = sum(t.numel() * 4 for m in (model.inp, model.out) for t in m.parameters())
    assert slots <= used <= slots + rest + (1 << 20)
    x = torch.randn(8, 1024, device=device)
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            model(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < used + (4 << 20)
    handle.remove()


def test_other_current_streams() -> None:
    """Forwards on different streams, in turn: release and acquire may not be in the order of one stream."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = toys.Stack(5, dim=512, widths=(8192,)).eval()
    torch.manual_seed(0)
    reference = toys.Stack(5, dim=512, widths=(8192,)).eval().to(device)
    handle = apply_distributed_layerwise_offload(model)
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = torch.randn(256, 512, device=device)
    torch.cuda.synchronize()
    got = []
    with torch.no_grad():
        expected = reference(x)
        torch.cuda.synchronize()
        for step in range(12):
            with torch.cuda.stream(streams[step % 3]):
                got.append(model(x))
    torch.cuda.synchronize()
    assert all(torch.equal(g, expected) for g in got)
    handle.remove()


def test_registered_memory_is_given_back() -> None:
    platform = get_platform(torch.device("cuda", torch.cuda.current_device()))
    memory = torch.zeros(1 << 22, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :][: 1 << 21]
    for _ in range(3):
        registrations = Registrations(platform)
        registrations.add([memory])
        with pytest.raises(RuntimeError, match="cudaHostRegister answered"):
            Registrations(platform).add([memory])
        registrations.close()
        registrations.close()
    torch.ones(1, device="cuda").add_(1)  # the refused call left no error behind
    torch.cuda.synchronize()


def test_exception_then_right() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model, reference = toy(toys.Failing, 5), toy(toys.Failing, 5).to(device)
    handle = apply_distributed_layerwise_offload(model)
    x = feed(0).to(device)
    for kind in (ZeroDivisionError, KeyboardInterrupt):
        for position in range(6):
            model.fail_at, model.fail_with = position, kind
            with torch.no_grad(), pytest.raises(kind):
                model(x)
            model.fail_at = None
            with torch.no_grad():
                assert torch.equal(model(x), reference(x))
    handle.remove()


@pytest.mark.parametrize("host", ("packed", "pinned"))
def test_a_model_that_is_on_the_device_already(host: str) -> None:
    """Its weights go to host memory that devices may only read, once it is page-locked."""
    device = torch.device("cuda", torch.cuda.current_device())
    for name in ("flux", "t5"):
        reference, model = build(name, 3, dtype=torch.bfloat16).to(device), build(name, 3, dtype=torch.bfloat16)
        handle = apply_distributed_layerwise_offload(model.to(device), host=host)
        for step in range(3):
            inputs = ALL[name].inputs(step)
            got, expected = run(model, inputs, device=device), run(reference, inputs, device=device)
            assert all(torch.equal(a, b) for a, b in zip(got, expected)), f"{name} step {step}"
        handle.remove()
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
