# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the forward hooks that drive the engine: on blocks, on leaves, on a component's root, and on submodules of a block
that are called outside its turn. Torch forward hooks and not diffusers' registry, which does not run them when forward
raises and breaks `fullgraph` compilation; the registry carries an inert marker, so that diffusers' own tools see us.
Must not hold weights, nor decide what is fetched.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .engine import Engine
from .guards import PlaceholderGuard
from .interrupts import interrupts
from .outputs import own_output
from .tensor_utils import iter_tensors
from .units import Component, Unit
from .validation import refuse_foreign_hooks


MARKER = "distributed_layerwise_offload"


class DistributedLayerwiseOffloadHook(ModelHook):
    """
    An inert entry in a model's `HookRegistry`: it shows in its `repr`, and removing it (`remove_hook(MARKER)`)
    disables the offload. Weights are moved by forward hooks, never here.
    """

    def __init__(self, on_removal: Callable[[], None]) -> None:
        super().__init__()
        self.leaving = False
        self._on_removal = on_removal

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """What diffusers calls when the hook is removed: by its own tools, unless we are `leaving` ourselves."""
        if not self.leaving:
            self.leaving = True
            self._on_removal()
        return module


class ComponentHooks:
    """
    The hooks of one component, all removed together.

    Args:
        engine (`Engine`): what they drive.
        component (`Component`): its state.
        root (`nn.Module`): the component's module.
        modules (`Sequence[tuple[nn.Module, ...]]`): those of each of the component's units, in the same order.
    """

    def __init__(
        self,
        engine: Engine,
        component: Component,
        root: nn.Module,
        modules: Sequence[tuple[nn.Module, ...]],
    ) -> None:
        self._engine = engine
        self._component = component
        # Blocks hold these hooks, and the engine holds blocks: a model that is dropped has to be free to go.
        self._find_root = weakref.ref(root)
        self._handles: list[RemovableHandle] = []
        self._unit_modules = [(module, unit) for parts, unit in zip(modules, component.units) for module in parts]
        self._units_of = {
            id(inner): unit for module, unit in self._unit_modules for inner in module.modules() if inner is not module
        }
        self._hooked: set[int] = set()
        self._first: _FirstForward | None = None
        self._checked = False
        self._entered: tuple[nn.Module, set[int], int] | None = None

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
        for entry in _entries(root, units):
            self._attach_entry(entry)
        HookRegistry.check_if_exists_or_initialize(root).register_hook(
            DistributedLayerwiseOffloadHook(on_removal), MARKER
        )

    def remove(self) -> None:
        """Takes every hook off; real weights are put back by the caller. Idempotent."""
        self.end_first()
        while self._handles:
            self._handles.pop().remove()
        root = self._find_root()
        if root is not None:
            _remove_marker(root)

    def _attach(self, module: nn.Module, unit: Unit) -> None:
        engine = self._engine
        device_type = engine.platform.device.type

        # Disabled *directly*, which is what lets torch.compile(fullgraph=True) step around them without a break.
        @torch.compiler.disable
        def pre(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
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

        @torch.compiler.disable
        def post(module: nn.Module, args: tuple, output: Any) -> Any:
            timing = engine.timing
            if timing is not None:
                timing.hook_begins()
            if torch.is_autocast_enabled(device_type):
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

        self._handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
        # always_call: a block that raises is released too.
        self._handles.append(module.register_forward_hook(post, always_call=True))
        self._hooked.add(id(module))

    def _attach_entry(self, module: nn.Module) -> None:
        """
        Marks where a forward of the component begins and ends: usually its root, but some pipelines call a model in it
        (a text encoder's decoder). The outermost of those called counts.
        """
        inner = {id(m) for m in module.modules() if m is not module}

        @torch.compiler.disable
        def pre(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            # One left by a KeyboardInterrupt, after which torch runs no hooks, does not enclose what is called next.
            if self._entered is None or id(module) not in self._entered[1]:
                self._check_alone()
                self._engine.enter(self._component)
                self.end_first()
                self._entered = (module, inner, threading.get_ident())
                self._begin_first()

        @torch.compiler.disable
        def post(module: nn.Module, args: tuple, output: Any) -> None:
            # Not if entering was refused, to a second thread.
            entered = self._entered
            if entered is not None and entered[0] is module and entered[2] == threading.get_ident():
                self._entered = None
                self.end_first()
                self._checked |= output is not None
                self._engine.leave(self._component, complete=output is not None)

        self._handles.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(post, always_call=True))

    def _check_alone(self) -> None:
        """Functions such as `apply_group_offloading` cannot be guarded, so what they leave behind is looked for."""
        for module in self._watched:
            attributes = vars(module)
            if "_hf_hook" in attributes or "_diffusers_hook" in attributes:
                refuse_foreign_hooks(module, self._component.name)

    # The first forward of a component looks for weights that are used outside their block's turn.

    def _begin_first(self) -> None:
        if self._checked or torch.compiler.is_compiling():
            return
        root = self._watched[0]
        if all(module._compiled_call_impl is None for module in root.modules()):
            with interrupts:
                self._first = _FirstForward(self._component, self._acquire_submodule)
        else:
            self._checked = True  # tracing would see the guard, and compile for it

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


class _FirstForward:
    """
    What is active during the first forward: a global hook on module calls, and, while no block computes, the guard on
    placeholders. Not inside blocks: dynamo gives up for good on what it meets under such a guard. Interrupts are
    deferred while these go on and off: both are kept by torch, which would not take back one of them alone.
    """

    def __init__(self, component: Component, on_call: Callable[[nn.Module], None]) -> None:
        self._handle = register_module_forward_pre_hook(lambda module, args: on_call(module))
        self._component = component
        self._thread = threading.get_ident()
        self._guard: PlaceholderGuard | None = None
        self._inside: set[Unit] = set()
        self._watch()

    def suspend(self, unit: Unit) -> None:
        """A unit computes."""
        if threading.get_ident() == self._thread:
            with interrupts:
                self._inside.add(unit)
                self._unwatch()

    def resume(self, unit: Unit) -> None:
        """A unit has computed, unless the call was one inside another of itself, or was refused to a second thread."""
        if unit.held or threading.get_ident() != self._thread:
            return
        with interrupts:
            self._inside.discard(unit)
            if not self._inside:
                self._watch()

    def close(self) -> None:
        """Ends it all."""
        self._unwatch()
        self._handle.remove()

    def _watch(self) -> None:
        if self._guard is None:
            self._guard = PlaceholderGuard(self._component)
            self._guard.__enter__()

    def _unwatch(self) -> None:
        # The stack of guards belongs to a thread, and goes with it.
        if self._guard is not None and threading.get_ident() == self._thread:
            self._guard.__exit__(None, None, None)
        self._guard = None


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


def _remove_marker(root: nn.Module) -> None:
    """
    Takes the marker out of the registry. A hook that was registered after it and replaces forward calls what lies
    under it through `original_forward`, which the registry does not mend on removal; we do.
    """
    registry: HookRegistry | None = getattr(root, "_diffusers_hook", None)
    if registry is None:
        return
    marker = registry.get_hook(MARKER)
    if not isinstance(marker, DistributedLayerwiseOffloadHook) or marker.leaving:
        return
    index = registry._hook_order.index(MARKER)
    under = registry._fn_refs[index].forward
    over = registry._fn_refs[index + 1 :][:1]
    replaced = [(ref, ref.forward) for ref in over if ref.original_forward is not None]
    marker.leaving = True
    registry.remove_hook(MARKER, recurse=False)
    for ref, forward in replaced:
        ref.forward, ref.original_forward = forward, under
    if not registry.hooks:  # the registry leaves the class's own method on the instance, and itself
        if getattr(vars(root).get("forward"), "__func__", None) is type(root).forward:
            del root.forward
        del root._diffusers_hook
