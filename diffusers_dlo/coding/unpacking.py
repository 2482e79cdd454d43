# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns making ordinary weights of a coded file, on the host: all checks first, then block by block. Must not know where
they go, nor choose the codec.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ..block_layout import align
from ..checkpoint.container import chunk_digests, content_digest
from ..checkpoint.safetensors_file import damaged, read_header
from ..packed_weights import progress
from .block_reader import BlockReader, damaged_shard
from .codec import Codec, check_version
from .coded_block import CodedBlock
from .coded_file import CodedFile


def check_file(coded: CodedFile, title: str) -> None:
    """
    Reads a whole file, with a progress bar of that title, and makes sure that it is what was written.

    Raises:
        `RuntimeError`: it is not.
    """
    start = min(stored.offset for stored in read_header(coded.path))
    fd = os.open(coded.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with progress(title, os.fstat(fd).st_size - start) as bar:
            found = content_digest(dict(chunk_digests(fd, start, 0, 1, bar.update)))
    except OSError as error:
        raise damaged(coded.path, error.strerror or error) from error
    finally:
        os.close(fd)
    if found != coded.content:
        raise damaged(coded.path, f"its content is not what was written (SHA-256 {found}, and not {coded.content})")


class FileDecoder:
    """
    Decodes the blocks of a coded file into memory of the host, one at a time.

    Args:
        coded (`CodedFile`): what the file says.
        codec (`Codec`): the one that it names.

    Raises:
        `RuntimeError`: the codec is of another series than what the file was coded with.
    """

    def __init__(self, coded: CodedFile, codec: Codec) -> None:
        check_version(codec, coded.codec_version, coded.path)
        self._coded = coded
        self._reader = BlockReader(codec)

    def image(self, block: CodedBlock) -> torch.Tensor:
        """
        The image of a block, `(nbytes,)` of `uint8`, with padding at its end.

        Raises:
            `RuntimeError`: a shard is damaged.
        """
        with open(self._coded.path, "rb", buffering=0) as file:
            return self._reader.read(block, _shards_of(block, file))

    def tensors(self, block: CodedBlock) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """
        The bytes of the tensors of a block, `(nbytes,)` of `uint8`, with the names that each has in the model.

        Raises:
            `RuntimeError`: a shard is damaged, or the file contradicts itself.
        """
        places, end = [], 0
        for tensor in block.tensors:
            places.append((tensor.names, align(end), align(end) + tensor.nbytes))
            end = align(end) + tensor.nbytes
        if end != block.nbytes:
            raise damaged(self._coded.path, f"the tensors of block '{block.name}' do not have the bytes that it has")
        image = self.image(block)
        for names, start, stop in places:
            yield names, image[start:stop]


def _shards_of(block: CodedBlock, file: Any) -> Iterator[torch.Tensor]:
    """The coded shards of a block, read one after the other."""
    for shard in block.shards:
        coded = torch.empty(shard.place.nbytes, dtype=torch.uint8)
        rest = coded.numpy().data
        file.seek(shard.place.offset)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise damaged_shard(shard, "the file is cut off")
            rest = rest[count:]
        yield coded
