# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What of the devices' codec needs no device: the tables of its runs are looked at before the library reads them, and a
library that is missing, broken or another is named with what to install.
"""

import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from diffusers_dlo.device import ans_codec
from diffusers_dlo.device.ans_codec import AnsCodec
from tests.coding.images import up


CHUNK = 256 << 10
CODEC = AnsCodec.__new__(AnsCodec)  # `check` asks nothing of a device
NUMBERS = (-(1 << 63), -CHUNK, -16, -1, 0, 1, 15, 16, 256, 4096, 1 << 31, 1 << 40, (1 << 63) - 16, (1 << 63) - 1)


def run(offsets: Sequence[int], sizes: Sequence[int], lengths: Sequence[int], nbytes: int) -> torch.Tensor:
    """A run of `nbytes` bytes that begins with this table."""
    table = torch.tensor([*offsets, *sizes, *lengths], dtype=torch.int64).view(torch.uint8)
    coded = torch.zeros(max(nbytes, table.numel()), dtype=torch.uint8)
    coded[: table.numel()] = table
    return coded[:nbytes]


def sound(nbytes: int, size: int = 1000) -> tuple[list[int], list[int], list[int], int]:
    """The table of a run for so many bytes, each chunk of which takes `size`, and the bytes of that run."""
    count = -(-nbytes // CHUNK)
    begin, pitch = up(24 * count), -(-size // 16) * 16
    lengths = [CHUNK] * (count - 1) + [nbytes - (count - 1) * CHUNK]
    return [begin + i * pitch for i in range(count)], [size] * count, lengths, up(begin + count * pitch)


def is_inside(offset: int, size: int, begin: int, stop: int) -> bool:
    return begin <= offset and 0 < size <= stop - offset and offset % 16 == 0


def refuse(table: tuple[list[int], list[int], list[int], int], nbytes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CODEC.check(run(*table), nbytes)


@pytest.mark.parametrize("size", (1, 15, 16, 1000, CHUNK))
def test_sound_tables(size: int) -> None:
    for nbytes in (256, CHUNK - 256, CHUNK, CHUNK + 256, 11 * CHUNK, 11 * CHUNK + 512):
        CODEC.check(run(*sound(nbytes, size)), nbytes)


def test_the_last_chunk_may_end_with_the_run() -> None:
    offsets, sizes, lengths, total = sound(3 * CHUNK, 256)
    assert offsets[-1] + sizes[-1] == total
    CODEC.check(run(offsets, sizes, lengths, total), 3 * CHUNK)
    refuse((offsets, [256, 256, 257], lengths, total), 3 * CHUNK, "a chunk lies outside of it")
    refuse(([*offsets[:2], offsets[2] + 16], sizes, lengths, total), 3 * CHUNK, "a chunk lies outside of it")


def test_each_number_of_a_table() -> None:
    """Anything that is not what it was is refused, unless it is another place inside."""
    nbytes, before, accepted = 3 * CHUNK + 256, sound(3 * CHUNK + 256), 0
    for column, row, number in itertools.product(range(3), range(4), NUMBERS):
        table = sound(nbytes)
        table[column][row] = number
        offset, size = table[0][row], table[1][row]
        if table == before or (column < 2 and is_inside(offset, size, 256, table[3])):
            CODEC.check(run(*table), nbytes)
            accepted += 1
        else:
            refuse(table, nbytes, "lengths of its chunks" if column == 2 else "a chunk lies outside of it")
    assert 0 < accepted < 40


def test_tables_for_another_length() -> None:
    table = sound(3 * CHUNK)
    for nbytes in (256, CHUNK, 2 * CHUNK, 3 * CHUNK - 256):
        refuse(table, nbytes, "the lengths of its chunks do not add up to it")
    for nbytes in (1 << 40, 1 << 62, 1 << 70):
        refuse(table, nbytes, "fewer than its table")
    offsets, sizes, lengths, total = table
    refuse((offsets, sizes, [2 * CHUNK, CHUNK // 2, CHUNK // 2], total), 3 * CHUNK, "do not add up")
    refuse((offsets, sizes, [CHUNK, 2 * CHUNK, 0], total), 3 * CHUNK, "do not add up")


def test_tables_that_are_cut_off() -> None:
    coded = run(*sound(30 * CHUNK))
    for nbytes in (0, 1, 24, 255, 256, 24 * 30 - 1, 24 * 30, 767):
        with pytest.raises(ValueError, match=f"a run has {nbytes} bytes, fewer than its table"):
            CODEC.check(coded[:nbytes], 30 * CHUNK)
    for nbytes in (768, 1024, coded.numel() - 256):
        with pytest.raises(ValueError, match="a chunk lies outside of it"):
            CODEC.check(coded[:nbytes], 30 * CHUNK)


@seed(0)
@settings(max_examples=150, deadline=None, database=None)
@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_what_is_accepted_lies_inside(count: int, rooms: int, drawn: st.DataObject) -> None:
    """By plain integers: whatever stands in a table, the library reads nothing outside of the run."""
    number = st.one_of(st.integers(-2, 200).map(lambda n: 16 * n), st.sampled_from(NUMBERS), st.integers(0, 4000))
    offsets, sizes = (drawn.draw(st.lists(number, min_size=count, max_size=count)) for _ in range(2))
    total, nbytes = 256 * rooms, count * CHUNK
    accepted = True
    try:
        CODEC.check(run(offsets, sizes, [CHUNK] * count, total), nbytes)
    except ValueError:
        accepted = False
    assert accepted == all(is_inside(offset, size, 256, total) for offset, size in zip(offsets, sizes))


# The library


@pytest.fixture
def without_system_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A system that has no such library; what was asked for. Files are loaded as ever."""
    asked: list[str] = []
    load = ctypes.CDLL

    def refused(name: str) -> Any:
        asked.append(name)
        if "/" not in name:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return load(name)

    monkeypatch.setattr(ans_codec.ctypes, "CDLL", refused)
    yield asked


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty package 'nvidia', which is found before any other."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "nvidia"}
    folder = tmp_path / "nvidia"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_the_library_is_missing(package: Path, without_system_library: list[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        AnsCodec(torch.device("cpu"))
    said = str(caught.value)
    assert without_system_library == ["libnvcomp.so.6"]
    assert said.startswith("The codec 'ans' needs nvCOMP 6, which cannot be loaded (libnvcomp.so.6: cannot open ")
    assert 'pip install "diffusers-dlo[coded]", or nvidia-libnvcomp-cu12' in said


def test_a_library_that_cannot_be_loaded_says_why(package: Path, without_system_library: list[str]) -> None:
    """That there is none in the system is not the reason: that the installed one does not work is."""
    path = package / "libnvcomp" / "lib64" / "libnvcomp.so.6"
    path.parent.mkdir(parents=True)
    path.write_text("no library at all")
    with pytest.raises(RuntimeError) as caught:
        AnsCodec(torch.device("cpu"))
    assert without_system_library == [str(path), "libnvcomp.so.6"]
    assert f"({path}: " in str(caught.value) and "No such file" in str(caught.value)


def give_library(monkeypatch: pytest.MonkeyPatch, version: int, status: int = 0) -> None:
    def properties(reference: Any) -> int:
        reference._obj.version = version
        return status

    monkeypatch.setattr(ans_codec, "_load_library", lambda: SimpleNamespace(nvcompGetProperties=properties))


@pytest.mark.parametrize("version", ("5.1.3", "7.0.0", "0.0.0"))
def test_a_library_of_another_series(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    major, minor, patch = map(int, version.split("."))
    give_library(monkeypatch, 1000 * major + 100 * minor + patch)
    with pytest.raises(RuntimeError) as caught:
        AnsCodec(torch.device("cpu"))
    said = str(caught.value)
    assert f"'ans' needs nvCOMP 6, and version {version} is installed" in said and '-cu13>=6,<7"' in said


def test_a_library_of_the_series(monkeypatch: pytest.MonkeyPatch) -> None:
    give_library(monkeypatch, 6212)
    codec = AnsCodec(torch.device("cpu"))
    assert (codec.name, codec.version) == ("ans", "6.2.12")
    give_library(monkeypatch, 6000, status=10)
    with pytest.raises(RuntimeError, match="nvCOMP refused 'nvcompGetProperties' with status 10"):
        AnsCodec(torch.device("cpu"))
