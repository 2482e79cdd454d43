# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What a Ctrl-C leaves behind in torch, which runs no hooks after it: nothing, for whatever runs next."""

import gc
import weakref

import pytest
import torch
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from diffusers_dlo import apply_distributed_layerwise_offload
from tests.toys import Failing, feed, toy


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def watching() -> tuple[int, int]:
    """What is active for every module and operation of this process."""
    return len(torch_modules._global_forward_pre_hooks), len(_get_current_dispatch_mode_stack())


@pytest.mark.parametrize("part", ("blocks.1.up", "out"), ids=("in_a_block", "outside_blocks"))
def test_an_interrupted_first_forward_watches_nobody_else(part: str) -> None:
    """The model is dropped, so no forward of its own ends the checks; nor do they, or its engine, keep it."""
    model, other = toy(Failing, 3), toy(Failing, 3, seed=1)
    expected = other(feed(0))
    apply_distributed_layerwise_offload(model)
    model.get_submodule(part).register_forward_pre_hook(_interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(feed(0))
    assert watching() == (1, int(part == "out")), "the first forward is watched"
    dropped = weakref.ref(model)
    del model
    assert torch.equal(other(feed(0)), expected)
    assert watching() == (0, 0)
    handle = apply_distributed_layerwise_offload(other)
    gc.collect()
    assert dropped() is None
    with torch.no_grad():
        assert torch.equal(other(feed(0)), expected)
    handle.remove()
    assert watching() == (0, 0)


def test_the_first_forward_after_an_interrupted_one_is_watched() -> None:
    model, reference = toy(Failing, 3), toy(Failing, 3)
    handle = apply_distributed_layerwise_offload(model)
    interrupt = model.out.register_forward_pre_hook(_interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(feed(0))
    interrupt.remove()
    seen = []
    watch = model.out.register_forward_pre_hook(lambda *_: seen.append(watching()))
    with torch.no_grad():
        outputs = [model(feed(seed)) for seed in range(2)]
    assert seen == [(1, 1), (0, 0)]
    watch.remove()
    assert all(torch.equal(output, reference(feed(seed))) for seed, output in enumerate(outputs))
    handle.remove()
