# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What users combine, on real devices: blocks compiled by inductor, CUDA graphs, context parallelism over NCCL."""

import time

import pytest
import torch
from diffusers import ContextParallelConfig
from torch._dynamo.utils import counters

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.ranks import run_ranks
from tests.zoo import MODELS, build, run


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_compiled_blocks(transfer: str) -> None:
    """One graph, compiled before the offload was there: equal bits, nothing compiled anew."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch._dynamo.reset()
    counters.clear()
    model, reference = build("wan", 5, dtype=torch.bfloat16), build("wan", 5, dtype=torch.bfloat16).to(device)
    for module in (model, reference):
        module.compile_repeated_blocks(fullgraph=True)
    run(reference, MODELS["wan"].inputs(0), device=device)
    handle = apply_distributed_layerwise_offload(model, transfer=transfer)
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for step in range(4):
                inputs = MODELS["wan"].inputs(step)
                got, expected = run(model, inputs, device=device), run(reference, inputs, device=device)
                assert all(torch.equal(a, b) for a, b in zip(got, expected)), step
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        model.compile_repeated_blocks(mode="reduce-overhead")
        with pytest.raises(ValueError, match="records CUDA graphs"):
            run(model, inputs, device=device)
    finally:
        handle.remove()
        torch._dynamo.reset()


def _context_parallel(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for degrees, backend in (({"ulysses_degree": size}, "native"), ({"ring_degree": size}, "_native_flash")):
        model, reference = (build("ltx", 5, dtype=torch.bfloat16) for _ in range(2))
        reference.to(device)
        handle = apply_distributed_layerwise_offload(model, transfer="all_gather", grace=0.1, timeout=60.0)
        for module in (model, reference):
            module.set_attention_backend(backend)
            module.enable_parallelism(config=ContextParallelConfig(**degrees))
        for step in range(6):
            inputs = {**MODELS["ltx"].inputs(step), "encoder_attention_mask": None}
            expected = run(reference, inputs, device=device)
            torch.cuda.synchronize()
            if step == 1 + rank:
                time.sleep(0.5)
            got = run(model, inputs, device=device)
            assert all(torch.equal(a, b) for a, b in zip(got, expected)), (degrees, step)
        report = handle.report()
        assert (report.transfer, report.passes, report.ghost_passes) == ("all_gather", 6, 0)
        handle.remove()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_context_parallelism_with_late_ranks() -> None:
    run_ranks(2, _context_parallel, backend="nccl")
