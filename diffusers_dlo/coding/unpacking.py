# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns making ordinary weights of coded ones, on the host: all checks first, then block by block. Must not know where
they go, nor choose the codec.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..block_layout import align
from ..checkpoint.container import chunk_digests, content_digest
from ..checkpoint.safetensors_file import damaged, read_header
from ..packed_weights import progress
from .check_sum import CheckSums, as_text
from .codec import Codec, check_version
from .coded_file import CodedBlock, CodedFile, CodedShard
from .shard_coding import Segment, check_segments, decode_shard


def check_content(coded: CodedFile, title: str) -> None:
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


def decoded(coded: torch.Tensor, segments: Sequence[Segment], nbytes: int, codec: Codec) -> torch.Tensor:
    """A coded shard, checked and intact, as the bytes that it was, `(nbytes,)`; both on the codec's device."""
    out = torch.empty(nbytes, dtype=torch.uint8, device=codec.device)
    largest = max((segment.nbytes for segment in segments if segment.is_coded), default=0)
    scratch_nbytes = codec.scratch_nbytes(largest) if largest else 0
    scratch = torch.empty(scratch_nbytes, dtype=torch.uint8, device=codec.device)
    decode_shard(coded, segments, out, codec, scratch)
    return out


class Decoder:
    """
    Decodes the blocks of a coded file into memory of the host.

    Args:
        coded (`CodedFile`): what the file says.
        codec (`Codec`): the one that it names.

    Raises:
        `RuntimeError`: the codec is of another series than what the file was coded with.
    """

    def __init__(self, coded: CodedFile, codec: Codec) -> None:
        check_version(codec, coded.codec_version, coded.path)
        self._coded, self._codec = coded, codec
        self._sums = CheckSums(codec.device)

    def image(self, block: CodedBlock) -> torch.Tensor:
        """
        The image of a block, `(nbytes,)` of `uint8`, with padding at its end.

        Raises:
            `RuntimeError`: a shard is damaged.
        """
        image = torch.empty(align(block.nbytes), dtype=torch.uint8)
        with open(self._coded.path, "rb", buffering=0) as file:
            for shard in block.shards:
                if shard.nbytes:
                    coded = torch.empty(shard.place.nbytes, dtype=torch.uint8)
                    file.seek(shard.place.offset)
                    _fill(file, coded, shard)
                    self._decode(shard, coded, image[shard.offset : shard.offset + shard.nbytes])
        return image

    def _decode(self, shard: CodedShard, coded: torch.Tensor, out: torch.Tensor) -> None:
        codec = self._codec
        try:
            check_segments(coded, shard.segments, shard.nbytes, codec)
        except ValueError as error:
            raise damaged(shard.place.path, f"{shard} cannot be decoded: {error}") from error
        data = coded.to(codec.device)
        found = as_text(self._sums.queue(data))
        if found != shard.check_sum:
            raise damaged(shard.place.path, f"{shard} has check sum {found}, and not {shard.check_sum}")
        out.copy_(decoded(data, shard.segments, shard.nbytes, codec))

    def tensors(self, block: CodedBlock) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
        """
        The bytes of the tensors of a block, `(nbytes,)` of `uint8`, with the names that each has in the model.

        Raises:
            `RuntimeError`: a shard is damaged, or the file contradicts itself.
        """
        image, end = self.image(block), 0
        for tensor in block.tensors:
            start, end = align(end), align(end) + tensor.nbytes
            if end > block.nbytes:
                break
            yield tensor.names, image[start:end]
        if end != block.nbytes:
            raise damaged(self._coded.path, f"the tensors of block '{block.name}' do not have the bytes that it has")


def _fill(file: Any, out: torch.Tensor, shard: CodedShard) -> None:
    view = out.numpy().data
    while view:
        count = file.readinto(view)
        if not count:
            raise damaged(shard.place.path, f"{shard} is cut off")
        view = view[count:]
