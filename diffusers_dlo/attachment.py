# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns one component while it is offloaded: its module, its units and tensors, its hooks and guards, and their undoing,
from whatever point enabling had reached. Must not talk to other ranks.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from .block_discovery import find_units
from .engine import Engine
from .guards import Guards
from .hooks import ComponentHooks
from .host.store import HostStore, tensor_view
from .offload_plan import ComponentPlan
from .tensor_utils import ManagedTensor, flat_bytes
from .units import Component, Unit


_HANDLE = "_distributed_layerwise_offload_handle"
_SAMPLE_NBYTES = 64


def get_handle(module: nn.Module) -> Any:
    """The `OffloadHandle` of a module that is offloaded, or None."""
    return vars(unwrap_module(module)).get(_HANDLE)


class Attachment:
    """
    One component and everything that enabling adds to it.

    Args:
        module (`nn.Module`): the component, unwrapped.
        plan (`ComponentPlan`): its plan.
        block_names (`Sequence[str]`, *optional*): the lists that the plan was made with.
        engine (`Engine`): what streams it.
    """

    def __init__(
        self, module: nn.Module, plan: ComponentPlan, block_names: Sequence[str] | None, engine: Engine
    ) -> None:
        self.module = module
        self.plan = plan
        self._engine = engine
        units, self.resident = find_units(module, block_names)
        self._unit_modules = [unit.modules for unit in units]
        self._owned = [unit.tensors for unit in units]
        self._component: Component | None = None
        self._hooks: ComponentHooks | None = None
        self._guards: Guards | None = None
        self._store: HostStore | None = None
        self._dropped: set[int] = set()
        self._dropped_module: weakref.finalize | None = None

    @property
    def component(self) -> Component:
        """Its state in the engine."""
        assert self._component is not None
        return self._component

    def fingerprints(self) -> list[str]:
        """
        A line for each unit with a digest of 64 bytes from the middle of its largest tensor: enough to tell another
        checkpoint, adapter or seed from this one without reading the weights.
        """
        lines = []
        for unit, owned in zip((*self.plan.blocks, *self.plan.leaves), self._owned):
            tensor = max(owned, key=lambda item: item.tensor.numel()).tensor
            content = flat_bytes(tensor)
            middle = content.numel() // 2
            sample = content[middle : middle + _SAMPLE_NBYTES].cpu()
            digest = hashlib.sha256(bytes(sample.tolist())).hexdigest()[:12]
            lines.append(f"weights of block '{unit.name}' of '{self.plan.name}': digest {digest}")
        return lines

    def attach_to_engine(self, store: HostStore, num_slots: int) -> None:
        """Makes the run-time state of the component and hands it to the engine, which allocates slots."""
        device = self._engine.platform.device
        name = self._engine.new_name(self.plan.name)
        keys = {id(unit): key for key, (_, unit) in enumerate(store.plan.units)}
        self._store = store
        units = [
            Unit(name, index, layout, [ManagedTensor(o, device) for o in owned], store, keys[id(layout)])
            for index, (layout, owned) in enumerate(zip((*self.plan.blocks, *self.plan.leaves), self._owned))
        ]
        count = len(self.plan.blocks)
        self._component = Component(name, self.plan, units[:count], units[count:])
        self._engine.attach(self._component, num_slots)

    def drop_originals(self, unit: Unit) -> None:
        """Lets go of the memory of a unit's original tensors."""
        for tensor in unit.tensors:
            tensor.drop_original()
        self._dropped.add(unit.key)

    def drop_all_originals(self) -> None:
        """As `drop_originals`, for every unit that still has them: all ranks have stored everything."""
        for unit in self.component.units:
            if unit.key not in self._dropped:
                self.drop_originals(unit)

    def attach_to_module(self, handle: object, on_removal: Callable[[], None]) -> None:
        """Puts the stand-ins, hooks and guards on the module."""
        for unit in self.component.units:
            for tensor in unit.tensors:
                tensor.insert()
        self._guards = Guards(self.component, self.module, self._engine.platform.device)
        self._hooks = ComponentHooks(self._engine, self.component, self.module, self._unit_modules, on_removal)
        object.__setattr__(self.module, _HANDLE, handle)
        # A pipeline that is dropped without disabling gives its memory back too. At exit there is nothing to give
        # back.
        self._dropped_module = weakref.finalize(self.module, self._engine.discard, self.component)
        self._dropped_module.atexit = False

    def detach(self) -> None:
        """
        Undoes whatever was done: no hooks, no guards, ordinary tensors of the original identity, nothing in the
        engine. Where the store has only shards, all ranks do this together. Idempotent.
        """
        vars(self.module).pop(_HANDLE, None)
        if self._dropped_module is not None:
            self._dropped_module.detach()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._guards is not None:
            self._guards.remove()
            self._guards = None
        if self._component is not None:
            try:
                for unit in self._component.units:
                    self._restore(unit)
            finally:
                self._engine.detach(self._component)
                self._component = None

    def _restore(self, unit: Unit) -> None:
        image = self._engine.read(unit) if unit.key in self._dropped else None
        for tensor, layout in zip(unit.tensors, unit.layout.tensors):
            if image is None:
                tensor.restore(None)
            elif tensor.kept:
                tensor.restore(tensor.born.detach().to("cpu", copy=True))
            else:
                tensor.restore(tensor_view(image, layout))
        self._dropped.discard(unit.key)
