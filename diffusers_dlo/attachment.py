# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns one component while it is offloaded: its module, its units and tensors, its hooks and guards, and their undoing,
from whatever point enabling had reached. Must not talk to other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from .block_discovery import FoundUnit
from .config import DistributedLayerwiseOffloadConfig
from .engine import Engine
from .guards import Guards
from .hooks import ComponentHooks
from .host.store import HostStore
from .loader_guards import LoaderGuard
from .managed_tensor import ManagedTensor
from .offload_plan import ComponentPlan
from .tensor_utils import OwnedTensor
from .units import Component, Unit


HANDLE = "_distributed_layerwise_offload_handle"
"""The attribute of a module or pipeline that holds its `OffloadHandle`."""


def get_handle(module: nn.Module) -> Any:
    """The `OffloadHandle` of a module that is offloaded, or None."""
    return vars(unwrap_module(module)).get(HANDLE)


class Attachment:
    """
    One component and everything that enabling adds to it.

    Args:
        module (`nn.Module`): the component, unwrapped.
        units (`Sequence[FoundUnit]`), resident (`Sequence[OwnedTensor]`): what `find_units` found, in the plan's
        order.
        engine (`Engine`): what streams it.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[FoundUnit],
        resident: Sequence[OwnedTensor],
        engine: Engine,
    ) -> None:
        self.module = module
        self.resident = resident
        self._engine = engine
        self._unit_modules = [unit.modules for unit in units]
        self.owned = [unit.tensors for unit in units]
        self._component: Component | None = None
        self._hooks: ComponentHooks | None = None
        self._guards: Guards | None = None
        self.loaders: LoaderGuard | None = None
        self._store: HostStore | None = None
        self._stored: set[int] = set()
        self._finalizer: weakref.finalize | None = None

    @property
    def component(self) -> Component:
        """Its state in the engine."""
        assert self._component is not None
        return self._component

    def attach_to_engine(
        self, plan: ComponentPlan, store: HostStore, config: DistributedLayerwiseOffloadConfig
    ) -> None:
        """
        Makes the run-time state of the component, as the store's `plan` of it says, and hands it to the engine, which
        allocates slots.
        """
        device = self._engine.platform.device
        name = self._engine.new_name(plan.name)
        keys = {id(unit): key for key, (_, unit) in enumerate(store.plan.units)}
        self._store = store
        units = [
            Unit(name, index, layout, [ManagedTensor(o, device) for o in owned], store, keys[id(layout)])
            for index, (layout, owned) in enumerate(zip((*plan.blocks, *plan.leaves), self.owned))
        ]
        count = len(plan.blocks)
        self._component = Component(name, plan, units[:count], units[count:])
        self._engine.attach(self._component, config)

    def drop_originals(self, unit: Unit) -> None:
        """Lets go of the memory of a unit's original tensors."""
        for tensor in unit.tensors:
            tensor.drop_original()
        self._stored.add(unit.key)

    def drop_all_originals(self) -> None:
        """As `drop_originals`, for every unit that still has them: all ranks have stored everything."""
        for unit in self.component.units:
            if unit.key not in self._stored:
                self.drop_originals(unit)

    def attach_to_module(self, handle: object, on_removal: Callable[[], None]) -> None:
        """Puts the stand-ins, hooks and guards on the module."""
        for unit in self.component.units:
            for tensor in unit.tensors:
                tensor.insert()
        # Kept before they do anything, so that what is half done can be undone.
        self.loaders = LoaderGuard(self.component, self.module)
        self._guards = Guards(self.component, self.module, self._engine.platform.device, self.loaders)
        self._guards.attach()
        self._hooks = ComponentHooks(self._engine, self.component, self.module, self._unit_modules, self.loaders)
        self._hooks.attach(on_removal)
        object.__setattr__(self.module, HANDLE, handle)
        # A pipeline that is dropped without disabling gives its memory back too. At exit there is nothing to give
        # back.
        self._finalizer = weakref.finalize(self.module, self._engine.discard, self.component)
        self._finalizer.atexit = False

    def quiet(self) -> None:
        """Ends what an interrupted first forward left active."""
        if self._hooks is not None:
            self._hooks.end_first()

    def detach(self, device: torch.device | None = None) -> None:
        """
        Undoes whatever was done: no hooks, no guards, ordinary tensors of the original identity, nothing in the
        engine. Where the store has only shards, all ranks do this together. Idempotent.

        Args:
            device (`torch.device`, *optional*): where the weights go. Defaults to where they came from.

        Raises:
            `RuntimeError`: some weights are lost; they are empty now, so that any use of them raises.
        """
        vars(self.module).pop(HANDLE, None)
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._guards is not None:
            self._guards.remove()
            self._guards = None
            self.loaders = None
        if self._component is None:
            return
        lost: RuntimeError | None = None
        for unit in self._component.units:
            try:
                self._restore(unit, device)
            except RuntimeError as error:
                lost = lost or error
                for tensor in unit.tensors:
                    tensor.lose()
        self._engine.detach(self._component)
        self._component = None
        if lost is not None:
            raise lost

    def _restore(self, unit: Unit, device: torch.device | None) -> None:
        values = self._engine.read(unit) if unit.key in self._stored else [None] * len(unit.tensors)
        for tensor, value in zip(unit.tensors, values):
            if value is not None:
                value = tensor.born.detach() if tensor.kept else value
                value = value.to(device or _home_of(tensor.original))
            tensor.restore(value)
        self._stored.discard(unit.key)


def _home_of(original: torch.Tensor) -> torch.device:
    """Where the value of a tensor goes back to: one that was never anywhere, since it is coded, to the host."""
    return torch.device("cpu") if original.is_meta else original.device
