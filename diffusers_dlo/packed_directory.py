# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the directory of a packed checkpoint: finding the one that is read, having the new one appear complete or not at
all, and what lies in it beside the weights. Must not know how weights are written, nor change the directory it reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .coding.coded_file import METHOD


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf", ".index.json")
"""How the names of weight files end: a packed component has one of its own in their place."""
_QUANTIZATION = "quantization_config"


@contextmanager
def new_directory(source: str, out: str) -> Iterator[str]:
    """
    A directory to fill, which becomes `out` when all has gone well, and else is taken away.

    Raises:
        `ValueError`: `out` is there already, or lies inside of `source`. `RuntimeError`: it cannot be written.
    """
    if os.path.commonpath([os.path.realpath(source), os.path.realpath(out)]) == os.path.realpath(source):
        raise ValueError(f"'{out}' lies inside of '{source}'; name a directory outside of the checkpoint.")
    incomplete = f"{out}.incomplete-{os.getpid()}"
    try:
        os.makedirs(incomplete)
        yield incomplete
        os.rename(incomplete, out)
    except OSError as error:
        raise RuntimeError(f"'{out}' cannot be written ({error.strerror or error}); nothing is left of it.") from error
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def refuse_present(out: str) -> None:
    """
    Refuses a directory that is there.

    Raises:
        `ValueError`: it is.
    """
    if os.path.lexists(out):
        raise ValueError(f"'{out}' is there already; name a directory that is not, or remove it first.")


def find_source(model: str) -> str:
    """
    The directory of a checkpoint; downloaded where `model` is the name of a pipeline on the Hub.

    Raises:
        `ValueError`: there is none.
    """
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


def is_pipeline(folder: str) -> bool:
    """Whether a checkpoint is that of a pipeline, with its models in directories."""
    return os.path.isfile(os.path.join(folder, "model_index.json"))


def coded_components(folder: str) -> list[str]:
    """The models of a checkpoint that are coded, by their directories; `""` for a checkpoint that is one model."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if is_pipeline(folder) else [""]
    found = []
    for name in names:
        path = os.path.join(folder, name, "config.json")
        quantization = read_config(path).get(_QUANTIZATION) if os.path.isfile(path) else None
        if isinstance(quantization, dict) and quantization.get("quant_method") == METHOD:
            found.append(name)
    return found


def read_config(path: str) -> dict[str, Any]:
    """
    The configuration of a model.

    Raises:
        `ValueError`: it is none.
    """
    try:
        with open(path) as file:
            return dict(json.load(file))
    except (ValueError, TypeError) as error:
        raise ValueError(f"'{path}' is no configuration of a model ({error}).") from error


def copy_rest(source: str, out: str, skip: set[str]) -> None:
    """Copies a checkpoint without the directories in `skip`."""
    for entry in os.scandir(source):
        if entry.is_dir() and entry.name not in skip:
            shutil.copytree(entry.path, os.path.join(out, entry.name))
        elif entry.is_file():
            shutil.copyfile(entry.path, os.path.join(out, entry.name))


def copy_component(source: str, out: str, dtype: torch.dtype) -> None:
    """
    Copies what lies beside the weights of a model: configurations, with the dtype that they name set to the new one.
    """
    os.makedirs(out, exist_ok=True)
    for entry in os.scandir(source):
        if entry.is_file() and not entry.name.endswith(_WEIGHTS):
            shutil.copyfile(entry.path, os.path.join(out, entry.name))
    path = os.path.join(out, "config.json")
    if os.path.isfile(path):
        config = read_config(path)
        _set_dtype(config, _name_of(dtype))
        _write_config(path, config)


def mark_coded(folder: str, dtype: torch.dtype | None) -> None:
    """Has the configuration of a model say that it is coded in `dtype`, or, with None, that it is not."""
    path = os.path.join(folder, "config.json")
    config = {key: value for key, value in read_config(path).items() if key != _QUANTIZATION}
    if dtype is not None:
        config[_QUANTIZATION] = {"quant_method": METHOD, "dtype": _name_of(dtype)}
    _write_config(path, config)


def _write_config(path: str, config: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _set_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value is not None:
            config[key] = dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
