# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns filling a meta model from safetensors files through `_remap_ckpt_key` of its class: which key belongs
to which tensor, and all that can be wrong with that. Must not read weights, copy them, or leave a model half filled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from diffusers.utils.torch_utils import unwrap_module
from torch import nn

from ..casts import flat_bytes, run_dtype, set_pending_casts
from ..coding.coded_file import is_shard_key
from ..tensor_utils import born_on_device, owned_tensors, put
from .files import find_checkpoint
from .pending_guard import guard_pending
from .safetensors_file import DTYPES, StoredTensor, damaged, list_some, map_tensors, read_header


_REMAP = "_remap_ckpt_key"


def load_mapped_checkpoint(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    r"""
    Fills a model that was built on the meta device from safetensors, through `_remap_ckpt_key` of its class:
    parameters become views of the mapped files, no byte is read or copied. Ties, `requires_grad` and the training mode
    stay as they are. Where a file's floating dtype is not the model's, the file's is kept, and the cast to the model's
    is done when the offload is enabled, as after `mapped_loading`.

    `_remap_ckpt_key(key)` returns the model's name for a key of the checkpoint, or None for one that the model does
    not use. Every parameter and persistent buffer needs a key; of tied ones, one is enough.

    Args:
        model (`torch.nn.Module`): usually built under `accelerate.init_empty_weights()`; at least one tensor is on
            the meta device. Tensors that have values already are replaced too.
        path (`str` or `os.PathLike`): a `.safetensors` file, a `.safetensors.index.json` file, or a directory that
            holds one of either.

    Returns:
        `torch.nn.Module`: `model`. It is as it was, and no file stays mapped, where an error is raised.

    Raises:
        `TypeError`: the class of `model` does not define `_remap_ckpt_key`.
        `ValueError`: nothing to fill; a coded checkpoint, or several in the directory; an index that leads out of its
            directory; a key that `_remap_ckpt_key` fails on; missing, unexpected, duplicated or mismatched tensors,
            all listed.
        `RuntimeError`: no safetensors, or files that are damaged, missing, or disagree with their index.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module, got {type(model).__name__!r}. Fill a pipeline's models singly.")
    target = unwrap_module(model)
    class_name = type(target).__name__
    remap = remap_function(target)
    if remap is None:
        raise TypeError(
            f"{class_name!r} does not define '{_REMAP}', so the keys of a checkpoint cannot be mapped to its names. "
            "Define it (a key in, the model's name out, None for a key that is not used), or load the model with "
            "from_pretrained, which maps files too."
        )
    if not any(owned.tensor.is_meta for owned in owned_tensors(target)):
        raise ValueError(
            f"{class_name!r} has no tensor on the meta device: there is nothing to fill. Build it under "
            "accelerate.init_empty_weights()."
        )
    found, files = find_checkpoint(os.fsdecode(path))
    sources = _sources(class_name, remap, found, files)
    problems = _problems(target, sources)
    if any(problems.values()):
        raise ValueError(_describe(class_name, found, problems))
    _fill(target, {name: stored[0] for name, stored in sources.items()})
    guard_pending(target)
    return model


def remap_function(model: nn.Module) -> Callable[[str], object] | None:
    """What `_remap_ckpt_key` of the model's class is on this model: static, class or instance method."""
    return getattr(model, _REMAP) if callable(getattr(type(model), _REMAP, None)) else None


def _sources(
    class_name: str, remap: Callable[[str], object], found: str, files: Mapping[str, frozenset[str] | None]
) -> dict[str, list[StoredTensor]]:
    """For each name that keys map to, what the checkpoint found at `found` stores under these keys."""
    headers = {file: read_header(file) for file in files}
    sources: dict[str, list[StoredTensor]] = {}
    for file, listed in files.items():
        absent = sorted((listed or frozenset()).difference(stored.key for stored in headers[file]))
        if absent:
            raise damaged(found, f"'{os.path.basename(file)}' lacks keys it lists there: {list_some(absent)}")
        for stored in headers[file]:
            if is_shard_key(stored.key):
                raise ValueError(
                    f"'{file}' is coded, and a meta model is filled with weights as they are. Load it with "
                    "from_pretrained, or decode it with `diffusers-dlo pack --decode`."
                )
            try:
                name = remap(stored.key)
            except Exception as error:
                raise ValueError(
                    f"'{_REMAP}' of {class_name!r} failed on the key '{stored.key}': {error!r}."
                ) from error
            if name is None:
                continue
            if not isinstance(name, str):
                raise ValueError(
                    f"'{_REMAP}' of {class_name!r} returned {name!r} for the key '{stored.key}'. It must return the "
                    "name of a parameter or buffer, or None for a key that the model does not use."
                )
            if listed is not None and stored.key not in listed:
                raise damaged(found, f"'{os.path.basename(file)}' holds '{stored.key}', which it does not list there")
            sources.setdefault(name, []).append(stored)
    return sources


def _state_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, under each of their names, as in the state dict."""
    return {
        f"{path}.{attribute}" if path else attribute: tensor
        for path, module in model.named_modules(remove_duplicate=False)
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and attribute not in module._non_persistent_buffers_set
    }


def _problems(model: nn.Module, sources: Mapping[str, list[StoredTensor]]) -> dict[str, list[str]]:
    """All that keeps `model` from being filled, by kind."""
    state = _state_names(model)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    missing, unfillable, mismatched, untied = [], [], [], []
    for owned in owned_tensors(model):
        own = names.get(id(owned.tensor), [])
        given = [name for name in own if name in sources]
        if not own and owned.tensor.is_meta:
            unfillable.append(owned.name)
        elif own and not given:
            missing.append(own[0])
        for name in given:
            stored, first = sources[name][0], sources[given[0]][0]
            difference = _difference(owned.tensor, stored)
            if difference:
                mismatched.append(f"{name} ({difference})")
            elif name != given[0] and (stored.dtype != first.dtype or not _same_bytes(stored, first)):
                untied.append(f"{name} and {given[0]}")
    return {
        "missing, no key maps to them": missing,
        "unexpected, the model has no such parameter or persistent buffer": [
            f"{name} (from '{found[0].key}')" for name, found in sources.items() if name not in state
        ],
        "duplicated, several keys map to one name": [
            f"{name} (from {' and '.join(repr(stored.key) for stored in found)})"
            for name, found in sources.items()
            if len(found) > 1
        ],
        "mismatched": mismatched,
        "one tensor in the model, with different values in the checkpoint": untied,
        "non-persistent buffers on the meta device, which no checkpoint fills (build the model under "
        "accelerate.init_empty_weights(), which leaves buffers real)": unfillable,
    }


def _difference(mine: torch.Tensor, stored: StoredTensor) -> str | None:
    """Why what is stored cannot take the place of a tensor of the model."""
    if type(mine) not in (torch.Tensor, nn.Parameter):
        return f"a {type(mine).__name__} in the model; only plain tensors can be filled"
    dtype, wanted = DTYPES.get(stored.dtype), run_dtype(mine)
    castable = dtype is not None and dtype.is_floating_point and wanted.is_floating_point
    if tuple(mine.shape) == stored.shape and (dtype == wanted or castable):
        return None
    theirs, ours = (str(d).removeprefix("torch.") for d in (dtype or stored.dtype, wanted))
    return f"{stored.shape} {theirs} in the checkpoint, {tuple(mine.shape)} {ours} in the model"


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """The only place that reads weights: a tied tensor that the checkpoint holds twice."""
    views = map_tensors((one, other))
    return torch.equal(flat_bytes(views[one]), flat_bytes(views[other]))


def _describe(class_name: str, path: str, problems: Mapping[str, list[str]]) -> str:
    lines = [f"{class_name!r} cannot be filled from '{path}':"]
    lines += [f"  {kind} ({len(names)}): {list_some(names)}" for kind, names in problems.items() if names]
    kinds = [kind.partition(",")[0].partition(" ")[0] for kind, names in problems.items() if names]
    if {"missing", "unexpected", "duplicated", "mismatched"} & set(kinds):
        lines.append(f"Correct '{_REMAP}' of {class_name!r}, or build the model with the checkpoint's configuration.")
    if "missing" in kinds:
        lines.append("Weights whose tie was lost on the meta device must be tied again first (model.tie_weights()).")
    return "\n".join(lines)


def _fill(model: nn.Module, sources: Mapping[str, StoredTensor]) -> None:
    """Puts views in every place that held their tensors; all are made first, so that nothing can fail half-way."""
    by_tensor: dict[int, StoredTensor] = {}
    for name, tensor in _state_names(model).items():
        if name in sources:
            by_tensor.setdefault(id(tensor), sources[name])
    filled = []
    with torch.inference_mode(False):
        views = map_tensors(by_tensor.values())
        for owned in owned_tensors(model):
            if id(owned.tensor) in by_tensor:
                view, wanted = views[by_tensor[id(owned.tensor)]], run_dtype(owned.tensor)
                tensor = born_on_device(owned.tensor, view)
                set_pending_casts(tensor, (wanted,) if wanted != view.dtype else ())
                filled.append((owned.owners, tensor))
    for owners, tensor in filled:
        put(owners, tensor)
