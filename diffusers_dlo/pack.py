# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the making of packed checkpoints: ordinary diffusers and transformers checkpoints whose weights lie in the order
of blocks, in the dtype they are to be used in, coded or not; and of ordinary ones from coded ones. Must not change the
checkpoint it reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from diffusers import ModelMixin
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn

from .checkpoint.container import Container, write_bytes
from .checkpoint.loading import mapped_loading
from .checkpoint.safetensors_file import damaged
from .coding.codec import ON_HOST, Codec
from .coding.coded_file import CodedFile, read_coded_file
from .coding.loading import release
from .coding.packing import write_coded
from .coding.shard_coding import CODED_DTYPES
from .coding.unpacking import FileDecoder, check_file
from .config import DistributedLayerwiseOffloadConfig
from .device.onload import default_device
from .device.platform import get_platform
from .packed_directory import (
    coded_components,
    copy_component,
    copy_rest,
    find_source,
    is_pipeline,
    mark_coded,
    new_directory,
    read_config,
    refuse_present,
)
from .packed_weights import check_written, weights_name, write_weights
from .selection import select


_MOST_RANKS = 64


def pack_checkpoint(
    model: str, out: str, dtype: torch.dtype, codec: str | None = None, ranks: int | None = None
) -> list[str]:
    r"""
    Writes a checkpoint anew so that the offload streams it from disk as it is: in `dtype`, each block in one piece.
    `from_pretrained(out, dtype=dtype)` loads it as it loads any other. With a codec, the blocks of diffusers' models
    are coded, without loss: such a checkpoint is for this package to load and to enable, and `decode_checkpoint` makes
    an ordinary one of it.

    Args:
        model (`str`): a directory with a pipeline (`model_index.json`) or a single model (`config.json`), or the name
            of a pipeline on the Hub. Of a pipeline, the components that would stream are packed; others are copied.
        out (`str`): the directory to make. It appears once it is complete, or not at all.
        dtype (`torch.dtype`): floating. Modules that a class keeps in float32 stay so.
        codec (`str`, *optional*): `"ans"`, on a device that has it, or `"zstd"`, on the host.
        ranks (`int`, *optional*, defaults to 1): with a codec, how many shards a block is coded in: as many as ranks
            that are to share weights, 64 at most.

    Returns:
        `list[str]`: the files with packed weights.

    Raises:
        `ValueError`: there is no such checkpoint, or it is coded already; `out` is there already; coding makes nothing
        smaller; `ranks` is no such number. `RuntimeError`: it cannot be written, or would not load as what it was, or
        the codec does not work here; nothing is left of it.
    """
    if ranks is not None and codec is None:
        raise ValueError("'ranks' is for coded checkpoints alone: name a codec too, or leave it out.")
    ranks = 1 if ranks is None else ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"'ranks' must be a whole number from 1 to {_MOST_RANKS}, got {ranks!r}.")
    if codec is not None and str(dtype).removeprefix("torch.") not in CODED_DTYPES:
        raise ValueError(
            f"'{dtype}' is not made smaller by coding, only 16-bit floats are. Pack with dtype bfloat16 or float16, "
            "or without a codec."
        )
    out = os.path.abspath(out)
    refuse_present(out)
    opened = None if codec is None else _open_codec(codec)
    source = find_source(model)
    coded = coded_components(source)
    if coded:
        folder = os.path.normpath(os.path.join(source, coded[0]))
        raise ValueError(f"'{folder}' is coded. Decode it with `diffusers-dlo pack --decode`, and pack that.")
    written = []
    with new_directory(source, out) as folder:
        modules = _load_all(source, dtype)
        if opened is not None:
            _refuse_nothing_to_code(modules, source)
        if "" not in modules:
            copy_rest(source, folder, skip=set(modules))
        smaller = False
        for name, module in modules.items():
            part, title = os.path.join(folder, name), name or type(module).__name__
            copy_component(os.path.join(source, name), part, dtype)
            path = os.path.join(part, weights_name(module))
            if opened is not None and isinstance(module, ModelMixin):
                smaller |= _pack_coded(module, path, title, opened, ranks, dtype)
            else:
                write_weights(module, path, f"Packing {title}")
                check_written(module, part, dtype, path)
            written.append(os.path.join(out, name, os.path.basename(path)))
        if opened is not None and not smaller:
            raise ValueError(
                f"Coding makes no block of '{source}' smaller: only large tensors of 16-bit floats get smaller, and "
                "only where their exponents are alike, as those of weights are. Pack it without a codec."
            )
    return written


def _pack_coded(module: nn.Module, path: str, title: str, codec: Codec, ranks: int, dtype: torch.dtype) -> bool:
    """Writes a model coded, or as it is if that makes nothing smaller; whether it did."""
    folder = os.path.dirname(path)
    coded = write_coded(module, path, title, codec, ranks, dtype)
    if coded.blocks:
        mark_coded(folder, dtype)
    else:
        if os.path.exists(path):
            os.unlink(path)
        write_weights(module, path, f"Packing {title}")
    check_written(module, folder, dtype, path, coded.tensor_names)
    return bool(coded.blocks)


