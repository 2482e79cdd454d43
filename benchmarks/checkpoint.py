# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the checkpoint that all variants load: real safetensors files with an index, as `save_pretrained` lays them out,
with weights drawn from a seed for each tensor. Must not know how they are held once they are loaded.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from sizes import make_meta_model

from diffusers_dlo.byte_size import format_bytes


FILE_NBYTES = 4 << 30
"""About what a file holds; a few of them are written at a time."""
PIECE_NBYTES = 64 << 20
WRITERS = 4
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, tell: Callable[[str], None]
) -> None:
    """
    Writes a model with random weights, drawn on `device`. A folder that holds just this model is left as it is.

    Raises:
        `ValueError`: the folder holds something else. `OSError`: there is no room.
    """
    model = make_meta_model(config, dtype)
    wanted = {name: json.loads(json.dumps(value)) for name, value in config.items()}
    if (folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        found = json.loads((folder / "config.json").read_text())
        if any(found.get(name) != value for name, value in wanted.items()):
            raise ValueError(f"'{folder}' holds another model; name an empty folder, or remove what is in it.")
        tell(f"the weights are in {folder} already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    files = _share_out(model.state_dict())
    stem = SAFETENSORS_WEIGHTS_NAME.removesuffix(".safetensors")
    paths = [folder / f"{stem}-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    start = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda job: _write_file(*job, device), zip(paths, files)))
    total = sum(tensor.nbytes for file in files for tensor in file.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: path.name for path, file in zip(paths, files) for name in file},
    }
    model.save_config(folder)
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))  # last: what is half written has none
    seconds = time.perf_counter() - start
    tell(f"{format_bytes(total)} written to {folder} in {seconds:.0f} s")


def _share_out(state: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file: neighbours together, up to a size."""
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in state.items():
        if files[-1] and sum(t.nbytes for t in files[-1].values()) + tensor.nbytes > FILE_NBYTES:
            files.append({})
        files[-1][name] = tensor
    return files


def _write_file(path: Path, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """One file, in the order in which safetensors writes one: large items first, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    on_device = device.type != "cpu"
    staging = torch.empty(PIECE_NBYTES, dtype=torch.uint8, pin_memory=on_device)
    stream = torch.get_device_module(device.type).Stream(device) if on_device else None
    # Unbuffered writes of pieces, and not a mapping: a full disk is then an error and not a signal.
    with open(path, "wb", buffering=0) as file, torch.get_device_module(device.type).stream(stream):
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            weight = _draw(name, tensors[name], device).reshape(-1).view(torch.uint8)
            for begin in range(0, weight.numel(), PIECE_NBYTES):
                piece = weight[begin : begin + PIECE_NBYTES]
                target = staging[: piece.numel()]
                target.copy_(piece)
                _write(file.fileno(), target.numpy().data)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _draw(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A weight: normal; of vectors, ones for norms and zeros for biases, so that activations stay in range."""
    if tensor.ndim < 2:
        fill = 0.0 if name.endswith("bias") else 1.0
        return torch.full(tensor.shape, fill, dtype=tensor.dtype, device=device)
    # A seed from the name, so that the order of drawing does not matter.
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).normal_(0, 0.02, generator=generator)


def load_model(folder: Path, dtype: torch.dtype) -> Cosmos3OmniTransformer:
    """The model as users load it: `from_pretrained` in the dtype of the files, which maps them and reads nothing."""
    return Cosmos3OmniTransformer.from_pretrained(folder, dtype=dtype).requires_grad_(False)


def coded_folder(folder: Path) -> Path:
    """Where a checkpoint lies once it is coded: beside it."""
    return folder.with_name(f"{folder.name}-coded")


def is_in_memory(folder: Path) -> bool:
    """Whether the file system of a folder, or of where it is to be, is kept in memory, and so has no cold state."""
    path = folder.resolve()
    while not path.exists():
        path = path.parent
    best, kind = "", ""
    with open("/proc/mounts") as mounts:
        for line in mounts:
            _, point, name, *_ = line.split()
            if path.is_relative_to(point) and len(point) >= len(best):
                best, kind = point, name
    return kind in ("tmpfs", "ramfs")


def cached_part(folder: Path) -> float:
    """The part of a checkpoint, 0 to 1, that the page cache holds."""
    if is_in_memory(folder):
        return 1.0
    cached = total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            size = path.stat().st_size
            for offset in range(0, size, PIECE_NBYTES):
                total += 1
                # In the middle, since headers have been read.
                middle = offset + min(PIECE_NBYTES, size - offset) // 2
                try:
                    os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
                    cached += 1
                except OSError:
                    pass
    return cached / max(total, 1)


def evict(folder: Path) -> None:
    """Has the page cache let go of a checkpoint."""
    os.sync()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path, most: int | None = None) -> float:
    """Reads a checkpoint, or its first bytes, in order by one thread; bytes per second."""
    buffer, nbytes, start = bytearray(16 << 20), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while (most is None or nbytes < most) and (count := file.readinto(buffer)):
                nbytes += count
    return nbytes / (time.perf_counter() - start)
