# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns finding the safetensors files of a checkpoint: a file, an index, or a directory with one of either. Must not read
weights, nor follow an index out of its directory.
"""

from __future__ import annotations

import json
import os

from .safetensors_file import damaged, list_some, without_repeats


_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_USUAL = ("diffusion_pytorch_model.safetensors", "model.safetensors")
"""What diffusers and transformers call a checkpoint in one file; `.index.json` follows where it is in several."""


def find_checkpoint(path: str) -> tuple[str, dict[str, frozenset[str] | None]]:
    """
    The file or index that `path` means, and the files with the keys that an index says each of them holds.

    Raises:
        `ValueError`: several candidates, or an index that leads out of its directory. `RuntimeError`: none, or a
        damaged index.
    """
    found = _pick(path) if os.path.isdir(path) else path
    if not os.path.isfile(found):
        raise RuntimeError(
            f"No safetensors at '{found}': there is no such file. Give a local path; "
            "huggingface_hub.snapshot_download fetches a repository and returns where it lies."
        )
    if found.endswith(_INDEX_SUFFIX):
        return found, _read_index(found)
    if found.endswith(_SUFFIX):
        return found, {found: None}
    raise RuntimeError(
        f"'{found}' is no safetensors file, and others (.bin, .pt, .ckpt, .gguf) cannot be mapped. Convert it with "
        "save_pretrained(..., safe_serialization=True)."
    )


def _pick(directory: str) -> str:
    """The one index, else the one safetensors file, of a directory."""
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and not entry.is_dir())
    files = [name for name in names if name.endswith(_SUFFIX)]
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    # Shards lie beside their index, but a whole checkpoint under its usual name beside it is another one.
    candidates = [*indices, *(name for name in files if name in _USUAL)] if indices else files
    candidates = [f"{name}.index.json" for name in _USUAL if f"{name}.index.json" in indices][:1] or candidates
    if len(candidates) > 1:
        raise ValueError(
            f"'{directory}' holds several checkpoints: {list_some(candidates)}. Give the path of the one to load."
        )
    if not candidates:
        raise RuntimeError(
            f"There are no safetensors in '{directory}'. Other files (.bin, .pt, .ckpt, .gguf) cannot be mapped: "
            "convert them with save_pretrained(..., safe_serialization=True). Of a pipeline, give the folder of one "
            "component."
        )
    return os.path.join(directory, candidates[0])


def _read_index(path: str) -> dict[str, frozenset[str] | None]:
    """
    The files that an index names, and the keys in each. Only names are checked: the files of the Hub's cache are links
    that lead out of the directory.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=without_repeats)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("it has no 'weight_map' from keys to file names")
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    keys: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        keys.setdefault(name, set()).add(key)
    for name in keys:
        if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise ValueError(
                f"'{path}' names the file {name!r}, which may lead out of its directory. Only plain names of files "
                "beside the index are accepted: move the files there and correct the index."
            )
    files = {name: os.path.join(os.path.dirname(path), name) for name in keys}
    absent = [name for name, file in files.items() if not os.path.isfile(file)]
    if absent:
        raise damaged(path, f"it names files that are not there: {list_some(absent)}")
    return {files[name]: frozenset(held) for name, held in keys.items()}
