# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns `mapped_loading`: inside it, models are loaded with their weights left in the mapped file, and the casts that
loading asks for are put off. Must not know of the offload: what is left to do stands on each parameter as
`pending_casts`, see `tensor_utils.py`.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..casts import set_pending_casts
from ..tensor_utils import owned_tensors, put
from .delayed_cast import DataAssignment, DelayedCast, PutOffCasts
from .mapped import mapped_addresses
from .pending_guard import guard_pending


_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers casts in a pool of threads, where no dispatch mode of this thread applies, unless this is set."""


class mapped_loading(ContextDecorator):
    """
    Inside this context `from_pretrained` and `from_single_file`, of models and of pipelines, leave the weights where
    they are, in the mapped checkpoint and in its dtype, and only note the casts that `dtype=` asks for. Enabling the
    offload does them, bit for bit as loading would have, and each rank casts no more than what it stores:

        with diffusers_dlo.mapped_loading():
            pipe = DiffusionPipeline.from_pretrained(path, dtype=torch.bfloat16)
        pipe.enable_distributed_layerwise_offload()

    Without it, a checkpoint in another dtype than the one asked for becomes a private copy in every rank. Where
    dtypes agree, it changes nothing: such weights stay in the file anyway. May be nested, used again, and used as a
    decorator; other threads load as ever, but transformers uses no threads of its own meanwhile.

    Until its weights are cast, a model

    - refuses to compute: `forward`, of it or of the part that is called, raises a `RuntimeError`;
    - casts on `.to`, `.half` and the like, where these change anything, and is an ordinary model then: right
      for what is not to be offloaded, such as a VAE, at the price of the private copy;
    - shows the dtype of the file in `model.dtype`, `state_dict()` and what `save_pretrained` writes;
    - must not be changed: load adapters once the offload is enabled, and what is to be fused without this context.

    What is not left in the file, and cast at once: weights that the loader computes with (fused, transposed or merged
    ones), those of a quantized model, those read with `disable_mmap=True` or `low_cpu_mem_usage=False`, those that
    other threads load (`HF_ENABLE_PARALLEL_LOADING`), and everything on systems other than Linux.
    """

    def __enter__(self) -> None:
        _patches.put()
        _here.open += 1

    def __exit__(self, *error: object) -> None:
        _here.open -= 1
        _patches.take_back()


@dataclass
class _Load:
    """One outermost call of a loader: the modules it has made, and for each call open in it whether it quantizes."""

    found: list[nn.Module] = field(default_factory=list)
    quantizes: list[bool] = field(default_factory=list)
    _mapped: list[tuple[int, int]] = field(default_factory=list)

    def may_wait(self, tensor: torch.Tensor) -> bool:
        """Whether the cast of `tensor` may be put off: it lies in a file, and no quantizer wants it."""
        return not self.quantizes[-1] and self._is_mapped(tensor)

    def _is_mapped(self, tensor: torch.Tensor) -> bool:
        """Whether a file is mapped where `tensor` lies. A stale yes is harmless: the cast is only done later."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        for fresh in (False, True):
            if fresh:
                self._mapped = mapped_addresses()
            index = bisect_right(self._mapped, (start, sys.maxsize)) - 1
            if index >= 0 and stop <= self._mapped[index][1]:
                return True
        return False


class _Here(threading.local):
    """What is going on in this thread: how many contexts are open, and the load in progress."""

    open: int = 0
    load: _Load | None = None


_here = _Here()


@contextmanager
def _loading() -> Iterator[_Load]:
    """A call of a loader, the outermost one or one inside it."""
    load = _here.load
    if load is None:
        load = _here.load = _Load()
        try:
            with DataAssignment(), PutOffCasts(load.may_wait), _loading():
                yield load
        finally:
            _here.load = None
    else:
        load.quantizes.append(False)
        try:
            yield load
        finally:
            load.quantizes.pop()


