# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The engine on `tests/schedules.py`: what a seed enables, in what order its models call their blocks, what raises,
skips, repeats, and is taken off in the middle. One seed is one scenario, of several schedules.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from diffusers_dlo import (
    OffloadHandle,
    api,
    apply_distributed_layerwise_offload,
    plan_distributed_layerwise_offload,
    process_engine,
)
from diffusers_dlo.distributed.group import OffloadGroup, World
from diffusers_dlo.gather_lane import GatherLane
from tests.coded import code_as_it_is
from tests.other_ranks import AbsentRanks, Echo
from tests.queues import MODES, Stream
from tests.schedules import ScheduledPlatform


FORWARDS = 2
"""Of each schedule."""


class Reader(nn.Module):
    """A block that computes nothing, but looks whether its weights are its own, when it is its turn on its stream."""

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        super().__init__()
        self.name = name
        self.weights = nn.ParameterList(torch.randn(size) for size in sizes)
        self.expected = [weight.detach().numpy().tobytes() for weight in self.weights]
        self.is_interrupted = False

    def forward(self, platform: ScheduledPlatform) -> bool:
        platform.read(self.name, [(weight, expected) for weight, expected in zip(self.weights, self.expected)])
        if self.is_interrupted:
            raise KeyboardInterrupt  # after which torch runs no hooks
        return True


class Readers(nn.Module):
    """Blocks of unequal size, called as `calls` say: an index, and the stream that computes it."""

    def __init__(self, name: str, sizes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader(f"{name}block {index}", each) for index, each in enumerate(sizes))
        self.calls: Sequence[tuple[int, Stream]] = ()
        self.error: BaseException | None = None

    def forward(self, platform: ScheduledPlatform) -> bool:
        for index, stream in self.calls:
            with platform.on(stream):
                self.blocks[index](platform)
        if self.error is not None:
            raise self.error
        return True  # with nothing, torch's hooks could not tell it from a forward that raised


@dataclass(frozen=True)
class Kind:
    """
    What is not left to the seed: the options, how many ranks share weights, the budgets of the models in turn as a
    fraction of all shards, how many models there are from the beginning, whether a shard is gathered from its place in
    the block, and whether always from its slot; and which of the blocks are coded, `"all"` or `"some"`.
    """

    transfer: str | None = None
    size: int | None = None
    fractions: tuple[float, ...] = ()
    num_slots: int | None = None
    models: int = 1
    in_place: bool | None = None
    slots_only: bool | None = None
    coded: str = ""


