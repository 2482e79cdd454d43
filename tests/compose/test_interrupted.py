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