def _loader(original: classmethod) -> classmethod:
    """The classmethod of a loader with casts put off, in threads that have a context open."""
    function = original.__func__

    @functools.wraps(function)
    def load_mapped(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not _here.open:
            return function(cls, *args, **kwargs)
        outermost = _here.load is None
        with _loading() as load:
            result = function(cls, *args, **kwargs)
            load.found += _modules_of(result)
        if outermost:
            replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            for module in load.found:
                _leave_in_file(module, replaced)
        return result

    return classmethod(load_mapped)


def _quantizer(original: Callable) -> Callable:
    """The method of a quantizer that is called before weights are read: they are its to consume, so no cast waits."""

    @functools.wraps(original)
    def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _here.load is not None:
            _here.load.quantizes[-1] = True
        return original(self, *args, **kwargs)

    return preprocess


def _modules_of(result: Any) -> list[nn.Module]:
    """The models in what a loader returns: a model, a pipeline, or a tuple that begins with a model."""
    if isinstance(result, tuple):
        result = result[0] if result else None
    if isinstance(result, nn.Module):
        return [result]
    components = getattr(result, "components", None)
    parts = components.values() if isinstance(components, dict) else ()
    return [part for part in parts if isinstance(part, nn.Module)]


class _Patches:
    """
    What is exchanged in other libraries while any thread has a context open: the public loaders, the call that tells
    of a quantizer, and an environment variable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._exchanged: list[tuple[type, str, Any, Any]] = []
        self._environment: str | None = None

    def put(self) -> None:
        """One more context is open."""
        with self._lock:
            if not self._contexts:
                for owner, name, change in _places():
                    before = vars(owner)[name]
                    self._exchanged.append((owner, name, before, change(before)))
                for owner, name, _, after in self._exchanged:
                    setattr(owner, name, after)
                self._environment = os.environ.get(_ONE_THREAD)
                os.environ[_ONE_THREAD] = "1"
            self._contexts += 1

    def take_back(self) -> None:
        """One context fewer is open; with the last one everything is as it was."""
        with self._lock:
            self._contexts -= 1
            if self._contexts:
                return
            while self._exchanged:
                owner, name, before, after = self._exchanged.pop()
                if vars(owner)[name] is after:  # what others have put over it since is theirs, and calls on
                    setattr(owner, name, before)
            if self._environment is None:
                os.environ.pop(_ONE_THREAD, None)
            else:
                os.environ[_ONE_THREAD] = self._environment


_patches = _Patches()


def _places() -> list[tuple[type, str, Callable[[Any], Any]]]:
    from diffusers import DiffusionPipeline, ModelMixin
    from diffusers.loaders import FromOriginalModelMixin, FromSingleFileMixin
    from diffusers.quantizers import DiffusersQuantizer
    from transformers import PreTrainedModel
    from transformers.quantizers import HfQuantizer

    return [
        (ModelMixin, "from_pretrained", _loader),
        (PreTrainedModel, "from_pretrained", _loader),
        (DiffusionPipeline, "from_pretrained", _loader),
        (FromOriginalModelMixin, "from_single_file", _loader),
        (FromSingleFileMixin, "from_single_file", _loader),
        (DiffusersQuantizer, "preprocess_model", _quantizer),
        (HfQuantizer, "preprocess_model", _quantizer),
    ]


def _leave_in_file(model: nn.Module, replaced: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """
    Puts ordinary tensors in place of every `DelayedCast` of a loaded model, ties kept, and has it guarded. `replaced`
    holds what was done so far, by the id of what was replaced.
    """
    for owned in owned_tensors(model):
        tensor = owned.tensor
        if not isinstance(tensor, DelayedCast):
            continue
        if id(tensor) not in replaced:
            replaced[id(tensor)] = (tensor, _ordinary(tensor))
        put(owned.owners, replaced[id(tensor)][1])
    guard_pending(model)


def _ordinary(tensor: DelayedCast) -> torch.Tensor:
    """The same in an ordinary tensor over the file, its casts pending, or over what memory the elements have."""
    elements = tensor.elements
    elements.check_unwritten()
    plain = elements.source.detach()
    if isinstance(tensor, nn.Parameter):
        plain = nn.Parameter(plain, requires_grad=tensor.requires_grad)
    for key, value in vars(tensor).items():
        if key not in ("elements", "_is_param"):
            setattr(plain, key, value)
    set_pending_casts(plain, elements.casts)
    return plain
