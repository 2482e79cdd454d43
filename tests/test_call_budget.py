# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What the engine asks of a device for each block, counted. On some devices one wait too many costs more than a gather
does, and Python between kernels is what a short block has no time for.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from diffusers_dlo import api, apply_distributed_layerwise_offload
from diffusers_dlo.host.pinned import PinnedStore
from tests.doubles import DelayedPlatform, Mark, Worker
from tests.ranks import run_ranks
from tests.test_stream_order import LateBlock, LateStack
from tests.toys import feed, toy


CPU = torch.device("cpu")
WIDTHS = (24, 40, 8, 24, 16)


class CountingPlatform(DelayedPlatform):
    """The double, counting what is asked of it, and by which threads."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        super().__init__(device, **options)
        self.calls: Counter[str] = Counter()
        self.submitting: set[int] = set()
        self.using: set[int] = set()
        self.pending: list[threading.Event] = []

    @property
    def is_busy(self) -> bool:
        return not all(event.is_set() for event in self.pending)

    def new_stream(self, high_priority: bool = False) -> Worker:
        self.calls["new stream"] += 1
        return super().new_stream(high_priority)

    def new_event(self) -> Mark:
        self.calls["new event"] += 1
        return super().new_event()

    def empty(self, nbytes: int) -> torch.Tensor:
        self.calls["allocation"] += 1
        return super().empty(nbytes)

    def submit(
        self,
        stream: Worker,
        work: Callable[[], None],
        after: Sequence[Mark] = (),
        record: Mark | None = None,
        timed: Any = None,
    ) -> None:
        self.submitting.add(threading.get_ident())
        self.calls["switch to a stream"] += 1
        self.calls["wait on a stream"] += len(after)
        self.calls["record on a stream"] += record is not None
        end = threading.Event()
        self.pending = [event for event in self.pending if not event.is_set()] + [end]

        def tracked() -> None:
            work()
            end.set()

        super().submit(stream, tracked, after, record, timed)

    def compute_wait(self, event: Mark) -> None:
        self.calls["wait in computing"] += 1
        super().compute_wait(event)

    def compute_record(self, event: Mark) -> None:
        self.calls["record in computing"] += 1
        super().compute_record(event)

    def synchronize(self) -> None:
        self.calls["wait on the host"] += 1
        super().synchronize()

    def use_in_this_thread(self) -> None:
        self.using.add(threading.get_ident())


def run(model: LateStack, platform: CountingPlatform, step: int) -> torch.Tensor:
    LateBlock.stream = platform.compute
    try:
        with torch.no_grad():
            return model(feed(step))
    finally:
        LateBlock.stream = None


def _count(rank: int, size: int, options: dict[str, Any]) -> dict[str, int]:
    """What one forward in the steady state asks for, in all."""
    model, reference = toy(LateStack, WIDTHS), toy(LateStack, WIDTHS)
    platform = CountingPlatform(CPU)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, **options)
    try:
        for step in range(3):
            run(model, platform, step)
        before = Counter(platform.calls)
        output = run(model, platform, 3)
        counted = {name: count - before[name] for name, count in platform.calls.items()}
        with torch.no_grad():
            assert torch.equal(output, reference(feed(3)))
    finally:
        handle.remove()
    return {name: count for name, count in counted.items() if count}


BUDGETS = {
    # A block is copied (behind its slot), waited for before it computes, and its slot given back.
    "local": {
        "switch to a stream": 1,
        "wait on a stream": 1,
        "record on a stream": 1,
        "wait in computing": 1,
        "record in computing": 1,
    },
    # And gathered, behind its own copy.
    "all_gather": {
        "switch to a stream": 2,
        "wait on a stream": 2,
        "record on a stream": 2,
        "wait in computing": 1,
        "record in computing": 1,
    },
}


@pytest.mark.parametrize("transfer", BUDGETS)
def test_what_a_block_asks_of_the_device(transfer: str) -> None:
    """No more than is written above: no event, stream or memory is made, and the host waits for nothing."""
    expected = {name: count * len(WIDTHS) for name, count in BUDGETS[transfer].items()}
    for counted in run_ranks(2, _count, {"transfer": transfer}):
        assert counted == expected


def _serve(rank: int, size: int) -> tuple[int, int, bool]:
    """One rank computes more than the other, whose service thread takes part in the rest."""
    model = toy(LateStack, WIDTHS)
    platform = CountingPlatform(CPU)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, grace=0.05)
    here = threading.get_ident()
    for step in range(2 + 3 * rank):
        run(model, platform, step)
    handle.join()
    others = platform.submitting - {here}
    passes = handle.report().passes
    handle.remove()
    return len(others), passes, others <= platform.using


def test_every_thread_that_submits_work_has_made_the_device_its_own() -> None:
    (served, _, right), (_, passes, also_right) = run_ranks(2, _serve)
    assert passes == 5 and served == 1
    assert right and also_right


def test_pinned_memory_stays_until_what_copies_from_it_has_ended() -> None:
    """Disabled right after a forward, when the next one's first copies are under way."""
    platform = CountingPlatform(CPU, copy_seconds=0.05)
    model = toy(LateStack, WIDTHS)
    with patch.object(api, "get_platform", lambda device: platform):
        handle = apply_distributed_layerwise_offload(model, transfer="local", host="pinned")
    run(model, platform, 0)
    busy: list[bool] = []
    close = PinnedStore.close

    def watched(store: PinnedStore) -> None:
        busy.append(platform.is_busy)
        close(store)

    assert platform.is_busy
    with patch.object(PinnedStore, "close", watched):
        handle.remove()
    assert busy == [False]
