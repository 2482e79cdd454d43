# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Coded shards: segments cover a shard without a gap, every bit comes back, what does not shrink stays as it is."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from diffusers_dlo.block_layout import SMALL_NBYTES, BlockLayout
from diffusers_dlo.coding.codec import Codec
from diffusers_dlo.coding.coded_block import Segment
from diffusers_dlo.coding.shard_coding import (
    CODED_DTYPES,
    Region,
    check_segments,
    decode_shard,
    encode_shard,
    regions_of,
    shard_bounds,
)
from diffusers_dlo.coding.zstd import ZstdCodec
from tests.coding.images import (
    EVERY_DTYPE,
    as_bytes,
    extremes,
    image_of,
    layout_of,
    random_bits,
    tensor_of,
    up,
    weights,
)


CODEC = ZstdCodec()
NOTHING = torch.empty(0, dtype=torch.uint8)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LARGE = SMALL_NBYTES // 2 + 128
"""Values of 16 bits that are just more than what goes along with its neighbour."""


def check_regions(layout: BlockLayout) -> list[Region]:
    regions = regions_of(layout)
    assert [region.start for region in regions] == [0, *(region.stop for region in regions)][: len(regions)]
    assert (regions[-1].stop if regions else 0) == up(layout.nbytes)
    assert all(region.stop > region.start and region.start % 256 == 0 for region in regions)
    return regions


def code(layout: BlockLayout, image: torch.Tensor, shards: int) -> list[tuple[Segment, str]]:
    """An image through coded shards and back, equal; all segments of all shards, and the dtype of each."""
    regions, every, back = check_regions(layout), [], torch.full_like(image, 0xA5)
    for index in range(shards):
        start, stop = shard_bounds(layout.nbytes, shards, index)
        coded, found = encode_shard(image[start:stop], (start, stop), regions, CODEC)
        segments = [segment for segment, _ in found]
        check_segments(coded, segments, stop - start, CODEC)
        end = coded_end = 0
        for segment, dtype in found:
            assert (segment.offset, segment.coded_offset) == (end, coded_end) and segment.nbytes > 0
            end, coded_end = end + segment.nbytes, coded_end + segment.coded_nbytes
            part = coded[segment.coded_offset : coded_end]
            if segment.is_coded:
                assert dtype in CODED_DTYPES and segment.coded_nbytes <= 0.95 * segment.nbytes
            else:
                assert torch.equal(part, image[start + segment.offset : start + end])
        assert (end, coded_end) == (stop - start, coded.numel())
        around = torch.full((stop - start + 512,), 0x5A, dtype=torch.uint8)
        decode_shard(coded, segments, around[256 : 256 + stop - start], CODEC, NOTHING)
        assert bool((around[:256] == 0x5A).all()) and bool((around[256 + stop - start :] == 0x5A).all())
        back[start:stop] = around[256 : 256 + stop - start]
        every += found
    assert torch.equal(back, image)
    return every


