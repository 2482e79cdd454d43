# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Images of blocks that lie in files: what runs, realignments and memory put together are the tensors' own bytes, on any
number of shards, and no copy is made that could be spared.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from diffusers_dlo.block_layout import ALIGNMENT, SMALL_NBYTES, BlockLayout, lay_out
from diffusers_dlo.checkpoint.mapped import FileRange
from diffusers_dlo.tensor_utils import OwnedTensor, Owner


DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.complex128, torch.bool)
NUM_CASES = 400
KIB = 1 << 10


def up(nbytes: int) -> int:
    return (nbytes + 255) // 256 * 256


def own(tensor: torch.Tensor, name: str, kind: str = "parameter") -> OwnedTensor:
    return OwnedTensor(tensor, [Owner(nn.Module(), name, name, kind)])


def tensor_of(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Case:
    """Tensors of a block, some of which lie in made-up files, and the content of all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.paths = [f"/models/{name}.safetensors" for name in "cab"[: self.random.randint(1, 3)]]
        self.tensors = [self.make_tensor() for _ in range(self.random.randint(1, 14))]
        kinds = self.random.choices(("parameter", "buffer"), k=len(self.tensors))
        self.owned = [own(tensor, f"layer.{i}", kind) for i, (tensor, kind) in enumerate(zip(self.tensors, kinds))]
        self.files = self.place()
        sizes = dict.fromkeys(self.paths, 0)
        for place in self.files.values():
            sizes[place.path] = max(sizes[place.path], place.offset + place.nbytes)
        generator = torch.Generator().manual_seed(seed)
        self.content = {
            path: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            for path, size in sizes.items()
        }
        self.layout = lay_out("blocks.3", self.owned, seed % 2 == 0, self.files)

    def make_tensor(self) -> torch.Tensor:
        dtype = self.random.choice(DTYPES)
        numel = self.random.choice(
            (
                self.random.randint(1, 40),
                self.random.randint(100, 3000),
                128 * self.random.randint(1, 30),
                (SMALL_NBYTES // dtype.itemsize) + self.random.randint(-1, 1),
                self.random.randint(SMALL_NBYTES, 2 * SMALL_NBYTES) // dtype.itemsize,
            )
        )
        tensor = torch.empty(numel, dtype=dtype, device="meta")
        rows = next(rows for rows in (7, 5, 3, 2, 1) if numel % rows == 0)
        tensor = tensor.view(rows, -1)
        return tensor.t() if self.random.random() < 0.3 else tensor

    def place(self) -> dict[int, FileRange]:
        """In files of any order, with gaps of all sizes between them, and now and then over one another."""
        ends = {path: self.random.choice((0, 8, 104, 256, 1000)) for path in self.paths}
        files: dict[int, FileRange] = {}
        in_memory = self.random.choice((0.0, 0.2, 0.5, 1.0))
        tidy = self.random.random() < 0.3
        for tensor in self.random.sample(self.tensors, len(self.tensors)):
            if self.random.random() < in_memory:
                continue
            path = self.random.choice(self.paths)
            gap = self.random.choice(
                (0, 0, 0, 0, self.random.randint(1, 300), 256, SMALL_NBYTES, SMALL_NBYTES + 1, 3 * SMALL_NBYTES)
            )
            if self.random.random() < 0.1:
                gap = -self.random.randint(1, 2000)
            start = max(ends[path] + (0 if tidy else gap), 0)
            files[id(tensor)] = FileRange(path, start, nbytes_of(tensor))
            ends[path] = max(ends[path], start + nbytes_of(tensor))
        return files

    def fetch(self) -> torch.Tensor:
        """The image as a device would have it, with noise wherever nothing is copied."""
        image = torch.randint(0, 256, (self.layout.padded_nbytes(1),), dtype=torch.uint8)
        for run in self.layout.runs:
            piece = self.content[run.path][run.file_offset : run.file_offset + run.nbytes]
            assert piece.numel() == run.nbytes, "a run reaches beyond what is in the file"
            image[run.offset : run.offset + run.nbytes] = piece
        for source, target, nbytes in self.layout.realigned:
            image[target : target + nbytes] = image[source : source + nbytes].clone()
        return image


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = [Case(seed) for seed in range(NUM_CASES)]
    # The cases are of all sorts, or the tests below would say little.
    layouts = [case.layout for case in found]
    assert sum(not layout.runs for layout in layouts) > 20
    assert sum(len(layout.runs) == 1 for layout in layouts) > 20
    assert sum(len(layout.runs) > 3 for layout in layouts) > 20
    assert sum(bool(layout.realigned) for layout in layouts) > 100
    assert sum(bool(layout.runs) and layout.nbytes > layout.memory_offset for layout in layouts) > 100
    assert sum(bool(layout.runs) and layout.nbytes <= layout.memory_offset for layout in layouts) > 50
    return found


def assert_disjoint(spans: Sequence[tuple[int, int]]) -> None:
    for (_, stop), (start, _) in pairwise(sorted(spans)):
        assert stop <= start


# ------------------------------------------------------------------------------------------------------ any image


def test_tensors_are_described_in_order_of_registration(cases: list[Case]) -> None:
    for seed, case in enumerate(cases):
        assert case.layout.name == "blocks.3" and case.layout.is_leaf == (seed % 2 == 0)
        assert len(case.layout.tensors) == len(case.owned)
        for place, item in zip(case.layout.tensors, case.owned):
            tensor = item.tensor
            assert (place.name, place.kind, place.nbytes) == (item.name, item.owners[0].kind, nbytes_of(tensor))
            assert getattr(torch, place.dtype) is tensor.dtype
            assert (place.shape, place.stride) == (tuple(tensor.shape), tensor.stride())
            assert place.file == case.files.get(id(tensor))


def test_every_tensor_is_aligned_and_none_overlaps_another(cases: list[Case]) -> None:
    assert ALIGNMENT == 256
    for case in cases:
        tensors = case.layout.tensors
        assert all(place.offset % 256 == 0 for place in tensors)
        assert_disjoint([(place.offset, place.offset + place.nbytes) for place in tensors])
        assert max(place.offset + place.nbytes for place in tensors) <= case.layout.nbytes


def test_runs_and_realignments_give_the_bytes_of_the_file(cases: list[Case]) -> None:
    for case in cases:
        image = case.fetch()
        for place in case.layout.tensors:
            if place.file is not None:
                expected = case.content[place.file.path][place.file.offset : place.file.offset + place.nbytes]
                assert torch.equal(image[place.offset : place.offset + place.nbytes], expected), place.name


def test_the_parts_of_an_image_follow_each_other(cases: list[Case]) -> None:
    for case in cases:
        layout = case.layout
        runs = [(run.offset, run.offset + run.nbytes) for run in layout.runs]
        targets = [(target, target + nbytes) for _, target, nbytes in layout.realigned]
        memory = [(t.offset, t.offset + t.nbytes) for t in layout.tensors if t.file is None]
        parts = runs + targets + memory
        assert parts == sorted(parts)
        assert_disjoint(parts)
        assert layout.nbytes == parts[-1][1]
        end_of_files = (runs + targets)[-1][1] if runs else 0
        assert layout.memory_offset == up(end_of_files)
        # No more is left out than alignment asks for: a slot is no larger than it has to be.
        for index, ((_, stop), (start, _)) in enumerate(pairwise([(0, 0), *parts])):
            assert 0 <= start - up(stop) < (256 if index < len(runs) else 1)
        # Each realignment copies within what a run brought, and only small tensors that lie there.
        small = {t.offset: t.nbytes for t in layout.tensors if t.file is not None and t.nbytes <= SMALL_NBYTES}
        for source, target, nbytes in layout.realigned:
            assert small[target] == nbytes and source % 256
            assert any(start <= source and source + nbytes <= stop for start, stop in runs)


def test_what_is_in_no_file_lies_one_after_the_other_at_the_end(cases: list[Case]) -> None:
    for case in cases:
        end = case.layout.memory_offset
        for place in case.layout.tensors:
            if place.file is None:
                assert place.offset == up(end)
                end = place.offset + place.nbytes


def test_runs_are_as_few_as_their_rule_allows(cases: list[Case]) -> None:
    """Between two runs is a reason: another file, a wide gap, an overlap, or large tensors that align differently."""
    for case in cases:
        runs = sorted(case.layout.runs, key=lambda run: (run.path, run.file_offset))
        assert list(case.layout.runs) == runs, "in the order of the files"
        places = sorted((t.file for t in case.layout.tensors if t.file), key=lambda f: (f.path, f.offset))
        members: list[list[FileRange]] = []
        for run in runs:
            inside, position = [], run.file_offset
            while position < run.file_offset + run.nbytes or not inside:
                place = places.pop(0)
                assert place.path == run.path and 0 <= place.offset - position <= (SMALL_NBYTES if inside else 0)
                inside.append(place)
                position = place.offset + place.nbytes
            assert position == run.file_offset + run.nbytes, "a run ends with a tensor"
            assert len(phases(inside)) <= 1
            members.append(inside)
        assert not places
        for before, after in pairwise(members):
            gap = after[0].offset - before[-1].offset - before[-1].nbytes
            assert (
                before[0].path != after[0].path
                or not 0 <= gap <= SMALL_NBYTES
                or len(phases([*before, after[0]])) == 2
            ), "two runs could have been one"


def phases(places: Sequence[FileRange]) -> set[int]:
    return {place.offset % 256 for place in places if place.nbytes > SMALL_NBYTES}


@pytest.mark.parametrize("size", range(1, 9))
def test_shards_are_equal_and_aligned(cases: list[Case], size: int) -> None:
    for case in cases:
        layout = case.layout
        shard, padded = layout.shard_nbytes(size), layout.padded_nbytes(size)
        assert shard % 256 == 0 and padded == shard * size and padded >= layout.nbytes
        assert (shard - 256) * size < layout.nbytes, "no shard is larger than it has to be"
        stored = layout.memory_nbytes(size)
        if all(place.file is not None for place in layout.tensors):
            assert stored == 0
        else:
            assert layout.memory_offset + stored == padded


def test_layouts_do_not_depend_on_the_order_in_which_places_are_given(cases: list[Case]) -> None:
    for case in cases:
        items = list(case.files.items())
        case.random.shuffle(items)
        extra = {0: FileRange("/models/other.safetensors", 0, 100)}  # a tensor of another block
        again = lay_out("blocks.3", case.owned, case.layout.is_leaf, {**extra, **dict(items)})
        assert again == case.layout and again.digest == case.layout.digest


def test_the_digest_tells_layouts_apart(cases: list[Case]) -> None:
    """Two ranks with the same digest may share a store, so whatever they copy has to be in it."""
    assert len({case.layout.digest for case in cases}) == len({case.layout.describe() for case in cases})
    case = next(case for case in cases if len(case.layout.runs) > 1 and case.layout.realigned)
    layout, run = case.layout, case.layout.runs[0]
    others = [
        lay_out("blocks.4", case.owned, layout.is_leaf, case.files),
        lay_out("blocks.3", case.owned, not layout.is_leaf, case.files),
        lay_out("blocks.3", case.owned, layout.is_leaf),
        lay_out("blocks.3", case.owned[1:], layout.is_leaf, case.files),
        *(
            replace(layout, runs=(run._replace(**change), *layout.runs[1:]))
            for change in ({"path": "/b"}, {"file_offset": 1}, {"offset": 256}, {"nbytes": run.nbytes + 1})
        ),
    ]
    for key, place in case.files.items():
        moved = replace(place, offset=place.offset + 4 * SMALL_NBYTES)
        others.append(lay_out("blocks.3", case.owned, layout.is_leaf, {**case.files, key: moved}))
    digests = [layout.digest, *(other.digest for other in others)]
    assert len(set(digests)) == len(digests)


# --------------------------------------------------------------------------------------------------- special images


def place_all(sizes: Sequence[int], start: int = 0, gaps: Sequence[int] = ()) -> tuple[list[OwnedTensor], dict]:
    """Tensors of these sizes, one after the other in a file."""
    owned, files, end = [], {}, start
    for index, nbytes in enumerate(sizes):
        owned.append(own(tensor_of(nbytes), f"{index}"))
        files[id(owned[-1].tensor)] = FileRange("/a", end, nbytes)
        end += nbytes + (gaps[index] if index < len(gaps) else 0)
    return owned, files


def lay(sizes: Sequence[int], start: int = 0, gaps: Sequence[int] = ()) -> BlockLayout:
    owned, files = place_all(sizes, start, gaps)
    return lay_out("block", owned, False, files)


@pytest.mark.parametrize("seed", range(20))
def test_without_files_tensors_lie_one_after_the_other(seed: int) -> None:
    case = Case(seed)
    layout = lay_out("block", case.owned, False)
    assert (
        layout
        == lay_out("block", case.owned, False, {})
        == lay_out("block", case.owned, False, {0: FileRange("/a", 0, 1)})
    )
    assert layout.memory_offset == 0 and layout.runs == () and layout.realigned == ()
    end = 0
    for place, tensor in zip(layout.tensors, case.tensors):
        assert place.offset == up(end) and place.file is None
        end = place.offset + nbytes_of(tensor)
    assert layout.nbytes == end
    for size in range(1, 9):
        assert layout.memory_nbytes(size) == layout.padded_nbytes(size)


@pytest.mark.parametrize("seed", range(20))
def test_a_tidy_checkpoint_is_one_run_without_waste(seed: int) -> None:
    """What real checkpoints are: sizes that are multiples of 256, in the order of their names, any header before."""
    source = random.Random(seed)
    sizes = [256 * source.choice((1, 2, 7, 20, 256, 257, 400)) for _ in range(source.randint(1, 30))]
    start = source.randint(0, 100_000)
    owned, files = place_all(sizes, start)
    source.shuffle(owned)  # modules register in another order than the file has
    layout = lay_out("block", owned, False, files)
    (run,) = layout.runs
    assert run == ("/a", start, 0, sum(sizes)) and layout.realigned == ()
    assert layout.nbytes == layout.memory_offset == sum(sizes) and layout.memory_nbytes(3) == 0


def test_a_block_in_two_files_is_two_runs() -> None:
    owned = [own(tensor_of(512), name) for name in "abcd"]
    places = (("/y", 40), ("/x", 8), ("/y", 552), ("/x", 520))
    files = {id(item.tensor): FileRange(path, offset, 512) for item, (path, offset) in zip(owned, places)}
    layout = lay_out("block", owned, False, files)
    assert layout.runs == (("/x", 8, 0, 1024), ("/y", 40, 1024, 1024)) and layout.realigned == ()
    assert [place.offset for place in layout.tensors] == [1024, 0, 1536, 512]


def test_a_gap_up_to_64_kib_is_copied_along() -> None:
    sizes = (128 * KIB, 256)
    for gap in (256, 1024, 64 * KIB):
        layout = lay(sizes, 40, (gap,))
        assert layout.runs == (("/a", 40, 0, sum(sizes) + gap),) and layout.realigned == ()
        assert layout.tensors[1].offset == sizes[0] + gap
    for gap in (64 * KIB + 1, 64 * KIB + 256, 1 << 30):
        layout = lay(sizes, 40, (gap,))
        assert layout.runs == (("/a", 40, 0, sizes[0]), ("/a", 40 + sizes[0] + gap, sizes[0], sizes[1]))
        assert layout.nbytes == sum(sizes) and layout.realigned == ()


def test_a_large_tensor_out_of_phase_starts_a_run_and_a_small_one_is_realigned() -> None:
    large = 64 * KIB + 1
    layout = lay((large, large), 0, (7,))
    assert layout.runs == (("/a", 0, 0, large), ("/a", large + 7, up(large), large)) and layout.realigned == ()
    small = 64 * KIB
    layout = lay((large, small, 300, large), 0, (7, 0, (-large - 7 - small - 300) % 256))
    (run,) = layout.runs
    last = up(large + 7 + small + 300)
    assert run == ("/a", 0, 0, last + large)
    assert [(nbytes, source) for source, _, nbytes in layout.realigned] == [
        (small, large + 7),
        (300, large + 7 + small),
    ]
    assert [target for _, target, _ in layout.realigned] == [up(run.nbytes), up(run.nbytes) + small]
    assert layout.tensors[3].offset == last


def test_small_tensors_before_a_large_one_follow_its_phase() -> None:
    layout = lay((100, 200, 128 * KIB, 50), 64)
    (run,) = layout.runs
    assert run == ("/a", 64, (-300) % 256, 350 + 128 * KIB)
    assert layout.tensors[2].offset == 512
    assert [nbytes for _, _, nbytes in layout.realigned] == [100, 200], "what follows it happens to be aligned"


def test_small_tensors_alone_are_placed_where_most_are_aligned() -> None:
    layout = lay((100, 256, 512, 256, 30), 1000)
    (run,) = layout.runs
    assert (run.offset + 100) % 256 == 0
    assert [nbytes for _, _, nbytes in layout.realigned] == [100]
    assert layout.nbytes == up(run.offset + run.nbytes) + 100


def test_tensors_over_one_another_are_copied_once_each() -> None:
    """Two loads of one file: different tensors of a block that show the same bytes, wholly or in part."""
    owned = [own(tensor_of(1000), name) for name in "abc"]
    files = {id(item.tensor): FileRange("/a", offset, 1000) for item, offset in zip(owned, (512, 512, 1100))}
    layout = lay_out("block", owned, False, files)
    assert [(run.file_offset, run.nbytes) for run in layout.runs] == [(512, 1000), (512, 1000), (1100, 1000)]
    assert [place.offset for place in layout.tensors] == [0, 1024, 2048] and layout.realigned == ()


def test_a_block_partly_in_memory() -> None:
    owned, files = place_all((512, 300, 256), 8)
    owned.insert(1, own(tensor_of(10), "first"))
    owned.append(own(tensor_of(700), "second"))
    layout = lay_out("block", owned, False, files)
    assert layout.runs == (("/a", 8, 0, 1068),) and layout.realigned == ((812, 1280, 256),)
    assert layout.memory_offset == 1536 and layout.nbytes == 2492
    assert [place.offset for place in layout.tensors] == [0, 1536, 512, 1280, 1792]
    assert layout.memory_nbytes(1) == 2560 - 1536 and layout.memory_nbytes(3) == 3 * 1024 - 1536
