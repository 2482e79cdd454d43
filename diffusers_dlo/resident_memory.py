# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what of one offload stays on the device: the memory, whether shards that stay are pulled, and giving it all back.
Must not decide which blocks stay (`residency.py`), nor when (`resident_agreement.py`).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from diffusers.utils import logging
from torch import nn

from .arena import open_arena
from .byte_size import format_bytes
from .config import DistributedLayerwiseOffloadConfig
from .device.resident import Allocation
from .engine import Engine
from .host.shared_file import Refused
from .offload_plan import OffloadPlan
from .resident_agreement import ResidentAgreement, Step
from .units import Component


logger = logging.get_logger(__name__)

_RETURN_SECONDS = 60.0
"""How long a rank that is out of memory waits for the others to agree that what stays is given back."""


class ResidentMemory:
    """
    What stays on the device for one handle. All ranks of the group make it together.

    Args:
        engine (`Engine`): what streams the rest.
        plan (`OffloadPlan`): with what stays.
        config (`DistributedLayerwiseOffloadConfig`): its `gather`.

    Raises:
        `RuntimeError`: pulls are demanded, and the devices cannot read each other's memory.
    """

    def __init__(self, engine: Engine, plan: OffloadPlan, config: DistributedLayerwiseOffloadConfig) -> None:
        self._engine = engine
        self._plan = plan
        self._config = config
        self._residents = plan.residents
        self._parts: list[torch.Tensor] = []
        self._components: list[Component] = []
        self._allocated: list[tuple[Component, Allocation]] = []
        self._agreement: ResidentAgreement | None = None
        self._watched: list[tuple[nn.Module, str]] = []
        self._check_budget()
        if self._wants_pull(config.gather):
            self._open(is_demanded=config.gather == "pull")

    @property
    def pulls_all(self) -> bool:
        """Whether each rank pulls every block for itself, in no pass."""
        return bool(self._parts) and self._residents.count == len(self._plan.candidates)

    def attach(self, components: Sequence[Component], placed: Iterable[nn.Module] = ()) -> None:
        """
        Allocates what stays, of components that are attached to the engine, and follows their forwards, and what the
        `placed` models encode and decode. All ranks together, while no pass can begin.
        """
        names = {candidate.component for candidate in self._plan.candidates}
        self._components = [component for component in components if component.plan.name in names]
        automatic = self._plan.device_budget == "auto"
        if not automatic and not self._residents:
            return
        if self.pulls_all:
            for component in self._components:
                self._engine.lanes.go_pull(component, self._config)
        if not automatic:
            self._allocate()
            self._keep()
        if self._parts:
            return  # which other ranks read: it cannot be given back
        step = Step.MEASURING if automatic else Step.KEPT
        platform = self._engine.platform
        self._agreement = ResidentAgreement(platform, self._try_to_allocate, self._keep, self._drop, step)
        lane = self._engine.lanes.agreeing_lane(self._components[0])
        if lane is not None:
            lane.agree_on(self._components[0].name, self._agreement)
        for component in self._components:
            component.watcher = self
        for module in placed:
            self._watch(module)

    def unwatch(self) -> None:
        """Placed models are as they were. Idempotent."""
        while self._watched:
            module, name = self._watched.pop()
            vars(module).pop(name, None)

    def _watch(self, module: nn.Module) -> None:
        for name in ("encode", "decode"):
            method = getattr(module, name, None)
            if not callable(method) or name in vars(module):
                continue

            @functools.wraps(method)
            def retrying(*args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> Any:
                try:
                    return method(*args, **kwargs)
                except torch.OutOfMemoryError as error:
                    if not self.give_back(error):
                        raise
                self._await_return()  # here the error is gone, and with it what it kept of the first attempt
                return method(*args, **kwargs)

            vars(module)[name] = retrying
            self._watched.append((module, name))

    def _await_return(self) -> None:
        """Waits until what stayed has left: ranks that gather agree on that between their passes."""
        deadline = time.monotonic() + _RETURN_SECONDS
        assert self._agreement is not None
        while self._agreement.step is not Step.OFF and time.monotonic() < deadline:
            time.sleep(0.01)

    def fill(self) -> None:
        """Brings what no pass brings. All ranks together; nobody reads before all have."""
        if not self.pulls_all:
            return
        with self._engine.group.agreement("enable: resident shards"):
            for component in self._components:
                self._engine.lanes.fill(component)

    # What the engine says of forwards (`Watcher`)

    def begin(self) -> None:
        assert self._agreement is not None
        if self._engine.lanes.agreeing_lane(self._components[0]) is None:
            self._agreement.settle()
        self._agreement.begin()

    def end(self, complete: bool) -> None:
        assert self._agreement is not None
        if complete:
            self._agreement.end()
            return
        error = sys.exc_info()[1]
        if isinstance(error, torch.OutOfMemoryError):
            self.give_back(error)

    def give_back(self, error: BaseException) -> bool:
        """The device is out of memory: nothing stays any more, and `error` says so. Whether anything did."""
        if self._agreement is None:
            return False
        nbytes = sum(component.resident_nbytes for component in self._components)
        if not self._agreement.give_back():
            return False
        lane = self._engine.lanes.agreeing_lane(self._components[0])
        if lane is None:
            self._agreement.settle()
        else:
            lane.seek_round()
        note = (
            f"Weights that stayed on the device for device_budget={self._plan.device_budget!r} are given back "
            f"({format_bytes(nbytes)}) and stream from now on. Try again; if that is too slow, enable with a smaller "
            "budget."
        )
        logger.warning(f"rank {self._engine.group.rank} is out of device memory. {note}")
        error.args = (f"{error.args[0] if error.args else ''}\n{note}", *error.args[1:])
        return True

    # What the agreement calls

    def _try_to_allocate(self, nbytes: int) -> bool:
        self._residents = self._plan.residents_for(nbytes)
        try:
            self._allocate()
        except torch.OutOfMemoryError:
            self._allocated = []
            return False
        return True

    def _allocate(self) -> None:
        peers = self._peers()
        self._allocated = [
            (component, self._engine.lanes.allocate(component, self._residents, peers.get(component.plan.name)))
            for component in self._components
        ]

    def _keep(self) -> None:
        for component, allocation in self._allocated:
            self._engine.lanes.of(component).keep(component, allocation)
        self._allocated = []
        if self._engine.group.rank == 0:
            blocks = len(self._plan.candidates)
            logger.info(
                f"{self._residents.count} of {blocks} blocks stay on the device, in part or whole; "
                f"{format_bytes(self._residents.nbytes)}"
            )

    def _drop(self) -> None:
        self._allocated = []
        for component in self._components:
            self._engine.lanes.of(component).give_back(component)

    def _check_budget(self) -> None:
        budget, plan = self._plan.device_budget, self._plan
        if isinstance(budget, int) and budget and not self._residents and self._engine.group.rank == 0:
            shards = 1 if plan.components[0].transfer == "local" else plan.group_size
            largest = max(candidate.layout.shard_nbytes(shards) for candidate in plan.candidates)
            logger.warning(
                f"device_budget={format_bytes(budget)} keeps nothing on the device: what a rank copies of the largest "
                f"block takes {format_bytes(largest)}, and staging twice as much. Raise it or leave it out."
            )

    def _wants_pull(self, gather: str) -> bool:
        if gather == "collective" or not self._residents.shards:
            return False
        if self._engine.group.gather is None:
            return False
        return gather == "pull" or self._residents.count == len(self._plan.candidates)

    def _open(self, is_demanded: bool) -> None:
        nbytes = sum(candidate.layout.shard_nbytes(self._plan.group_size) for candidate in self._kept_shards())
        try:
            self._parts = open_arena(self._engine.group, self._engine.platform, nbytes)
        except Refused as refusal:
            if is_demanded:
                raise RuntimeError(
                    f'gather="pull" is not to be had here: {refusal}. Use gather="auto", which takes the all-gather '
                    "where devices cannot read each other's memory."
                ) from refusal
            logger.info(f"Shards that stay are gathered by the backend: {refusal}")

    def _kept_shards(self) -> list:
        shards = self._residents.shards
        return [c for c in self._plan.candidates if c.block in shards.get(c.component, ())]

    def _peers(self) -> dict[str, Mapping[int, Sequence[torch.Tensor]]]:
        """The places of all ranks' shards in the arena, by component and block."""
        if not self._parts:
            return {}
        found: dict[str, dict[int, Sequence[torch.Tensor]]] = {}
        start = 0
        with torch.inference_mode(False):
            for component, block, layout in self._kept_shards():
                stop = start + layout.shard_nbytes(self._plan.group_size)
                found.setdefault(component, {})[block] = [part[start:stop] for part in self._parts]
                start = stop
        return found  # type: ignore[return-value]
