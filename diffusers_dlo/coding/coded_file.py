# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what a coded checkpoint says of itself: which blocks it has in coded shards, by which codec and for how many
ranks. Must not decode, nor know of models.

[Note: Coded checkpoint]
    A safetensors file. What streams in no block lies in it as in any checkpoint. A block that is worth it lies in it
    as one tensor of bytes for each shard, `dlo_coded.<block>.<shard>`, of the image that the block has when it lies in
    no file, cut for a number of ranks. All else stands in the file's metadata under `"coded"`: the segments of each
    shard, its check sum, and what the image is made up of. A digest of the whole header stands beside it, so that
    names and places that were changed are noticed before anything is read. Its configuration names a quantization
    method, `METHOD`, so that diffusers asks this package when it loads the model, and says what is missing where it is
    not installed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.mapped import FileRange
from ..checkpoint.safetensors_file import DTYPES, StoredTensor, damaged, peek_header, read_metadata
from .shard_coding import Segment, shard_bounds


METHOD = "dlo_coded"
"""What `config.json` of a coded model names as its quantization method."""
METADATA_KEY = "coded"
"""Where the description stands in the metadata of the file."""
DIGEST_KEY = "coded_sha256"
"""Where the digest of all else in the header stands."""
FORMAT = 1
"""The version of the description; what has another one is refused."""
_PREFIX = "dlo_coded."
_ITEMSIZES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPES.values()}


def shard_key(block: str, shard: int) -> str:
    """The name of a coded shard in its file."""
    return f"{_PREFIX}{block}.{shard}"


def is_shard_key(key: str) -> bool:
    """Whether a name in a file is that of a coded shard."""
    return key.startswith(_PREFIX)


