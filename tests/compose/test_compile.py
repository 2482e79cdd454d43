# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
torch.compile, of blocks and of whole models, before and after enabling: bit-equal to the same compiled model without
offload, no graph more, no break, no recompile; what would record addresses or placeholders is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import nn
from torch._dynamo.utils import counters

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy
from tests.zoo import MODELS, TEXT_ENCODERS, build, run


CLASSES = {"flux": 2, "wan": 1, "cosmos3": 1}
"""Models, and how many kinds of block each has: so many graphs."""
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Each test counts from nothing."""
    reset()
    yield
    reset()


def reset() -> None:
    torch._dynamo.reset()
    counters.clear()


def count_graphs() -> int:
    """All that were compiled so far, recompiles among them."""
    assert not counters["graph_break"], dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def inputs(name: str, seed: int) -> dict[str, Any]:
    return {**MODELS, **TEXT_ENCODERS}[name].inputs(seed)


def assert_equal(model: Callable, reference: Callable, name: str, seed: int) -> None:
    got, expected = run(model, inputs(name, seed)), run(reference, inputs(name, seed))
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected)), (name, seed)
    assert not any(tensor.isnan().any() for tensor in got)


# ---------------------------------------------------------------------------------------------------------- blocks


def check_blocks(name: str, rank: int, cases: list[dict[str, Any]]) -> None:
    """
    The reference compiles one graph for each kind of block, and that is all there ever is: with blocks in alternating
    slots or at home, before, while and after they are offloaded, and enabled once more.
    """
    reset()
    reference = build(name, 3)
    reference.compile_repeated_blocks(fullgraph=True, backend=BACKEND)
    run(reference, inputs(name, 0))
    graphs = count_graphs()
    assert graphs == CLASSES[name]
    with torch.compiler.set_stance("fail_on_recompile"):
        for options in cases:
            model, early = build(name, 3), options is not cases[-1]
            if early:
                model.compile_repeated_blocks(fullgraph=True, backend=BACKEND)
            for again in range(2):
                handle = apply_distributed_layerwise_offload(model, **options)
                if not early and not again:
                    model.compile_repeated_blocks(fullgraph=True, backend=BACKEND)
                for step in range(3):
                    assert_equal(model, reference, name, 10 * rank + step)
                assert ("device_budget" in options) == (handle.report().resident_bytes > 0)
                handle.remove()
                assert_equal(model, reference, name, rank)
    assert count_graphs() == graphs


def case_budget(name: str) -> int:
    """Room for about half of the shards of a block or two."""
    block = next(module for module in build(name, 3).modules() if type(module).__name__ in _kinds(name))
    return 2 * sum(tensor.nbytes for tensor in block.parameters())


def _kinds(name: str) -> list[str]:
    return list(type(build(name, 1))._repeated_blocks)


def cases_of(name: str) -> list[dict[str, Any]]:
    return [
        {"transfer": "local"},
        {"transfer": "all_gather", "device_budget": case_budget(name)},
        {"transfer": "all_gather"},
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_blocks_on_one_rank(name: str) -> None:
    check_blocks(name, 0, cases_of(name))


def _blocks_on_ranks(rank: int, size: int) -> None:
    check_blocks("flux", rank, cases_of("flux"))


def test_blocks_on_two_ranks() -> None:
    run_ranks(2, _blocks_on_ranks)


def test_dynamic_shapes_and_modes_compile_what_they_compile_without_offload() -> None:
    """Another size, and inference_mode after no_grad, cost a graph each, the first time; the offload adds none."""
    models = [build("wan", 3) for _ in range(2)]
    graphs = []
    for model in models:
        reset()
        model.compile_repeated_blocks(fullgraph=True, dynamic=True, backend="eager")
        handle = apply_distributed_layerwise_offload(model) if model is models[1] else None
        outputs, graphs_so_far = [], []
        for width, mode in ((6, nullcontext), (8, torch.inference_mode), (4, nullcontext)):
            kwargs = inputs("wan", 0)
            generator = torch.Generator().manual_seed(width)
            kwargs["hidden_states"] = torch.randn(1, 4, 2, 4, width, generator=generator)
            with mode():
                outputs += run(model, kwargs)
            graphs_so_far.append(count_graphs())
        graphs.append((graphs_so_far, outputs))
        if handle is not None:
            handle.remove()
    (without, expected), (with_offload, got) = graphs
    assert with_offload == without
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


# ----------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("early", (pytest.param(True, marks=pytest.mark.slow), False), ids=("before", "after"))
def test_whole_models(early: bool) -> None:
    """`model.compile()`, and the pipeline's transformer wrapped: cut at the blocks, and compiled once."""
    reference = build("wan", 3)
    for in_place in (True, False):
        reset()
        model = build("wan", 3)
        pipe = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), transformer=model)
        if not early:
            pipe.enable_distributed_layerwise_offload(components=["transformer"])
        if in_place:
            model.compile(backend="eager")
        else:
            pipe.transformer = torch.compile(pipe.transformer, backend="eager")
        if early:
            assert_equal(pipe.transformer, reference, "wan", 0)  # compiled as one graph, without hooks
            pipe.enable_distributed_layerwise_offload(components=["transformer"])
        assert_equal(pipe.transformer, reference, "wan", 0)
        with torch.compiler.set_stance("fail_on_recompile"):
            for step in range(3):
                assert_equal(pipe.transformer, reference, "wan", step)
        assert counters["stats"]["unique_graphs"] >= 2, "a block, and what is around the blocks"
        pipe.disable_distributed_layerwise_offload()
        assert_equal(pipe.transformer, reference, "wan", 1)


