# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what of one offload stays on the device: how shards that stay become blocks, the memory, and giving it back. Must
not decide which blocks stay (`residency.py`), nor how much with `"auto"` (`auto_budget.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from diffusers.utils import logging

from .arena import open_arena
from .byte_size import format_bytes
from .config import DistributedLayerwiseOffloadConfig
from .engine import Engine
from .host.shared_file import Refused
from .offload_plan import OffloadPlan
from .units import Component


logger = logging.get_logger(__name__)


class ResidentMemory:
    """
    What stays on the device for one handle. All ranks of the group make it together.

    Args:
        engine (`Engine`): what streams the rest.
        plan (`OffloadPlan`): with what stays.
        gather (`str`): as in the configuration.

    Raises:
        `RuntimeError`: pulls are demanded, and the devices cannot read each other's memory.
    """

    def __init__(self, engine: Engine, plan: OffloadPlan, config: DistributedLayerwiseOffloadConfig) -> None:
        self._engine = engine
        self._plan = plan
        self._residents = plan.residents
        self._parts: list[torch.Tensor] = []
        self._check_budget()
        if self._wants_pull(config.gather):
            self._open(is_demanded=config.gather == "pull")

    @property
    def pulls_all(self) -> bool:
        """Whether each rank pulls every block for itself, in no pass."""
        return bool(self._parts) and self._residents.count == len(self._plan.candidates)

    def lane_of(self, name: str, transfer: str) -> str:
        """The kind of lane that a component of the plan belongs in."""
        return "pull" if self.pulls_all and name in self._names else transfer

    def keep(self, components: Sequence[Component]) -> None:
        """Allocates what stays, of components that are attached to the engine."""
        peers = self._peers()
        for component in components:
            if component.plan.name in self._names:
                self._engine.keep(component, self._residents, peers.get(component.plan.name))

    def fill(self, components: Sequence[Component]) -> None:
        """Brings what no pass brings. All ranks together; nobody reads before all have."""
        if not self.pulls_all:
            return
        with self._engine.group.agreement("enable: resident shards"):
            for component in components:
                self._engine.fill(component)

    @property
    def _names(self) -> frozenset[str]:
        return frozenset((*self._residents.shards, *self._residents.whole))

    def _check_budget(self) -> None:
        budget = self._plan.device_budget
        if isinstance(budget, int) and budget and not self._residents and self._engine.group.rank == 0:
            smallest = min(
                unit.layout.shard_nbytes(self._plan.shards(c))
                for c in self._plan.components
                for unit in self._plan.candidates
                if unit.component == c.name
            )
            logger.warning(
                f"device_budget={format_bytes(budget)} keeps nothing on the device: a single block's part takes "
                f"{format_bytes(smallest)}, and staging may take {format_bytes(2 * smallest)} more."
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
