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
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..block_layout import ALIGNMENT
from ..checkpoint.mapped import FileRange
from ..checkpoint.safetensors_file import DTYPES, StoredTensor, damaged, peek_header, read_metadata, without_repeats
from .coded_block import CodedBlock, CodedShard, CodedTensor, Segment
from .shard_coding import check_places, shard_bounds


METHOD = "dlo_coded"
"""What `config.json` of a coded model names as its quantization method."""
METADATA_KEY = "coded"
"""Where the description stands in the metadata of the file."""
DIGEST_KEY = "coded_sha256"
"""Where the digest of all else in the header stands."""
FORMAT = 1
"""The version of the description; what has another one is refused."""
_PREFIX = "dlo_coded."
_DTYPES = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
_MOST = 1 << 48
"""Bytes, or elements: more than any memory has."""


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
        `RuntimeError`: the file is cut off, or what it says of itself is missing, of another format, or contradicts
            itself.
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
        if any(map(is_shard_key, stored)):
            raise damaged(path, "it has coded shards, and the description of them is gone from its metadata")
        return None
    if metadata.get(DIGEST_KEY) != header_digest(stored.values(), metadata):
        raise damaged(path, "its header is not what was written")
    try:
        described = json.loads(text, object_pairs_hook=without_repeats)
        if (found := _count(described["format"])) != FORMAT:
            raise RuntimeError(
                f"'{path}' is in format {found} of coded checkpoints, and this version of diffusers_dlo reads format "
                f"{FORMAT}. Install the version that wrote it, or decode it with that (`diffusers-dlo pack --decode`)."
            )
        return _parse(path, described, stored)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{error} is missing in its description" if isinstance(error, KeyError) else error
        raise damaged(path, reason) from error


def _parse(path: str, described: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> CodedFile:
    ranks = _count(described["ranks"], 1)
    blocks: dict[str, CodedBlock] = {}
    for entry in _items(described["blocks"]):
        name, nbytes = _text(entry["name"]), _count(entry["nbytes"], 1)
        listed = _items(entry["shards"])
        if name in blocks or len(listed) != ranks:
            raise ValueError(f"block '{name}' has {len(listed)} shards for {ranks} ranks, or is there twice")
        shards = []
        for index, shard in enumerate(listed):
            bounds = shard_bounds(nbytes, ranks, index)
            try:
                shards.append(_parse_shard(path, name, bounds, shard, stored.get(shard_key(name, index))))
            except ValueError as error:
                raise ValueError(f"shard {index} of block '{name}': {error}") from None
        tensors = tuple(_parse_tensor(*tensor) for tensor in _items(entry["tensors"]))
        blocks[name] = CodedBlock(name, _text(entry["digest"]), nbytes, tensors, tuple(shards))
    _check_each_once(blocks, stored)
    return CodedFile(
        path=path,
        codec=_text(described["codec"]),
        codec_version=_text(described["codec_version"]),
        ranks=ranks,
        dtype=_text(described["dtype"]),
        blocks=blocks,
        content=_text(described["content"]),
        sizes={dtype: _parse_sizes(*_items(sizes)) for dtype, sizes in described["sizes"].items()},
    )


def _parse_shard(
    path: str, block: str, bounds: tuple[int, int], shard: Mapping[str, Any], found: StoredTensor | None
) -> CodedShard:
    if found is None:
        raise ValueError("it is not in the file")
    if found.dtype != "U8" or found.shape != (found.nbytes,):
        raise ValueError(f"it is a tensor of {found.dtype} and {found.shape}, not of {found.nbytes} bytes")
    if found.offset % ALIGNMENT:
        raise ValueError("it is not aligned in the file")
    if not re.fullmatch("[0-9a-f]{16}", check_sum := _text(shard["sum"])):
        raise ValueError(f"{check_sum!r} is no check sum")
    segments = tuple(_parse_segment(*_items(numbers)) for numbers in _items(shard["segments"]))
    check_places(segments, bounds[1] - bounds[0], found.nbytes)
    place = FileRange(path, found.offset, found.nbytes)
    return CodedShard(block, bounds[0], bounds[1] - bounds[0], place, check_sum, segments)


def _parse_segment(offset: object, nbytes: object, coded_offset: object, coded_nbytes: object) -> Segment:
    return Segment(_count(offset), _count(nbytes), _count(coded_offset), _count(coded_nbytes))


def _parse_sizes(nbytes: object, coded_nbytes: object) -> tuple[int, int]:
    return _count(nbytes), _count(coded_nbytes)


def _parse_tensor(names: object, dtype: object, shape: object) -> CodedTensor:
    known = tuple(_text(name) for name in _items(names))
    if not known or dtype not in _DTYPES:
        raise ValueError(f"the tensor {known} is of an unknown dtype, {dtype!r}, or has no name")
    sizes = tuple(_count(size) for size in _items(shape))
    if math.prod(max(size, 1) for size in sizes) > _MOST:
        raise ValueError(f"'{known[0]}' is larger than any memory")
    return CodedTensor(known, _text(dtype), sizes)


def _check_each_once(blocks: Mapping[str, CodedBlock], stored: Mapping[str, StoredTensor]) -> None:
    names = [name for block in blocks.values() for tensor in block.tensors for name in tensor.names]
    if len(set(names)) < len(names):
        raise ValueError(f"'{Counter(names).most_common(1)[0][0]}' is in coded blocks twice")
    known = {shard_key(block.name, index) for block in blocks.values() for index in range(len(block.shards))}
    if strange := [key for key in stored if is_shard_key(key) and key not in known]:
        raise ValueError(f"'{strange[0]}' is in the file, and in no block that is described")
    end = 0
    for place in sorted(
        (shard.place for block in blocks.values() for shard in block.shards), key=lambda one: one.offset
    ):
        if place.nbytes and place.offset < end:
            raise ValueError(f"two coded shards share byte {place.offset} of the file")
        end = max(end, place.offset + place.nbytes)


def _items(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{_short(found)} is no list")
    return found


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise ValueError(f"{_short(found)} is no text")
    return found


def _count(number: object, least: int = 0) -> int:
    if type(number) is not int or not least <= number <= _MOST:
        raise ValueError(f"{_short(number)} is no number from {least} to {_MOST}")
    return number


def _short(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 40 else f"{text[:40]}..."
