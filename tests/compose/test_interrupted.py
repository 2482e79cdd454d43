# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What users do next when a KeyboardInterrupt has ended a forward, after which torch runs no hooks: load adapters, save,
enter modes of their own, and drop the model.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.flop_counter import FlopCounterMode

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.process_engine import find_streamed
from tests.compose.adapting import TWO, adapter, assert_same_weights, equal, flux, outputs
from tests.toys import Failing, feed, toy


BETWEEN_BLOCKS, IN_A_BLOCK = "norm_out", "transformer_blocks.1.ff"


def interrupt(model: Any, path: str) -> None:
    """A forward that is interrupted when it comes to a module."""

    def hook(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.get_submodule(path).register_forward_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        outputs(model, 0)
    handle.remove()


def watched() -> tuple[int, int]:
    """The dispatch modes and the global hooks that are on."""
    return torch._C._len_torch_dispatch_stack(), len(torch_modules._global_forward_pre_hooks)


def offloaded() -> tuple[Any, Any, Any]:
    """A transformer with a large leaf that streams, one without offload, and the handle."""
    model, reference = flux(), flux()
    for each in (model, reference):
        torch.manual_seed(0)
        each.proj_out = nn.Linear(32, 20_000)
    return model, reference, apply_distributed_layerwise_offload(model)


@pytest.mark.parametrize("path", (BETWEEN_BLOCKS, IN_A_BLOCK), ids=("between_blocks", "in_a_block"))
def test_adapters_and_saving_after_it(path: str, tmp_path: Any) -> None:
    """In the first forward too, where reads of what is not there are looked for: it is over, and these are none."""
    model, reference, handle = offloaded()
    interrupt(model, path)
    assert watched() == (path == BETWEEN_BLOCKS, 1)
    wanted = reference.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    for each in (model, reference):
        each.load_lora_adapter(adapter("flux", TWO, 6), prefix=None, adapter_name="x")
    assert find_streamed(model.proj_out.weight) is not None  # nothing was taken for a read in forward
    assert equal(outputs(model, 0), outputs(reference, 0)) and watched() == (0, 0)
    handle.remove()
    assert_same_weights(model, reference)


def test_modes_of_users_are_left_and_entered_as_usual() -> None:
    model, reference, handle = offloaded()
    with FlopCounterMode(display=False):
        interrupt(model, BETWEEN_BLOCKS)
    counted = []
    for each in (model, reference):
        with FlopCounterMode(display=False) as counter:
            outputs(each, 0)
        counted.append(counter.get_total_flops())
        assert watched() == (0, 0)
    assert counted[0] == counted[1] > 0
    interrupt(model, IN_A_BLOCK)
    handle.remove()
    assert watched() == (0, 0)


@pytest.mark.parametrize("first", (True, False), ids=("in_the_first_forward", "later"))
@pytest.mark.parametrize("path", (BETWEEN_BLOCKS, IN_A_BLOCK), ids=("between_blocks", "in_a_block"))
def test_a_model_dropped_after_it_is_free(path: str, first: bool) -> None:
    """Nothing keeps the call that was interrupted, which has the model and what it computed: its memory is free."""
    model, reference, handle = offloaded()
    store = weakref.ref(handle._parts[0].component.store)
    if not first:
        outputs(model, 0)
    interrupt(model, path)
    dropped = weakref.ref(model)
    del model, handle
    gc.collect()
    assert dropped() is None
    outputs(reference, 0)
    assert watched() == (0, 0)
    gc.collect()
    assert store() is None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("part", ("blocks.1.up", "out"), ids=("in_a_block", "outside_blocks"))
def test_an_interrupted_first_forward_watches_nobody_else(part: str) -> None:
    """The model is dropped, so no forward of its own ends the checks; nor do they, or its engine, keep it."""
    model, other = toy(Failing, 3), toy(Failing, 3, seed=1)
    expected = other(feed(0))
    apply_distributed_layerwise_offload(model)
    model.get_submodule(part).register_forward_pre_hook(_interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(feed(0))
    assert watched() == (int(part == "out"), 1), "the first forward is watched"
    dropped = weakref.ref(model)
    del model
    assert torch.equal(other(feed(0)), expected)
    assert watched() == (0, 0)
    handle = apply_distributed_layerwise_offload(other)
    gc.collect()
    assert dropped() is None
    with torch.no_grad():
        assert torch.equal(other(feed(0)), expected)
    handle.remove()
    assert watched() == (0, 0)


def test_the_first_forward_after_an_interrupted_one_is_watched() -> None:
    model, reference = toy(Failing, 3), toy(Failing, 3)
    handle = apply_distributed_layerwise_offload(model)
    interrupt = model.out.register_forward_pre_hook(_interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(feed(0))
    interrupt.remove()
    seen = []
    watch = model.out.register_forward_pre_hook(lambda *_: seen.append(watched()))
    with torch.no_grad():
        outputs = [model(feed(seed)) for seed in range(2)]
    assert seen == [(1, 1), (0, 0)]
    watch.remove()
    assert all(torch.equal(output, reference(feed(seed))) for seed, output in enumerate(outputs))
    handle.remove()
