# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The weight cache: what is written, when it is found again and when it must not be, damage, failures, and several starts
at once. Never wrong weights.
"""

import ctypes
import errno
import fcntl
import gc
import json
import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_dlo import DistributedLayerwiseOffloadMixin, apply_distributed_layerwise_offload, host_view
from diffusers_dlo.casts import cast, flat_bytes, pending_casts, set_pending_casts
from diffusers_dlo.checkpoint import container
from diffusers_dlo.checkpoint.container import Container, Entry, chunk_digests, content_digest, is_storable
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.host import cache
from tests import toys, zoo
from tests.ranks import run_ranks
from tests.toys import feed, toy


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOGGER = "diffusers_dlo.host.cache"
NOBODY = 65534


@pytest.fixture(scope="module", autouse=True)
def fast_collections() -> Iterator[None]:
    """Enabling collects garbage, which is slow with all that pytest and torch hold."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[Path]:
    """`a` and `b`: one architecture, other weights, in fp32. Readable for every user, unlike pytest's own folders."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for seed, name in enumerate("ab"):
            zoo.build("wan", 2, seed=seed).save_pretrained(f"{folder}/{name}")
            os.chmod(weights_file(Path(folder, name)), 0o644)
        yield Path(folder)


@pytest.fixture
def checkpoint(checkpoints: Path, tmp_path: Path) -> Path:
    """A copy of `a` to change."""
    return Path(shutil.copytree(checkpoints / "a", tmp_path / "checkpoint"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The cache directory, not there yet."""
    return tmp_path / "cache"


def expected_of(path: Path | str, dtype: torch.dtype = BF16) -> nn.Module:
    """The model as it is without any offload, in memory that is aligned: the bits of kernels may depend on that."""
    model = WanTransformer3DModel.from_pretrained(path, dtype=dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def load(path: Path | str, dtype: torch.dtype = BF16) -> nn.Module:
    """The model left in its file, with casts pending, but for the modules that its class keeps in fp32."""
    model = WanTransformer3DModel.from_pretrained(path)
    kept = model._keep_in_fp32_modules
    for name, parameter in model.named_parameters():
        if not name.startswith("blocks."):  # what stays where it is, in a file at any address
            parameter.data = parameter.data.clone()
        if dtype != FP32 and not any(part in name.split(".") for part in kept):
            set_pending_casts(parameter, (dtype,))
    return model


def assert_streams(model: nn.Module, expected: nn.Module, seeds: Sequence[int] = (0,)) -> None:
    """Every bit of every weight, and of results."""
    for name, parameter in expected.named_parameters():
        value = host_view(model, name)
        assert value.dtype == parameter.dtype and torch.equal(bytes_of(value), bytes_of(parameter)), name
    for seed in seeds:
        assert_equal(results(model, seed), results(expected, seed))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def results(model: nn.Module, seed: int) -> list[torch.Tensor]:
    if isinstance(model, WanTransformer3DModel):
        return zoo.run(model, zoo.MODELS["wan"].inputs(seed))
    with torch.no_grad():
        return [model(feed(seed))]


def assert_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(wanted) and all(torch.equal(one, other) for one, other in zip(found, wanted))


def assert_restored(model: nn.Module, expected: nn.Module) -> None:
    """After `remove`: the weights, and a model that computes with them."""
    for name, parameter in expected.named_parameters():
        value = model.get_parameter(name)
        assert not pending_casts(value) and value.dtype == parameter.dtype, name
        assert torch.equal(bytes_of(value), bytes_of(parameter)), name
    for found, wanted in zip(results(model, 2), results(expected, 2)):
        assert torch.allclose(found, wanted, rtol=1e-2, atol=1e-3)  # where a weight lies may change a last bit


@contextmanager
def enabled(model: nn.Module, folder: Path | str, **options: Any) -> Iterator[Any]:
    handle = apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder, **options)
    try:
        yield handle
    finally:
        handle.remove()


def start(folder: Path | str, path: Path | str, dtype: torch.dtype = BF16, kind: str = "mapped") -> None:
    """A whole start, which must have right bits, whatever is in the directory."""
    model, expected = load(path, dtype), expected_of(path, dtype)
    with enabled(model, folder) as handle:
        assert handle.report().host_kind == kind
        assert_streams(model, expected)
    assert_restored(model, expected)


def start_toy(folder: Path | str, make: Callable[[], nn.Module], kind: str = "mapped") -> None:
    """As `start`, of a model in memory."""
    model, expected = make(), make()
    with enabled(model, folder) as handle:
        assert handle.report().host_kind == kind
        assert_streams(model, expected)
    assert_restored(model, expected)


