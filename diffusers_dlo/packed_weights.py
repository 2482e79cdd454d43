# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which weights of a model a packed checkpoint holds, and in which order; writing them to one file, and making sure
that the file loads as the model that it was. Must not know what lies beside that file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME, logging
from torch import nn

from .block_discovery import find_units
from .casts import middle_bytes, pending_casts, run_dtype, set_pending_casts
from .checkpoint.container import Container, Entry, is_storable
from .checkpoint.mapped import locate_tensors
from .coding.loading import release
from .quantized_parameter import is_known_parameter
from .wrapped_tensor import is_wrapper


def weights_name(module: nn.Module) -> str:
    """The name of the file that a model is loaded from."""
    from transformers import PreTrainedModel

    return "model.safetensors" if isinstance(module, PreTrainedModel) else SAFETENSORS_WEIGHTS_NAME


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """
    What a checkpoint of the model holds, by name. Of names for one tensor, transformers wants one, and ties the others
    itself; diffusers wants all.
    """
    from transformers import PreTrainedModel

    state = {k: tensor for k, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    if isinstance(module, PreTrainedModel):
        first: dict[int, str] = {}
        state = {key: tensor for key, tensor in state.items() if first.setdefault(id(tensor), key) == key}
    return state


def groups_of(module: nn.Module, state: Mapping[str, torch.Tensor]) -> list[list[Entry]]:
    """
    The weights of a model in the order of its blocks, what is in no block after them.

    Args:
        state (`Mapping[str, torch.Tensor]`): what the checkpoint is to hold, as `state_of` gives it, or a part.
    """
    names = {id(tensor): key for key, tensor in reversed(list(state.items()))}
    groups: list[list[Entry]] = []
    done: set[str] = set()
    for unit in find_units(module)[0]:
        keys = [names[id(owned.tensor)] for owned in unit.tensors if id(owned.tensor) in names]
        groups.append([entry_of(key, state[key]) for key in keys])
        done.update(keys)
    groups.append([entry_of(key, tensor) for key, tensor in state.items() if key not in done])
    return groups


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """
    A tensor as it is written.

    Raises:
        `ValueError`: it is quantized, or of a dtype that cannot be stored.
    """
    if is_wrapper(tensor) or is_known_parameter(tensor):
        raise ValueError(
            f"'{name}' is quantized (a {type(tensor).__name__}), and a packed checkpoint holds weights as they are "
            "computed with. Load and enable the quantized checkpoint as it is."
        )
    if not is_storable(tensor):
        raise ValueError(f"'{name}' is {tensor.dtype}, for which safetensors has no name; cast it first.")
    if not tensor.is_contiguous():
        casts = pending_casts(tensor)
        tensor = tensor.detach().contiguous()
        set_pending_casts(tensor, casts)
    return Entry(name, tensor)


@contextmanager
def new_file(path: str) -> Iterator[int]:
    """A new file, open; all that was written to it has reached the disk when it is closed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def progress(title: str, nbytes: int) -> Any:
    """A progress bar of so many bytes."""
    return logging.tqdm(total=nbytes, desc=title, unit="B", unit_scale=True)


def write_weights(
    module: nn.Module, path: str, title: str, write_others: Callable[[Container, int, Callable], object] | None = None
) -> None:
    """
    Writes the weights of a model to a file, with a progress bar of that title. Of tensors on the meta device
    `write_others(container, fd, done)` writes the bytes.
    """
    container = Container(groups_of(module, state_of(module)), {"format": "pt"})
    with new_file(path) as fd, progress(title, container.nbytes - len(container.header)) as bar:
        os.posix_fallocate(fd, 0, container.nbytes)
        absent = {entry.name: -1 for entry in container.entries if entry.tensor.is_meta}
        container.write_share(fd, 0, 1, bar.update, absent)
        if write_others is not None:
            write_others(container, fd, bar.update)
        container.write_header(fd)


def check_written(
    module: nn.Module, folder: str, dtype: torch.dtype, path: str, elsewhere: Collection[str] = ()
) -> nn.Module:
    """
    Makes sure that what was written loads as the model that it was, straight from the file, but for the values of
    those called in `elsewhere`.

    Returns:
        `nn.Module`: the model that was loaded.

    Raises:
        `RuntimeError`: it does not.
    """
    loaded = type(module).from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    release(loaded)
    expected, found = state_of(module), state_of(loaded)
    if expected.keys() != found.keys():
        raise RuntimeError(
            f"'{path}' does not load as it should: {sorted(expected.keys() ^ found.keys())[:5]} differ."
        )
    located = locate_tensors(tensor for tensor in found.values() if not tensor.is_meta)
    for key, tensor in found.items():
        if run_dtype(expected[key]) != tensor.dtype or expected[key].shape != tensor.shape:
            raise RuntimeError(f"'{key}' of '{path}' loads as {tensor.dtype}, {tuple(tensor.shape)}.")
        if tensor.is_meta != (key in elsewhere):
            raise RuntimeError(f"'{key}' of '{path}' is loaded with values or without, and should not be.")
        if key not in elsewhere:
            _compare(key, expected[key], tensor, path)
            if id(tensor) not in located.ranges and tensor.numel():
                raise RuntimeError(f"'{key}' of '{path}' is not read from the file: {located.main_reason}.")
    return loaded


def _compare(name: str, expected: torch.Tensor, found: torch.Tensor, path: str) -> None:
    if expected.is_meta:
        return
    if middle_bytes(entry_of(name, expected).tensor) != middle_bytes(found.contiguous()):
        raise RuntimeError(f"'{name}' of '{path}' does not load with the values that were written.")
