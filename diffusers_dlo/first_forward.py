# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the forward of a component that goes on, and what watches the first one for weights that are used outside their
block's turn. Must not decide what is done about one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .caller import Caller, find_caller
from .compilation import WHY_DISABLED
from .interrupts import interrupts
from .placeholder_guard import PlaceholderGuard
from .units import Component, Unit


class Entered:
    """
    The forward of a component that goes on. Torch runs no hooks after a KeyboardInterrupt: it may have ended unseen.

    Args:
        module (`nn.Module`): what was called; a model that is dropped after an interrupt has to be free to go.
        inner (`set[int]`): the modules in it, by id.
    """

    def __init__(self, module: nn.Module, inner: set[int]) -> None:
        self._find_module = weakref.ref(module)
        self._inner = inner
        self._thread = threading.get_ident()
        self._caller: Caller | None = find_caller(is_root=True)

    @property
    def is_over(self) -> bool:
        """Whether it has ended. May be asked from any thread."""
        return self._caller is not None and not self._caller.is_running()

    @property
    def is_here(self) -> bool:
        """Whether this is its thread."""
        return self._thread == threading.get_ident()

    def encloses(self, module: nn.Module) -> bool:
        """Whether a call of `module` is part of it."""
        return id(module) in self._inner and not self.is_over

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is that of `module`, in this thread."""
        return self._find_module() is module and self.is_here


class FirstForward:
    """
    What is active during the first forward: a global hook on module calls, and, while no block computes, the guard on
    placeholders. Not inside blocks: dynamo gives up for good on what it meets under such a guard, and where blocks are
    `compiled`, it would compile them for the hook. Interrupts are deferred while these go on and off: both are kept by
    torch, which would not take back one of them alone. Where an interrupt ended the forward, the guard lets everything
    pass, and the next call of any module takes both off.
    """

    def __init__(
        self,
        component: Component,
        entered: Entered,
        on_call: Callable[[nn.Module], None],
        keep: Callable[[Unit], None],
        compiled: bool,
    ) -> None:
        self._entered = entered
        self._on_call = on_call
        self._keep = keep
        self._compiled = compiled
        self._handle = self._hook_calls()
        self._component = component
        self._guard: PlaceholderGuard | None = None
        self._inside: set[Unit] = set()
        self._watch()

    def suspend(self, unit: Unit) -> None:
        """A unit computes."""
        if self._entered.is_here:
            with interrupts:
                self._inside.add(unit)
                self._unwatch()

    def resume(self, unit: Unit) -> None:
        """A unit has computed, unless the call was one inside another of itself, or was refused to a second thread."""
        if unit.held or not self._entered.is_here:
            return
        with interrupts:
            self._inside.discard(unit)
            if not self._inside:
                self._watch()

    def close(self) -> None:
        """Ends it all."""
        self._unwatch()
        self._handle.remove()

    def _hook_calls(self) -> RemovableHandle:
        @torch.compiler.disable(reason=WHY_DISABLED)
        def pre(module: nn.Module, args: tuple) -> None:
            if self._entered.is_here and self._entered.is_over:
                with interrupts:
                    self.close()
            else:
                self._on_call(module)

        return register_module_forward_pre_hook(pre)

    def _watch(self) -> None:
        if self._guard is None:
            self._guard = PlaceholderGuard(self._component, keep=self._keep, is_over=lambda: self._entered.is_over)
            self._guard.__enter__()
            if self._compiled:
                self._handle.remove()
                self._handle = self._hook_calls()

    def _unwatch(self) -> None:
        # The stack of guards belongs to a thread, and goes with it.
        if self._guard is not None and self._entered.is_here:
            self._guard.take_off()
            if self._compiled:
                self._handle.remove()
        self._guard = None
