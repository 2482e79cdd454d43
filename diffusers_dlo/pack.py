# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the writing of packed checkpoints: ordinary diffusers and transformers checkpoints whose weights lie in the order
of blocks, in the dtype they are to be used in. Must not change the checkpoint it reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME, logging
from torch import nn

from .block_discovery import find_units
from .casts import middle_bytes, pending_casts, run_dtype, set_pending_casts
from .checkpoint.container import Container, Entry, is_storable
from .checkpoint.loading import mapped_loading
from .checkpoint.mapped import locate_tensors
from .config import DistributedLayerwiseOffloadConfig
from .quantized_parameter import is_known_parameter
from .selection import select
from .wrapped_tensor import is_wrapper


logger = logging.get_logger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf", ".index.json")
"""How the names of weight files end: a packed component has one of its own in their place."""


def pack_checkpoint(model: str, out: str, dtype: torch.dtype) -> list[str]:
    r"""
    Writes a checkpoint anew so that the offload streams it from disk as it is: in `dtype`, each block in one piece.
    `from_pretrained(out, dtype=dtype)` loads it as it loads any other.

    Args:
        model (`str`): a directory with a pipeline (`model_index.json`) or a single model (`config.json`), or the name
            of a pipeline on the Hub. Of a pipeline, the components that would stream are packed; others are copied.
        out (`str`): the directory to make. It appears once it is complete, or not at all.
        dtype (`torch.dtype`): floating. Modules that a class keeps in float32 stay so.

    Returns:
        `list[str]`: the files with packed weights.

    Raises:
        `ValueError`: there is no such checkpoint, or `out` is there already. `RuntimeError`: it cannot be written, or
        would not load as what it was; nothing is left of it.
    """
    out = os.path.abspath(out)
    if os.path.lexists(out):
        raise ValueError(f"'{out}' is there already; name a directory that is not, or remove it first.")
    source = _find(model)
    if os.path.commonpath([os.path.realpath(source), os.path.realpath(out)]) == os.path.realpath(source):
        raise ValueError(f"'{out}' lies inside of '{source}'; name a directory outside of the checkpoint.")
    incomplete = f"{out}.incomplete-{os.getpid()}"
    try:
        os.makedirs(incomplete)
        try:
            with mapped_loading():
                modules = dict(_load(source, dtype))
        except OSError as error:
            raise ValueError(f"'{source}' cannot be loaded ({error}); only safetensors are.") from error
        if "" not in modules:
            _copy_rest(source, incomplete, skip=set(modules))
        written = []
        for name, module in modules.items():
            folder = os.path.join(incomplete, name)
            _copy_component(os.path.join(source, name), folder, dtype)
            path = os.path.join(folder, _weights_name(module))
            _write(module, path, name or type(module).__name__)
            _check(module, folder, dtype, path)
            written.append(os.path.join(out, name, os.path.basename(path)))
        os.rename(incomplete, out)
    except OSError as error:
        raise RuntimeError(f"'{out}' cannot be written ({error.strerror or error}); nothing is left of it.") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)
    return written


def _find(model: str) -> str:
    """The directory of a checkpoint; downloaded where `model` is the name of a pipeline on the Hub."""
    if not os.path.isdir(model):
        if os.path.sep in model.strip(os.path.sep) and os.path.exists(os.path.dirname(model)) or os.path.exists(model):
            raise ValueError(f"'{model}' is not a directory. Name one that holds a checkpoint.")
        from diffusers import DiffusionPipeline

        try:
            model = str(DiffusionPipeline.download(model))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"'{model}' is not a directory here, and not to be had from the Hub ({str(error).splitlines()[0]})."
            ) from error
    if not any(os.path.isfile(os.path.join(model, name)) for name in ("model_index.json", "config.json")):
        raise ValueError(
            f"'{model}' has neither a model_index.json nor a config.json, so it is no checkpoint. "
            "Name the directory of a pipeline or of one of its models."
        )
    return model


