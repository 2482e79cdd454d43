# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what the offload has to know of compilers: whether a module or its caller is compiled, and into what, and whether
it is being traced. Must not compile, nor change what is compiled.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from .device.platform import GRAPHS, GRAPHS_BACKENDS, GRAPHS_OPTION
from .tensor_utils import iter_tensors


WHY_DISABLED = (
    "the weights of a streamed block arrive before it is called and leave after, so a graph ends there: with "
    "fullgraph=True compile the blocks, by compile_repeated_blocks, and not the whole model"
)
"""Shown by torch.compile where it may not break a graph."""

_EVAL_FRAME = "torch._dynamo.eval_frame"


def refuse_tracing(name: str) -> None:
    """
    Raises:
        `RuntimeError`: what records a call for later use would record placeholders.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        raise RuntimeError(
            f"'{name}' is being exported or traced while it is under distributed layerwise offload: what is recorded "
            "would hold placeholders. Disable it first; torch.compile works with it enabled."
        )


def records_graphs(compiled: object) -> bool:
    """Whether a compiled call is recorded into device graphs, which replay with the addresses that they recorded."""
    read = getattr(compiled, "get_compiler_config", None)
    if read is not None and (read() or {}).get(GRAPHS_OPTION):
        return True
    # A function of torch's, made in a method of the compiler, which is to be had from nothing else.
    return any(_records_addresses(cell.cell_contents) for cell in getattr(read, "__closure__", None) or ())


def _records_addresses(compiler: object) -> bool:
    if (getattr(compiler, "compiler_config", None) or {}).get(GRAPHS_OPTION):
        return True
    backend = getattr(compiler, "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return getattr(backend, "compiler_name", None) in GRAPHS_BACKENDS


def is_caller_compiled() -> bool:
    """Whether this call comes from a compiled one."""
    return next(_compiled_callers(), None) is not None


def _compiled_callers() -> Iterator[Any]:
    """The compilers of the calls that this one comes from."""
    eval_frame = sys.modules.get(_EVAL_FRAME)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and eval_frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename == eval_frame.__file__:
            yield frame.f_locals.get("self")
        frame = frame.f_back


class CompiledParts:
    """
    What of a component is compiled; asked at every forward, since anything may be compiled at any time.

    Args:
        root (`nn.Module`): the component's module. Not kept, so that it is free to go.
        name (`str`): what to call it in messages.
    """

    def __init__(self, root: nn.Module, name: str) -> None:
        self._name = name
        self._find_root = weakref.ref(root)
        self._parts = [(type(part).__name__, vars(part)) for part in root.modules() if part is not root]

    def refuse_recorded_graphs(self) -> None:
        """
        Raises:
            `ValueError`: a part of the component, or what calls it, was compiled into device graphs.
        """
        wrapper = getattr(sys.modules.get(_EVAL_FRAME), "OptimizedModule", None)
        if wrapper is None:
            return
        root = self._find_root()
        for kind, state in (*(() if root is None else ((type(root).__name__, vars(root)),)), *self._parts):
            children = state["_modules"]
            # A thousand parts are asked in each forward, and few or none are compiled.
            if not (state.get("_compiled_call_impl") or "forward" in state or wrapper in map(type, children.values())):
                continue
            compiled = [state.get("_compiled_call_impl"), state.get("forward")]
            compiled += [vars(child).get("forward") for child in children.values() if type(child) is wrapper]
            if any(call is not None and records_graphs(call) for call in compiled):
                raise ValueError(recorded_graphs_text(self._name, kind))
        for compiler in _compiled_callers():
            if _records_addresses(compiler):
                raise ValueError(recorded_graphs_text(self._name, "its caller"))


def recorded_graphs_text(name: str, kind: str) -> str:
    """The refusal of what was compiled into device graphs."""
    return (
        f"'{name}' ({kind}) is compiled with mode=\"reduce-overhead\" or another that records {GRAPHS}: they "
        "replay fixed addresses, and a block's address changes with its slot. Use another mode."
    )


def compiled_modules(root: nn.Module) -> list[nn.Module]:
    """A module and its parts, as far as they are compiled, in place or in a wrapper."""
    compiled = [part for part in root.modules() if part._compiled_call_impl is not None or "dynamo_ctx" in vars(part)]
    return [getattr(part, "_orig_mod", part) for part in compiled]


def refuse_nan(output: Any, name: str) -> None:
    """
    Raises:
        `RuntimeError`: a forward that could not be watched has returned what placeholders are made of.
    """
    if any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in iter_tensors(output)):
        raise RuntimeError(
            f"'{name}' returned NaN in its first forward. It is compiled as a whole, so nothing could tell whether "
            "weights were used outside their block's turn, when NaN stands in their place. In a new process, run it "
            "once before it is compiled, with the offload enabled: such a use is then mended, or named."
        )