def header_digest(stored: Iterable[StoredTensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of what the header of a file says, but for the digest itself."""
    places = sorted((one.key, one.dtype, one.shape, one.offset, one.nbytes) for one in stored)
    said = sorted((key, value) for key, value in metadata.items() if key != DIGEST_KEY)
    return hashlib.sha256(json.dumps([places, said], separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class CodedShard:
    """
    One coded shard: `nbytes` bytes of its block's image from `offset` on, without padding at its end.

    Attributes:
        place (`FileRange`): where the coded bytes lie.
        check_sum (`str`): of these ([Note: Check sums]).
        segments (`tuple[Segment, ...]`): what they are made up of ([Note: Coded shards]).
    """

    block: str
    offset: int
    nbytes: int
    place: FileRange
    check_sum: str
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return f"the coded shard of block '{self.block}' at byte {self.place.offset} of '{self.place.path}'"


@dataclass(frozen=True)
class CodedTensor:
    """A tensor of a coded block, by the names it has in the model: what its values will be like."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class CodedBlock:
    """A block in coded shards. `digest` is that of its layout, `nbytes` its image's size without padding."""

    name: str
    digest: str
    nbytes: int
    tensors: tuple[CodedTensor, ...]
    shards: tuple[CodedShard, ...]

    @property
    def coded_nbytes(self) -> int:
        """Bytes of all its coded shards."""
        return sum(shard.place.nbytes for shard in self.shards)

    @property
    def tensors_nbytes(self) -> int:
        """Bytes of its weights when they are not coded."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class CodedFile:
    """
    What a coded checkpoint holds ([Note: Coded checkpoint]).

    Attributes:
        path (`str`): of the file.
        codec (`str`), codec_version (`str`): what its shards were coded with.
        ranks (`int`): how many shards each block is cut into.
        dtype (`str`): what it was packed in.
        blocks (`dict[str, CodedBlock]`): by name.
        content (`str`): SHA-256 of all that follows the header, as `content_digest` makes it.
        sizes (`dict[str, tuple[int, int]]`): of each dtype in coded blocks: its bytes, and what they are coded.
    """

    path: str
    codec: str
    codec_version: str
    ranks: int
    dtype: str
    blocks: dict[str, CodedBlock]
    content: str = ""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def tensor_names(self) -> set[str]:
        """The names, in the model, of all tensors that lie in coded blocks."""
        return {name for block in self.blocks.values() for tensor in block.tensors for name in tensor.names}

    def repack_command(self, ranks: int) -> str:
        """What to type to have it for another number of ranks."""
        return (
            f"diffusers-dlo pack --decode MODEL PLAIN && diffusers-dlo pack PLAIN OUT --dtype {self.dtype} "
            f"--codec {self.codec} --ranks {ranks}"
        )

    def as_text(self) -> str:
        """The description that stands in the file's metadata."""
        described: dict[str, Any] = {
            "format": FORMAT,
            "codec": self.codec,
            "codec_version": self.codec_version,
            "ranks": self.ranks,
            "dtype": self.dtype,
            "content": self.content,
            "sizes": self.sizes,
            "blocks": [
                {
                    "name": block.name,
                    "digest": block.digest,
                    "nbytes": block.nbytes,
                    "tensors": [[tensor.names, tensor.dtype, tensor.shape] for tensor in block.tensors],
                    "shards": [{"sum": shard.check_sum, "segments": shard.segments} for shard in block.shards],
                }
                for block in self.blocks.values()
            ],
        }
        return json.dumps(described, separators=(",", ":"))


def read_coded_file(path: str) -> CodedFile | None:
    """
    What a safetensors file says of its coded blocks; None if it has none. Nothing but its header is read.

    Raises:
        `RuntimeError`: the file is cut off, or what it says of itself is of another format, or contradicts itself.
    """
    return parse_coded_file(path, peek_header(path), read_metadata(path))


def parse_coded_file(path: str, listed: Iterable[StoredTensor], metadata: Mapping[str, str]) -> CodedFile | None:
    """
    The same from the parts of a header, of a file that may be elsewhere.

    Raises:
        `RuntimeError`: as `read_coded_file`.
    """
    stored = {one.key: one for one in listed}
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    if metadata.get(DIGEST_KEY) != header_digest(stored.values(), metadata):
        raise damaged(path, "its header is not what was written")
    try:
        described = json.loads(text)
        if described["format"] != FORMAT:
            raise ValueError(
                f"it is in format {described['format']!r} of coded checkpoints, and this version reads {FORMAT}"
            )
        return _parse(path, described, stored)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{error} is missing in its description" if isinstance(error, KeyError) else error
        raise damaged(path, reason) from error


def _parse(path: str, described: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> CodedFile:
    ranks = _count(described["ranks"], 1)
    blocks: dict[str, CodedBlock] = {}
    for entry in described["blocks"]:
        name, nbytes = str(entry["name"]), _count(entry["nbytes"], 1)
        if name in blocks or len(entry["shards"]) != ranks:
            raise ValueError(f"block '{name}' has {len(entry['shards'])} shards for {ranks} ranks, or is there twice")
        shards = []
        for index, shard in enumerate(entry["shards"]):
            start, stop = shard_bounds(nbytes, ranks, index)
            found = stored[shard_key(name, index)]
            segments = tuple(Segment(*(_count(number) for number in segment)) for segment in shard["segments"])
            if sum(segment.nbytes for segment in segments) != stop - start or found.dtype != "U8":
                raise ValueError(f"shard {index} of block '{name}' does not have the bytes that it should have")
            place = FileRange(path, found.offset, found.nbytes)
            shards.append(CodedShard(name, start, stop - start, place, str(shard["sum"]), segments))
        tensors = tuple(_parse_tensor(*tensor) for tensor in entry["tensors"])
        blocks[name] = CodedBlock(name, str(entry["digest"]), nbytes, tensors, tuple(shards))
    return CodedFile(
        path=path,
        codec=str(described["codec"]),
        codec_version=str(described["codec_version"]),
        ranks=ranks,
        dtype=str(described["dtype"]),
        blocks=blocks,
        content=str(described["content"]),
        sizes={str(dtype): (_count(sizes[0]), _count(sizes[1])) for dtype, sizes in described["sizes"].items()},
    )


def _parse_tensor(names: list[str], dtype: str, shape: list[int]) -> CodedTensor:
    if dtype not in _ITEMSIZES or not names:
        raise ValueError(f"a weight has no name, or is of an unknown dtype ({names}, {dtype!r})")
    sizes = tuple(_count(size) for size in shape)
    if math.prod(sizes) > 1 << 48:
        raise ValueError(f"'{names[0]}' is larger than any memory")
    return CodedTensor(tuple(map(str, names)), str(dtype), sizes)


def _count(number: object, least: int = 0) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{number!r} is no number of {least} or more")
    return number
