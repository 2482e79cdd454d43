# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What a coded checkpoint says of itself: read back as it was written, and refused wherever it contradicts itself."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diffusers_dlo.checkpoint.container import Container, Entry
from diffusers_dlo.checkpoint.mapped import FileRange
from diffusers_dlo.checkpoint.safetensors_file import peek_header, read_metadata
from diffusers_dlo.coding.check_sum import CheckSums, as_text
from diffusers_dlo.coding.coded_block import CodedBlock, CodedShard, CodedTensor
from diffusers_dlo.coding.coded_file import (
    DIGEST_KEY,
    CodedFile,
    header_digest,
    is_shard_key,
    read_coded_file,
    shard_key,
)
from diffusers_dlo.coding.shard_coding import check_segments, decode_shard, encode_shard, regions_of, shard_bounds
from diffusers_dlo.coding.zstd import ZstdCodec
from tests.coding.images import image_of, layout_of, random_bits, weights


CODEC = ZstdCodec()
RANKS = 3
TENSORS = {
    "blocks.0": [weights(60_000).view(torch.bfloat16), random_bits(80_000).view(torch.float32)],
    "blocks.1": [weights(70_001, torch.float16).view(torch.float16), torch.arange(5)],
    "tiny": [weights(200).view(torch.bfloat16)],
}
"""By block. The last has fewer bytes than shards of 256."""
NOTHING = torch.empty(0, dtype=torch.uint8)


def write(path: Path) -> CodedFile:
    """A coded checkpoint at `path`, and what it has to say of itself."""
    sums, parts, blocks = CheckSums(torch.device("cpu")), {}, {}
    for name, tensors in TENSORS.items():
        layout, shards = layout_of(tensors, name), []
        image, regions = image_of(layout, tensors), regions_of(layout)
        for index in range(RANKS):
            start, stop = shard_bounds(layout.nbytes, RANKS, index)
            coded, found = encode_shard(image[start:stop], (start, stop), regions, CODEC)
            parts[shard_key(name, index)] = coded
            place = FileRange(str(path), 0, coded.numel())
            segments = tuple(segment for segment, _ in found)
            shards.append(CodedShard(name, start, stop - start, place, as_text(sums.queue(coded)), segments))
        described = tuple(CodedTensor((f"{name}.{one.name}",), one.dtype, one.shape) for one in layout.tensors)
        blocks[name] = CodedBlock(name, layout.digest, layout.nbytes, described, tuple(shards))
    coded_file = CodedFile(
        str(path), "zstd", CODEC.version, RANKS, "bfloat16", blocks, "0" * 64, {"bfloat16": (120_400, 80_000)}
    )
    entries = [Entry(name, part) for name, part in parts.items()]
    metadata = {"coded": coded_file.as_text(), DIGEST_KEY: "0" * 64, "format": "pt"}
    container = Container([entries, [Entry("rest", torch.arange(7))]], metadata)
    with open(path, "wb") as file:
        container.write_share(file.fileno(), 0, 1, lambda _: None)
        container.write_header(file.fileno())
        container.write_header(
            file.fileno(), **{DIGEST_KEY: header_digest(peek_header(str(path)), read_metadata(str(path)))}
        )
    places = container.places(str(path))
    placed = {
        name: replace(
            block,
            shards=tuple(replace(s, place=places[shard_key(name, i)]) for i, s in enumerate(block.shards)),
        )
        for name, block in blocks.items()
    }
    return replace(coded_file, blocks=placed)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> CodedFile:
    return write(tmp_path_factory.mktemp("coded") / "diffusion_pytorch_model.safetensors")


