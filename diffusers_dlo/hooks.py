# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the forward hooks that drive the engine: on blocks, on leaves, on a component's root, and on submodules of a block
that are called outside its turn. Torch forward hooks and not diffusers' registry, which does not run them when forward
raises and breaks `fullgraph` compilation; the registry carries an inert marker (`marker.py`).
Must not hold weights, nor decide what is fetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers.utils import logging
from torch import nn
from torch.utils.hooks import RemovableHandle

from .adapters import adapter_configs, same_objects
from .byte_size import format_bytes
from .compilation import (
    WHY_DISABLED,
    CompiledParts,
    compiled_modules,
    is_caller_compiled,
    refuse_nan,
    refuse_tracing,
)
from .distributed.companions import find_companions
from .engine import Engine
from .first_forward import Entered, FirstForward
from .interrupts import interrupts
from .loader_guards import LoaderGuard, refuse_adapters_of_placeholders
from .marker import put_marker, remove_marker
from .outputs import own_output
from .step_caches import acquire_inside, give_back_references, has_hooks, is_acquired_inside
from .tensor_utils import iter_tensors
from .units import Component, Unit
from .validation import refuse_foreign_hooks


logger = logging.get_logger(__name__)


class ComponentHooks:
    """
    The hooks of one component, all removed together.

    Args:
        engine (`Engine`): what they drive.
        component (`Component`): its state.
        root (`nn.Module`): the component's module.
        modules (`Sequence[tuple[nn.Module, ...]]`): those of each of the component's units, in the same order.
        loaders (`LoaderGuard`): what its loaders of adapters go through.
    """

    def __init__(
        self,
        engine: Engine,
        component: Component,
        root: nn.Module,
        modules: Sequence[tuple[nn.Module, ...]],
        loaders: LoaderGuard,
    ) -> None:
        self._engine = engine
        self._loaders = loaders
        self._component = component
        # Blocks hold these hooks, and the engine holds blocks: a model that is dropped has to be free to go.
        self._find_root = weakref.ref(root)
        self._find_entries: list[weakref.ref[nn.Module]] = []
        self._handles: list[RemovableHandle] = []
        self._unit_modules = [(module, unit) for parts, unit in zip(modules, component.units) for module in parts]
        self._units_of = {
            id(inner): unit for module, unit in self._unit_modules for inner in module.modules() if inner is not module
        }
        self._inside: list[tuple[nn.Module, dict[str, Any]]] = []
        self._hooked: set[int] = set()
        self._first: FirstForward | None = None
        self._checked = self._compiled_checked = self._unwatched = False
        self._compiled: CompiledParts | None = None
        self._adapters = adapter_configs(root)
        self._entered: Entered | None = None

    @property
    def _watched(self) -> tuple[nn.Module, ...]:
        """The component's module, while it is there, and those of its units."""
        root = self._find_root()
        return (*(() if root is None else (root,)), *(module for module, _ in self._unit_modules))

    def attach(self, on_removal: Callable[[], None]) -> None:
        """Puts them on; `on_removal` is called when somebody removes the marker from the registry."""
        for module, unit in self._unit_modules:
            self._attach(module, unit)
        root, *units = self._watched
        self._inside = [(module, vars(module)) for module in root.modules() if module is not root]
        entries = _entries(root, units)
        self._compiled = CompiledParts(root, self._component.name)
        self._find_entries = [weakref.ref(entry) for entry in entries]
        for entry in entries:
            self._attach_entry(entry)
        put_marker(root, on_removal)

    def remove(self) -> None:
        """Takes every hook off; real weights are put back by the caller. Idempotent."""
        self.end_first()
        while self._handles:
            self._handles.pop().remove()
        root = self._find_root()
        if root is not None:
            give_back_references(root)
            remove_marker(root)

    def _attach(self, module: nn.Module, unit: Unit) -> None:
        engine, begin, end = self._engine, partial(self._begin, unit), partial(self._end, unit)

        # Disabled *directly*, which is what lets torch.compile(fullgraph=True) step around them without a break.
        @torch.compiler.disable(reason=WHY_DISABLED)
        def pre(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if not (has_hooks(module) and acquire_inside(module, begin, end, engine.offer(unit))):
                begin(args, kwargs)

        @torch.compiler.disable(reason=WHY_DISABLED)
        def post(module: nn.Module, args: tuple, output: Any) -> Any:
            return None if has_hooks(module) and is_acquired_inside(module) else end(output)

        self._handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
        # always_call: a block that raises is released too.
        self._handles.append(module.register_forward_hook(post, always_call=True))
        self._hooked.add(id(module))

    def _begin(self, unit: Unit, args: tuple, kwargs: dict[str, Any]) -> None:
        """A unit is about to compute."""
        refuse_tracing(unit.component)
        engine = self._engine
        timing = engine.timing
        if timing is not None:
            timing.hook_begins()
        if torch.is_grad_enabled():
            needs_grad = any(tensor.requires_grad for tensor in unit.tensors)
            _refuse_grad(unit, needs_grad or any(t.requires_grad for t in iter_tensors((args, kwargs))))
        engine.acquire(unit)
        if self._first is not None:
            self._first.suspend(unit)
        if timing is not None:
            timing.hook_ends(unit)

    def _end(self, unit: Unit, output: Any) -> Any:
        """It has computed `output`, or raised. Another output to return in its place, or None."""
        engine = self._engine
        timing = engine.timing
        if timing is not None:
            timing.hook_begins()
        if torch.is_autocast_enabled(engine.platform.device.type):
            torch.clear_autocast_cache()  # it holds a cast copy of every weight
        try:
            replaced = own_output(unit, output)
        finally:
            engine.release(unit)
        if self._first is not None:
            self._first.resume(unit)
        if torch.is_grad_enabled():  # an adapter in the block may train where its inputs need no gradient
            _refuse_grad(unit, any(t.requires_grad for t in iter_tensors(output)))
        if timing is not None:
            timing.hook_ends(unit)
        return replaced

    def _attach_entry(self, module: nn.Module) -> None:
        """
        Marks where a forward of the component begins and ends: usually its root, but some pipelines call a model in it
        (a text encoder's decoder). The outermost of those called counts.
        """
        inner = {id(m) for m in module.modules() if m is not module}

        @torch.compiler.disable(reason=WHY_DISABLED)
        def pre(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            refuse_tracing(self._component.name)
            if self._entered is None or not self._entered.encloses(module):
                self._check_alone()
                self._check_adapters()
                entries = (find() for find in self._find_entries)
                self._component.companions = find_companions(entry for entry in entries if entry is not None)
                self._engine.enter(self._component)
                self.end_first()
                self._entered = Entered(module, inner)
                self._begin_first(self._entered)

        @torch.compiler.disable(reason=WHY_DISABLED)
        def post(module: nn.Module, args: tuple, output: Any) -> None:
            # Not if entering was refused, to a second thread.
            if self._entered is not None and self._entered.is_of(module):
                self._entered = None
                self.end_first()
                self._engine.leave(self._component, complete=output is not None)
                self._end_checks(output)

        self._handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(post, always_call=True))

    def _check_alone(self) -> None:
        """Functions such as `apply_group_offloading` cannot be guarded, so what they leave behind is looked for."""
        root, name = self._find_root(), self._component.name
        if root is not None:
            refuse_foreign_hooks(root, name, self._engine.platform.device)
        for module, attributes in self._inside:
            if "_hf_hook" in attributes or "_diffusers_hook" in attributes:
                refuse_foreign_hooks(module, name)
        assert self._compiled is not None
        self._compiled.refuse_recorded_graphs()

    def _check_adapters(self) -> None:
        """The forward after adapters came or went is checked as a first one: some read weights of other modules."""
        root = self._find_root()
        configs = () if root is None else adapter_configs(root)
        if root is not None and not same_objects(configs, self._adapters):
            self._loaders.refuse_merging()
            refuse_adapters_of_placeholders(root, self._component)
            self._adapters = configs
            self._checked = False

    # The first forward of a component looks for weights that are used outside their block's turn.

    def _begin_first(self, entered: Entered) -> None:
        # Dynamo gives up for good on what it meets under the guard.
        self._unwatched = not self._compiled_checked and is_caller_compiled()
        if self._checked or self._unwatched:
            return
        inside = {*self._units_of, *(id(module) for module, _ in self._unit_modules)}
        compiled = compiled_modules(self._watched[0])
        self._unwatched = any(id(module) not in inside for module in compiled)
        if not self._unwatched:
            with interrupts:
                self._first = FirstForward(
                    self._component, entered, self._acquire_submodule, self._keep_leaf, bool(compiled)
                )

    def _end_checks(self, output: Any) -> None:
        """A forward has returned `output`, or raised if that is None."""
        if output is None:
            return
        if self._unwatched:
            refuse_nan(output, self._component.name)
            self._compiled_checked = True
        self._checked = True

    def end_first(self) -> None:
        """Ends the checks of the first forward."""
        # Also reached by the next forward: torch runs no hook after a KeyboardInterrupt.
        with interrupts:
            if self._first is not None:
                self._first.close()
                self._first = None

    def _acquire_submodule(self, module: nn.Module) -> None:
        """A module is about to be called: if it is part of a block that is not, it acquires that block from now on."""
        unit = self._units_of.get(id(module))
        if unit is None or unit.held or id(module) in self._hooked:
            return
        self._attach(module, unit)
        self._engine.acquire(unit)  # the hook just added takes part from the next call on; its counterpart in this one
        if self._first is not None:
            self._first.suspend(unit)

    def _keep_leaf(self, leaf: Unit) -> None:
        """A leaf's weights are read where its module is not called, so no hook fetches them: they stay from now on."""
        self._engine.acquire(leaf)
        leaf.keep()
        self._engine.release(leaf)
        logger.warning(
            f"'{leaf.layout.name}' of '{leaf.component}' is used without being called, so its "
            f"{format_bytes(leaf.layout.nbytes)} stay on the device."
        )


def _refuse_grad(unit: Unit, needs_grad: bool) -> None:
    if needs_grad:
        raise RuntimeError(
            f"{unit} was called with gradients enabled; its weights leave the device after the call, so a backward "
            "pass would be wrong. Run it under torch.no_grad() or torch.inference_mode()."
        )


def _entries(root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that enclose units and can be called: the root, and models inside it."""
    wanted = {id(unit) for unit in units}
    return [
        module
        for module in root.modules()
        if id(module) not in wanted
        and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and (module is root or any(id(m) in wanted for m in module.modules()))
    ]
