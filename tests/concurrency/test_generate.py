# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Waves of different requests on real ranks: bits, order, what is refused before anything is computed, failures."""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_output import FluxPipelineOutput
from diffusers.utils import BaseOutput

from diffusers_dlo.concurrency.generate import ConcurrentGenerationError, generate_concurrently
from tests.ranks import run_ranks


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny_checkpoints


@dataclass
class Drawing(BaseOutput):
    frames: torch.Tensor
    note: str | None = None


class Painter:
    """A pipeline without weights, which remembers what it was asked for."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, prompt: str, num_inference_steps: int = 1, generator: Any = None, **options: Any) -> Any:
        self.prompts.append(prompt)
        if "fail" in options:
            raise options["fail"](f"no paint for {prompt}")
        seed = torch.rand(1, generator=generator) if generator is not None else torch.zeros(1)
        frames = torch.tensor([float(ord(c)) for c in prompt] + [0.0]) * num_inference_steps + seed
        frames[-1] = -0.0
        form = options.get("form", "drawing")
        if form == "drawing":
            return Drawing(frames=frames, note=None if prompt == "b" else prompt)
        return (frames.numpy(), [prompt]) if form == "tuple" else {prompt}


def requests_for(prompts: str, **common: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "num_inference_steps": 3, **common} for prompt in prompts]


def same(got: Any, expected: Any) -> bool:
    """Equal bit for bit, and of the same types."""
    if type(got) is not type(expected):
        return False
    if isinstance(got, torch.Tensor):
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (got, expected)]
        return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(*bits)
    if isinstance(got, np.ndarray):
        return (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    if isinstance(got, dict):
        return list(got) == list(expected) and all(same(got[key], expected[key]) for key in got)
    if isinstance(got, (list, tuple)):
        return len(got) == len(expected) and all(map(same, got, expected))
    return got == expected


def caught(kind: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with pytest.raises(kind) as info:
        call(*args, **options)
    assert type(info.value) is kind
    return info.value


def _orders(rank: int, size: int) -> None:
    for prompts in ("a", "ab", "abcdefg"):
        for form in ("drawing", "tuple"):
            requests = requests_for(prompts, form=form)
            expected = [Painter()(**request) for request in requests]
            own = [value if index % size == rank else None for index, value in enumerate(expected)]
            for gather, wanted in (("all", expected), ("first", None if rank else expected), ("none", own)):
                painter = Painter()
                results = generate_concurrently(painter, requests, gather=gather)
                assert same(results, wanted), (prompts, form, gather, results)
                assert painter.prompts == list(prompts[rank::size])
    mixed = [{"prompt": "a", "num_inference_steps": 1}, {"prompt": "b", "num_inference_steps": 9}, {"prompt": "c"}]
    assert same(generate_concurrently(Painter(), mixed, strict=False), [Painter()(**request) for request in mixed])

    def seeded() -> list[dict[str, Any]]:
        return [{**r, "generator": torch.Generator().manual_seed(i)} for i, r in enumerate(requests_for("xxxx"))]

    results = generate_concurrently(Painter(), seeded())
    assert same(results, [Painter()(**request) for request in seeded()]) and not same(results[0], results[1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", (1, 2, 3))
def test_results_come_in_order_bit_for_bit(size: int) -> None:
    run_ranks(size, _orders, timeout=50)


def _long_result(rank: int, size: int) -> None:
    data = torch.arange(35 * 2**20, dtype=torch.int16)  # more than one chunk, and not a multiple of it

    def pipe(**request: Any) -> torch.Tensor:
        return data + request["add"]

    for gather in ("all", "first"):
        requests = [{"add": add, "num_inference_steps": 1} for add in range(size)]
        results = generate_concurrently(pipe, requests, gather=gather)
        assert (results is None) == (gather == "first" and rank > 0)
        assert results is None or all(torch.equal(result, data + add) for add, result in enumerate(results))


@pytest.mark.timeout(60)
def test_long_results_travel_in_chunks() -> None:
    run_ranks(2, _long_result, timeout=50)


REFUSED: dict[str, tuple[type[Exception], list[Any], dict[str, Any], str]] = {
    "missing": (ValueError, [{"prompt": "a", "num_inference_steps": 3}, {"prompt": "b"}], {}, "[1]: nothing in 1"),
    "none": (ValueError, requests_for("ab", num_inference_steps=None), {}, "[0, 1]: None in 0, None in 1"),
    "bool": (ValueError, requests_for("a", num_inference_steps=True), {}, "[0]: True in 0"),
    "float": (ValueError, requests_for("a", num_inference_steps=3.0), {}, "[0]: 3.0 in 0"),
    "steps": (
        ValueError,
        [*requests_for("ab"), *requests_for("c", num_inference_steps=5)],
        {},
        "'num_inference_steps' must be the same in every request, got 3 in requests [0, 1]; 5 in requests [2]. Give",
    ),
    "extra_args": (
        ValueError,
        [*requests_for("a", extra_args={"y": 1, "x": 2}), *requests_for("b"), *requests_for("c", extra_args={"x": 3})],
        {},
        'got {"x": 2, "y": 1} in requests [0]; not given in requests [1]; {"x": 3} in requests [2]. Give',
    ),
    "not JSON": (ValueError, requests_for("ab", extra_args={"x": {1}}), {}, "'extra_args' of request 0 cannot be"),
    "empty": (ValueError, [], {}, "'requests' is empty"),
    "gather": (
        ValueError,
        requests_for("a"),
        {"gather": "some"},
        "must be one of ('all', 'first', 'none'), got 'some'",
    ),
    "strict": (TypeError, requests_for("a"), {"strict": 1}, "'strict' must be True or False, got 1"),
    "a mapping": (TypeError, ["a fox"], {}, "request 0 must be a mapping of keyword arguments, got 'str'"),
    "a key": (TypeError, [{3: "a"}], {}, "request 0 has the key 3"),
}


def shared_generator() -> list[dict[str, Any]]:
    return requests_for("abc", generator=torch.Generator())


def _refusals(rank: int, size: int) -> dict[str, str]:
    painter, texts = Painter(), {}
    for name, (kind, requests, options, text) in REFUSED.items():
        texts[name] = str(caught(kind, generate_concurrently, painter, requests, **options))
        assert text in texts[name], texts[name]
    texts["generator"] = str(caught(ValueError, generate_concurrently, painter, shared_generator()))
    assert "requests 0 and 1 share one torch.Generator" in texts["generator"]
    assert painter.prompts == []
    ordered = [*requests_for("a", extra_args={"y": 1, "x": 2}), *requests_for("b", extra_args={"x": 2, "y": 1})]
    assert len(generate_concurrently(painter, ordered)) == 2
    return texts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", (1, 3))
def test_refused_alike_on_every_rank_before_anything_is_computed(size: int) -> None:
    texts = run_ranks(size, _refusals, timeout=50)
    assert texts == [texts[0]] * size


def _differences(rank: int, size: int) -> list[str]:
    painter, texts = Painter(), []
    last = rank == size - 1

    def refused(requests: Any, kind: type[Exception] = ValueError, **options: Any) -> str:
        texts.append(str(caught(kind, generate_concurrently, painter, requests, **options)))
        return texts[-1]

    text = refused(requests_for("abcd"[: 3 + last]))
    assert f"is the number of requests: rank 0 has 3, rank {size - 1} has 4." in text
    text = refused(requests_for("aby" if last else "abx"))
    assert f"is 'prompt' of request 2: rank 0 has 'x', rank {size - 1} has 'y'." in text
    text = refused(requests_for("ab", num_inference_steps=4 if last else 3))
    assert f"is 'num_inference_steps' of request 0: rank 0 has 3, rank {size - 1} has 4." in text
    text = refused(requests_for("ab", **({"form": "tuple"} if last else {})))
    assert f"is 'form' of request 0: rank 0 has none, rank {size - 1} has 'tuple'." in text
    text = refused(requests_for("ab", image=torch.tensor([-0.0 if last else 0.0])))
    assert "is 'image' of request 0: rank 0 has a 'torch.Tensor' of digest " in text
    text = refused(requests_for("ab"), strict=not last)
    assert f"is 'strict': rank 0 has True, rank {size - 1} has False." in text
    text = refused(requests_for("ab"), gather="first" if last else "all")
    assert f"is 'gather': rank 0 has 'all', rank {size - 1} has 'first'." in text
    text = refused(requests_for("a", generator=[torch.Generator().manual_seed(7 + last)]))
    assert "is 'generator' of request 0: rank 0 has a 'builtins.list' of digest " in text
    used = torch.Generator().manual_seed(7)
    if last:
        torch.rand(1, generator=used)
    text = refused(requests_for("a", generator=used))
    assert "is 'generator' of request 0" in text and "generators made for this call" in text
    # Not a difference: objects of the same type, which are local to each rank.
    assert len(generate_concurrently(painter, requests_for("a", callback=[object(), print]))) == 1
    assert painter.prompts == ["a"] * (rank == 0)

    other = f"rank {size - 1} failed: "
    for bad, kind in (("a fox", TypeError), (["a fox"], TypeError), ([{1: 2}], TypeError), ([], ValueError)):
        text = str(caught(kind, generate_concurrently, painter, bad if last else requests_for("a")))
        assert text.startswith(other) != last, text
    text = str(caught(TypeError, generate_concurrently, None if last else painter, requests_for("a")))
    assert "'pipe' must be a pipeline or another callable, got 'NoneType'" in text
    return texts


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", (2, 3))
def test_different_lists_are_refused_with_the_first_difference(size: int) -> None:
    texts = run_ranks(size, _differences, timeout=50)
    assert texts == [texts[0]] * size


def _failures(rank: int, size: int) -> None:
    requests = requests_for("abcde")
    requests[1]["fail"], requests[3]["fail"] = KeyError, OSError
    texts = {1: "KeyError: 'no paint for b'", 3: "OSError: no paint for d"}
    expected = [None if i in texts else Painter()(**request) for i, request in enumerate(requests)]
    for gather in ("all", "first", "none"):
        painter = Painter()
        error = caught(ConcurrentGenerationError, generate_concurrently, painter, requests, gather=gather)
        assert painter.prompts == list("abcde"[rank::size]) and error.errors == texts
        mine = [value if i % size == rank else None for i, value in enumerate(expected)]
        assert same(error.results, expected if gather == "all" or (gather == "first" and rank == 0) else mine)
        assert "2 of 5 requests failed" in str(error)
        for index, text in texts.items():
            assert f"request {index} on rank {index % size}: {text}" in str(error)
        causes = [text for index, text in texts.items() if index % size == rank]
        cause = error.__cause__
        assert (f"{type(cause).__name__}: {cause}" if cause else None) == (causes[0] if causes else None)
        assert copy.copy(error).errors == texts
    _unsendable(rank, size)
    if size > 1:
        _unknown(rank, size)
    assert same(generate_concurrently(Painter(), requests_for("ab"))[1], Painter()("b", 3))


def _unsendable(rank: int, size: int) -> None:
    requests = requests_for("ab")
    requests[1]["form"] = "set"
    assert generate_concurrently(Painter(), requests, gather="none")[1] == ({"b"} if rank == 1 % size else None)
    if size == 1:
        assert generate_concurrently(Painter(), requests)[1] == {"b"}
        return
    error = caught(ConcurrentGenerationError, generate_concurrently, Painter(), requests)
    assert list(error.errors) == [1] and same(error.results, [Painter()("a", 3), None])
    assert "gather='none'" in error.errors[1] and "'value' cannot be sent: a 'builtins.set'" in error.errors[1]
    assert isinstance(error.__cause__, ValueError) == (rank == 1)


def _unknown(rank: int, size: int) -> None:
    kind = None
    if rank == 1:

        @dataclass
        class Private(BaseOutput):
            value: int

        kind = Private
    error = caught(
        ConcurrentGenerationError,
        generate_concurrently,
        lambda prompt, num_inference_steps: kind(3) if rank == 1 else 3,
        requests_for("ab"),
    )
    assert error.results == [3, None] and list(error.errors) == [1]
    assert "rank 0 cannot take the result: ValueError: no output class" in error.errors[1]
    assert "_unknown.<locals>.Private" in error.errors[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", (1, 2, 3))
def test_a_failed_request_stops_no_other(size: int) -> None:
    run_ranks(size, _failures, timeout=50)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", (KeyboardInterrupt, SystemExit))
def test_an_interrupt_is_not_held_back(kind: type[BaseException]) -> None:
    painter = Painter()
    with pytest.raises(kind):
        generate_concurrently(painter, [*requests_for("a", fail=kind), *requests_for("b")])
    assert painter.prompts == ["a"]


def _death(rank: int, size: int) -> str:
    def pipe(prompt: str, num_inference_steps: int) -> int:
        if prompt == "b":
            os._exit(1)
        return 3

    return str(caught(RuntimeError, generate_concurrently, pipe, requests_for("abc")))


@pytest.mark.timeout(60)
def test_a_rank_that_ends_is_noticed() -> None:
    text = run_ranks(2, _death, timeout=50, expect_death=(1,))[0]
    assert text.startswith("rank 0 waited at the join of wave 1, and another rank has ended or took no part.")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoints.build_tiny_flux(tmp_path_factory.mktemp("tiny") / "flux"))


def load(path: str) -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(path, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pictures(steps: list[int], output_type: str = "np", **common: Any) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"picture {index}",
            "num_inference_steps": number,
            "generator": torch.Generator().manual_seed(index),
            **{"height": 32, "width": 32, "output_type": output_type},
            **common,
        }
        for index, number in enumerate(steps)
    ]


def _streamed(rank: int, size: int, path: str) -> None:
    reference, pipe = load(path), load(path)
    handle = pipe.enable_distributed_layerwise_offload(onload_device="cpu")

    def check(results: Any, make: Callable[[], list[dict[str, Any]]], failed: tuple[int, ...] = ()) -> None:
        for index, request in enumerate(make()):
            expected = None if index in failed else reference(**request)
            assert same(results[index], expected), index
            assert index in failed or type(results[index]) in (FluxPipelineOutput, tuple)

    for _ in range(2 - rank if rank < 2 else 0):
        pipe(**pictures([2])[0])  # unequal work from before, without joining
    for make, strict in (
        (lambda: pictures([2]), True),
        (lambda: pictures([2] * (size + 1)), True),
        (lambda: pictures([1, 3, 2, 1], "pt"), False),
        (lambda: pictures([2, 2], "pil", return_dict=False), True),
    ):
        check(generate_concurrently(pipe, make(), strict=strict), make)

    def stop(pipe: Any, step: int, *args: Any) -> dict[str, Any]:
        raise ArithmeticError(f"stopped at step {step}")

    failing = pictures([2] * 4)
    failing[1]["callback_on_step_end"] = stop
    error = caught(ConcurrentGenerationError, generate_concurrently, pipe, failing)
    assert error.errors == {1: "ArithmeticError: stopped at step 0"}
    check(error.results, lambda: pictures([2] * 4), failed=(1,))
    pipe.disable_distributed_layerwise_offload()
    assert not handle.enabled
    check(generate_concurrently(pipe, pictures([1, 1, 1])), lambda: pictures([1, 1, 1]))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", (pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)))
def test_a_streaming_pipeline(size: int, flux: str) -> None:
    run_ranks(size, _streamed, flux, timeout=110)
