# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what of one offload stays on the device: the memory, whether shards that stay are pulled, and giving it all back.
Must not decide which blocks stay (`residency.py`), nor when (`resident_agreement.py`).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from diffusers.utils import logging
from torch import nn

from .arena import open_arena
from .byte_size import format_bytes
from .config import DistributedLayerwiseOffloadConfig
from .device.resident import Allocation
from .distributed.control import RankLost
from .engine import Engine
from .gather_lane import GatherLane
from .host.shared_file import Refused
from .offload_plan import OffloadPlan
from .resident_agreement import ResidentAgreement, Step
from .retrying import Retrying, add_note, watch
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
        self._watched: list[weakref.ref[Retrying]] = []  # a model that the user drops has to be free to go
        self._finalizers: list[weakref.finalize] = []
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
            self._allocate_budget()
            self._keep()
        if not self._parts:  # which other ranks read: it cannot be given back
            step = Step.MEASURING if automatic else Step.KEPT
            most = self._plan.residents_for(1 << 62).nbytes
            self._agreement = ResidentAgreement(
                self._engine.platform, self._try_to_allocate, self._keep, self._drop, step, most
            )
            lane = self._agreeing_lane()
            if lane is not None:
                lane.agree_on(self._components, self._agreement)
        for component in self._components:
            component.watcher = self
        for module in placed:
            self._watched += [weakref.ref(watched) for watched in watch(module, self)]

    def close(self) -> None:
        """The offload is taken off: placed models are as they were, and nothing is agreed any more. Idempotent."""
        while self._finalizers:
            self._finalizers.pop().detach()
        self._unwatch()
        if self._agreement is not None:
            self._agreement.stop()

    def end_with(self, modules: Sequence[nn.Module]) -> None:
        """Placed models, which may live on, are let go with the last of these `modules`, which stream."""
        for module in modules:
            finalizer = weakref.finalize(module, self._lose_module)
            finalizer.atexit = False
            self._finalizers.append(finalizer)

    def _lose_module(self) -> None:
        if not any(finalizer.alive for finalizer in self._finalizers):
            self._unwatch()

    def _unwatch(self) -> None:
        while self._watched:
            watched = self._watched.pop()()
            if watched is not None:
                watched.let_go(self)

    def fill(self) -> None:
        """Brings what no pass brings. All ranks together; nobody reads before all have."""
        if not self.pulls_all:
            return
        failure: Exception | None = None
        for component in self._components:  # all of them, and no interrupt in between: see [Note: Lone gather]
            try:
                self._engine.lanes.fill(component)
            except RankLost as error:
                failure = error
                break
            except Exception as error:
                failure = failure or error
        with self._engine.group.agreement("enable: resident shards"):
            if failure is not None:
                raise failure

    # What the engine says of forwards (`Watcher`)

    def begin(self) -> None:
        if self._agreement is None:
            return
        if self._agreeing_lane() is None:
            self._agreement.settle()
        self._agreement.begin()

    def end(self, complete: bool) -> None:
        error = sys.exc_info()[1]
        if complete and self._agreement is not None:
            self._agreement.end()
        elif not complete and isinstance(error, torch.OutOfMemoryError):
            self.give_back(error)

    # What is asked for memory (`Lender`)

    def give_back(self, error: BaseException) -> bool:
        """The device is out of memory: nothing stays any more, and `error` says so. Whether anything did."""
        nbytes = sum(component.resident_nbytes for component in self._components)
        if self._agreement is None:
            add_note(
                error,
                f"Weights that stay on the device for device_budget={self._plan.device_budget!r} "
                f"({format_bytes(nbytes)}) cannot be given back, because the other ranks read them there. Enable with "
                'a smaller budget, or with gather="collective".',
            )
            return False
        if not self._agreement.give_back():
            return False
        lane = self._agreeing_lane()
        if lane is None:
            self._agreement.settle()
        else:
            lane.seek_round()
        note = (
            f"Weights that stayed on the device for device_budget={self._plan.device_budget!r} are given back "
            f"({format_bytes(nbytes)}){'' if lane is None else ' before the next pass'} and stream from then on. Try "
            "again; if that is too slow, enable with a smaller budget."
        )
        logger.warning(f"rank {self._engine.group.rank} is out of device memory. {note}")
        add_note(error, note)
        return True

    def await_return(self) -> str | None:
        """Waits until what stayed has left: ranks that gather agree on that between their passes."""
        lane, deadline = self._agreeing_lane(), time.monotonic() + _RETURN_SECONDS
        assert self._agreement is not None
        turn = lane.service.turn if lane is not None and lane.service is not None else None
        if turn is not None and turn.options.uneven == "error" and self._agreement.step is not Step.OFF:
            return (
                'With uneven="error" ranks agree at their next forward only, and until then the weights stay. Try '
                'again after it, enable with a smaller budget, or with uneven="ghost".'
            )
        while self._agreement.step is not Step.OFF:
            if time.monotonic() > deadline or (turn is not None and turn.failed):
                return "The weights are still there: the other ranks have not agreed to give theirs back."
            time.sleep(0.01)
        return None

    def _agreeing_lane(self) -> GatherLane | None:
        return next((lane for c in self._live if (lane := self._engine.lanes.agreeing_lane(c)) is not None), None)

    @property
    def _live(self) -> list[Component]:
        """The components that are in a lane still: a model may be gone before what watches it."""
        lanes = [(component, self._engine.lanes.find(component.lane)) for component in self._components]
        return [c for c, lane in lanes if lane is not None and lane.components.get(c.name) is c]

    # What the agreement calls

    def _try_to_allocate(self, nbytes: int) -> bool:
        self._residents = self._plan.residents_for(nbytes)
        try:
            self._allocate()
        except torch.OutOfMemoryError:
            self._allocated = []
            logger.warning(
                f"rank {self._engine.group.rank} has no room for the {format_bytes(nbytes)} that "
                f"device_budget={self._plan.device_budget!r} came to, so nothing stays. Enable with a number of bytes."
            )
            return False
        return True

    def _allocate_budget(self) -> None:
        try:
            self._allocate()
        except torch.OutOfMemoryError as error:
            add_note(
                error,
                f"rank {self._engine.group.rank} has no room for device_budget={self._plan.device_budget!r}, of which "
                f"it needs {format_bytes(self._residents.nbytes)}. Enable with a smaller budget, or with "
                'device_budget="auto", which takes what the first forward leaves free.',
            )
            raise

    def _allocate(self) -> None:
        lanes, peers = self._engine.lanes, self._peers()
        allocated = [(c, lanes.allocate(c, self._residents, peers.get(c.plan.name))) for c in self._live]
        if allocated:
            lanes.add_staging(*allocated[0])
        self._allocated = allocated

    def _keep(self) -> None:
        live = self._live
        for component, allocation in self._allocated:
            if component in live:
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
        for component in self._live:
            self._engine.lanes.of(component).give_back(component)

    def _check_budget(self) -> None:
        budget, plan = self._plan.device_budget, self._plan
        if isinstance(budget, int) and budget and not self._residents and self._engine.group.rank == 0:
            shards = max(plan.shards(component) for component in plan.components if not component.runs_once)
            largest = max(candidate.layout.shard_nbytes(shards) for candidate in plan.candidates)
            staging = ", and staging twice as much" if shards > 1 and plan.stages else ""
            logger.warning(
                f"device_budget={format_bytes(budget)} keeps nothing on the device: what a rank copies of the largest "
                f"block takes {format_bytes(largest)}{staging}. Raise it, or leave it out."
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