def _load(folder: str, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
    """The models to pack, by their directory in the checkpoint, `""` for a checkpoint that is one model."""
    if os.path.isfile(os.path.join(folder, "model_index.json")):
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        yield from select(pipeline, DistributedLayerwiseOffloadConfig(), None).streamed.items()
    else:
        yield "", _load_model(folder, dtype)


def _load_model(folder: str, dtype: torch.dtype) -> nn.Module:
    """
    The model in a directory, of the class that its `config.json` names.

    Raises:
        `ValueError`: it names none that diffusers or transformers has.
    """
    import diffusers
    import transformers

    path = os.path.join(folder, "config.json")
    try:
        with open(path) as file:
            config = dict(json.load(file))
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{path}' is no configuration of a model ({error}).") from error
    name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    library = diffusers if "_class_name" in config else transformers
    cls = getattr(library, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"'{folder}' holds a '{name}', which this {library.__name__} does not have.")
    return cls.from_pretrained(folder, dtype=dtype, use_safetensors=True)  # type: ignore[attr-defined]


def _copy_rest(source: str, out: str, skip: set[str]) -> None:
    for entry in os.scandir(source):
        if entry.is_dir() and entry.name not in skip:
            shutil.copytree(entry.path, os.path.join(out, entry.name))
        elif entry.is_file():
            shutil.copyfile(entry.path, os.path.join(out, entry.name))


def _copy_component(source: str, out: str, dtype: torch.dtype) -> None:
    """Copies what lies beside the weights: configurations, with the dtype that they name set to the new one."""
    os.makedirs(out, exist_ok=True)
    for entry in os.scandir(source):
        if not entry.is_file() or entry.name.endswith(_WEIGHTS):
            continue
        target = os.path.join(out, entry.name)
        shutil.copyfile(entry.path, target)
        if entry.name == "config.json":
            with open(target) as file:
                config = json.load(file)
            _set_dtype(config, str(dtype).removeprefix("torch."))
            with open(target, "w") as file:
                json.dump(config, file, indent=2)
                file.write("\n")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _set_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value is not None:
            config[key] = dtype


def _weights_name(module: nn.Module) -> str:
    from transformers import PreTrainedModel

    return "model.safetensors" if isinstance(module, PreTrainedModel) else SAFETENSORS_WEIGHTS_NAME


def _write(module: nn.Module, path: str, name: str) -> None:
    """Writes the weights of a model in the order of its blocks, what is in no block after them."""
    state = _state_of(module)
    names = {id(tensor): key for key, tensor in reversed(state.items())}
    groups: list[list[Entry]] = []
    done: set[str] = set()
    for unit in find_units(module)[0]:
        keys = [names[id(owned.tensor)] for owned in unit.tensors if id(owned.tensor) in names]
        groups.append([_entry(key, state[key]) for key in keys])
        done.update(keys)
    groups.append([_entry(key, tensor) for key, tensor in state.items() if key not in done])
    container = Container(groups, {"format": "pt"})
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, container.nbytes)
        with logging.tqdm(
            total=container.nbytes - len(container.header), desc=f"Packing {name}", unit="B", unit_scale=True
        ) as bar:
            container.write_share(fd, 0, 1, bar.update)
        container.write_header(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
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


def _entry(name: str, tensor: torch.Tensor) -> Entry:
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


def _check(module: nn.Module, folder: str, dtype: torch.dtype, path: str) -> None:
    """Makes sure that what was written loads as the model that it was, straight from the file."""
    loaded = type(module).from_pretrained(folder, dtype=dtype)  # type: ignore[attr-defined]
    expected, found = _state_of(module), _state_of(loaded)
    if expected.keys() != found.keys():
        raise RuntimeError(
            f"'{path}' does not load as it should: {sorted(expected.keys() ^ found.keys())[:5]} differ."
        )
    located = locate_tensors(found.values())
    for key, tensor in found.items():
        _compare(key, expected[key], tensor, path)
        if id(tensor) not in located.ranges and tensor.numel():
            raise RuntimeError(f"'{key}' of '{path}' is not read from the file: {located.main_reason}.")


def _compare(name: str, expected: torch.Tensor, found: torch.Tensor, path: str) -> None:
    if run_dtype(expected) != found.dtype or expected.shape != found.shape:
        raise RuntimeError(f"'{name}' of '{path}' loads as {found.dtype}, {tuple(found.shape)}.")
    if middle_bytes(_entry(name, expected).tensor) != middle_bytes(found.contiguous()):
        raise RuntimeError(f"'{name}' of '{path}' does not load with the values that were written.")