def test_a_text_encoder_and_parts_of_a_model() -> None:
    model, reference = build("t5", 3), build("t5", 3)
    compiled = torch.compile(model, backend="eager")
    handle = apply_distributed_layerwise_offload(compiled)
    for step in range(3):
        assert_equal(compiled, reference, "t5", step)
    handle.remove()
    model, reference = build("flux", 3), build("flux", 3)
    handle = apply_distributed_layerwise_offload(model)
    model.norm_out.compile(backend="eager")  # outside the blocks, inside them, and a block put back
    model.transformer_blocks[1].attn.compile(backend="eager")
    model.transformer_blocks[2] = torch.compile(model.transformer_blocks[2], backend="eager")
    for step in range(3):
        assert_equal(model, reference, "flux", step)
    assert counters["stats"]["unique_graphs"] >= 3
    handle.remove()


# ------------------------------------------------------------------------------------------------- the first forward


def borrowed(whole: bool) -> tuple[nn.Module, OffloadHandle]:
    model = toy(toys.Borrowing)
    for module in (model,) if whole else model.blocks:
        module.compile(backend="eager")
    return model, apply_distributed_layerwise_offload(model)


def test_parts_of_blocks_that_are_called_outside_their_turn() -> None:
    """Mended with compiled blocks; with the whole model compiled an error, unless it has been run once before."""
    reference = toy(toys.Borrowing)
    model, handle = borrowed(whole=False)
    with torch.no_grad():
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step)))
    handle.remove()
    model, handle = borrowed(whole=True)
    with torch.no_grad():
        for step in range(2):
            with pytest.raises(RuntimeError, match="'model' returned NaN in its first forward.*before it is compiled"):
                model(feed(step))
    handle.remove()
    for cached in (True, False):  # dynamo does not look whether a module has got hooks
        if not cached:
            reset()
        model = toy(toys.Borrowing)
        handle = apply_distributed_layerwise_offload(model)
        with torch.no_grad():
            model(feed(0))
            model.compile(backend="eager")
            with pytest.raises(RuntimeError, match="'model' returned NaN") if cached else nullcontext():
                for step in range(3):
                    assert torch.equal(model(feed(step)), reference(feed(step)))
        handle.remove()


@pytest.mark.parametrize("whole", (True, False), ids=("whole", "blocks"))
def test_weights_that_are_read_outside_their_turn(whole: bool) -> None:
    model = toy(toys.Peeking)
    for module in (model,) if whole else model.blocks:
        module.compile(backend="eager")
    handle = apply_distributed_layerwise_offload(model)
    text = "returned NaN in its first forward" if whole else "'blocks.1.up.weight' of 'model' was read outside"
    with torch.no_grad(), pytest.raises(RuntimeError, match=text):
        model(feed(0))
    handle.remove()


# --------------------------------------------------------------------------------------------------------- refusals