def listing(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """All that is in the directory, and what would tell that it was written again."""
    if not os.path.isdir(folder):
        return {}
    found = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    return {name: (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found.items()}


def only_file(folder: Path | str) -> Path:
    (name,) = os.listdir(folder)
    assert name.endswith(".safetensors") and len(name) == 64 + len(".safetensors")
    return Path(folder) / name


def header_of(path: Path | str) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a header, and keeps its length."""
    header, begin = header_of(path)
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= begin - 8
    overwrite(path, 8, text.ljust(begin - 8))


def overwrite(path: Path | str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path | str, offset: int) -> None:
    """Changes one bit of a file."""
    with open(path, "rb") as file:
        file.seek(offset)
        (before,) = file.read(1)
    overwrite(path, offset, bytes([before ^ 1]))


@contextmanager
def same_time(path: Path | str) -> Iterator[None]:
    """Whatever is done to a file meanwhile does not show in its time of change."""
    status = os.stat(path)
    yield
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --------------------------------------------------------------------------------------------------- the container


def tensors_to_store() -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    found = [
        ("even", random(64, 32, dtype=BF16)),
        ("odd", random(37)),
        ("columns", random(16, 48).t()),
        ("permuted", random(7, 5, 3).permute(2, 0, 1)),
        ("one", torch.empty_strided((3, 1, 5), (5, 77, 1)).copy_(random(3, 1, 5))),
        ("scalar", random()),
        ("within", random(100)[3:67]),
        ("bool", random(37) > 0),
        ("double", random(9, dtype=torch.float64)),
        ("half", random(2, 3, dtype=FP16)),
        ("long", torch.arange(160).view(5, 32)),
        ("int", torch.arange(3, dtype=torch.int32)),
        ("short", torch.arange(7, dtype=torch.int16)),
        ("bytes", torch.arange(201, dtype=torch.uint8)),
        ("signed", torch.arange(-5, 6, dtype=torch.int8)),
        ("fp8", random(13, dtype=torch.float8_e4m3fn)),
        ("fp8 wide", random(256, dtype=torch.float8_e5m2)),
        ("empty", torch.empty(0, 4)),
        ('a "name" \u00fc', random(64)),
        ("conv", random(4, 8, 2, 2).to(memory_format=torch.channels_last)),
    ]
    for name, dtype, casts in (
        ("cast", FP32, (BF16,)),
        ("chain", FP32, (FP16, BF16, FP32)),
        ("narrow", torch.float64, (FP32, torch.float8_e4m3fn)),
        ("wide", BF16, (torch.float64,)),
    ):
        for shape in ((8, 32), (3, 11, 7)):
            tensor = random(*shape, dtype=dtype)
            tensor = tensor.t() if len(shape) == 2 else tensor.permute(1, 2, 0)
            set_pending_casts(tensor, casts)
            found.append((f"{name} {len(shape)}", tensor))
    return found


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """What is to be stored: after all casts, with the dimensions in the order they lie in memory."""
    tensor = cast(tensor)
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(order).contiguous()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that pieces, and the chunks of digests, begin and end within elements."""
    monkeypatch.setattr(container, "_PIECE_NBYTES", 101)
    monkeypatch.setattr(container, "_CHUNK_NBYTES", 999)
    monkeypatch.setattr("diffusers_dlo.casts._CAST_NBYTES", 24)


def write(made: Container, path: Path, size: int, **metadata: str) -> list[int]:
    """Writes a file as `size` ranks, and returns how many bytes each of them said it wrote."""
    said = [0] * size
    with open(path, "w+b") as file:
        for rank in range(size):

            def hear(nbytes: int, rank: int = rank) -> None:
                said[rank] += nbytes

            made.write_share(file.fileno(), rank, size, hear)
        made.write_header(file.fileno(), **metadata)
    return said


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_what_is_written_is_a_safetensors_file(size: int, small_pieces: None, tmp_path: Path) -> None:
    entries = [Entry(name, tensor) for name, tensor in tensors_to_store()]
    assert all(is_storable(entry.tensor) for entry in entries)
    assert not is_storable(torch.zeros(2, dtype=torch.complex128))
    made = Container([entries[:5], [], entries[5:]], {"format": "pt", "said": "00000"})
    said = write(made, tmp_path / "x.safetensors", size, said="later")
    assert sum(said) == made.nbytes - len(made.header) == sum(entry.nbytes for entry in entries)
    assert os.path.getsize(tmp_path / "x.safetensors") == made.nbytes
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == {entry.name for entry in entries}
    for name, tensor in tensors_to_store():
        wanted = memory_order(tensor)
        assert found[name].dtype == wanted.dtype, name
        assert sorted(found[name].shape) == sorted(wanted.shape), name
        assert 1 in wanted.shape or found[name].shape == wanted.shape, name
        assert torch.equal(bytes_of(found[name]), bytes_of(wanted)), name
    header, begin = header_of(tmp_path / "x.safetensors")
    assert header.pop("__metadata__") == {"format": "pt", "said": "later"}
    # Where they lie: on a page, those that leave their successors aligned first and in order, each on its own items.
    assert begin % 4096 == 0 and begin == len(made.header)
    places = made.places("/there")
    even = [entry.name for entry in entries if entry.nbytes % 256 == 0]
    order = sorted((name for name in header if name != "empty"), key=lambda name: header[name]["data_offsets"])
    assert order[: len(even) - 1] == [name for name in even if name != "empty"]
    for entry in entries:
        low, high = header[entry.name]["data_offsets"]
        place = places[entry.name]
        assert (place.path, place.offset, place.nbytes) == ("/there", begin + low, high - low)
        alignment = 256 if entry.name in even else cast(entry.tensor).element_size()
        assert low % alignment == 0, entry.name


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_ranks_write_each_byte_once(size: int, small_pieces: None, tmp_path: Path) -> None:
    made = Container([[Entry(name, tensor) for name, tensor in tensors_to_store()]], {})
    written = torch.zeros(made.nbytes, dtype=torch.int64)
    for rank in range(size):
        filled = []
        for fill in (0, 255):
            (tmp_path / "x").write_bytes(bytes([fill]) * made.nbytes)
            with open(tmp_path / "x", "r+b") as file:
                made.write_share(file.fileno(), rank, size, lambda nbytes: None)
            filled.append(torch.frombuffer(bytearray((tmp_path / "x").read_bytes()), dtype=torch.uint8))
        written += filled[0] == filled[1]
    assert not written[: len(made.header)].any()
    assert (written[len(made.header) :] == 1).all()


def test_the_header_does_not_move_the_tensors(tmp_path: Path) -> None:
    """A text of another length has no place of its own, and would shift all."""
    for count in (1, 30, 60, 200):
        made = Container([[Entry(f"tensor {i}", torch.zeros(64)) for i in range(count)]], {"x": "0" * 64})
        assert len(made.header) % 4096 == 0 and made.nbytes == len(made.header) + 256 * count
        assert json.loads(made.header[8:])["tensor 0"] == {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
    with open(tmp_path / "x", "w+b") as file:
        with pytest.raises(AssertionError):
            made.write_header(file.fileno(), x="0" * 9999)
        assert os.path.getsize(tmp_path / "x") == 0


@pytest.mark.parametrize("chunks", (256, 7))
def test_the_digest_is_that_of_the_content_for_any_number_of_ranks(
    chunks: int, small_pieces: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(container, "_CHUNKS", chunks)
    path, begin = tmp_path / "x", 77
    path.write_bytes(bytes(range(256)) * 50)

    def digest(size: int) -> str:
        found: dict[int, str] = {}
        shares = []
        for rank in range(size):
            heard: list[int] = []
            with open(path, "rb") as file:
                mine = dict(chunk_digests(file.fileno(), begin, rank, size, heard.append))
            assert not mine.keys() & found.keys()
            found |= mine
            shares.append(sum(heard))
        assert sum(shares) == os.path.getsize(path) - begin
        assert sorted(found) == list(range(len(found))) and len(found) == min(chunks, 13)
        return content_digest(found)

    before = digest(1)
    assert all(digest(size) == before for size in (2, 3, 5, 20))
    for offset in (begin, begin + 998, begin + 999, begin + 1998, 12_799):
        flip(path, offset)
        assert digest(2) != before
        flip(path, offset)
    for offset in (0, begin - 1):  # not content
        flip(path, offset)
        assert digest(2) == before
    content = path.read_bytes()
    for other in (content[:-1], content + b"\0", content[:begin] + content[begin + 1 :]):
        path.write_bytes(other)
        assert digest_or_error(path, begin) != before


def digest_or_error(path: Path, begin: int) -> str:
    with open(path, "rb") as file:
        return content_digest(dict(chunk_digests(file.fileno(), begin, 0, 1, lambda nbytes: None)))


def test_a_file_that_ends_while_it_is_digested(small_pieces: None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5000))
    with open(path, "rb") as file:
        digests = chunk_digests(file.fileno(), 0, 0, 1, lambda nbytes: None)
        next(digests)
        os.truncate(path, 1500)
        with pytest.raises(OSError, match="ends early"):
            list(digests)


# -------------------------------------------------------------------------------------------------- written and found


def test_the_first_start_writes_and_the_others_find(checkpoint: Path, folder: Path) -> None:
    start(folder, checkpoint)
    path, before = only_file(folder), listing(folder)
    header, begin = header_of(path)
    metadata = header.pop("__metadata__")
    assert metadata["key"] == path.stem and metadata["written_ns"] == str(path.stat().st_mtime_ns)
    assert begin % 4096 == 0 and metadata["content"] == digest_or_error(path, begin)
    # All that streams, in its final dtype and in no other.
    state, stored = expected_of(checkpoint).state_dict(), load_file(path)
    assert {name.split(".")[1] for name in stored} == {"blocks"}
    for name, tensor in stored.items():
        wanted = memory_order(state[name.removeprefix("model.")])
        assert tensor.dtype == wanted.dtype and torch.equal(bytes_of(tensor), bytes_of(wanted))
    assert {FP32, BF16} == {tensor.dtype for tensor in stored.values()}
    for _ in range(2):
        start(folder, checkpoint)
        assert listing(folder) == before


def test_every_dtype_stride_and_leaf(folder: Path) -> None:
    """In memory, and what safetensors has no name for stays there."""

    class Model(toys.Leafy):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(toys.MixedBlock(16, width) for width in (24, 40, 8))
            self.blocks[0].exact = nn.Parameter(torch.randn(300, dtype=torch.float64))
            self.blocks[1].low = nn.Parameter(torch.randn(300).to(torch.float8_e4m3fn), requires_grad=False)
            self.blocks[1].phase = nn.Parameter(torch.randn(30, dtype=torch.complex128))
            self.blocks[2].bits = nn.Parameter(torch.arange(300) % 3 == 0, requires_grad=False)
            self.blocks[2].count = nn.Parameter(torch.arange(77, dtype=torch.int16), requires_grad=False)

    for _ in range(2):
        start_toy(folder, lambda: toy(Model), kind="mapped+packed")
        before = listing(folder)
        stored = load_file(only_file(folder))
        assert "model.embed.weight" in stored and "model.blocks.1.phase" not in stored
        assert {t.dtype for t in stored.values()} == {
            *(FP32, BF16, torch.float64, torch.float8_e4m3fn, torch.bool, torch.int16)
        }
    assert listing(folder) == before


@pytest.mark.parametrize("make", (toys.Tied, toys.Repeated, toys.Nested, toys.Aliased), ids=lambda cls: cls.__name__)
def test_weights_in_several_places(make: type[nn.Module], folder: Path) -> None:
    if make is toys.Aliased:  # writes to its buffers in forward
        model, expected = toy(make), toy(make)
        with enabled(model, folder), torch.no_grad():
            for seed in range(3):
                assert torch.equal(model(feed(seed)), expected(feed(seed)))
        assert len(os.listdir(folder)) == 1
        return
    for _ in range(2):
        start_toy(folder, lambda: toy(make))
        before = listing(folder)
    assert listing(folder) == before and len(before) == 1


def test_weights_that_are_in_files_need_no_cache(checkpoint: Path, folder: Path) -> None:
    start(folder, checkpoint, FP32)
    assert not folder.exists()
    # Nor does it pay for a few that are not.
    model, expected = load(checkpoint, FP32), expected_of(checkpoint, FP32)
    model.blocks[0].ffn.net[2].bias.data = expected.blocks[0].ffn.net[2].bias.data.clone()
    with enabled(model, folder) as handle:
        assert handle.report().host_kind == "mapped+packed"
        assert_streams(model, expected)
    assert not folder.exists()


def test_another_path_of_the_same_checkpoint(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    start(folder, checkpoint)
    before = listing(folder)
    shutil.copytree(checkpoint, tmp_path / "moved")  # keeps times
    shutil.rmtree(checkpoint)
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    (tmp_path / "linked cache").symlink_to(folder)
    start(folder, tmp_path / "moved")
    start(tmp_path / "linked cache", tmp_path / "link")
    assert listing(folder) == before


def test_a_relative_directory(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(folder, checkpoint)
    before = listing(folder)
    monkeypatch.chdir(folder.parent)
    model, expected = load(checkpoint), expected_of(checkpoint)
    with enabled(model, "cache"):
        monkeypatch.chdir("/")
        assert_streams(model, expected)
    assert listing(folder) == before


def weights_file(checkpoint: Path) -> Path:
    (path,) = checkpoint.glob("*.safetensors")
    return path


def save_others(path: Path) -> None:
    """Other weights in the same places, with the same time: as when times are lost in an archive."""
    with same_time(path):
        zoo.build("wan", 2, seed=1).save_pretrained(path.parent)


def exchange_places(path: Path) -> None:
    """The same weights in other places of the file, with the same time."""
    names = ("blocks.0.attn1.to_q.weight", "blocks.1.attn1.to_q.weight")
    with same_time(path):
        header, begin = header_of(path)
        (one, stop), (other, _) = (header[name]["data_offsets"] for name in names)
        content = path.read_bytes()
        for source, target in ((one, other), (other, one)):
            overwrite(path, begin + target, content[begin + source :][: stop - one])
        exchange(*names)(path)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "touched": os.utime,
    "copied": lambda path: copied(path),
    "other weights": save_others,
    "another order": exchange_places,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_changed_gets_another_file(change: str, checkpoint: Path, folder: Path) -> None:
    start(folder, checkpoint)
    first = listing(folder)
    CHANGES[change](weights_file(checkpoint))
    for _ in range(2):
        start(folder, checkpoint)
        second = listing(folder)
        assert len(second) == 2 and first.items() < second.items()
    assert listing(folder) == second


def test_other_weights_and_dtypes_get_files_of_their_own(checkpoints: Path, folder: Path) -> None:
    for name, dtype in (("a", BF16), ("b", BF16), ("a", FP16), ("b", FP16)):
        before = listing(folder)
        start(folder, checkpoints / name, dtype)
        assert before.items() < listing(folder).items() and len(listing(folder)) == len(before) + 1
    before = listing(folder)
    for name, dtype in (("b", FP16), ("a", BF16), ("b", BF16), ("a", FP16)):
        start(folder, checkpoints / name, dtype)
    assert listing(folder) == before


def test_other_ways_to_cast_get_files_of_their_own(checkpoints: Path, folder: Path) -> None:
    """To one dtype, and not with the same bits."""
    for count, casts in enumerate(((BF16,), (FP16, BF16), (torch.float8_e5m2, BF16)), 1):
        model, expected = load(checkpoints / "a"), expected_of(checkpoints / "a")
        for name, parameter in model.named_parameters():
            if pending_casts(parameter):
                set_pending_casts(parameter, casts)
                expected.get_parameter(name).data = cast(parameter).detach().clone()
        with enabled(model, folder):
            assert_streams(model, expected)
        assert len(os.listdir(folder)) == count


def test_the_same_bytes_read_as_another_dtype(folder: Path, tmp_path: Path) -> None:
    """From the same place of the same file, and cast to the same dtype."""
    source = toy(toys.Stack, 3).to(BF16)
    save_file(source.state_dict(), tmp_path / "x.safetensors")
    for count, dtype in enumerate((BF16, FP16), 1):
        model, expected = toy(toys.Stack, 3), toy(toys.Stack, 3)
        for name, tensor in load_file(tmp_path / "x.safetensors").items():
            *path, attribute = name.split(".")
            parameter = nn.Parameter(tensor.view(dtype), requires_grad=False)
            set_pending_casts(parameter, (FP32,))
            setattr(model.get_submodule(".".join(path)), attribute, parameter)
            expected.get_parameter(name).data = tensor.view(dtype).clone().float()
        with enabled(model, folder):
            assert_streams(model, expected)
        assert len(os.listdir(folder)) == count


def test_weights_in_memory_are_known_by_their_content(folder: Path) -> None:
    def make(name: str = "", index: int = 0) -> nn.Module:
        model = toy(toys.Stack, 3)
        if name:
            bits = flat_bytes(model.get_parameter(name))
            bits[index] ^= 1
        return model

    start_toy(folder, make)
    first = listing(folder)
    start_toy(folder, make)
    assert listing(folder) == first and len(first) == 1
    changes = (("blocks.0.norm.weight", 0), ("blocks.0.norm.weight", -1), ("blocks.1.up.weight", 700))
    for count, change in enumerate((*changes, ("blocks.2.down.bias", 33)), 2):
        start_toy(folder, lambda change=change: make(*change))
        assert len(os.listdir(folder)) == count and first.items() < listing(folder).items()
    before = listing(folder)
    # What does not stream is not part of it.
    start_toy(folder, lambda: make("out.weight", 5))
    start_toy(folder, make)
    assert listing(folder) == before


def test_the_same_bytes_in_another_shape_or_dtype(folder: Path) -> None:
    """In memory, so that nothing but the content and what is made of it tells them apart."""
    weight = toy(toys.Stack, 1).blocks[0].up.weight.detach()

    def make(kind: str) -> nn.Module:
        model = toy(toys.Stack, 1)
        values = weight.clone()
        if kind == "columns":
            values = values.view(16, 24).t()
        elif kind == "integers":
            values = values.view(torch.int32)
        model.blocks[0].up.weight = nn.Parameter(values, requires_grad=False)
        return model

    for count, kind in enumerate(("rows", "columns"), 1):
        start_toy(folder, lambda kind=kind: make(kind))
        assert len(os.listdir(folder)) == count
    with enabled(make("integers"), folder):  # does not compute
        assert len(os.listdir(folder)) == 3
    before = listing(folder)
    for kind in ("columns", "rows"):
        start_toy(folder, lambda kind=kind: make(kind))
    assert listing(folder) == before


def test_weights_partly_in_memory(checkpoint: Path, folder: Path) -> None:
    """Cast, in the file as they are, and changed after loading: all are in the one file."""

    def make(change: int = 0) -> tuple[nn.Module, nn.Module]:
        model, expected = load(checkpoint), expected_of(checkpoint)
        for block, other in zip(model.blocks, expected.blocks):
            other.attn1.to_q.weight.data.mul_(1.5).view(-1)[-1] += change
            block.attn1.to_q.weight = nn.Parameter(other.attn1.to_q.weight.data.clone())
        return model, expected

    for change, count in ((0, 1), (0, 1), (1, 2), (0, 2), (1, 2)):
        model, expected = make(change)
        with enabled(model, folder) as handle:
            assert handle.report().host_kind == "mapped"
            assert_streams(model, expected)
        assert len(os.listdir(folder)) == count


def test_components_of_a_pipeline_share_a_file(checkpoints: Path, folder: Path) -> None:
    class Own(DistributedLayerwiseOffloadMixin):
        def __init__(self, **components: nn.Module) -> None:
            self.components = components

    a, b = checkpoints / "a", checkpoints / "b"
    before: dict[str, tuple[int, ...]] = {}
    for count, paths in ((1, (a, b)), (1, (a, b)), (2, (b, a)), (3, (a,)), (3, (b, a)), (3, (a, b))):
        names = ("transformer", "transformer_2")[: len(paths)]
        models, expected = [load(path) for path in paths], [expected_of(path) for path in paths]
        handle = Own(**dict(zip(names, models))).enable_distributed_layerwise_offload(
            onload_device="cpu", cache_dir=folder
        )
        try:
            assert handle.report().host_kind == "mapped"
            for model, other in zip(models, expected):
                assert_streams(model, other)
        finally:
            handle.remove()
        assert before.items() <= listing(folder).items() and len(listing(folder)) == count
        before = listing(folder)
    assert all(
        name.startswith(("transformer.blocks", "transformer_2.blocks")) for name in load_file(folder / min(before))
    )


def test_enabling_again_streams_from_the_cache_itself(checkpoint: Path, folder: Path) -> None:
    model, expected = load(checkpoint), expected_of(checkpoint)
    for _ in range(3):
        with enabled(model, folder) as handle:
            assert handle.report().host_kind == "mapped"
            assert_streams(model, expected)
        assert_restored(model, expected)
        assert len(os.listdir(folder)) == 1
    # Without the file they are weights in memory, and known as such.
    only_file(folder).unlink()
    with enabled(model, folder):
        assert_streams(model, expected)
        assert len(os.listdir(folder)) == 1
    start(folder, checkpoint)
    assert len(os.listdir(folder)) == 2


def test_a_device_that_cannot_use_it(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is written: nobody would ever stream from it."""
    monkeypatch.setattr(Platform, "registers_host_memory", False)
    start(folder, checkpoint, kind="pinned")
    assert listing(folder) == {}


@pytest.mark.parametrize("umask", (0o022, 0o077, 0o007, 0o000))
@pytest.mark.parametrize("nameless", (True, False))
def test_who_may_read_it(
    umask: int, nameless: bool, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        refuse_nameless_files(monkeypatch)
    before = os.umask(umask)
    try:
        start(folder, checkpoint)
    finally:
        os.umask(before)
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o644 & ~umask


# ------------------------------------------------------------------------------------------------------------- damage


Change = Callable[[Path], Any]


def unseen(change: Change) -> Change:
    """A change that the time of a file does not tell."""

    def change_and_set_time(path: Path) -> None:
        with same_time(path):
            change(path)

    return change_and_set_time


def flip_at(part: float, shift: int = 0) -> Change:
    """Of the content; `part` is 0 for its beginning, 1 for its end."""

    def change(path: Path) -> None:
        begin = header_of(path)[1]
        flip(path, begin + int(part * (path.stat().st_size - begin)) + shift)

    return change


def flip_in_the_middle_of_a_tensor(path: Path) -> None:
    header, begin = header_of(path)
    flip(path, begin + sum(header["model.blocks.1.attn1.to_q.weight"]["data_offsets"]) // 2 + 3)


def cut(nbytes: Callable[[Path], int]) -> Change:
    return lambda path: os.truncate(path, nbytes(path))


def exchange(one: str, other: str) -> Change:
    """The places of two tensors, as a header says them."""

    def change(header: dict[str, Any]) -> None:
        places = [header[name]["data_offsets"] for name in (one, other)]
        header[other]["data_offsets"], header[one]["data_offsets"] = places

    return lambda path: rewrite_header(path, change)


def rename(path: Path) -> None:
    name = "model.blocks.{}.attn1.to_q.weight"
    rewrite_header(path, lambda header: header.update({name.format(9): header.pop(name.format(0))}))


def metadata(**values: str) -> Change:
    return lambda path: rewrite_header(path, lambda header: header["__metadata__"].update(values))


def without_digest(path: Path) -> None:
    rewrite_header(path, lambda header: header["__metadata__"].pop("content"))


def put_link(target: str) -> Change:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(target or path)

    return change


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def header_size(path: Path) -> int:
    return header_of(path)[1]


DAMAGES: dict[str, Change] = {
    "first bit": flip_at(0),
    "some bit": flip_at(0.5),
    "last bit": flip_at(1, -1),
    "a bit that is looked at": unseen(flip_in_the_middle_of_a_tensor),
    "one byte less": unseen(cut(lambda path: path.stat().st_size - 1)),
    "half of it": cut(lambda path: path.stat().st_size // 2),
    "the header alone": unseen(cut(header_size)),
    "half a header": unseen(cut(lambda path: header_size(path) // 2)),
    "seven bytes": cut(lambda path: 7),
    "nothing": unseen(cut(lambda path: 0)),
    "zeros": unseen(lambda path: path.write_bytes(bytes(path.stat().st_size))),
    "zeros for weights": unseen(
        lambda path: overwrite(path, header_size(path), bytes(path.stat().st_size - header_size(path)))
    ),
    "more": append,
    "no safetensors": unseen(lambda path: path.write_bytes(b"PK\x03\x04" + os.urandom(9000))),
    "an endless header": unseen(lambda path: overwrite(path, 0, (1 << 62).to_bytes(8, "little"))),
    "a short header": unseen(lambda path: overwrite(path, 0, (300).to_bytes(8, "little"))),
    "a list for a header": unseen(lambda path: overwrite(path, 8, b"[1, 2]".ljust(header_size(path) - 8))),
    "exchanged tensors": unseen(exchange("model.blocks.0.attn1.to_q.weight", "model.blocks.1.attn1.to_q.weight")),
    "another name": unseen(rename),
    "another key": unseen(metadata(key="0" * 64)),
    "another digest": metadata(content="0" * 64),
    "an empty digest": metadata(content=""),
    "no digest": without_digest,
    "no metadata": unseen(lambda path: rewrite_header(path, lambda header: header.pop("__metadata__"))),
    "a link to itself": put_link(""),
    "a link to nothing": put_link("nowhere"),
}
"""What is done to a complete file; some of it without a trace in its time."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_noticed_and_written_anew(
    damage: str, checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(folder, checkpoint)
    path = only_file(folder)
    content, inode = path.read_bytes(), path.stat().st_ino
    keep = os.open(path, os.O_RDONLY)  # so that the number of its inode is not given to another
    try:
        DAMAGES[damage](path)
        with caplog.at_level(logging.WARNING, logger=LOGGER):
            start(folder, checkpoint)
        (text,) = warnings_in(caplog)
        assert str(path) in text and "anew" in text
        assert only_file(folder) == path and path.stat().st_ino != inode and not path.is_symlink()
        begin = header_of(path)[1]
        assert path.read_bytes()[begin:] == content[begin:] and len(path.read_bytes()) == len(content)
        before = listing(folder)
        caplog.clear()
        start(folder, checkpoint)
        assert listing(folder) == before and not warnings_in(caplog)
    finally:
        os.close(keep)


@pytest.mark.parametrize("full", (False, True))
def test_what_is_no_file_is_left_alone(full: bool, checkpoint: Path, folder: Path) -> None:
    start(folder, checkpoint)
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    if full:
        (path / "x").write_text("theirs")
    model, expected = load(checkpoint), expected_of(checkpoint)
    assert_refused(model, folder, str(path), "'cache_dir'")
    assert path.is_dir() and os.listdir(folder) == [path.name]
    assert_still_usable(model, expected)


def assert_refused(model: nn.Module, folder: Path | str, *texts: str) -> None:
    parameters = dict(model.named_parameters())
    casts = {name: pending_casts(parameter) for name, parameter in parameters.items()}
    with pytest.raises(RuntimeError) as caught:
        apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder)
    assert all(text in str(caught.value) for text in (os.path.realpath(folder), *texts)), str(caught.value)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and pending_casts(parameter) == casts[name]


def assert_still_usable(model: nn.Module, expected: nn.Module) -> None:
    handle = apply_distributed_layerwise_offload(model, onload_device="cpu")
    try:
        assert_streams(model, expected)
    finally:
        handle.remove()
    assert_restored(model, expected)


def copied(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def copied_with_its_time(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


def a_link_to_it(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere.safetensors"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)


def with_another_time(path: Path) -> None:
    unseen(metadata(written_ns="never"))(path)


@pytest.mark.parametrize("change", (os.utime, copied, copied_with_its_time, a_link_to_it, with_another_time))
def test_a_copy_counts_if_its_content_is_right(
    change: Change, checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(folder, checkpoint)
    path = only_file(folder)
    change(path)
    before = listing(folder)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        for _ in range(2):
            start(folder, checkpoint)
            assert listing(folder) == before
    assert not warnings_in(caplog)
    # And only then.
    if change is not copied_with_its_time:
        unseen(DAMAGES["last bit"])(path)
        start(folder, checkpoint)
        assert only_file(folder).read_bytes()[-1] == path.read_bytes()[-1]
        assert listing(folder) != before


def test_a_file_under_the_name_of_another(checkpoints: Path, folder: Path) -> None:
    start(folder, checkpoints / "a")
    first = only_file(folder)
    start(folder, checkpoints / "b")
    (second,) = (path for path in folder.iterdir() if path != first)
    one, other = first.read_bytes(), second.read_bytes()
    for path, content in ((first, other), (second, one)):
        with same_time(path):
            path.write_bytes(content)
    start(folder, checkpoints / "a")
    start(folder, checkpoints / "b")
    assert load_file(first).keys() == load_file(second).keys() and len(os.listdir(folder)) == 2


def test_no_flipped_bit_of_a_header_leads_to_wrong_weights(checkpoints: Path, folder: Path) -> None:
    expected = expected_of(checkpoints / "a")
    start(folder, checkpoints / "a")
    path = only_file(folder)
    content, written_ns = path.read_bytes(), path.stat().st_mtime_ns
    end = 8 + len(content[8 : header_of(path)[1]].rstrip())
    for offset in (0, 1, 4, 7, 8, *range(9, end, end // 25), end - 1, end, header_of(path)[1] - 1):
        path.write_bytes(content)
        flip(path, offset)
        os.utime(path, ns=(written_ns, written_ns))
        model = load(checkpoints / "a")
        with enabled(model, folder):
            assert_streams(model, expected, seeds=())


def test_a_header_that_exchanges_tensors_with_the_same_middle(folder: Path) -> None:
    """What is looked at of each tensor is the same in both, and the time says nothing."""

    def make() -> nn.Module:
        model = toy(toys.Stack, 2, toys.Block, 16, (24,))
        model.blocks[0].up.weight.data.copy_(model.blocks[1].up.weight.data)[0, 0] += 1
        return model

    start_toy(folder, make)
    path = only_file(folder)
    unseen(exchange("model.blocks.0.up.weight", "model.blocks.1.up.weight"))(path)
    start_toy(folder, make)


def test_a_file_that_was_cut_where_nobody_looks(folder: Path) -> None:
    def make() -> nn.Module:
        model = toy(toys.Stack, 2)
        for block in model.blocks:  # without small tensors, which are looked at from the middle to the end
            block.norm.weight = block.norm.bias = block.up.bias = block.down.bias = None
        return model

    start_toy(folder, make)
    path = only_file(folder)
    for change in (cut(lambda path: path.stat().st_size - 1), append):
        content = path.read_bytes()
        unseen(change)(path)
        start_toy(folder, make)
        assert path.read_bytes()[: len(content)][header_size(path) :] == content[header_size(path) :]


def test_only_a_file_with_another_time_is_read(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, that is: weights of hundreds of gigabytes take minutes to read."""
    start(folder, checkpoint)
    read: list[int] = []
    original = cache.chunk_digests

    def digest(*args: Any) -> Iterator[tuple[int, str]]:
        read.append(1)
        return original(*args)

    monkeypatch.setattr(cache, "chunk_digests", digest)
    start(folder, checkpoint)
    assert not read
    os.utime(only_file(folder))
    start(folder, checkpoint)
    assert read == [1]


def test_a_file_that_changes_once_it_was_checked(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at it and its use."""
    start(folder, checkpoint)
    path = only_file(folder)
    os.utime(path)
    original, flipped = cache.content_digest, []

    def digest_and_flip(chunks: Any) -> str:
        if not flipped:
            DAMAGES["last bit"](path)
            flipped.append(True)
        return original(chunks)

    monkeypatch.setattr(cache, "content_digest", digest_and_flip)
    model, expected = load(checkpoint), expected_of(checkpoint)
    try:
        handle = apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder)
    except RuntimeError as error:
        assert str(path) in str(error)
        return
    try:
        assert_streams(model, expected)
    finally:
        handle.remove()


# -------------------------------------------------------------------------------------------------- while it is in use


@pytest.mark.parametrize("change", (os.unlink, copied, os.utime, DAMAGES["last bit"], DAMAGES["half of it"]))
def test_a_file_that_changes_while_it_is_streamed(change: Change, checkpoint: Path, folder: Path) -> None:
    model, expected = load(checkpoint), expected_of(checkpoint)
    handle = apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder)
    try:
        assert_streams(model, expected)
        path = only_file(folder)
        change(path)
        with pytest.raises(RuntimeError, match="weights stream from it") as caught:
            results(model, 0)
        assert str(path) in str(caught.value)
    finally:
        if change in (os.unlink, copied):  # the whole file is still in memory
            handle.remove()
            assert_restored(model, expected)
        else:
            with pytest.raises(RuntimeError, match="weights are lost"):
                handle.remove()
    start(folder, checkpoint)


def test_weights_outlive_the_directory(checkpoint: Path, folder: Path) -> None:
    for find in (False, True):
        model, expected = load(checkpoint), expected_of(checkpoint)
        if find:
            start(folder, checkpoint)
        with enabled(model, folder):
            assert_streams(model, expected)
        shutil.rmtree(folder)
        assert_restored(model, expected)
        with torch.no_grad():
            for tensor in (*model.parameters(), *expected.parameters()):
                tensor.mul_(2)
        assert_restored(model, expected)


def traces_of(folder: Path | str) -> list[str]:
    """Descriptors and mappings of this process that lead to the directory, or to a file without a name in it."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            pass
    with open("/proc/self/maps") as maps:
        found += [line.split(maxsplit=5)[-1].strip() for line in maps]
    return [path for path in found if path.startswith(os.path.realpath(folder))]


def test_nothing_is_left_open_or_mapped(checkpoint: Path, folder: Path) -> None:
    for _ in range(2):
        model, expected = load(checkpoint), expected_of(checkpoint)
        with enabled(model, folder):
            assert_streams(model, expected)
            # A mapping to stream from and one for users, and nothing of how it was written.
            assert traces_of(folder) and set(traces_of(folder)) == {str(only_file(folder))}
        del model, expected
        gc.collect()
        assert traces_of(folder) == []
    DAMAGES["last bit"](only_file(folder))
    start(folder, checkpoint)
    gc.collect()
    assert traces_of(folder) == []


# ----------------------------------------------------------------------------------------------------------- failures


def refuse_nameless_files(monkeypatch: pytest.MonkeyPatch, code: int = errno.EOPNOTSUPP) -> list[str]:
    """As NFS does. Returns, as they come, the directories that were asked."""
    asked: list[str] = []
    original = os.open

    def refuse(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            asked.append(str(path))
            raise OSError(code, os.strerror(code))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    return asked


@pytest.mark.parametrize("code", (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL))
def test_a_file_system_without_nameless_files(
    code: int, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = refuse_nameless_files(monkeypatch, code)
    start(folder, checkpoint)
    assert asked == [str(folder)]
    before = listing(folder)
    assert len(before) == 1 and only_file(folder).stat().st_nlink == 1
    start(folder, checkpoint)
    assert listing(folder) == before and len(asked) == 1


@pytest.mark.parametrize("nameless", (True, False))
@pytest.mark.parametrize("call", ("posix_fallocate", "pwrite", "pwrite late", "preadv", "fsync", "utime", "interrupt"))
def test_a_file_that_cannot_be_written(
    call: str, nameless: bool, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = load(checkpoint), expected_of(checkpoint)
    calls = 0
    name = {"interrupt": "pwrite"}.get(call, call.split()[0])
    original = getattr(os, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if call == "pwrite late" and calls < 20:
            return original(*args, **kwargs)
        if call == "interrupt":
            raise KeyboardInterrupt
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if not nameless:
            refuse_nameless_files(patch)
        patch.setattr(os, name, fail)
        if call == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder)
        else:
            assert_refused(model, folder, "No space left on device", "Free disk space", "'cache_dir'")
    assert calls and listing(folder) == {}
    gc.collect()
    assert traces_of(folder) == []
    assert_still_usable(model, expected)
    start(folder, checkpoint)  # and the lock is free
    assert len(listing(folder)) == 1


def test_directories_that_cannot_be(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    model, expected = load(checkpoint), expected_of(checkpoint)
    for where in (tmp_path / "file", tmp_path / "file" / "below"):
        assert_refused(model, where, "'cache_dir'")
    with pytest.raises(RuntimeError, match="'cache_dir'"):
        apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=tmp_path / "loop")
    assert (tmp_path / "file").read_text() == "theirs"
    assert_still_usable(model, expected)


def test_a_checkpoint_that_is_gone(checkpoint: Path, folder: Path) -> None:
    """Its mapped weights are still whole; they count as weights in memory."""
    model, expected = load(checkpoint), expected_of(checkpoint)
    shutil.rmtree(checkpoint)
    with enabled(model, folder):
        assert_streams(model, expected)
    assert len(os.listdir(folder)) == 1


def test_a_checkpoint_that_changes_while_the_cache_is_written(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written then is not what the name of the file says, whatever the start itself does about it."""
    source = weights_file(checkpoint)
    content, status = source.read_bytes(), source.stat()
    header, begin = header_of(source)
    place = begin + header["blocks.1.attn1.to_q.weight"]["data_offsets"][0] + 3  # the sign of the first element
    original = Container.write_share

    def write_share(self: Container, *args: Any) -> None:
        overwrite(source, place, bytes([content[place] ^ 0x80]))
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Container, "write_share", write_share)
        try:
            model = load(checkpoint)
            apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder).remove()
        except RuntimeError as error:
            assert str(source) in str(error)
            assert listing(folder) == {}
        assert source.read_bytes() != content
    source.write_bytes(content)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    start(folder, checkpoint)


# ------------------------------------------------------------------------------------------------- several at once


def put_as_another_start(good: Path, path: Path) -> bool:
    """
    Gives a good file its name as another start would: under the lock, which it does not get while this start has it.
    """
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.copy2(good, path.with_suffix(".other"))
        os.replace(path.with_suffix(".other"), path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def test_a_file_that_another_start_wrote_anew_is_not_taken_away(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found it damaged; the other one streams from what it has put in its place."""
    start(folder, checkpoint)
    path = only_file(folder)
    shutil.copy2(path, tmp_path / "good")
    DAMAGES["last bit"](path)
    original, others = os.unlink, []

    def unlink(target: Any, *args: Any, **kwargs: Any) -> None:
        if os.fspath(target) == str(path) and not others and put_as_another_start(tmp_path / "good", path):
            others.append(os.open(path, os.O_RDONLY))
        original(target, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    try:
        start(folder, checkpoint)
        assert all(os.fstat(fd).st_ino == path.stat().st_ino for fd in others)
    finally:
        for fd in others:
            os.close(fd)


@pytest.mark.parametrize("nameless", (True, False))
def test_two_starts_without_locks_agree_on_one_file(
    nameless: bool, checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: the one that is done first streams from its file, which must not be replaced then."""
    start(folder, checkpoint)
    path = only_file(folder)
    os.replace(path, tmp_path / "good")
    if not nameless:
        refuse_nameless_files(monkeypatch)
    original, others = Container.write_share, []

    def no_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def write_share(self: Container, *args: Any) -> None:
        original(self, *args)
        os.replace(tmp_path / "good", path)
        others.append(path.stat().st_ino)

    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(Container, "write_share", write_share)
    start(folder, checkpoint)
    assert only_file(folder).stat().st_ino == others[0]


def _start_and_tell(rank: int, size: int, scenes: Sequence[tuple[str, str]]) -> list[dict[str, tuple[int, ...]]]:
    """A start in each directory; and what is in it after."""
    gc.freeze()
    found = []
    for folder, path in scenes:
        start(folder, path)
        found.append(listing(folder))
    return found


def test_any_number_of_ranks_writes_and_finds_the_same(checkpoints: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoints / "a", tmp_path / "copy")
    contents = {}
    everywhere: dict[str, tuple[int, ...]] = {}
    for size in (2, 3, 1):
        own, path = tmp_path / f"of {size}", str(checkpoints / "a" if size != 3 else copy)
        said = run_ranks(size, _start_and_tell, [(str(own), path), (str(tmp_path / "all"), path), (str(own), path)])
        first, common, again = said[0]
        assert all(rank == said[0] for rank in said) and first == again and len(first) == len(common) == 1
        assert everywhere in ({}, common)
        everywhere = common
        file = only_file(own)
        header, begin = header_of(file)
        contents[size] = (file.name, header.pop("__metadata__")["content"], header, file.read_bytes()[begin:])
    assert contents[1] == contents[2] == contents[3]
    start(tmp_path / "all", copy)
    assert listing(tmp_path / "all") == everywhere


def _scenes_of_two(rank: int, size: int, checkpoints: str, folder: str) -> dict[str, Any]:
    """What two ranks see that one alone does not; each scene in a directory of its own."""
    gc.freeze()
    from tests import test_cache

    said: dict[str, Any] = {}
    a, root = f"{checkpoints}/a", Path(folder)

    def own(scene: str) -> Path:
        return root / scene

    # Damage in the share of either rank: noticed by both, and written anew.
    for damage in ("first bit", "last bit", "half of it", "nothing", "exchanged tensors"):
        where = own(f"damaged {damage}")
        start(where, a)
        torch.distributed.barrier()  # until then, the other one may still read what it has mapped
        if rank == 0:
            DAMAGES[damage](only_file(where))
        torch.distributed.barrier()
        start(where, a)
        said[where.name] = listing(where)

    # Touched and damaged in one place: each rank digests a part of the file only.
    patch = pytest.MonkeyPatch()
    with patch.context() as small:
        small.setattr(container, "_CHUNK_NBYTES", 1024)
        where = own("chunks")
        start(where, a)
        for offset in (None, -1, -1500):
            torch.distributed.barrier()
            before = listing(where)
            torch.distributed.barrier()
            if rank == 0:
                path = only_file(where)
                os.utime(path) if offset is None else flip(path, path.stat().st_size + offset)
            torch.distributed.barrier()
            changed = listing(where)
            start(where, a)
            assert (listing(where) == changed) == (offset is None) and before != changed
    said["chunks"] = listing(where)

    # No space, on real tmpfs; found when it is reserved, and when it is written to.
    for reserves in (True, False):
        where = own(f"full {reserves}")
        os.makedirs(where, exist_ok=True)
        model, expected = load(a), expected_of(a)
        with small_disk(where) as mounted, patch.context() as fake:
            if not reserves:
                fake.setattr(os, "posix_fallocate", lambda *args: None)
            if not mounted:
                fake.setattr(os, "posix_fallocate" if reserves else "pwrite", test_cache.no_space)
            said[where.name] = refusal(model, where)
            assert listing(where) == {}
        assert_still_usable(model, expected)

    # The file that another start has named after rank 0 has looked and before rank 1 has.
    where = own("late")
    start(where, a)
    path = only_file(where)
    torch.distributed.barrier()
    if rank == 0:
        os.replace(path, root / "good")
    torch.distributed.barrier()
    with patch.context() as late:
        if rank == 1:
            exists, put = os.path.lexists, []

            def lexists(target: Any) -> bool:
                if os.fspath(target) == str(path) and not put:
                    time.sleep(0.2)
                    if put_as_another_start(root / "good", path):
                        put.append(os.open(path, os.O_RDONLY))  # its inode's number is its own as long as this is open
                        said["late"] = path.stat().st_ino
                return exists(target)

            late.setattr(os.path, "lexists", lexists)
        start(where, a)
    torch.distributed.barrier()
    said["late found"] = only_file(where).stat().st_ino

    # Ranks with weights from different files do not share a cache, and stream all the same.
    where = own("different")
    mine = f"{folder}/copy {rank}"
    shutil.copytree(a, mine)
    os.utime(weights_file(Path(mine)), ns=(0, 10**18 + rank))
    model, expected = load(mine), expected_of(mine)
    with enabled(model, where) as handle:
        said["different"] = handle.report().host_kind
        assert_streams(model, expected)
    assert listing(where) == {}

    # One that was told of a cache, and one that was not; two of their own.
    for scene, mine in (("told", own("told") if rank else None), ("own", own(f"own {rank}"))):
        model, expected = load(a), expected_of(a)
        try:
            apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=mine).remove()
        except RuntimeError as error:
            said[scene] = str(error)
        assert_still_usable(model, expected)
        assert listing(mine or "") == {}

    # In memory, and unlike where nobody looks.
    model = toy(toys.Stack, 3)
    if rank == 1:
        with torch.no_grad():
            model.blocks[0].up.weight[-1, -1] += 1
    try:
        apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=own("unlike")).remove()
    except RuntimeError as error:
        said["unlike"] = str(error)
    return said


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """
    A file system of 16 KiB at `folder`, for this process alone, where that is allowed. Whether it is.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    mounted = (
        libc.unshare(new_mounts) == 0
        and libc.mount(None, b"/", None, private | recursive, None) == 0
        and libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=16k") == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            assert libc.umount(os.fsencode(folder)) == 0, "something keeps a file of it open"


def refusal(model: nn.Module, folder: Path | str) -> str:
    """The `RuntimeError` of enabling, after which the model is what it was."""
    parameters = dict(model.named_parameters())
    casts = {name: pending_casts(parameter) for name, parameter in parameters.items()}
    try:
        handle = apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder)
    except RuntimeError as error:
        assert all(p is parameters[n] and pending_casts(p) == casts[n] for n, p in model.named_parameters())
        return str(error)
    handle.remove()
    return "not refused"


@pytest.fixture(scope="module")
def two_ranks(checkpoints: Path) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), run_ranks(2, _scenes_of_two, str(checkpoints), folder)


def test_ranks_find_damage_together(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, said = two_ranks
    scenes = [name for name in said[0] if name.startswith("damaged") or name == "chunks"]
    assert len(scenes) == 6
    for scene in scenes:
        assert said[0][scene] == said[1][scene] and len(said[0][scene]) == 1


def test_a_full_disk_is_an_error_on_every_rank(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, said = two_ranks
    for reserves in (True, False):
        for rank in range(2):
            text = said[rank][f"full {reserves}"]
            for part in (f"{folder}/full {reserves}/", "No space left on device", "Free disk space", "'cache_dir'"):
                assert part in text, text
    assert said[1]["full True"] == f"rank 0 failed: {said[0]['full True']}"


def test_a_file_that_appears_between_the_looks_of_two_ranks(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """It is good, and the start that wrote it streams from it: nobody may take it away."""
    _, said = two_ranks
    if "late" in said[1]:
        assert said[1]["late"] == said[0]["late found"] == said[1]["late found"]


def test_ranks_with_different_files_do_without(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    _, said = two_ranks
    assert [rank["different"] for rank in said] == ["packed", "packed"]


@pytest.mark.parametrize("scene", ("told", "own"))
def test_ranks_with_different_directories_are_refused(
    scene: str, two_ranks: tuple[Path, list[dict[str, Any]]]
) -> None:
    for said in two_ranks[1]:
        assert "do not have the same model or options" in said[scene] and "cache_dir" in said[scene]


def test_ranks_with_different_weights_do_not_spoil_later_starts(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    """What one rank has digested, another may have written: the file is not what its name says."""
    folder, said = two_ranks
    if any("unlike" in rank for rank in said):
        assert all("unlike" in rank for rank in said) and listing(folder / "unlike") == {}
    start_toy(folder / "unlike", lambda: toy(toys.Stack, 3))


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, to whom permissions are nothing."""
    if os.geteuid():
        yield
        return
    dumpable, libc = 4, ctypes.CDLL(None)
    os.seteuid(NOBODY)
    libc.prctl(dumpable, 1, 0, 0, 0)  # else /proc/self is root's
    try:
        yield
    finally:
        os.seteuid(0)


def _scenes_without_rights(rank: int, size: int, checkpoints: str, folder: str) -> dict[str, str]:
    gc.freeze()
    a, root = f"{checkpoints}/a", Path(folder)
    start(root / "warm up", a)  # imports, and connects the ranks
    said: dict[str, str] = {}
    with ExitStack() as undo:
        for scene, mode, content in (
            ("read-only", 0o555, ""),
            ("unreadable", 0o000, ""),
            ("only to pass through", 0o311, ""),
            ("good", 0o555, "good"),
            ("damaged", 0o555, "damaged"),
            ("of another user", 0o1777, "damaged"),
        ):
            if scene == "of another user" and os.geteuid():
                continue
            where = root / scene
            if rank == 0:
                if content:
                    shutil.copytree(root / "warm up", where)
                    if content == "damaged":
                        DAMAGES["last bit"](only_file(where))
                os.makedirs(where, exist_ok=True)
                os.chmod(where, mode)
                undo.callback(os.chmod, where, 0o755)
            torch.distributed.barrier()
            before = listing_as_root(where)
            model, expected = load(a), expected_of(a)
            with as_nobody():
                if scene == "good":
                    with enabled(model, where) as handle:
                        said[scene] = handle.report().host_kind
                        assert_streams(model, expected)
                    assert_restored(model, expected)
                else:
                    said[scene] = outcome(model, where)
                    assert_still_usable(model, expected)
            torch.distributed.barrier()
            assert listing_as_root(where) == before
        with as_nobody():
            model, expected = load(a), expected_of(a)
            said["no parent"] = outcome(model, root / "read-only" / "below")
            assert_still_usable(model, expected)
    return said


def listing_as_root(folder: Path) -> dict[str, tuple[int, ...]]:
    return listing(folder) if os.access(folder, os.R_OK, effective_ids=True) else {}


def outcome(model: nn.Module, folder: Path) -> str:
    try:
        apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder).remove()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.fixture(scope="module")
def without_rights(checkpoints: Path) -> Iterator[tuple[Path, list[dict[str, str]]]]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder), run_ranks(2, _scenes_without_rights, str(checkpoints), folder)


@pytest.mark.parametrize("scene", ("read-only", "unreadable", "only to pass through", "damaged", "of another user"))
def test_directories_without_rights(scene: str, without_rights: tuple[Path, list[dict[str, str]]]) -> None:
    folder, said = without_rights
    if scene not in said[0]:
        pytest.skip("needs root")
    for rank in range(2):
        text = said[rank][scene]
        assert text.startswith("RuntimeError: ") and "ermi" in text, text
        assert str(folder / scene) in text and "'cache_dir'" in text, text


def test_a_directory_that_cannot_be_made(without_rights: tuple[Path, list[dict[str, str]]]) -> None:
    folder, said = without_rights
    for rank in range(2):
        assert said[rank]["no parent"].startswith("RuntimeError: "), said[rank]
        assert str(folder / "read-only" / "below") in said[rank]["no parent"]
        assert "'cache_dir'" in said[rank]["no parent"]


def test_a_cache_that_others_have_written(without_rights: tuple[Path, list[dict[str, str]]]) -> None:
    assert [rank["good"] for rank in without_rights[1]] == ["mapped", "mapped"]


def _die_while_writing(rank: int, size: int, path: str, folder: str, victim: int) -> str:
    gc.freeze()
    original = container.write_bytes
    calls = 0

    def write_a_little(*args: Any) -> None:
        nonlocal calls
        calls += 1
        original(*args)
        if rank == victim and calls == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    container.write_bytes = write_a_little
    model, expected = load(path), expected_of(path)
    parameters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="ended"):
        apply_distributed_layerwise_offload(model, onload_device="cpu", cache_dir=folder)
    assert calls > 20
    for name, parameter in expected.named_parameters():
        assert model.get_parameter(name) is parameters[name]
        assert torch.equal(cast(parameters[name]), parameter)
    gc.collect()
    assert traces_of(folder) == []
    return "alive"


@pytest.mark.parametrize("victim", (0, 1))
def test_a_rank_that_is_killed_while_it_writes(victim: int, checkpoint: Path, folder: Path) -> None:
    folder.mkdir()
    said = run_ranks(2, _die_while_writing, str(checkpoint), str(folder), victim, expect_death=(victim,))
    assert said[1 - victim] == "alive" and listing(folder) == {}
    start(folder, checkpoint)
    assert len(listing(folder)) == 1


def _start_at_once(rank: int, size: int, path: str, folder: str, meet: str, group: str) -> tuple[str, Any]:
    gc.freeze()
    wait = Meeting(meet, group)

    class Waiting(Container):
        """Both have looked by the time it is made, and neither has locked the directory."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            wait(f"made {rank}")

    cache.Container = Waiting  # type: ignore[misc]
    model, expected = load(path), expected_of(path)
    with enabled(model, folder) as handle:
        assert_streams(model, expected)
        wait(f"enabled {rank}")
        assert_streams(model, expected, seeds=(2, 3))  # what the other has done since does not matter
        return handle.report().host_kind, listing(folder)


class Meeting:
    """Where two groups wait for each other."""

    def __init__(self, folder: str, group: str) -> None:
        self.folder, self.group = folder, group

    def __call__(self, what: str) -> None:
        for group in "xy":
            path = f"{self.folder}/{what} {group}"
            if group == self.group:
                Path(path).touch()
        deadline = time.monotonic() + 60
        while not all(os.path.exists(f"{self.folder}/{what} {group}") for group in "xy"):
            assert time.monotonic() < deadline, f"the other group did not come to '{what}'"
            time.sleep(0.01)


def test_two_groups_at_once_write_one_file(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    said: dict[str, Any] = {}

    def run(group: str) -> None:
        try:
            said[group] = run_ranks(2, _start_at_once, str(checkpoint), str(folder), str(meet), group)
        except BaseException as error:
            said[group] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = listing(folder)
    assert said == {group: [("mapped", before)] * 2 for group in "xy"} and len(before) == 1
    start(folder, checkpoint)
    assert listing(folder) == before
