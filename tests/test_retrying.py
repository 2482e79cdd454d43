# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What placed models encode and decode is tried again where an offload can give memory back."""

import copy
import gc
import pickle
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from diffusers_dlo import api, resident_memory
from tests import toys
from tests.ranks import run_ranks
from tests.test_resident_memory import roomy, run
from tests.toys import feed, toy


class Decoder(nn.Module):
    """A small model that is placed, and runs out of memory some times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.failures = 0
        self.calls = 0

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x.sum() * self.weight


class Pipeline(DiffusionPipeline):
    """A transformer that streams, and a decoder that does not."""

    def __init__(self, transformer: nn.Module, vae: nn.Module) -> None:
        super().__init__()
        self._components = {"transformer": transformer, "vae": vae}
        self.transformer, self.vae = transformer, vae

    @property
    def components(self) -> dict[str, nn.Module]:
        return self._components


def _decoding(rank: int, size: int) -> None:
    transformer, reference, vae = toy(toys.Stack, 6), toy(toys.Stack, 6), toy(Decoder)
    pipe = Pipeline(transformer, vae)
    ordinary = vae.decode
    options = {"components": ["transformer"], "blocks": {"transformer": ["blocks"]}, "device_budget": "auto"}
    with patch.object(api, "get_platform", lambda device: roomy(1 << 20)):
        handle = pipe.enable_distributed_layerwise_offload(**options)
    run(transformer, reference, range(4))
    handle.join()
    assert handle.report().resident_bytes > 0
    if rank == 0:
        vae.failures = 1
        assert torch.equal(vae.decode(feed(0)), ordinary(feed(0))) and vae.calls == 3
        assert handle.report().resident_bytes == 0
        vae.failures = 2
        with pytest.raises(torch.OutOfMemoryError):  # there is nothing left to give back
            vae.decode(feed(0))
        assert vae.calls == 4
    run(transformer, reference, range(4, 6))
    handle.join()
    assert handle.report().resident_bytes == 0
    pipe.disable_distributed_layerwise_offload()
    assert "decode" not in vars(vae)


def test_decoding_without_memory_is_tried_again_without_what_stays() -> None:
    _decoding(0, 1)
    run_ranks(2, _decoding)


def _pipeline() -> tuple[Pipeline, toys.Stack, Decoder]:
    transformer, vae = toy(toys.Stack, 6), toy(Decoder)
    return Pipeline(transformer, vae), transformer, vae


_OPTIONS: dict[str, Any] = {"components": ["transformer"], "blocks": {"transformer": ["blocks"]}}


def _strict_ranks(rank: int, size: int) -> float:
    pipe, transformer, vae = _pipeline()
    reference = toy(toys.Stack, 6)
    with patch.object(api, "get_platform", lambda device: roomy(1 << 20)):
        handle = pipe.enable_distributed_layerwise_offload(
            **_OPTIONS, device_budget="auto", uneven="error", timeout=30.0
        )
    run(transformer, reference, range(4))
    start = time.monotonic()
    if rank == 0:
        vae.failures = 1
        vae.decode(feed(0))
    elapsed = time.monotonic() - start
    run(transformer, reference, range(4, 6))
    handle.remove()
    return elapsed


def test_strict_ranks_do_not_wait_for_a_return_that_never_comes() -> None:
    """With uneven="error" a rank answers only with a pass of its own: no round is made while one decodes."""
    elapsed = run_ranks(2, _strict_ranks_quickly)
    assert max(elapsed) < 2.0, f"decoding waited {max(elapsed):.1f} s for the others"


def _strict_ranks_quickly(rank: int, size: int) -> float:
    with patch.object(resident_memory, "_RETURN_SECONDS", 5.0):
        return _strict_ranks(rank, size)


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_decoding_without_memory_after_the_transformer_is_gone(transfer: str) -> None:
    """A decoder outlives its pipeline: what it raises is still what it ran into."""
    pipe, transformer, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20, transfer=transfer)
    del pipe, transformer, handle
    gc.collect()
    vae.failures = 1
    with pytest.raises(torch.OutOfMemoryError):
        vae.decode(feed(0))


def test_a_copy_of_a_watched_decoder_decodes_with_its_own_weights() -> None:
    """What is put on the module is bound to it, and copied as it is."""
    pipe, _, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)
    try:
        other = copy.deepcopy(vae)
        with torch.no_grad():
            other.weight.fill_(5.0)
            assert torch.equal(other.decode(feed(0)), feed(0).sum() * torch.full((3,), 5.0))
    finally:
        handle.remove()


def test_a_decode_that_the_user_put_there_meanwhile_stays() -> None:
    pipe, _, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)

    def mine(x: torch.Tensor) -> str:
        return "mine"

    vae.decode = mine
    handle.remove()
    assert vars(vae).get("decode") is mine


def test_a_decoder_of_two_pipelines_is_watched_until_the_second_is_disabled() -> None:
    """Only the first of two offloads watches a decoder that both have."""
    vae = toy(Decoder)
    pipes = [Pipeline(toy(toys.Stack, 4), vae) for _ in range(2)]
    options = {**_OPTIONS, "device_budget": 1 << 20, "transfer": "local"}
    first = pipes[0].enable_distributed_layerwise_offload(**options)
    second = pipes[1].enable_distributed_layerwise_offload(**options)
    first.remove()
    vae.failures = 1
    try:
        vae.decode(feed(0))
    finally:
        second.remove()


def test_what_is_pickled_of_a_watched_decoder_has_its_own_weights() -> None:
    pipe, _, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)
    other = pickle.loads(pickle.dumps(vae))
    handle.remove()
    with torch.no_grad():
        other.weight.fill_(5.0)
        assert torch.equal(other.decode(feed(0)), feed(0).sum() * torch.full((3,), 5.0))


def test_a_copy_of_a_watched_decoder_is_watched_where_it_is_placed() -> None:
    pipe, _, vae = _pipeline()
    pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)
    other = Pipeline(toy(toys.Stack, 6), copy.deepcopy(vae))
    pipe.disable_distributed_layerwise_offload()
    handle = other.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)
    other.vae.failures = 1
    other.vae.decode(feed(0))
    assert other.vae.calls == 2 and vae.calls == 0
    handle.remove()
    assert "decode" not in vars(other.vae)


def test_a_wrapper_that_the_user_put_around_it_outlives_the_offload() -> None:
    pipe, _, vae = _pipeline()
    handle = pipe.enable_distributed_layerwise_offload(**_OPTIONS, device_budget=1 << 20)
    watched = vae.decode
    vae.decode = lambda x: watched(x) * 2
    handle.remove()
    with torch.no_grad():
        assert torch.equal(vae.decode(feed(0)), 2 * feed(0).sum() * torch.ones(3))
    vae.failures = 1
    with pytest.raises(torch.OutOfMemoryError) as caught:
        vae.decode(feed(0))
    assert vae.calls == 2 and "given back" not in str(caught.value)


def _strict_ranks_twice(rank: int, size: int) -> None:
    pipe, transformer, vae = _pipeline()
    reference = toy(toys.Stack, 6)
    options = {**_OPTIONS, "device_budget": 1 << 20, "gather": "collective", "uneven": "error"}
    handle = pipe.enable_distributed_layerwise_offload(**options)
    run(transformer, reference, range(2))
    if rank == 0:
        vae.failures = 2
        with pytest.raises(torch.OutOfMemoryError, match='uneven="error"'):
            vae.decode(feed(0))
    run(transformer, reference, range(2))
    handle.join()
    assert handle.report().resident_bytes == 0
    vae.decode(feed(0))
    handle.remove()


def test_strict_ranks_say_that_memory_comes_at_the_next_forward() -> None:
    run_ranks(2, _strict_ranks_twice)