def _compile_in_place(model: nn.Module) -> Any:
    model.compile(mode="reduce-overhead")
    return model


def _compile_with_a_backend(model: nn.Module) -> Any:
    model.blocks[2].compile(backend="cudagraphs")
    return model


def _compile_with_a_switch(model: nn.Module) -> Any:
    with torch._inductor.config.patch("triton.cudagraphs", True):
        model.blocks[2].compile()
    return model


def _compile_a_block(model: nn.Module) -> Any:
    model.blocks[1].compile(options={"triton.cudagraphs": True})
    return model


def _compile_a_part(model: nn.Module) -> Any:
    model.blocks[1].up.compile(mode="max-autotune")
    return model


def _put_a_block_back(model: nn.Module) -> Any:
    model.blocks[1] = torch.compile(model.blocks[1], mode="reduce-overhead")
    return model


def _put_a_part_back(model: nn.Module) -> Any:
    model.blocks[1].up = torch.compile(model.blocks[1].up, mode="reduce-overhead")
    return model


def _replace_a_forward(model: nn.Module) -> Any:
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, mode="reduce-overhead")
    return model


def _wrap(model: nn.Module) -> Any:
    return torch.compile(model, mode="reduce-overhead")


def _wrap_a_function(model: nn.Module) -> Any:
    return torch.compile(lambda x: model(x), mode="max-autotune")


WAYS = {
    "in place": _compile_in_place,
    "a block": _compile_a_block,
    "a backend": _compile_with_a_backend,
    "a switch": _compile_with_a_switch,
    "a part": _compile_a_part,
    "a block put back": _put_a_block_back,
    "a part put back": _put_a_part_back,
    "a forward": _replace_a_forward,
    "wrapped": _wrap,
    "a function": _wrap_a_function,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_cuda_graphs_are_refused(way: Callable) -> None:
    """Before anything is changed, or at the next forward, before anything is computed."""
    text = 'is compiled with mode="reduce-overhead" or another that records CUDA graphs.*Use another mode'
    called = way(toy(toys.Stack, 3))
    if isinstance(called, nn.Module):
        with pytest.raises(ValueError, match=text):
            apply_distributed_layerwise_offload(called)
    model = toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        model(feed(0))
        called = way(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                called(feed(0))
    assert counters["stats"]["unique_graphs"] == 0
    report = handle.report()
    assert report.passes <= 1
    handle.remove()


def _export(module: nn.Module) -> None:
    torch.export.export(module, (feed(0),), strict=False)


def _export_strictly(module: nn.Module) -> None:
    torch.export.export(module, (feed(0),), strict=True)


def _trace(module: nn.Module) -> None:
    torch.jit.trace(module, (feed(0),))


@pytest.mark.parametrize("record", (_export, _export_strictly, _trace), ids=("export", "strictly", "trace"))
@pytest.mark.parametrize("part", (False, True), ids=("model", "block"))
def test_what_records_placeholders_is_refused(record: Callable, part: bool) -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    text = "the weights of a streamed block arrive before" if record is _export_strictly else "would hold placeholders"
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
        with pytest.raises(RuntimeError, match=text):
            record(model.blocks[1] if part else model)
        assert torch.equal(model(feed(1)), reference(feed(1)))
    handle.remove()


def test_one_graph_for_a_whole_model_is_refused_with_the_reason() -> None:
    model = build("wan", 2)
    handle = apply_distributed_layerwise_offload(model)
    for called in (torch.compile(model, fullgraph=True, backend="eager"), model):
        if called is model:
            model.compile(fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="with fullgraph=True compile the blocks"):
            run(called, inputs("wan", 0))
    handle.remove()


# ---------------------------------------------------------------------------------------------------------- inductor


@pytest.mark.slow
def test_blocks_with_inductor() -> None:
    model, reference = build("wan", 3), build("wan", 3)
    for module in (reference, model):
        module.compile_repeated_blocks(fullgraph=True)
    run(reference, inputs("wan", 0))
    handle = apply_distributed_layerwise_offload(model)
    for mode in (nullcontext, torch.inference_mode):
        with mode():
            for step in range(3):
                assert_equal(model, reference, "wan", step)
    assert count_graphs() == 2, "one for each mode"
    handle.remove()