class Scenario:
    """
    One seed: one or two models, enabled, called through some schedules, and disabled.

    Args:
        seed (`int`): all of it depends on this.
        kind (`Kind`): what does not.
        drops, drops_synchronize: as for `ScheduledPlatform`.
        platform: the class of it.
    """

    def __init__(
        self,
        seed: int,
        kind: Kind = Kind(),
        drops: Callable[[str, str, str], bool] | None = None,
        drops_synchronize: str = "",
        platform: type[ScheduledPlatform] = ScheduledPlatform,
    ) -> None:
        self.seed, self.kind = seed, kind
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.platform = platform(drops, drops_synchronize)
        self.platform.reseed(seed, self.random.choice(MODES))
        self.side = self.platform.add_stream("compute")
        transfer = kind.transfer or self.random.choice(("local", "all_gather", "all_gather"))
        size = kind.size or (1 if transfer == "local" else self.random.choice((1, 2, 3)))
        self.group = OffloadGroup(World(0, 1, None, None), range(size), Echo(size))  # type: ignore[arg-type]
        self.ranks = AbsentRanks(self.platform, size)
        if size > 1:
            self.group.gather = self.ranks  # type: ignore[assignment]
            self.ranks.in_place = self._choose(kind.in_place, 0.75)
            self.platform.slots_only = self._choose(kind.slots_only, 0.25)
        self.options = {"transfer": transfer, "num_slots": kind.num_slots or self.random.choice((2, 2, 3, 4))}
        self.options |= {"host": "coded" if kind.coded else "pinned", "gather": "collective"}
        self.folder = tempfile.TemporaryDirectory()
        self.models: list[tuple[Readers, OffloadHandle]] = []
        self.enabled = self.schedules = 0

    def _choose(self, fixed: bool | None, chance: float) -> bool:
        drawn = self.random.random() < chance
        return drawn if fixed is None else fixed

    def enable(self, sizes: Sequence[Sequence[int]] = ()) -> None:
        """One more model, of blocks with weights of these `sizes`, or of any."""
        rng, name = self.random, f"model {self.enabled} "
        self.enabled += 1
        drawn = [[rng.randrange(2, 200) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(2, 8))]
        model = Readers(name, sizes or drawn)
        plan = plan_distributed_layerwise_offload(model, group_size=self.group.size)
        fractions = self.kind.fractions or (rng.choice((0, 0, 0, 0.3, 0.5, 0.9, 1.0, 1.5)),)
        fraction = fractions[(self.enabled - 1) % len(fractions)]
        budget = int(fraction * sum(block.shard_nbytes(self.group.size) for block in plan.blocks)) or None
        if self.kind.coded:
            path = f"{self.folder.name}/{self.enabled}.safetensors"
            code_as_it_is(model, path, self.group.size, lambda block: self.kind.coded == "all" or block % 2 == 0)
        with (
            patch.object(api, "get_platform", lambda device: self.platform),
            patch.object(api, "form_group", lambda world, introductions, timeout: self.group),
        ):
            handle = apply_distributed_layerwise_offload(model, **self.options, device_budget=budget)
        component = handle.plan.components[0].name
        self.ranks.add(handle, {component: model})
        self.models.append((model, handle))

    def steady(self, steps: int, serves: bool = False) -> None:
        """Complete forwards of the first model, or passes that this rank does for others."""
        model, _ = self.models[0]
        model.calls = [(index, self.platform.compute) for index in range(len(model.blocks))]
        for _ in range(steps):
            if serves:
                self.serve()
            else:
                with torch.no_grad():
                    model(self.platform)

    def run(self, schedules: int = 8) -> list[str]:
        """Runs it; the faults that showed, of the first schedule with any."""
        try:
            while len(self.models) < self.kind.models:
                self.enable()
            for _ in range(schedules):
                if self.models and not self.platform.faults:
                    self._schedule()
            faults = list(self.platform.faults)
        finally:
            self.platform.host_reads = True  # disabling reads weights back from the device
            while self.models:
                self.models.pop()[1].remove()
            self.platform.synchronize()
            self.folder.cleanup()
        return faults or self.platform.faults

    def _schedule(self) -> None:
        rng, platform = self.random, self.platform
        platform.reseed(rng.randrange(1 << 30), rng.choice(MODES))
        self.schedules += 1
        if len(self.models) < 2 and rng.random() < 0.25:
            self.enable()
        for _ in range(FORWARDS):
            is_interrupted = self._forward(*rng.choice(self.models))
            if self.group.size > 1 and not is_interrupted and rng.random() < 0.2:
                self.serve()
        if len(self.models) == 2 and rng.random() < 0.25:
            self._take_off(rng.randrange(2))

    def _forward(self, model: Readers, handle: OffloadHandle) -> bool:
        """Whether it was interrupted, so that blocks may still be held."""
        rng = self.random
        order = list(range(len(model.blocks)))
        way = rng.random()
        if way < 0.15:
            order = [index for index in order if rng.random() < 0.5]
        elif way < 0.3:
            order.reverse()
        elif way < 0.45:
            order = [index for index in order for _ in range(rng.randrange(1, 3))]
        elif way < 0.6:
            order = [rng.choice(order) for _ in range(rng.randrange(1, 2 * len(order)))]
        beside = 0.2 if rng.random() < 0.3 else 0.0
        model.calls = [(index, self.side if rng.random() < beside else self.platform.compute) for index in order]
        model.error = None
        if rng.random() < 0.2:
            model.calls = model.calls[: rng.randrange(len(model.calls) + 1)]
            model.error = rng.choice((ZeroDivisionError(), torch.OutOfMemoryError()))
        elif model.calls and rng.random() < 0.1:
            model.blocks[model.calls[-1][0]].is_interrupted = True
        try:
            with torch.no_grad():
                model(self.platform)
        except (ZeroDivisionError, torch.OutOfMemoryError, KeyboardInterrupt):
            pass
        is_interrupted, model.error = any(block.is_interrupted for block in model.blocks), None
        for block in model.blocks:
            block.is_interrupted = False
        if rng.random() < 0.3:
            self.platform.drain(self.platform.compute)
        return is_interrupted

    def serve(self) -> None:
        """A pass that this rank does for others alone."""
        lane = process_engine._engine.lanes.find("all_gather")  # type: ignore[union-attr]
        if not isinstance(lane, GatherLane):
            return
        component = self.random.choice(sorted(lane.components))
        said = {"kind": "run", "component": component, "full": False, "proposal": None, "refused": None}
        with lane.driving():
            lane.grant([said | {"companions": []} | lane.describe_state()] * self.group.size)
            lane.finish_lap(is_ghost=True)

    def _take_off(self, index: int) -> None:
        model, handle = self.models.pop(index)
        if self.random.random() < 0.5:
            self.platform.host_reads = True
            handle.remove()
            self.platform.host_reads = False
            for block in model.blocks:
                for weight, expected in zip(block.weights, block.expected):
                    if weight.detach().numpy().tobytes() != expected:
                        self.platform.faults.append(f"{block.name} has other weights after it was disabled")
            return
        del model, handle  # dropped without a word
        gc.collect()


def repeat(seed: int, **options: Any) -> None:
    """Runs one scenario, and fails with what showed in it."""
    scenario = Scenario(seed, **options)
    faults = scenario.run()
    assert not faults, (
        f"{faults[0]} (schedule {scenario.schedules} of seed {seed}, mode {scenario.platform.mode}). Repeat it with: "
        f'python -c "from tests.scenarios import repeat; repeat({seed})"'
    )
