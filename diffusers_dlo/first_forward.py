# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what watches the first forward of a component for weights that are used outside their block's turn. Must not
decide what is done about one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from .compilation import WHY_DISABLED
from .interrupts import interrupts
from .placeholder_guard import PlaceholderGuard
from .units import Component, Unit


class FirstForward:
    """
    What is active during the first forward: a global hook on module calls, and, while no block computes, the guard on
    placeholders. Not inside blocks: dynamo gives up for good on what it meets under such a guard, and where blocks are
    `compiled`, it would compile them for the hook. Interrupts are deferred while these go on and off: both are kept by
    torch, which would not take back one of them alone.
    """

    def __init__(
        self,
        component: Component,
        on_call: Callable[[nn.Module], None],
        keep: Callable[[Unit], None],
        compiled: bool,
    ) -> None:
        self._on_call = on_call
        self._keep = keep
        self._compiled = compiled
        self._handle = self._hook_calls()
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

    def _hook_calls(self) -> RemovableHandle:
        @torch.compiler.disable(reason=WHY_DISABLED)
        def pre(module: nn.Module, args: tuple) -> None:
            self._on_call(module)

        return register_module_forward_pre_hook(pre)

    def _watch(self) -> None:
        if self._guard is None:
            self._guard = PlaceholderGuard(self._component, keep=self._keep)
            self._guard.__enter__()
            if self._compiled:
                self._handle.remove()
                self._handle = self._hook_calls()

    def _unwatch(self) -> None:
        # The stack of guards belongs to a thread, and goes with it.
        if self._guard is not None and threading.get_ident() == self._thread:
            self._guard.__exit__(None, None, None)
            if self._compiled:
                self._handle.remove()
        self._guard = None