def decode_checkpoint(model: str, out: str) -> list[str]:
    r"""
    Writes the ordinary checkpoint that a coded one was made of: the same files as `pack_checkpoint` writes without a
    codec, in the dtype that it is coded in.

    Args:
        model (`str`): a directory with a coded pipeline or a coded model, or the name of such a pipeline on the Hub.
        out (`str`): the directory to make. It appears once it is complete, or not at all.

    Returns:
        `list[str]`: the files with decoded weights.

    Raises:
        `ValueError`: nothing is coded there; `out` is there already. `RuntimeError`: a file is damaged, or its codec
        does not work here, or is of another series; it cannot be written. Nothing is left of it.
    """
    out = os.path.abspath(out)
    refuse_present(out)
    source = find_source(model)
    names = coded_components(source)
    if not names:
        raise ValueError(f"'{source}' has nothing that is coded: it loads as it is.")
    files = {name: _find_coded(os.path.join(source, name)) for name in names}
    decoders = {name: FileDecoder(coded, _open_codec(coded.codec)) for name, coded in files.items()}
    for name, coded in files.items():
        check_file(coded, f"Checking {name or os.path.basename(source)}")
    modules = _load_coded(source, names)
    written = []
    with new_directory(source, out) as folder:
        if "" not in names:
            copy_rest(source, folder, skip=set(names))
        for name, module in modules.items():
            coded, dtype, part = files[name], getattr(torch, files[name].dtype), os.path.join(folder, name)
            copy_component(os.path.join(source, name), part, dtype)
            mark_coded(part, None)
            path = os.path.join(part, weights_name(module))
            title = f"Decoding {name or type(module).__name__}"
            write_weights(module, path, title, _decoding(coded, decoders[name]))
            check_written(module, part, dtype, path)
            written.append(os.path.join(out, name, os.path.basename(path)))
    return written


def _find_coded(folder: str) -> CodedFile:
    """What the coded file in the directory of a model says."""
    path = os.path.join(folder, SAFETENSORS_WEIGHTS_NAME)
    coded = read_coded_file(path)
    if coded is None:
        raise damaged(path, "its config.json says that it is coded, and it is not")
    return coded


def _load_coded(source: str, names: list[str]) -> dict[str, nn.Module]:
    """The coded models of a checkpoint, their coded weights on the meta device, as ordinary models."""
    modules = {}
    for name in names:
        try:
            modules[name] = load_model(os.path.join(source, name), None)
        except OSError as error:
            raise ValueError(f"'{os.path.join(source, name)}' cannot be loaded ({error}).") from error
        release(modules[name])
    return modules


def _decoding(coded: CodedFile, decoder: FileDecoder) -> Callable[[Container, int, Callable[[int], object]], None]:
    """Writes the weights of coded blocks to their places in a container."""

    def write(container: Container, fd: int, done: Callable[[int], object]) -> None:
        places = container.places("")
        for block in coded.blocks.values():
            for names, data in decoder.tensors(block):
                for name in names:
                    write_bytes(fd, data.numpy().data, places[name].offset)
                    done(data.numel())

    return write


def _open_codec(name: str) -> Codec:
    device = torch.device("cpu") if name == ON_HOST else default_device(None)
    return get_platform(device).open_codec(name)


def _refuse_nothing_to_code(modules: dict[str, nn.Module], source: str) -> None:
    if not any(isinstance(module, ModelMixin) for module in modules.values()):
        kinds = ", ".join(type(module).__name__ for module in modules.values())
        raise ValueError(
            f"'{source}' has no model of diffusers to code (only {kinds}); text encoders run once a prompt, and are "
            "packed as they are. Pack it without a codec."
        )


def _load_all(source: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The models to pack, by their directory in the checkpoint, `""` for a checkpoint that is one model."""
    try:
        with mapped_loading():
            return dict(_load(source, dtype))
    except OSError as error:
        raise ValueError(f"'{source}' cannot be loaded ({error}); only safetensors are.") from error


def _load(folder: str, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
    if is_pipeline(folder):
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        yield from select(pipeline, DistributedLayerwiseOffloadConfig(), None).streamed.items()
    else:
        yield "", load_model(folder, dtype)


def load_model(folder: str, dtype: torch.dtype | None) -> nn.Module:
    """
    The model in a directory, of the class that its `config.json` names.

    Raises:
        `ValueError`: it names none that diffusers or transformers has.
    """
    import diffusers
    import transformers

    config = read_config(os.path.join(folder, "config.json"))
    name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    library = diffusers if "_class_name" in config else transformers
    cls = getattr(library, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"'{folder}' holds a '{name}', which this {library.__name__} does not have.")
    return cls.from_pretrained(folder, dtype=dtype, use_safetensors=True)  # type: ignore[attr-defined]