def content(nbytes: int, kind: str, number: int) -> torch.Tensor:
    if kind == "bits":
        return random_bits(nbytes, number)
    if kind == "one":
        return random_bits(2, number).repeat(nbytes // 2 + 1)[:nbytes]
    if kind == "extremes":
        return extremes(BF16 if number % 2 else F16, nbytes // 2 + 1)[:nbytes]
    return weights(nbytes // 2 + 1, F16 if kind == "halves" else BF16, number)[:nbytes]


def test_every_dtype_in_one_image() -> None:
    """Each small, of one element, and large, of an odd size; any bits, so also those that are no value of a dtype."""
    tensors = [
        tensor_of(random_bits(shape[0] * shape[1] * dtype.itemsize, 3 * i + len(str(shape))), dtype, shape)
        for shape in ((1, 1), (37, 3), (SMALL_NBYTES // 16 + 5, 17))
        for i, dtype in enumerate(EVERY_DTYPE)
    ]
    tensors += [tensor_of(weights(2 * LARGE + 1, dtype), dtype, (2 * LARGE + 1,)) for dtype in (BF16, F16)]
    layout = layout_of(tensors)
    image = image_of(layout, tensors)
    for shards in (1, 2, 3, 7):
        found = code(layout, image, shards)
        coded = {dtype for segment, dtype in found if segment.is_coded}
        assert coded == {"bfloat16", "float16"} and not all(segment.is_coded for segment, _ in found)
    for place, tensor in zip(layout.tensors, tensors):
        assert torch.equal(image[place.offset :][: place.nbytes], as_bytes(tensor))


@seed(0)
@settings(max_examples=80, deadline=None, database=None)
@given(st.data())
def test_any_image(drawn: st.DataObject) -> None:
    tensors = []
    for _ in range(drawn.draw(st.integers(1, 6))):
        dtype = drawn.draw(st.sampled_from((BF16, BF16, F16, *EVERY_DTYPE)))
        shape = drawn.draw(
            st.one_of(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(150, 260), max_size=2))
        )
        kind = drawn.draw(st.sampled_from(("weights", "halves", "bits", "one", "extremes")))
        count = int(torch.tensor([1, *shape]).prod()) * dtype.itemsize
        tensors.append(tensor_of(content(count, kind, drawn.draw(st.integers(0, 99))), dtype, shape))
    layout = layout_of(tensors)
    code(layout, image_of(layout, tensors), drawn.draw(st.sampled_from((1, 2, 3, 4, 5, 8, 64))))


def test_shards_are_those_of_plans() -> None:
    for nbytes in (0, 1, 255, 256, 257, 1000, 4096, 100_001):
        layout = replace(layout_of([]), nbytes=nbytes)
        for shards in (1, 2, 3, 7, 100):
            bounds = [shard_bounds(nbytes, shards, index) for index in range(shards)]
            assert bounds[0][0] == 0 and bounds[-1][1] == up(nbytes)
            assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:]))
            own = layout.shard_nbytes(shards)
            assert all(b - a == own or b == up(nbytes) for a, b in bounds)
            assert all(a == min(own * index, up(nbytes)) for index, (a, _) in enumerate(bounds))


def test_more_shards_than_there_is() -> None:
    tensors = [weights(500).view(BF16)]
    layout = layout_of(tensors)
    assert [stop - start for start, stop in (shard_bounds(layout.nbytes, 9, i) for i in range(9))] == [256] * 4 + [
        0
    ] * 5
    code(layout, image_of(layout, tensors), 9)
    coded, segments = encode_shard(NOTHING, (1024, 1024), regions_of(layout), CODEC)
    assert coded.numel() == 0 and coded.dtype == torch.uint8 and segments == []
    check_segments(coded, [], 0, CODEC)


def test_where_an_image_is_cut() -> None:
    """Where a large tensor of another kind begins; small ones, and those that are no 16-bit floats, stay together."""
    small, count = torch.zeros(10), LARGE
    tensors = [
        small, torch.zeros(count, dtype=BF16), small.clone(), torch.zeros(count, dtype=BF16),
        torch.zeros(count, dtype=F16),
        torch.zeros(count, dtype=F32), torch.zeros(4 * count, dtype=torch.int8), small.to(BF16),
        torch.zeros(count, dtype=BF16), torch.zeros(0), torch.zeros(5, dtype=torch.bool),
    ]  # fmt: skip
    size = 2 * count
    assert check_regions(layout_of(tensors)) == [
        Region(0, 256, "float32"),
        Region(256, 512 + 2 * size, "bfloat16"),
        Region(512 + 2 * size, 512 + 3 * size, "float16"),
        Region(512 + 3 * size, 768 + 7 * size, "float32"),
        Region(768 + 7 * size, 1024 + 8 * size, "bfloat16"),
    ]
    at_limit = [torch.zeros(SMALL_NBYTES, dtype=torch.int8), torch.zeros(SMALL_NBYTES // 2, dtype=BF16)]
    assert [region.dtype for region in check_regions(layout_of(at_limit))] == ["int8"], "not large"


def test_tensors_without_elements() -> None:
    assert check_regions(layout_of([torch.zeros(0), torch.zeros(3, 0, dtype=BF16)])) == []
    tensors = [torch.zeros(0), weights(LARGE).view(BF16), torch.zeros(0, dtype=F16)]
    layout = layout_of(tensors)
    assert check_regions(layout) == [Region(0, 2 * LARGE, "bfloat16")]
    moved = replace(layout.tensors[0], offset=0)
    assert check_regions(replace(layout, tensors=(layout.tensors[1], moved))) == [Region(0, 2 * LARGE, "bfloat16")]


def test_what_does_not_shrink_stays() -> None:
    random16, normal = (one.view(BF16) for one in (random_bits(2 * LARGE), weights(LARGE)))
    (segment, dtype), *more = code(layout_of([random16]), as_bytes(random16), 1)
    assert segment == Segment(0, 2 * LARGE, 0, 2 * LARGE) and not segment.is_coded and dtype == "bfloat16" and not more
    ((segment, _),) = code(layout_of([normal]), as_bytes(normal), 1)
    assert segment.is_coded and segment.coded_nbytes <= 0.69 * segment.nbytes
    as_other = as_bytes(normal).view(torch.int16)
    ((segment, _),) = code(layout_of([as_other]), as_bytes(normal), 1)
    assert not segment.is_coded, "it would shrink, but nothing says that it is a float"


class Said(Codec):
    """A codec that makes of each run as many bytes as it is told."""

    name, version, device = "said", "1", torch.device("cpu")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def encode(self, data: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self._nbytes, dtype=torch.uint8)

    def check(self, coded: torch.Tensor, nbytes: int) -> None:
        pass

    def scratch_nbytes(self, nbytes: int) -> int:
        return 0

    def decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        out.zero_()


def test_at_most_95_percent_are_worth_it() -> None:
    data, regions = random_bits(25_600), [Region(0, 25_600, "bfloat16")]
    for nbytes, kept in ((24_320, 24_320), (24_321, 25_600), (25_600, 25_600), (30_000, 25_600)):
        coded, ((segment, _),) = encode_shard(data, (0, 25_600), regions, Said(nbytes))
        assert (coded.numel(), segment.coded_nbytes) == (kept, kept)
        assert torch.equal(coded, data) == (kept == 25_600)


SOUND = (Segment(0, 1024, 0, 768), Segment(1024, 512, 768, 512), Segment(1536, 2048, 1280, 1536))
TOTAL, CODED = 3584, 2816


def with_segment(index: int, **changes: int) -> list[Segment]:
    return [segment._replace(**changes) if i == index else segment for i, segment in enumerate(SOUND)]


REFUSED: dict[str, tuple[Sequence[Segment], str]] = {
    "one_missing": (SOUND[:-1], "its segments are 1536 bytes in 1280, and it is 3584 in 2816"),
    "the_first_missing": (SOUND[1:], "follow each other"),
    "none": ((), "are 0 bytes in 0"),
    "another_order": ((SOUND[1], SOUND[0], SOUND[2]), "follow each other"),
    "one_twice": ((*SOUND, SOUND[2]), "follow each other"),
    "overlapping": (with_segment(1, offset=768), "follow each other"),
    "overlapping_where_coded": (with_segment(1, coded_offset=512), "follow each other"),
    "a_gap": (with_segment(2, offset=1792), "follow each other"),
    "a_gap_where_coded": (with_segment(2, coded_offset=1536), "follow each other"),
    "before_the_shard": (with_segment(0, offset=-256), "follow each other"),
    "before_the_coded_shard": (with_segment(0, coded_offset=-256), "follow each other"),
    "longer_coded": (with_segment(1, coded_nbytes=768), "a segment of 512 bytes has 768 coded ones"),
    "no_coded_bytes": (with_segment(0, coded_nbytes=0), "has 0 coded ones"),
    "negative_coded_bytes": (with_segment(0, coded_nbytes=-256), "has -256 coded ones"),
    "no_bytes": (with_segment(0, nbytes=0, coded_nbytes=0), "a segment of 0 bytes"),
    "negative_bytes": (with_segment(0, nbytes=-256, coded_nbytes=-256), "a segment of -256 bytes"),
    "unaligned": (with_segment(2, nbytes=2047), "not aligned"),
    "unaligned_where_coded": (with_segment(2, coded_nbytes=1535), "not aligned"),
    "leaving_the_shard": (with_segment(2, nbytes=2304), "are 3840 bytes in 2816, and it is 3584"),
    "leaving_the_coded_shard": (with_segment(2, coded_nbytes=1792), "in 3072, and it is 3584 in 2816"),
    "huge": (with_segment(2, nbytes=1 << 70), "in 2816, and it is 3584"),
    "huge_and_coded": (with_segment(2, nbytes=1 << 70, coded_nbytes=1 << 70), "and it is 3584 in 2816"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_segments_that_are_refused(what: str) -> None:
    segments, reason = REFUSED[what]
    check_segments(torch.zeros(CODED, dtype=torch.uint8), SOUND, TOTAL, Said(0))
    with pytest.raises(ValueError, match=reason):
        check_segments(torch.zeros(CODED, dtype=torch.uint8), segments, TOTAL, Said(0))


def test_each_coded_segment_is_looked_at() -> None:
    tensors = [weights(LARGE).view(BF16), random_bits(4 * LARGE).view(F32), weights(LARGE, F16).view(F16)]
    layout = layout_of(tensors)
    image = image_of(layout, tensors)
    coded, found = encode_shard(image, (0, image.numel()), regions_of(layout), CODEC)
    segments = [segment for segment, _ in found]
    assert [segment.is_coded for segment in segments] == [True, False, True]
    for segment in segments:
        changed = coded.clone()
        changed[segment.coded_offset + 8] ^= 1  # of a coded run: how many values it has
        if segment.is_coded:
            with pytest.raises(ValueError, match="a run says that it has"):
                check_segments(changed, segments, image.numel(), CODEC)
        else:
            check_segments(changed, segments, image.numel(), CODEC)
    with pytest.raises(ValueError, match="and it is"):
        check_segments(coded[:-256], segments, image.numel(), CODEC)