class Parts:
    """The header of a file, what is described in it, and what follows it: to be changed, and written anew."""

    def __init__(self, path: str) -> None:
        content = Path(path).read_bytes()
        self.room = int.from_bytes(content[:8], "little")
        self.header: Any = json.loads(content[8 : 8 + self.room])
        self.described: Any = json.loads(self.header["__metadata__"]["coded"])
        self.data = content[8 + self.room :]

    def write(self, path: Path, text: str | None = None) -> str:
        """With a description, or with `text` in its place."""
        header = copy.deepcopy(self.header)
        header["__metadata__"]["coded"] = json.dumps(self.described) if text is None else text
        return self.write_header(path, json.dumps(header))

    def write_header(self, path: Path, text: str) -> str:
        """With a header, and a digest in it that fits if it is one: what is refused is refused for what it says."""
        self._write(path, text)
        with suppress(RuntimeError, ValueError, TypeError, KeyError, RecursionError):
            digest = header_digest(peek_header(str(path)), read_metadata(str(path)))
            header = json.loads(text)
            header["__metadata__"][DIGEST_KEY] = digest
            self._write(path, json.dumps(header))
        return str(path)

    def _write(self, path: Path, text: str) -> None:
        header = text.encode().ljust(self.room)
        header = header.ljust(-(-(len(header) + 8) // 4096) * 4096 - 8)
        path.write_bytes(len(header).to_bytes(8, "little") + header + self.data)


@pytest.fixture
def parts(sound: CodedFile) -> Parts:
    return Parts(sound.path)


def refuse(path: str, *words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        read_coded_file(path)
    said = str(caught.value)
    assert said.startswith(f"'{path}' cannot be used: ") and "convert it anew" in said
    assert all(word in said for word in words), said


def test_it_is_read_as_it_was_written(sound: CodedFile) -> None:
    assert read_coded_file(sound.path) == sound
    assert sound.tensor_names == {"blocks.0.t0", "blocks.0.t1", "blocks.1.t0", "blocks.1.t1", "tiny.t0"}
    assert set(load_file(sound.path)) == {"rest", *(shard_key(name, i) for name in TENSORS for i in range(RANKS))}
    assert [shard.nbytes for shard in sound.blocks["tiny"].shards] == [256, 256, 0]
    block = sound.blocks["blocks.0"]
    assert block.coded_nbytes == sum(shard.place.nbytes for shard in block.shards) < block.nbytes
    assert str(block.shards[0]) == (
        f"the coded shard of block 'blocks.0' at byte {block.shards[0].place.offset} of '{sound.path}'"
    )


def test_its_blocks_are_decoded(sound: CodedFile) -> None:
    """From the bytes that the file says they are, after its check sums and its segments were looked at."""
    content = torch.frombuffer(bytearray(Path(sound.path).read_bytes()), dtype=torch.uint8)
    sums = CheckSums(torch.device("cpu"))
    found = read_coded_file(sound.path)
    assert found is not None
    for name, block in found.blocks.items():
        layout = layout_of(TENSORS[name], name)
        expected = image_of(layout, TENSORS[name])
        assert block.digest == layout.digest and block.nbytes == layout.nbytes
        for shard in block.shards:
            coded = content[shard.place.offset : shard.place.offset + shard.place.nbytes]
            assert as_text(sums.queue(coded)) == shard.check_sum
            check_segments(coded, shard.segments, shard.nbytes, CODEC)
            out = torch.empty(shard.nbytes, dtype=torch.uint8)
            decode_shard(coded, shard.segments, out, CODEC, NOTHING)
            assert torch.equal(out, expected[shard.offset : shard.offset + shard.nbytes]), shard


def test_names_and_commands(sound: CodedFile) -> None:
    assert shard_key("blocks.10", 2) == "dlo_coded.blocks.10.2"
    assert is_shard_key("dlo_coded.blocks.10.2") and not is_shard_key("blocks.dlo_coded.0")
    assert sound.repack_command(4) == (
        "diffusers-dlo pack --decode MODEL PLAIN && "
        "diffusers-dlo pack PLAIN OUT --dtype bfloat16 --codec zstd --ranks 4"
    )


def test_files_that_are_not_coded(parts: Parts, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {key: value for key, value in parts.header.items() if not is_shard_key(key)}
    for metadata in ({}, {"format": "pt"}):
        header["__metadata__"] = metadata
        assert read_coded_file(parts.write_header(path, json.dumps(header))) is None
    del header["__metadata__"]
    assert read_coded_file(parts.write_header(path, json.dumps(header))) is None
    parts.header["__metadata__"] = {"format": "pt"}
    refuse(parts.write_header(path, json.dumps(parts.header)), "the description of them is gone")


def test_another_format(parts: Parts, tmp_path: Path) -> None:
    parts.described["format"] = 2
    path = parts.write(tmp_path / "x.safetensors")
    with pytest.raises(RuntimeError) as caught:
        read_coded_file(path)
    said = str(caught.value)
    assert said.startswith(f"'{path}' is in format 2 of coded checkpoints, and this version") and "--decode" in said


def test_files_that_are_cut_off(sound: CodedFile, tmp_path: Path) -> None:
    content, path = Path(sound.path).read_bytes(), tmp_path / "x.safetensors"
    begin = 8 + int.from_bytes(content[:8], "little")
    for nbytes in (0, 1, 7, 8, 9, 100, begin - 4000, begin, begin + 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:nbytes])
        refuse(str(path))
    for length in (0, 10, begin + 1_000_000, 1 << 40, (1 << 64) - 1):
        path.write_bytes(length.to_bytes(8, "little") + content[8:])
        refuse(str(path))
    refuse(str(tmp_path / "none.safetensors"), "No such file")


def test_headers_that_are_no_headers(parts: Parts, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text in (
        "[]",
        "7",
        "null",
        '"x"',
        "{",
        '{"a": 1}',
        '{"a": {"dtype": "U8"}}',
        '{"__metadata__": 3}',
        "\\u00ff",
    ):
        refuse(parts.write_header(path, text))
    refuse(parts.write_header(path, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "recursion")
    refuse(parts.write_header(path, '{"__metadata__": {"coded": ' + "[" * 100_000 + "]" * 100_000 + "}}"), "recursion")
    key = shard_key("blocks.0", 1)
    start, stop = parts.header[key]["data_offsets"]
    for offsets in (
        [-256, 0],
        [stop, start],
        [float(start), stop],
        [start, None],
        [True, stop],
        ["0", "1"],
        [start],
        5,
    ):
        parts.header[key]["data_offsets"] = offsets
        refuse(parts.write(path))
    parts.header[key]["data_offsets"] = [start, start + (1 << 60)]
    refuse(parts.write(path), "bytes, and by its header")


Change = Callable[[Parts], object]


def block_of(parts: Parts, index: int = 0) -> dict[str, Any]:
    return parts.described["blocks"][index]


def move(parts: Parts, by: int, key: str = shard_key("blocks.0", 1)) -> None:
    parts.header[key]["data_offsets"] = [offset + by for offset in parts.header[key]["data_offsets"]]


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "a_block_twice": (lambda p: p.described["blocks"].append(block_of(p)), "or is there twice"),
    "a_tensor_twice": (
        lambda p: block_of(p)["tensors"].append(block_of(p, 1)["tensors"][0]), "'blocks.1.t0' is in coded blocks",
    ),
    "a_shard_less": (lambda p: block_of(p)["shards"].pop(), "has 2 shards for 3 ranks"),
    "other_ranks": (lambda p: p.described.update(ranks=2), "has 3 shards for 2 ranks"),
    "no_ranks": (lambda p: p.described.update(ranks=0), "0 is no number from 1"),
    "a_shard_not_in_the_file": (
        lambda p: p.header.pop(shard_key("blocks.1", 2)), "shard 2 of block 'blocks.1': it is not in the file",
    ),
    "a_shard_of_no_block": (
        lambda p: p.header.update({shard_key("x", 0): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
        "'dlo_coded.x.0' is in the file, and in no block",
    ),
    "a_block_not_described": (lambda p: p.described["blocks"].pop(), "'dlo_coded.tiny.0' is in the file"),
    "a_shard_of_another_dtype": (
        lambda p: p.header[shard_key("blocks.0", 1)].update(dtype="I8"),
        "shard 1 of block 'blocks.0': it is a tensor of I8",
    ),
    "a_shard_of_another_shape": (
        lambda p: p.header[shard_key("blocks.0", 1)].update(shape=[1, 2]), "a tensor of U8 and (1, 2)",
    ),
    "shards_that_overlap": (lambda p: move(p, -256), "two coded shards share byte"),
    "unaligned_in_the_file": (lambda p: move(p, 8), "it is not aligned in the file"),
    "segments_for_a_larger_block": (lambda p: block_of(p).update(nbytes=1 << 20), "shard 0 of block 'blocks.0'"),
    "segments_for_a_smaller_block": (lambda p: block_of(p).update(nbytes=256), "shard 0 of block 'blocks.0'"),
    "a_huge_block": (lambda p: block_of(p).update(nbytes=1 << 49), "is no number from 1 to"),
    "a_huge_tensor": (
        lambda p: block_of(p)["tensors"][0].__setitem__(2, [0, 1 << 40, 1 << 40]), "'blocks.0.t0' is larger than any",
    ),
    "an_unknown_dtype": (lambda p: block_of(p)["tensors"][0].__setitem__(1, "float4"), "unknown dtype, 'float4'"),
    "no_check_sum": (lambda p: block_of(p)["shards"][0].update(sum="12"), "'12' is no check sum"),
    "nothing_about_the_codec": (lambda p: p.described.pop("codec"), "'codec' is missing in its description"),
    "segments_that_overlap": (
        lambda p: block_of(p)["shards"][1]["segments"][-1].__setitem__(0, 0), "its segments do not follow each other",
    ),
    "a_negative_number": (
        lambda p: block_of(p)["shards"][1]["segments"][0].__setitem__(0, -256), "-256 is no number from 0",
    ),
    "five_numbers": (lambda p: block_of(p)["shards"][1]["segments"][0].append(1), "positional argument"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictions(parts: Parts, tmp_path: Path, what: str) -> None:
    change, words = CONTRADICTIONS[what]
    change(parts)
    refuse(parts.write(tmp_path / "x.safetensors"), words)


def test_descriptions_that_are_none(parts: Parts, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text in ("", "x", "[]", "null", "7", '"format"', "{}", '{"format": 1}', '{"format": 1, "format": 1}', "NaN"):
        refuse(parts.write(path, text))
    refuse(parts.write(path, "[" * 100_000 + "]" * 100_000), "recursion")
    text = json.dumps(parts.described)
    refuse(parts.write(path, text.replace('"ranks": 3', f'"ranks": {"9" * 5000}')), "cannot be used")
    refuse(parts.write(path, text.replace('"ranks": 3', '"ranks": 3, "ranks": 3')), "'ranks' is in it twice")
    for end in range(0, len(text), 97):
        refuse(parts.write(path, text[:end]))


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a description stands."""
    yield path
    for key, value in (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    ):
        yield from places(value, (*path, key))


def test_any_value_anywhere(parts: Parts, sound: CodedFile, tmp_path: Path) -> None:
    """Refused with a reason, or taken for what it is: never another error, and never a place outside of the file."""
    path, before = tmp_path / "x.safetensors", parts.described
    odd: tuple[Any, ...] = (None, True, -1, 1 << 70, 1.5, float("inf"), "x", [], {}, [[]], [1, 2, 3, 4], {"sum": 1})
    accepted, count = set(), 0
    every = [place for place in places(before) if place and place[:2] not in (("blocks", 1), ("blocks", 2))]
    for place in every:
        for value in odd:
            parts.described = copy.deepcopy(before)
            parent = parts.described
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = value
            count += 1
            try:
                found = read_coded_file(parts.write(path))
            except RuntimeError as error:
                assert str(error).startswith(f"'{path}' cannot be used: "), (place, value)
                assert len(str(error)) < 600, (place, value)
                continue
            assert found is not None
            accepted.add(" ".join(key for key in place if isinstance(key, str)))
            size = path.stat().st_size
            for block in found.blocks.values():
                assert all(isinstance(name, str) for tensor in block.tensors for name in tensor.names)
                for shard in block.shards:
                    assert 0 < shard.place.offset <= shard.place.offset + shard.place.nbytes <= size
                    assert sum(segment.nbytes for segment in shard.segments) == shard.nbytes
    assert count > 500
    # What nothing in the file contradicts: names, free text, and shapes, which the model's own are compared with.
    assert accepted == {"codec", "codec_version", "dtype", "content", "sizes", "blocks digest", "blocks tensors"}
