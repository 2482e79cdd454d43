# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Toys whose blocks lie in coded shards. Toys are too small for a codec to make smaller, so their segments lie there as
they are: everything but the codec is what it is for large models. What codecs do is tested with real ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from diffusers_dlo.block_discovery import find_units
from diffusers_dlo.block_layout import lay_out
from diffusers_dlo.checkpoint.container import Container, Entry
from diffusers_dlo.checkpoint.mapped import FileRange
from diffusers_dlo.coding.check_sum import CheckSums, as_text
from diffusers_dlo.coding.coded_block import CodedBlock, CodedShard, CodedTensor, Segment
from diffusers_dlo.coding.coded_file import CodedFile, read_coded_file, shard_key
from diffusers_dlo.coding.loading import put_mark, take_values
from diffusers_dlo.coding.packing import metadata_of, write_header
from diffusers_dlo.coding.shard_coding import shard_bounds
from diffusers_dlo.coding.zstd import ZstdCodec
from diffusers_dlo.host.store import copy_range


def code_as_it_is(
    model: nn.Module, path: Path | str, ranks: int, chooses: Callable[[int], bool] = lambda block: True
) -> None:
    """
    Writes the blocks of a model that `chooses` picks, and that are all in its state dict, to coded shards at `path`,
    and leaves it without their values, as loading does. A file that is there already is taken to hold the same.
    """
    if not os.path.exists(path):
        _write(model, str(path), ranks, chooses)
    coded = read_coded_file(str(path))
    assert coded is not None
    take_values(model, coded)
    put_mark(model, coded)


def _write(model: nn.Module, path: str, ranks: int, chooses: Callable[[int], bool]) -> None:
    codec, sums = ZstdCodec(), CheckSums(torch.device("cpu"))
    state = model.state_dict(keep_vars=True)
    entries, blocks = [], {}
    for index, unit in enumerate(unit for unit in find_units(model)[0] if not unit.is_leaf):
        stored = all(
            state.get(owner.name) is item.tensor and item.tensor.is_contiguous()
            for item in unit.tensors
            for owner in item.owners
        )
        if not stored or not chooses(index):
            continue
        layout = lay_out(unit.name, unit.tensors, is_leaf=False)
        image = torch.zeros(layout.padded_nbytes(1), dtype=torch.uint8)
        copy_range(layout, [item.tensor for item in unit.tensors], 0, image)
        shards = []
        for shard in range(ranks):
            start, stop = shard_bounds(layout.nbytes, ranks, shard)
            data = image[start:stop].clone()
            segments = (Segment(0, stop - start, 0, stop - start),) if stop > start else ()
            place = FileRange("", 0, stop - start)
            shards.append(CodedShard(unit.name, start, stop - start, place, as_text(sums.queue(data)), segments))
            entries.append(Entry(shard_key(unit.name, shard), data))
        tensors = tuple(
            CodedTensor(tuple(owner.name for owner in item.owners), place.dtype, place.shape)
            for item, place in zip(unit.tensors, layout.tensors)
        )
        blocks[unit.name] = CodedBlock(unit.name, layout.digest, layout.nbytes, tensors, tuple(shards))
    coded = CodedFile(path, codec.name, codec.version, ranks, "bfloat16", blocks)
    container = Container([entries], metadata_of(coded))
    part = f"{path}.{os.getpid()}"
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        container.write_share(fd, 0, 1, lambda nbytes: None)
        write_header(container, fd, part, coded)
    finally:
        os.close(fd)
    os.replace(part, path)
