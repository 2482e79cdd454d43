# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns trying again what a placed model encodes or decodes, where the device ran out of memory and an offload could give
some back. Must not know what is given back, nor how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn


_NAMES = ("encode", "decode")


class Lender(Protocol):
    """Who has device memory that it can do without."""

    def give_back(self, error: BaseException) -> bool:
        """The device is out of memory, as `error` says, which may be added to. Whether memory is given back."""

    def await_return(self) -> str | None:
        """Waits until it has been given back. Why it has not been, if so."""


class Retrying:
    """
    What is put in place of a method of a model. It belongs to that model: a copy of the model, or what is pickled of
    it, has its own method again.

    Args:
        module (`nn.Module`): whose method it is.
        name (`str`): the method's; the model has it from its class.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._method: Callable[..., Any] = getattr(module, name)
        self._module = module
        self._name = name
        self.lenders: list[Lender] = []
        functools.update_wrapper(self, self._method)

    def let_go(self, lender: Lender) -> None:
        """
        Asks `lender` no more. Without any, the model has its own method again; what the user put there meanwhile
        stays.
        """
        self.lenders = [other for other in self.lenders if other is not lender]
        if not self.lenders and vars(self._module).get(self._name) is self:
            del vars(self._module)[self._name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._method(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            lenders = [lender for lender in list(self.lenders) if lender.give_back(error)]
            if not lenders:
                raise
        # Here the error is gone, and with it what it kept of the first attempt.
        kept = [why for lender in lenders if (why := lender.await_return()) is not None]
        try:
            return self._method(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            for why in kept:
                add_note(error, why)
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)


def watch(module: nn.Module, lender: Lender) -> list[Retrying]:
    """
    Has what `module` encodes and decodes be tried again with what `lender` gives back, until it is let go. What the
    user has put in place of a method stays as it is.
    """
    watched = []
    for name in _NAMES:
        found = vars(module).get(name)
        if callable(getattr(module, name, None)) and (found is None or _is_its_own(found, module, name)):
            found = vars(module)[name] = Retrying(module, name)
        if isinstance(found, Retrying):
            found.lenders.append(lender)
            watched.append(found)
    return watched


def _is_its_own(method: Any, module: nn.Module, name: str) -> bool:
    """Whether a method on the instance is what its class has: as a copy of a watched model has it."""
    inherited = getattr(type(module), name, None)
    return inherited is not None and isinstance(method, MethodType) and method == MethodType(inherited, module)


def add_note(error: BaseException, note: str) -> None:
    """Says more in the text of an error, once."""
    text = str(error.args[0]) if error.args else ""
    if note not in text:
        error.args = (f"{text}\n{note}", *error.args[1:])
