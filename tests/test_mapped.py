# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Weights that stay in the files they were loaded from: where they are found, that the bits are those of ordinary
loading, and every way in which a file can change, vanish or be refused. What could end a process runs in one of its
own.
"""

import copy
import ctypes
import gc
import json
import logging
import mmap
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from diffusers_dlo import DistributedLayerwiseOffloadConfig as Config
from diffusers_dlo import (
    api,
    apply_distributed_layerwise_offload,
    host_view,
    is_distributed_layerwise_offload_enabled,
    plan_distributed_layerwise_offload,
)
from diffusers_dlo.checkpoint.mapped import FileRange, Located, locate_tensors
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.host.mapped import FileStamp, MappedStore
from diffusers_dlo.host.packed import image_offsets
from diffusers_dlo.host.shared_file import create_shared_file
from diffusers_dlo.offload_plan import OffloadPlan, build_plan, find_all
from diffusers_dlo.selection import select
from diffusers_dlo.tensor_utils import owned_tensors
from tests import toys, zoo
from tests.ranks import run_ranks
from tests.toys import feed, toy


FP32, BF16 = torch.float32, torch.bfloat16
CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
ALL = {**zoo.MODELS, **zoo.TEXT_ENCODERS}
WEIGHTS = "diffusion_pytorch_model.safetensors"
NOT_VIEWS = "they are not views of a mapped file: loaded with a cast, not from safetensors, or changed while loading"
LIBC = ctypes.CDLL(None)
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# ------------------------------------------------------------------------------------------------------- checkpoints


def write_container(path: Path, tensors: Mapping[str, torch.Tensor], seed: int = 0, remainder: int = 0) -> None:
    """
    A safetensors file by hand: tensors in scrambled order, with odd bytes between them, described in yet another
    order. The content begins at `remainder` modulo 8: writers pad to 0, and readers take what comes. Tensors that are
    not contiguous are written as they lie in memory.
    """
    source = random.Random(seed)
    items = [(name, memory_order(tensor)) for name, tensor in tensors.items()]
    items += [(f"filler.{i}", torch.full((source.randint(1, 99),), i, dtype=torch.uint8)) for i in range(len(items))]
    source.shuffle(items)
    header, content = {}, b""
    for name, tensor in items:
        data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(content), len(content) + len(data)]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        content += data
    names = sorted(header)
    source.shuffle(names)
    text = json.dumps({name: header[name] for name in names}).encode()
    text += b" " * ((remainder - len(text)) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


CODES = {FP32: "F32", BF16: "BF16", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL", torch.uint8: "U8"}


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor with its dimensions in the order in which they lie in memory."""
    return tensor.detach().permute(order_of(tensor)).contiguous()


def order_of(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def memory_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return memory_order(tensor).reshape(-1).view(torch.uint8)


def assign(model: nn.Module, path: Path) -> nn.Module:
    """Has parameters and buffers show the file, in the shapes and strides that they have."""
    loaded, there = load_file(path), tensors_of(model)
    for name, tensor in there.items():
        if name in loaded:
            order = order_of(tensor)
            tensor.data = loaded[name].permute([order.index(dim) for dim in range(tensor.dim())])
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def unmapped(model: nn.Module) -> nn.Module:
    """The model in memory of its own, which allocators align better than files do."""
    for tensor in tensors_of(model).values():
        tensor.data = tensor.data.clone()
    return model


def save(name: str, folder: Path, dtype: torch.dtype = FP32, num_blocks: int = 3, **options: object) -> None:
    zoo.build(name, num_blocks, dtype=dtype).save_pretrained(folder, **options)


def load(name: str, folder: Path, dtype: torch.dtype = FP32) -> nn.Module:
    return class_of(name).from_pretrained(folder, dtype=dtype).eval()


@cache
def class_of(name: str) -> type:
    return type(zoo.build(name, 1))


def wan_in(folder: Path, num_blocks: int = 3) -> Path:
    """A checkpoint, in float32, so that all of it is used as it lies in the file; the path of the file."""
    save("wan", folder, num_blocks=num_blocks)
    return Path(os.path.realpath(folder / WEIGHTS))


def run(model: nn.Module, name: str, seed: int) -> list[torch.Tensor]:
    if name in ALL:
        return zoo.run(model, ALL[name].inputs(seed))
    with torch.no_grad():
        return [model(feed(seed)).clone()]


def assert_equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str = "") -> None:
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: output {index} differs"
        assert not torch.isnan(a).any(), what


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str = "") -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        tensor = got[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (value.dtype, value.shape, value.stride()), (
            what,
            name,
        )
        assert torch.equal(memory_bytes(tensor), memory_bytes(value)), (what, name)


def open_files(folder: Path | str) -> list[str]:
    """What of `folder`, and of this package's shared memory, this process has mapped or open."""
    wanted = (os.path.realpath(folder), "memfd:diffusers_dlo")
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if any(w in line for w in wanted)]
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += [link for link in [os.readlink(f"/proc/self/fd/{fd}")] if any(w in link for w in wanted)]
        except FileNotFoundError:  # the listing's own
            pass
    return found


def collected(folder: Path | str) -> list[str]:
    gc.collect()
    return open_files(folder)


def shared_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "diffusers_dlo" in name]


def ranks(size: int, work: Callable[..., object], *args: object) -> list:
    """As `run_ranks`, with `Path`s among `args`, and collections that take no time: enabling does one each."""
    return run_ranks(size, _quickly, work, *args)


def _quickly(rank: int, size: int, work: Callable[..., object], *args: object) -> object:
    gc.freeze()
    return work(rank, size, *args)


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    before = open_files(tmp_path)
    yield
    # Collecting is slow, and rarely needed.
    assert set(open_files(tmp_path)) <= set(before) or set(collected(tmp_path)) <= set(before)
    assert shared_memory() == []


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that other users may enter, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(os.path.realpath(folder))


# ------------------------------------------------------------------------------------------------ finding file ranges


def located_exactly(tensors: Mapping[str, torch.Tensor], located: Located) -> None:
    """Every tensor was located, and the file holds its bytes there."""
    assert not located.reasons and not located.written and len(located.ranges) == len(tensors) > 0
    for name, tensor in tensors.items():
        place = located.ranges[id(tensor)]
        assert os.path.realpath(place.path) == place.path and place.nbytes == tensor.numel() * tensor.element_size()
        with open(place.path, "rb") as file:
            file.seek(place.offset)
            assert file.read(place.nbytes) == memory_bytes(tensor).numpy().tobytes(), name


def refused(tensors: Sequence[torch.Tensor], reason: str) -> Located:
    """None was located, and that is why."""
    located = locate_tensors(tensors)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert dict(located.reasons) == {reason: nbytes} and located.main_reason == reason and not located.ranges
    return located


def toy_file(folder: Path, **tensors: torch.Tensor) -> Path:
    path = Path(os.path.realpath(folder)) / "weights.safetensors"
    save_file(tensors or {name: torch.randn(3000) for name in "abc"}, path)
    return path


@pytest.mark.parametrize("name", ("cosmos3", "wan", "flux", "t5", "clip", "qwen2_5_vl"))
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_models_are_located(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path / "whole", dtype)
    save(name, tmp_path / "shards", dtype, max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for folder in (tmp_path / "whole", tmp_path / "shards"):
        model = load(name, folder, dtype)
        kept = {key for key, p in model.named_parameters() if p.dtype != dtype}
        keeps = name in ("wan", "cosmos3") or (name == "t5" and transformers.__version__ < "5.1")  # as of then in fp16
        assert bool(kept) == (keeps and dtype == BF16)
        parameters = {key: p for key, p in model.named_parameters() if key not in kept}
        located = locate_tensors(parameters.values())
        located_exactly(parameters, located)
        assert {Path(place.path).parent for place in located.ranges.values()} == {Path(os.path.realpath(folder))}
        if kept:
            refused([model.get_parameter(key) for key in kept], NOT_VIEWS)


def test_variants_and_single_files_are_located(tmp_path: Path) -> None:
    save("ltx", tmp_path / "a", torch.float16, variant="fp16")
    cls = class_of("ltx")
    model = cls.from_pretrained(tmp_path / "a", dtype=torch.float16, variant="fp16")
    located = locate_tensors(model.parameters())
    located_exactly(dict(model.named_parameters()), located)
    assert all(place.path.endswith(".fp16.safetensors") for place in located.ranges.values())
    save_file(zoo.build("ltx", 3).state_dict(), tmp_path / "single.safetensors")
    model = cls.from_single_file(str(tmp_path / "single.safetensors"), config=str(tmp_path / "a"), dtype=FP32)
    located_exactly(dict(model.named_parameters()), locate_tensors(model.parameters()))


def test_views_that_fill_a_run_are_located(tmp_path: Path) -> None:
    path = toy_file(tmp_path, a=torch.randn(30, 70), b=torch.randn(8, 6, 4).bfloat16())
    loaded = load_file(path)
    a, b = loaded["a"], loaded["b"]
    views = {
        "transposed": a.t(),
        "rows": a[3:17],
        "row": a[11],
        "part of a row": a[11, 5:60],
        "element": a[4, 4],
        "permuted": b.permute(2, 0, 1),
        "other dtype": b.view(torch.int16),
        "more dimensions": a.view(30, 1, 7, 10).transpose(1, 3),
        "parameter": nn.Parameter(a),
        "buffer": nn.Buffer(b),
        "detached": nn.Parameter(b).detach(),
    }
    located_exactly(views, locate_tensors(views.values()))
    strided = a[:, ::2], a[::2], a[:, :30], a.expand(2, 30, 70), a[:0], a.view(30, 7, 10)[:, :, :3]
    for view in strided:
        refused([view], "their elements do not fill a run of memory")
    lazy = torch.complex(torch.ones(4), torch.ones(4)).conj()
    refused([lazy, torch._neg_view(a)], "their elements do not fill a run of memory")


def test_what_is_not_in_a_file(tmp_path: Path) -> None:
    path = toy_file(tmp_path)
    tensors = list(load_file(path).values())
    model = nn.ParameterList(tensors)
    assert len(locate_tensors(model.parameters()).ranges) == 3
    refused([p.to(BF16) for p in tensors], NOT_VIEWS)
    refused([p.clone() for p in tensors], NOT_VIEWS)
    refused(list(copy.deepcopy(model).parameters()), NOT_VIEWS)
    refused([torch.ones(5), nn.Parameter(torch.ones(3))], NOT_VIEWS)
    refused([torch.empty(5, device="meta")], "they are on 'meta'")

    class Odd(nn.Parameter):
        pass

    refused([Odd(tensors[0])], "they are Odds")
    assert locate_tensors([]).main_reason == "there are no weights"


def test_reasons_are_counted_in_bytes_and_tensors_once(tmp_path: Path) -> None:
    a, b, c = load_file(toy_file(tmp_path)).values()
    meta, copied = torch.empty(1000, device="meta"), torch.empty(10)
    b[7] = 0
    located = locate_tensors([a, b, a, meta, copied, copied, c[::2], copied])
    assert set(located.ranges) == {id(a)} and located.written == {id(b)}
    assert dict(located.reasons) == {
        "they were written to after loading": 12000,
        "they are on 'meta'": 4000,
        NOT_VIEWS: 40,
        "their elements do not fill a run of memory": 6000,
    }
    assert located.main_reason == "they were written to after loading"


def test_what_was_written_is_found_by_its_bytes(tmp_path: Path) -> None:
    """One element is enough, the same value does not count, and neighbours on the same page stay where they are."""
    sizes = [random.Random(0).choice((1, 10, 300, 1023, 1024, 5000)) for _ in range(120)]
    path = toy_file(tmp_path, **{f"{i:03}": torch.rand(size) for i, size in enumerate(sizes)})
    for seed in range(20):
        source = random.Random(seed)
        tensors = load_file(path)
        changed = set()
        for name, tensor in tensors.items():
            element = source.randrange(tensor.numel())
            what = source.choice(("nothing", "nothing", "same value", "changed back", "element", "everything"))
            if what == "same value":
                tensor.copy_(tensor.clone())
            elif what == "changed back":
                value = tensor[element].clone()
                tensor[element] = -1
                tensor[element] = value
            elif what == "element":
                tensor[element] += 1
                changed.add(name)
            elif what == "everything":
                tensor.neg_()
                changed.add(name)
        located = locate_tensors(tensors.values())
        assert located.written == {id(tensors[name]) for name in changed}
        assert set(located.ranges) == {id(tensors[name]) for name in tensors.keys() - changed}
        assert set(located.reasons) == {"they were written to after loading"}


def test_files_that_were_deleted_or_replaced(tmp_path: Path) -> None:
    path = toy_file(tmp_path)
    tensors = load_file(path)
    os.rename(path, tmp_path / "moved")
    located_exactly(tensors, locate_tensors(tensors.values()))
    path = toy_file(tmp_path)  # another file under the old name changes nothing
    located_exactly(tensors, locate_tensors(tensors.values()))
    os.replace(path, tmp_path / "moved")
    refused(list(tensors.values()), "their file has been deleted")
    path = toy_file(tmp_path)
    tensors = load_file(path)
    os.unlink(path)
    refused(list(tensors.values()), "their file has been deleted")


def test_files_that_grow_are_still_the_same(tmp_path: Path) -> None:
    path = toy_file(tmp_path)
    tensors = load_file(path)
    with open(path, "ab") as file:
        file.write(bytes(10_000))
    located_exactly(tensors, locate_tensors(tensors.values()))


@pytest.mark.parametrize("nbytes", (0, 1, 4096, -1))
def test_files_that_were_cut_off(nbytes: int, tmp_path: Path) -> None:
    """Nothing may be read of them, so this has to be an error, and not one more reason to copy the weights."""
    path = toy_file(tmp_path)
    tensors = load_file(path)
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)
    with pytest.raises(RuntimeError) as caught:
        locate_tensors(tensors.values())
    assert f"'{path}' has " in str(caught.value) and "it has been cut off since" in str(caught.value)
    assert "Restore the file and load the model again." in str(caught.value)


def test_memory_that_is_shared_for_writing(tmp_path: Path) -> None:
    path = toy_file(tmp_path)
    size = path.stat().st_size
    shared = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    refused([shared[200:300]], "their file is mapped for shared writing")
    private = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    located = locate_tensors([private[200:300], shared[200:300]])
    assert list(located.ranges.values()) == [FileRange(str(path), 200, 100)]
    fd = os.memfd_create("some")
    os.write(fd, bytes(PAGE))
    memory = torch.frombuffer(mmap.mmap(fd, PAGE), dtype=torch.uint8)
    os.close(fd)
    refused([memory], "their file has been deleted")


def _odd_paths(rank: int, size: int, folder: Path) -> None:
    for name in ("a b", "two  spaces ", "ä€", "gone (deleted)", "line\nfeed", "back\\slash", "carriage\rreturn"):
        (folder / name).mkdir()
        path = toy_file(folder / name)
        tensors = load_file(path)
        located = locate_tensors(tensors.values())
        located_exactly(tensors, located)
        assert {place.path for place in located.ranges.values()} == {str(path)}


def test_paths_with_odd_characters(tmp_path: Path) -> None:
    ranks(1, _odd_paths, tmp_path)  # a file that confuses is mapped as long as the process lives


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    path = toy_file(tmp_path / "blobs")
    os.symlink(path, tmp_path / "weights.safetensors")
    os.symlink(tmp_path / "weights.safetensors", tmp_path / "again")
    tensors = load_file(tmp_path / "again")
    assert {place.path for place in locate_tensors(tensors.values()).ranges.values()} == {str(path)}


def test_locating_leaves_nothing_open(tmp_path: Path) -> None:
    path = toy_file(tmp_path)
    tensors = load_file(path)
    tensors["a"][0] = 0
    before = collected(tmp_path), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        assert len(locate_tensors(tensors.values()).ranges) == 2
    assert (open_files(tmp_path), len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    os.truncate(path, 100)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            locate_tensors(tensors.values())
    assert (collected(tmp_path), len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_files_in_memory_are_located() -> None:
    """A checkpoint that somebody copied to `/dev/shm`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = toy_file(Path(folder))
        tensors = load_file(path)
        located_exactly(tensors, locate_tensors(tensors.values()))
        tensors["a"][2000] += 1
        located = locate_tensors(tensors.values())
        assert located.written == {id(tensors["a"])} and len(located.ranges) == 2


def _unreadable(rank: int, size: int, folder: Path) -> None:
    path = toy_file(folder)
    os.chmod(path, 0o600)
    tensors = list(load_file(path).values())
    try:
        os.seteuid(65534)  # which makes this process's own pagemap root's
        refused(tensors, f"their file '{path}' cannot be opened (Permission denied)")
        os.seteuid(0)
        os.chmod(path, 0o644)
        os.seteuid(65534)
        refused(tensors, "the kernel does not say whether they were written to (pagemap: Permission denied)")
    finally:
        os.seteuid(0)
    other = folder / "other"
    other.write_bytes(bytes(100_000))
    if own_mounts():
        assert LIBC.mount(bytes(other), bytes(path), None, MS_BIND, None) == 0
        refused(tensors, f"their file '{path}' has been replaced since it was loaded")


def own_mounts() -> bool:
    """Has this process mount things for itself alone."""
    return LIBC.unshare(CLONE_NEWNS) == 0 and LIBC.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None) == 0


@needs_root
def test_files_that_may_not_be_read_any_more(public_path: Path) -> None:
    ranks(1, _unreadable, public_path)


def _without_proc(rank: int, size: int, folder: Path) -> bool:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    if not own_mounts():
        return False
    assert LIBC.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0 and not os.path.exists("/proc/self")
    for host in ("packed", "pinned", "auto"):
        handle = apply_distributed_layerwise_offload(model, host=host)
        assert_equal(run(model, "toy", 0), run(reference, "toy", 0))
        handle.remove()
    return True


@needs_root
def test_a_system_that_does_not_say_what_is_mapped(tmp_path: Path) -> None:
    """Without `/proc` (a bare chroot), weights cannot stay in files; everything else works as it did."""
    if ranks(1, _without_proc, tmp_path) == [False]:
        pytest.skip("needs namespaces")


# ------------------------------------------------------------------------------------------------------------- bits


class OddLeafy(toys.Leafy):
    """All dtypes and strides in sizes that are no multiples of anything, and large leaves beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.MixedBlock(16, width) for width in (23, 41, 7))
        self.embed = nn.Embedding(401, 16)
        self.lm_head = nn.Linear(16, 403)


class Wide(toys.Stack):
    """Tensors too large to be realigned, next to small ones."""

    def __init__(self) -> None:
        super().__init__(3, widths=(1201, 1030, 2003))


@dataclass(frozen=True)
class Source:
    """How weights come to lie in files, and what then becomes of them. `model` names the inputs."""

    model: str
    write: Callable[[Path], None]
    load: Callable[[Path], nn.Module]
    kind: str = "mapped"


def pretrained(name: str, dtype: torch.dtype, kind: str = "mapped", **options: object) -> Source:
    return Source(
        name,
        lambda folder: save(name, folder, dtype, **options),
        lambda folder: load(name, folder, dtype),
        kind,
    )


def by_hand(build: Callable[[], nn.Module], remainder: int, model: str = "toy") -> Source:
    def write(folder: Path) -> None:
        write_container(folder / "w.safetensors", build().state_dict(), remainder, remainder)

    return Source(model, write, lambda folder: assign(build(), folder / "w.safetensors"))


def load_transposed(folder: Path) -> nn.Module:
    """Weights of linear layers that were stored the other way round."""
    model = toy(toys.Stack, 3)
    for name, value in load_file(folder / "w.safetensors").items():
        model.get_parameter(name).data = value.t() if value.dim() == 2 else value
    assert not model.blocks[0].up.weight.is_contiguous()
    return model


def write_transposed(folder: Path) -> None:
    folder.mkdir()
    state = toy(toys.Stack, 3).state_dict()
    save_file({k: v.t().contiguous() if v.dim() == 2 else v for k, v in state.items()}, folder / "w.safetensors")


def write_toy(folder: Path) -> None:
    folder.mkdir()
    save_file(toy(toys.Leafy).state_dict(), folder / "w.safetensors")


def load_written(folder: Path) -> nn.Module:
    """Some weights were changed after loading, in place and by new ones."""
    model = load("flux", folder, BF16)
    with torch.no_grad():
        model.transformer_blocks[1].attn.to_q.weight[3, 5] += 1
        model.transformer_blocks[1].norm1.linear.bias.mul_(1.5)
        model.transformer_blocks[2].ff.net[2].weight.copy_(model.transformer_blocks[2].ff.net[2].weight.clone())
    model.transformer_blocks[0].attn.fuse_projections()
    return model


SOURCES = {
    "bf16": pretrained("flux", BF16),
    "fp32": pretrained("sd3", FP32),
    "fp32 kept": pretrained("wan", BF16, "mapped+packed"),
    "shards": pretrained("cosmos3", BF16, max_shard_size="60KB"),
    "small shards": pretrained("hunyuanvideo", FP32, max_shard_size="20KB"),
    "text encoder": pretrained("t5", FP32),
    "assigned": Source("toy", write_toy, lambda folder: assign(toy(toys.Leafy), folder / "w.safetensors")),
    "transposed": Source("toy", write_transposed, load_transposed),
    "changed": Source("flux", lambda folder: save("flux", folder, BF16), load_written, "mapped+packed"),
    "scrambled": by_hand(lambda: zoo.build("ltx", 3, dtype=BF16), 0, "ltx"),
    "scrambled, odd": by_hand(lambda: zoo.build("qwenimage", 3), 3, "qwenimage"),
    **{f"odd sizes at {remainder}": by_hand(lambda: toy(OddLeafy), remainder) for remainder in (0, 1, 2, 4, 7)},
    **{f"large at {remainder}": by_hand(lambda: toy(Wide), remainder) for remainder in (0, 5)},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, source in SOURCES.items():
        source.write(folder / name)
    return folder


def aligned_residents(model: nn.Module) -> nn.Module:
    """Gives what does not stream memory of its own, as moving it to a device would."""
    (component,) = plan_distributed_layerwise_offload(model).components
    streamed = {tensor.name for unit in (*component.blocks, *component.leaves) for tensor in unit.tensors}
    for name, tensor in tensors_of(model).items():
        if name not in streamed:
            tensor.data = tensor.data.clone()
    return model


def check_bits(name: str, folder: Path, rank: int, again: bool, **options: object) -> None:
    """Three passes on inputs of this rank's own, then disabled again: outputs and weights bit-equal throughout."""
    source = SOURCES[name]
    reference, model = unmapped(source.load(folder / name)), aligned_residents(source.load(folder / name))
    seeds = [10 * rank + step for step in range(3)]
    expected = [run(reference, source.model, seed) for seed in seeds]
    before = tensors_of(model)
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        report = handle.report()
        assert report.host_kind == source.kind, name
        assert report.host_private_bytes == 0 and report.host_files_bytes > 0
        assert (report.host_shared_bytes == report.host_files_bytes) == (source.kind == "mapped")
        for seed, outputs in zip(seeds, expected):
            assert_equal(run(model, source.model, seed), outputs, f"{name}, seed {seed}")
        assert_same(model.state_dict(), reference.state_dict(), name)
        views = {key: host_view(model, key) for key in before}
        assert_same(views, tensors_of(reference), name)
        del views
    finally:
        handle.remove()
    assert_same(tensors_of(model), tensors_of(reference), name)
    for key, tensor in tensors_of(model).items():
        assert tensor is before[key] and tensor.requires_grad == tensors_of(reference)[key].requires_grad
    if not again:
        return
    # What was given back lies in the file as before, but for what no processor can read there: at a misaligned place.
    handle = apply_distributed_layerwise_offload(model, **options)
    try:
        assert handle.report().host_kind == source.kind or name.startswith(("odd sizes", "large", "scrambled"))
        assert_equal(run(model, source.model, seeds[1]), expected[1], f"{name} enabled again")
    finally:
        handle.remove()
    assert_same(tensors_of(model), tensors_of(reference), name)
    assert_equal(run(unmapped(model), source.model, seeds[0]), expected[0], f"{name} after disabling")


def _bits(rank: int, size: int, folder: Path) -> None:
    other = {"transfer": "local" if size > 1 else "all_gather", "num_slots": 3, "host": "mapped"}
    for index, name in enumerate(SOURCES):
        if size != 3 or index % 2:
            check_bits(name, folder, rank, True)
        if size != 3 or not index % 2:
            check_bits(name, folder, rank, False, **other)
        assert collected(folder) == [], name


@pytest.mark.parametrize("size", (1, 2, pytest.param(3, marks=pytest.mark.slow)))
def test_bits_are_those_of_ordinary_loading(size: int, checkpoints: Path) -> None:
    ranks(size, _bits, checkpoints)


def _residents(rank: int, size: int, folder: Path) -> None:
    for name in ("flux", "hunyuanvideo"):
        save(name, folder / name, max_shard_size="5KB")
        reference, model = unmapped(load(name, folder / name)), load(name, folder / name)
        handle = apply_distributed_layerwise_offload(model, host="mapped")
        assert_equal(run(model, name, 0), run(reference, name, 0), name)
        handle.remove()


def test_weights_that_change_between_two_offloads(tmp_path: Path) -> None:
    """What is given back is the user's own: what is written to it is neither in the file nor in another process."""
    path = wan_in(tmp_path)
    content = path.read_bytes()
    reference, model = unmapped(load("wan", tmp_path)), aligned_residents(load("wan", tmp_path))
    kinds = []
    for change in (None, "value", "nothing", "unlinked"):
        for changed in (reference, model):
            if change == "value":
                changed.blocks[1].attn1.to_q.weight.data[2, 3] += 1
                changed.blocks[2].ffn.net[2].bias.data.copy_(changed.blocks[0].ffn.net[2].bias.data)
        if change == "unlinked":
            os.unlink(path)
        handle = apply_distributed_layerwise_offload(model)
        kinds.append(handle.report().host_kind)
        try:
            assert_equal(run(model, "wan", 0), run(reference, "wan", 0))
        finally:
            handle.remove()
        assert_same(tensors_of(model), tensors_of(reference))
        assert not path.exists() or path.read_bytes() == content
    assert kinds == ["mapped", "mapped+packed", "mapped+packed", "packed"]


def test_what_stays_on_the_device_is_aligned_too(tmp_path: Path) -> None:
    """
    On the CPU nothing is moved, and weights between the blocks would be used where the file has them: with streamed
    ones aligned, that gives the bits of neither kind of loading.
    """
    ranks(1, _residents, tmp_path)


def _few_extents(rank: int, size: int, folder: Path) -> None:
    for name in ("cosmos3", "wan", "flux"):
        for dtype in (FP32, BF16):
            path = folder / f"{name} {dtype}"
            handle = apply_distributed_layerwise_offload(load(name, path, dtype), host="mapped")
            blocks, report = handle.plan.blocks, handle.report()
            handle.remove()
            assert 1 <= report.extents_per_block <= 3
            assert {len(block.runs) for block in blocks} == {1}, "a block lies together in the files that people save"


@pytest.mark.parametrize("size", (1, 2))
def test_a_block_is_a_few_copies(size: int, tmp_path: Path) -> None:
    for name in ("cosmos3", "wan", "flux"):
        for dtype in (FP32, BF16):
            save(name, tmp_path / f"{name} {dtype}", dtype)
    ranks(size, _few_extents, tmp_path)


def _each_its_own(rank: int, size: int, folder: Path) -> None:
    """Ranks that loaded different files share weights if they are the same, and are told if they are not."""
    same, other = folder / f"same {rank}", folder / f"other {rank}"
    torch.manual_seed(0)
    save("wan", same)
    zoo.build("wan", 3, seed=rank).save_pretrained(other)
    model, reference = load("wan", same), unmapped(load("wan", same))
    with pytest.raises(RuntimeError, match="these cannot: ranks loaded them from different files"):
        apply_distributed_layerwise_offload(model, host="mapped")
    handle = apply_distributed_layerwise_offload(model)
    assert handle.report().host_kind == "packed"
    assert_equal(run(model, "wan", rank), run(reference, "wan", rank))
    handle.remove()
    for host in ("auto", "mapped", "packed"):
        with pytest.raises(RuntimeError, match="do not have the same model .*: weights of block 'blocks.0'"):
            apply_distributed_layerwise_offload(load("wan", other), host=host)
    del model, handle
    assert collected(folder) == []


def test_ranks_with_files_of_their_own(tmp_path: Path) -> None:
    ranks(2, _each_its_own, tmp_path)


# ------------------------------------------------------------------------------------------------ extents and locking


class Registering(Platform):
    """
    A device that page-locks memory as CUDA does: in whole pages, each once, mapped from first to last. Refuses files
    whose path contains `refuses`, once it has locked `allows` ranges of them.
    """

    def __init__(self, refuses: str | None = None, allows: int = 0) -> None:
        super().__init__(CPU)
        self.refuses = refuses
        self.allows = allows
        self.ranges: dict[int, int] = {}
        self.calls = self.undone = 0

    def register_host_memory(self, address: int, nbytes: int) -> None:
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes > 0
        assert not any(address < start + length and start < address + nbytes for start, length in self.ranges.items())
        if self.refuses is not None and self.refuses in places_of(address, nbytes)[0][0]:
            if self.allows == 0:
                raise RuntimeError("the driver refused")
            self.allows -= 1
        else:
            assert places_of(address, nbytes)
        self.calls += 1
        self.ranges[address] = nbytes

    def unregister_host_memory(self, address: int) -> None:
        assert places_of(address, self.ranges.pop(address)), "memory is unmapped before it is unlocked"
        self.undone += 1

    def pages(self, path: Path | str) -> list[int]:
        """The numbers of the pages of a file that are locked, ascending."""
        return sorted(
            (start + position) // PAGE
            for address, nbytes in self.ranges.items()
            for where, start, length in places_of(address, nbytes)
            if where == str(path)
            for position in range(0, length, PAGE)
        )


def places_of(address: int, nbytes: int) -> list[tuple[str, int, int]]:
    """The parts of files that a range of addresses shows: path, offset and bytes. All of it has to show some."""
    found, stop = [], address + nbytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(text, 16) for text in line.split()[0].split("-"))
        if low <= address < high and "/" in line:
            part = min(high, stop) - address
            found.append((line[line.index("/") :], int(line.split()[2], 16) + address - low, part))
            address += part
    assert address == stop, "not mapped, or not from a file"
    return found


def pages_of(runs: Sequence[FileRange]) -> list[int]:
    return sorted(
        {page for run in runs for page in range(run.offset // PAGE, (run.offset + run.nbytes - 1) // PAGE + 1)}
    )


def plan_of(model: nn.Module, size: int, transfer: str) -> OffloadPlan:
    config = Config(host="mapped", transfer=transfer)
    selection = select(model, config, None)
    located = locate_tensors(owned.tensor for owned in owned_tensors(model))
    return build_plan(selection, find_all(selection, config), config, size, located.ranges)


def stores_of(model: nn.Module, size: int, transfer: str, platforms: Sequence[Platform]) -> list[MappedStore]:
    """The stores of all ranks, in one process."""
    plan = plan_of(model, size, transfer)
    nbytes = image_offsets(plan)[1]
    fd = create_shared_file(nbytes) if nbytes else None
    stamps = {path: FileStamp.of(path) for path in plan.files}
    stores = [
        MappedStore(plan, rank, platform, None if fd is None else os.dup(fd), stamps)
        for rank, platform in enumerate(platforms)
    ]
    if fd is not None:
        os.close(fd)
    tensors = tensors_of(model)
    for unit, layout in enumerate(stores[0].layouts):
        for store in stores:
            if store.writes(unit):
                store.write(unit, [tensors[place.name] for place in layout.tensors])
    return stores


@pytest.mark.parametrize("transfer", ("all_gather", "local"))
@pytest.mark.parametrize("size", (1, 2, 3, 8))
def test_what_ranks_copy_is_the_image_and_page_locked(size: int, transfer: str, checkpoints: Path) -> None:
    for name in ("fp32 kept", "changed", "small shards", "scrambled, odd", "assigned", "odd sizes at 7", "large at 5"):
        model = SOURCES[name].load(checkpoints / name)
        platforms = [Registering() for _ in range(size)]
        stores = stores_of(model, size, transfer, platforms)
        tensors = tensors_of(model)
        for unit, layout in enumerate(stores[0].layouts):
            whole = transfer == "local" or size == 1 or layout.is_leaf
            shard = layout.shard_nbytes(size)
            image = torch.randint(0, 256, (layout.padded_nbytes(size),), dtype=torch.uint8)
            for rank, (store, platform) in enumerate(zip(stores, platforms)):
                if whole:
                    image.random_(0, 256)
                copied = 0
                if layout.is_leaf:
                    store.prepare(unit)
                for offset, source, _ in store.extents(unit):
                    start, stop = source.data_ptr(), source.data_ptr() + source.numel()
                    assert any(low <= start and stop <= low + n for low, n in platform.ranges.items()), "not locked"
                    assert offset + source.numel() <= (len(image) if whole else shard)
                    image[(0 if whole else rank * shard) + offset :][: source.numel()] = source
                    copied += source.numel()
                assert copied <= sum(run.nbytes for run in layout.runs) + layout.memory_nbytes(size)
                if whole or rank == size - 1:
                    for source, target, nbytes in layout.realigned:
                        image[target : target + nbytes] = image[source : source + nbytes].clone()
                    for place in layout.tensors:
                        got = image[place.offset : place.offset + place.nbytes]
                        assert torch.equal(got, memory_bytes(tensors[place.name])), (name, place.name, rank)
                for index, place in enumerate(layout.tensors):
                    expected = {place.name: tensors[place.name]}
                    assert_same({place.name: store.view(unit, index)}, expected)
                    assert_same({place.name: store.private_view(unit, index)}, expected)
        del source, got
        for store, platform in zip(stores, platforms):
            store.close()
            store.close()
            assert platform.ranges == {} and platform.undone == platform.calls
        assert any(platform.calls for platform in platforms)
        del store
        assert collected("/nothing") == []


def test_a_private_view_is_this_process_own(checkpoints: Path) -> None:
    model = SOURCES["assigned"].load(checkpoints / "assigned")
    content = (checkpoints / "assigned" / "w.safetensors").read_bytes()
    stores = stores_of(model, 2, "local", [Platform(CPU)] * 2)
    place = stores[0].layouts[0].tensors[0]
    value = tensors_of(model)[place.name].detach().clone()
    view = stores[0].private_view(0, 0)
    view.fill_(7)
    assert torch.equal(stores[1].view(0, 0), value) and torch.equal(tensors_of(model)[place.name], value)
    run = stores[0].layouts[0].runs[0]
    ((_, source, _),) = stores[0].extents(0)
    position = place.file.offset - run.file_offset
    assert torch.equal(source[position : position + place.nbytes], memory_bytes(value))
    del source
    for store in stores:
        store.close()
    assert (view == 7).all(), "and it outlives the store"
    assert (checkpoints / "assigned" / "w.safetensors").read_bytes() == content


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[Platform], Platform]:
    def use(platform: Platform) -> Platform:
        monkeypatch.setattr(api, "get_platform", lambda device: platform)
        return platform

    return use


def test_leaves_are_locked_when_they_are_used(checkpoints: Path, platform: Callable) -> None:
    device = platform(Registering())
    path = Path(os.path.realpath(checkpoints / "assigned" / "w.safetensors"))
    model, reference = (SOURCES["assigned"].load(path.parent) for _ in range(2))
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    (component,) = handle.plan.components
    places = {unit.name: [FileRange(r.path, r.file_offset, r.nbytes) for r in unit.runs] for unit in component.leaves}
    blocks = [FileRange(run.path, run.file_offset, run.nbytes) for block in component.blocks for run in block.runs]
    assert places.keys() == {"embed", "lm_head"} and {place.path for place in blocks} == {str(path)}
    try:
        assert device.pages(path) == pages_of(blocks)
        for seed in range(2):
            assert_equal(run(model, "toy", seed), run(reference, "toy", seed))
            assert device.pages(path) == pages_of([*blocks, *places["embed"]]), "and the head is never called"
    finally:
        handle.remove()
    assert device.ranges == {} and device.undone == device.calls


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("diffusers_dlo")
    ]


@pytest.mark.parametrize("allows", (0, 1))
def test_files_that_cannot_be_locked(
    allows: int, checkpoints: Path, platform: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """`mapped` says why; `auto` takes the next kind, and says so once."""
    name = "small shards"  # several files, and so several ranges
    model, reference = aligned_residents(load("hunyuanvideo", checkpoints / name)), None
    reference = unmapped(load("hunyuanvideo", checkpoints / name))
    before = tensors_of(model), open_files(checkpoints)
    device = platform(Registering(".safetensors", allows))
    with pytest.raises(RuntimeError, match="cannot be kept in host memory: mapped: the driver refused"):
        apply_distributed_layerwise_offload(model, host="mapped")
    assert device.ranges == {} and device.undone == device.calls == allows
    assert collected(checkpoints) == before[1] and not warnings_of(caplog)
    assert all(tensor is before[0][key] for key, tensor in tensors_of(model).items())
    assert_equal(run(unmapped(model), "hunyuanvideo", 0), run(reference, "hunyuanvideo", 0))

    model = aligned_residents(load("hunyuanvideo", checkpoints / name))
    device = platform(Registering(".safetensors", allows))
    handle = apply_distributed_layerwise_offload(model)
    try:
        assert handle.report().host_kind == handle.plan.host == "packed"
        assert handle.report().host_files_bytes == 0
        (warning,) = warnings_of(caplog)
        assert "'packed' host store" in warning and "mapped: the driver refused" in warning
        assert not any(".safetensors" in places_of(*item)[0][0] for item in device.ranges.items())
        assert_equal(run(model, "hunyuanvideo", 1), run(reference, "hunyuanvideo", 1))
    finally:
        handle.remove()
    assert device.ranges == {} and device.undone == device.calls > 0


def test_neither_files_nor_shared_memory_can_be_locked(
    checkpoints: Path, platform: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    device = platform(Registering("/"))
    model, reference = (SOURCES["assigned"].load(checkpoints / "assigned") for _ in range(2))
    handle = apply_distributed_layerwise_offload(model)
    try:
        assert handle.report().host_kind == "pinned" and device.calls == 0
        (warning,) = warnings_of(caplog)
        assert "mapped: the driver refused packed: the driver refused" in warning
        assert_equal(run(model, "toy", 1), run(reference, "toy", 1))
    finally:
        handle.remove()


def test_a_leaf_that_cannot_be_locked_is_copied_all_the_same(
    checkpoints: Path, platform: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    device = platform(Registering())
    model, reference = (SOURCES["assigned"].load(checkpoints / "assigned") for _ in range(2))
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    device.refuses = ".safetensors"
    try:
        for seed in range(3):
            assert_equal(run(model, "toy", seed), run(reference, "toy", seed))
        (warning,) = warnings_of(caplog)
        assert "'embed' is copied from pageable memory" in warning and "the driver refused" in warning
    finally:
        handle.remove()
    assert device.ranges == {} and device.undone == device.calls


def test_devices_that_lock_nothing(
    checkpoints: Path, platform: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Registering, "registers_host_memory", False)
    device = platform(Registering(".safetensors"))
    model = SOURCES["assigned"].load(checkpoints / "assigned")
    with pytest.raises(RuntimeError, match="copies from memory it did not allocate, and 'cpu' devices do not"):
        apply_distributed_layerwise_offload(model, host="mapped")
    for host, kind in (("auto", "pinned"), ("packed", "packed")):
        handle = apply_distributed_layerwise_offload(model, host=host)
        assert handle.report().host_kind == kind and not warnings_of(caplog)
        handle.remove()
    assert device.calls == 0


def _one_rank_cannot_lock(rank: int, size: int, folder: Path) -> None:
    device = Registering(".safetensors" if rank == 1 else None)
    api.get_platform = lambda _: device
    model, reference = aligned_residents(load("wan", folder)), unmapped(load("wan", folder))
    before = len(open_files(folder))
    with pytest.raises(RuntimeError, match="mapped: (rank 1: )?the driver refused"):
        apply_distributed_layerwise_offload(model, host="mapped")
    assert device.ranges == {} and device.undone == device.calls == (0 if rank == 1 else device.calls)
    assert len(collected(folder)) == before
    handle = apply_distributed_layerwise_offload(model)
    assert handle.report().host_kind == "packed"
    assert_equal(run(model, "wan", rank), run(reference, "wan", rank))
    handle.remove()
    assert device.ranges == {} and device.undone == device.calls > 0


def test_one_rank_that_cannot_lock_files(tmp_path: Path) -> None:
    wan_in(tmp_path)
    ranks(2, _one_rank_cannot_lock, tmp_path)


# ------------------------------------------------------------------------------------------------- reading and saving


@pytest.mark.parametrize("name", ("fp32 kept", "assigned", "odd sizes at 7", "changed"))
def test_values_can_be_read_while_they_stream(name: str, checkpoints: Path) -> None:
    model, reference = (SOURCES[name].load(checkpoints / name) for _ in range(2))
    there = tensors_of(reference)
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    try:
        for passes in range(2):
            for key, tensor in there.items():
                view = host_view(model, key)
                assert view.device == CPU and not view.requires_grad
                assert_same({key: view}, {key: tensor})
                path, _, attribute = key.rpartition(".")
                assert_same({key: host_view(model.get_submodule(path), attribute)}, {key: tensor})
            assert_same(model.state_dict(), reference.state_dict())
            blocks = next(m for key, m in model.named_modules() if isinstance(m, nn.ModuleList))
            same = dict(reference.named_modules())[next(k for k, m in model.named_modules() if m is blocks)]
            assert_same(blocks[0].state_dict(), same[0].state_dict())
            if passes == 0:
                run(model, SOURCES[name].model, 0)
        assert {key for key in there if "blocks" not in key}, "some of it does not stream"
        for wrong in ("nothing", "nothing.weight", "blocks.77.weight", "", ".", "training"):
            with pytest.raises(ValueError, match=f"has no parameter or buffer '{wrong}'"):
                host_view(model, wrong)
        with pytest.raises(ValueError, match="see its named_parameters"):
            host_view(model, next(iter(there)).rpartition(".")[0])
    finally:
        handle.remove()
    for key, tensor in there.items():
        assert_same({key: host_view(model, key)}, {key: tensor})


def test_models_are_saved_elsewhere_while_they_stream(tmp_path: Path) -> None:
    for name, dtype, kind in (("wan", BF16, "mapped+packed"), ("flux", FP32, "mapped"), ("t5", FP32, "mapped")):
        save(name, tmp_path / name, dtype)
        model, reference = load(name, tmp_path / name, dtype), load(name, tmp_path / name, dtype)
        handle = apply_distributed_layerwise_offload(model, host="mapped")
        try:
            assert handle.report().host_kind == kind
            for folder, options in (("again", {}), ("shards", {"max_shard_size": "20KB"})):
                model.save_pretrained(tmp_path / folder / name, **options)
                assert_same(load(name, tmp_path / folder / name, dtype).state_dict(), reference.state_dict(), name)
            run(model, name, 0)
            torch.save(model.state_dict(), tmp_path / "state.pt")
            assert_same(torch.load(tmp_path / "state.pt"), reference.state_dict(), name)
        finally:
            handle.remove()


def _saved_over_itself(rank: int, size: int, folder: Path, name: str) -> None:
    """Refused while it streams; and where somebody finds a way, the process lives and no weight is lost."""
    save(name, folder)
    (path,) = (Path(os.path.realpath(path)) for path in folder.glob("*.safetensors"))
    reference, model = unmapped(load(name, folder)), aligned_residents(load(name, folder))
    content = path.read_bytes()
    os.mkdir(folder / "link")
    os.symlink(path, folder / "link" / path.name)
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    run(model, name, 0)
    for options in ({}, {"max_shard_size": "20KB"}):
        for where in (folder, folder / "link"):
            with pytest.raises(ValueError, match="would write over the weights it reads"):
                model.save_pretrained(where, **options)
    assert path.read_bytes() == content and len(list(folder.glob("*.safetensors*"))) == 1
    assert_equal(run(model, name, 0), run(reference, name, 0))
    # Safetensors puts another file in the place of the old one, which is still here to be read.
    save_file({key: value.clone() for key, value in model.state_dict().items()}, path, {"format": "pt"})
    with pytest.raises(RuntimeError, match="has been replaced by another file"):
        run(model, name, 0)
    assert_same(model.state_dict(), reference.state_dict(), name)
    handle.remove()
    assert_same(model.state_dict(), reference.state_dict(), name)
    assert_same(load(name, folder).state_dict(), reference.state_dict(), name)
    # Once more, now that nothing streams; the weights are still views of a file.
    model = aligned_residents(load(name, folder))
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    handle.remove()
    for options in ({}, {"max_shard_size": "20KB"}):
        model.save_pretrained(folder, **options)
        assert_same(model.state_dict(), reference.state_dict(), name)
        assert_same(load(name, folder).state_dict(), reference.state_dict(), name)
    assert_equal(run(unmapped(model), name, 1), run(reference, name, 1))
    model = aligned_residents(load(name, folder))
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    assert_equal(run(model, name, 1), run(reference, name, 1))
    handle.remove()


@pytest.mark.parametrize("name", ("wan", "t5"))
def test_a_model_that_is_saved_over_itself(name: str, tmp_path: Path) -> None:
    ranks(1, _saved_over_itself, tmp_path, name)


# ------------------------------------------------------------------------------------------------------ changed files


def touch(path: Path) -> None:
    os.utime(path)


def rewrite(path: Path) -> None:
    """In place, with the same size and, as it happens, the same content."""
    content = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def put_another_there(path: Path) -> None:
    zoo.build("wan", 3, seed=1).save_pretrained(path.parent / "new")
    os.replace(path.parent / "new" / WEIGHTS, path)


CHANGES: dict[Callable[[Path], None], tuple[str, bool]] = {
    touch: ("has been written to or touched", False),
    rewrite: ("has been written to or touched", False),
    truncate: ("bytes and has", False),
    empty: ("bytes and has 0 now", False),
    put_another_there: ("has been replaced by another file", True),
    os.unlink: ("cannot be found any more (No such file or directory)", True),
}
"""What is said of a change, and whether the weights can still be given back."""


def _changed(rank: int, size: int, folder: Path, transfer: str, passes: int) -> None:
    for number, (change, (text, survives)) in enumerate(CHANGES.items()):
        path = Path(os.path.realpath(folder)) / str(number) / WEIGHTS
        if rank == 0:
            wan_in(path.parent)
        dist.barrier()
        reference, model = unmapped(load("wan", path.parent)), aligned_residents(load("wan", path.parent))
        handle = apply_distributed_layerwise_offload(model, host="mapped", transfer=transfer)
        for seed in range(passes):
            assert_equal(run(model, "wan", seed + rank), run(reference, "wan", seed + rank))
        dist.barrier()
        if rank == 0:
            change(path)
        dist.barrier()
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                run(model, "wan", 0)
            assert f"'{path}' " in str(caught.value) and text in str(caught.value)
            assert "Load the model again and enable the offload anew" in str(caught.value)
        assert handle.report().passes == passes
        name = handle.plan.blocks[1].tensors[0].name
        if survives:
            assert_same(model.state_dict(), reference.state_dict())
            assert torch.equal(host_view(model, name), reference.get_parameter(name))
            handle.remove()
            assert_same(tensors_of(model), tensors_of(reference))
            assert_equal(run(unmapped(model), "wan", rank), run(reference, "wan", rank))
        else:
            with pytest.raises(RuntimeError) as caught:
                model.state_dict()
            assert f"'{path}' " in str(caught.value) and text in str(caught.value)
            with pytest.raises(RuntimeError) as caught:
                host_view(model, name)
            assert f"'{path}' " in str(caught.value) and text in str(caught.value)
            with pytest.raises(RuntimeError, match="The offload is off, but some weights are lost") as caught:
                handle.remove()
            assert f"'{path}' " in str(caught.value) and text in str(caught.value)
            assert model.get_parameter(name).numel() == 0, "any use of it raises"
            with pytest.raises(RuntimeError):
                run(model, "wan", 0)
        assert not handle.enabled and not is_distributed_layerwise_offload_enabled(model)
        handle.remove()
        del caught, model, handle
        assert collected(folder) == [], change
        dist.barrier()


@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_a_file_that_changes_is_an_error_on_all_ranks(transfer: str, tmp_path: Path) -> None:
    ranks(2, _changed, tmp_path, transfer, 1)


@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_a_file_that_changes_before_the_first_pass(transfer: str, tmp_path: Path) -> None:
    ranks(1, _changed, tmp_path, transfer, 0)


def _says_why(rank: int, size: int, folder: Path) -> None:
    path = wan_in(folder)
    model = load("wan", folder)
    handle = apply_distributed_layerwise_offload(model, host="mapped")
    touch(path)
    with pytest.raises(RuntimeError, match="some weights are lost") as caught:
        handle.remove()
    assert "rank that held their shards" not in str(caught.value), "no rank is at fault"


def test_lost_weights_are_not_blamed_on_a_rank(tmp_path: Path) -> None:
    ranks(1, _says_why, tmp_path)


def test_a_file_that_was_away_for_a_while(tmp_path: Path) -> None:
    path = wan_in(tmp_path)
    reference, model = unmapped(load("wan", tmp_path)), aligned_residents(load("wan", tmp_path))
    handle = apply_distributed_layerwise_offload(model, host="mapped", transfer="all_gather")
    try:
        os.rename(path, tmp_path / "away")
        with pytest.raises(RuntimeError, match="cannot be found any more"):
            run(model, "wan", 0)
        os.rename(tmp_path / "away", path)
        assert_equal(run(model, "wan", 0), run(reference, "wan", 0))
    finally:
        handle.remove()


CALLS = {
    "block": lambda model: model.blocks[0](feed(0)),
    "leaf in use": lambda model: model.embed(torch.arange(9)),
    "other leaf": lambda model: model.lm_head(feed(0)),
}
"""Parts that stream may be called without the rest, as embeddings are for prompts."""


def _direct_calls(rank: int, size: int, folder: Path, transfer: str, part: str) -> None:
    for change in (touch, empty):
        here = folder / change.__name__
        write_toy(here)
        path = Path(os.path.realpath(here / "w.safetensors"))
        reference, model = (aligned_residents(SOURCES["assigned"].load(here)) for _ in range(2))
        with torch.no_grad():
            expected = [CALLS[part](reference).clone()]
            handle = apply_distributed_layerwise_offload(model, host="mapped", transfer=transfer)
            assert_equal(run(model, "toy", 0), run(reference, "toy", 0))
            assert_equal([CALLS[part](model)], expected)
            run(model, "toy", 0)  # block 0 is here by now, and what comes next would be fetched
            change(path)
            with pytest.raises(RuntimeError) as caught:
                CALLS[part](model)
            assert f"'{path}' " in str(caught.value)
        with pytest.raises(RuntimeError, match="some weights are lost"):
            handle.remove()
        del caught, reference


@pytest.mark.parametrize("part", CALLS)
@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_parts_that_are_called_alone_notice_changes_too(transfer: str, part: str, tmp_path: Path) -> None:
    ranks(1, _direct_calls, tmp_path, transfer, part)


def _interrupted(rank: int, size: int, folder: Path, transfer: str, then: str) -> None:
    state, path = toy(toys.Failing, 5).state_dict(), folder / "w.safetensors"
    save_file(state, path)
    model = aligned_residents(assign(toy(toys.Failing, 5), path))
    handle = apply_distributed_layerwise_offload(model, host="mapped", transfer=transfer)
    run(model, "toy", 0)
    model.fail_at, model.fail_with = 1, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        run(model, "toy", 0)
    model.fail_at = None
    if "cut off" in then:
        os.truncate(path, 0)
    if "used again" in then:
        with pytest.raises(RuntimeError) as caught:
            run(model, "toy", 0)
        assert "w.safetensors' " in str(caught.value)
    if "cut off" in then:
        with pytest.raises(RuntimeError, match="some weights are lost"):
            handle.remove()
    else:
        handle.remove()
        assert_same(model.state_dict(), state)


@pytest.mark.parametrize("then", ("removed", "cut off, removed", "cut off, used again"))
@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_a_pass_that_was_interrupted(transfer: str, then: str, tmp_path: Path) -> None:
    """A pass that Ctrl-C ended is not completed from a file that has been cut off since."""
    ranks(1, _interrupted, tmp_path, transfer, then)


def _replaced_in_a_pass(rank: int, size: int, folder: Path) -> None:
    """
    Rank 0 is slow, and the file is replaced while it computes. What is left of the pass (some models skip blocks) is
    done all the same: another rank may be waiting for it already, and the old file is still here to be read.
    """
    path = Path(os.path.realpath(folder / "w.safetensors"))
    reference, model = (aligned_residents(assign(toy(toys.Stack, 6), path)) for _ in range(2))
    dist.barrier()
    handle = apply_distributed_layerwise_offload(model, host="mapped", timeout=20)
    run(model, "toy", 0)
    reference.order = model.order = (0, 1, 2)
    if rank == 0:

        def replace(*_: object) -> None:
            time.sleep(0.5)
            save_file(load_file(path), folder / "new")
            os.replace(folder / "new", path)

        model.blocks[2].register_forward_hook(replace)
    assert_equal(run(model, "toy", 1 + rank), run(reference, "toy", 1 + rank))
    dist.barrier()
    with pytest.raises(RuntimeError, match="has been replaced by another file"):
        run(model, "toy", 2)
    handle.remove()
    assert_same(model.state_dict(), reference.state_dict())


def test_a_file_that_is_replaced_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    save_file(toy(toys.Stack, 6).state_dict(), tmp_path / "w.safetensors")
    ranks(2, _replaced_in_a_pass, tmp_path)


def _unequal_work(rank: int, size: int, folder: Path) -> None:
    """Rank 0 asks for a pass of a changed file while rank 1 has ended, or asks for another component."""
    paths = {name: folder / name / WEIGHTS for name in ("changed", "kept")}
    if rank == 0:
        for path in paths.values():
            wan_in(path.parent)
    dist.barrier()
    reference = unmapped(load("wan", folder / "kept"))
    models = {name: aligned_residents(load("wan", folder / name)) for name in paths}
    handles = {name: apply_distributed_layerwise_offload(model, host="mapped") for name, model in models.items()}
    for model in models.values():
        assert_equal(run(model, "wan", rank), run(reference, "wan", rank))
    dist.barrier()
    if rank == 0:
        os.rename(paths["changed"], folder / "away")
    dist.barrier()
    for name in ("changed", "kept") if rank == 0 else ("kept", "changed"):
        if name == "kept":
            assert_equal(run(models[name], "wan", 5 + rank), run(reference, "wan", 5 + rank))
        else:
            with pytest.raises(RuntimeError, match="cannot be found any more"):
                run(models[name], "wan", 0)
    handles["kept"].join()
    if rank == 0:
        with pytest.raises(RuntimeError, match="cannot be found any more"):
            run(models["changed"], "wan", 0)
        assert_equal(run(models["kept"], "wan", 7), run(reference, "wan", 7))
    handles["kept"].remove()
    handles["changed"].remove()
    for model in models.values():
        assert_same(tensors_of(model), tensors_of(reference))


def test_a_change_does_not_hold_up_ranks_with_other_work(tmp_path: Path) -> None:
    ranks(2, _unequal_work, tmp_path)


# -------------------------------------------------------------------------------------------------- enabling and not


def _cut_off_before(rank: int, size: int, folder: Path) -> None:
    for number, nbytes in enumerate((0, 1, 5000)):
        path = Path(os.path.realpath(folder)) / str(number) / WEIGHTS
        if rank == 0:
            wan_in(path.parent)
        dist.barrier()
        model = aligned_residents(load("wan", path.parent))
        dist.barrier()
        if rank == 0:
            os.truncate(path, nbytes)
        dist.barrier()
        for host in ("auto", "packed", "mapped", "pinned"):
            with pytest.raises(RuntimeError) as caught:
                apply_distributed_layerwise_offload(model, host=host)
            assert f"'{path}' has {nbytes} bytes" in str(caught.value)
            assert not is_distributed_layerwise_offload_enabled(model)
        del model, caught
        assert collected(folder) == []


def test_a_file_that_was_cut_off_before_enabling(tmp_path: Path) -> None:
    ranks(2, _cut_off_before, tmp_path)


def _replaced_before(rank: int, size: int, folder: Path) -> None:
    path = Path(os.path.realpath(folder)) / WEIGHTS
    if rank == 0:
        wan_in(path.parent)
    dist.barrier()
    reference, model = unmapped(load("wan", folder)), aligned_residents(load("wan", folder))
    dist.barrier()
    if rank == 0:
        put_another_there(path)
    dist.barrier()
    before = tensors_of(model)
    with pytest.raises(RuntimeError, match="these cannot: their file has been deleted"):
        apply_distributed_layerwise_offload(model, host="mapped")
    assert all(tensor is before[key] for key, tensor in tensors_of(model).items())
    handle = apply_distributed_layerwise_offload(model)
    assert handle.report().host_kind == "packed"
    assert_equal(run(model, "wan", rank), run(reference, "wan", rank))
    handle.remove()
    assert_same(tensors_of(model), tensors_of(reference))


def test_a_file_that_was_replaced_before_enabling(tmp_path: Path) -> None:
    ranks(2, _replaced_before, tmp_path)


def _replaced_meanwhile(rank: int, size: int, folder: Path) -> None:
    path = wan_in(folder)
    reference, model = unmapped(load("wan", folder)), aligned_residents(load("wan", folder))
    original = api.find_all

    def find_all(*args: object) -> object:
        put_another_there(path)
        return original(*args)

    api.find_all = find_all
    try:
        handle = apply_distributed_layerwise_offload(model)
    except RuntimeError as error:
        assert f"'{path}' " in str(error)
    else:
        assert_equal(run(model, "wan", 0), run(reference, "wan", 0))
        handle.remove()


def test_a_file_that_is_replaced_while_enabling(tmp_path: Path) -> None:
    """Between looking where weights lie and opening the file, another one may take its place: never its weights."""
    ranks(1, _replaced_meanwhile, tmp_path)


def may_not_open(model: nn.Module) -> None:
    os.seteuid(65534)
    LIBC.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: what /proc says of this process is its own to read again


def has_a_copy(model: nn.Module) -> None:
    unmapped(model)


def has_a_copy_of_one(model: nn.Module) -> None:
    weight = model.blocks[1].attn1.to_q.weight
    weight.data = weight.data.clone()


def _one_rank_differs(rank: int, size: int, folder: Path, spoil: Callable[[nn.Module], None]) -> None:
    path = Path(os.path.realpath(folder)) / WEIGHTS
    if rank == 0:
        wan_in(folder)
        os.chmod(path, 0o600)
    dist.barrier()
    model, reference = aligned_residents(load("wan", folder)), unmapped(load("wan", folder))
    handle = apply_distributed_layerwise_offload(model, host="mapped")  # the ranks are connected from here on
    handle.remove()
    model = aligned_residents(load("wan", folder))
    partly = spoil is has_a_copy_of_one
    try:
        if rank == 1:
            spoil(model)
        before, there = tensors_of(model), collected(folder) if rank == 0 else []
        with pytest.raises(RuntimeError) as caught:
            apply_distributed_layerwise_offload(model, host="mapped")
        if partly:
            assert "these cannot: ranks loaded them from different files" in str(caught.value), str(caught.value)
        elif rank == 0:
            assert "rank 1 did not load them from files" in str(caught.value), str(caught.value)
        else:
            reason = f"their file '{path}' cannot be opened (Permission denied)"
            assert (reason if spoil is may_not_open else NOT_VIEWS) in str(caught.value)
        assert all(tensor is before[key] for key, tensor in tensors_of(model).items())
        assert not is_distributed_layerwise_offload_enabled(model)
        del caught
        if rank == 0:
            assert collected(folder) == there
        handle = apply_distributed_layerwise_offload(model)
        assert handle.report().host_kind == "packed"
        for seed in range(2):
            assert_equal(run(model, "wan", seed + rank), run(reference, "wan", seed + rank))
        handle.remove()
        assert_same(tensors_of(model), tensors_of(reference))
        del model, before, handle
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert collected(folder) == [] and shared_memory() == []


@pytest.mark.parametrize("spoil", (pytest.param(may_not_open, marks=needs_root), has_a_copy, has_a_copy_of_one))
def test_one_rank_does_not_have_them_in_the_file(spoil: Callable, public_path: Path) -> None:
    """The weights are the same, so `auto` packs them; `mapped` is refused alike on all ranks."""
    ranks(2, _one_rank_differs, public_path, spoil)


def _in_memory_only(rank: int, size: int, folder: Path) -> None:
    model, reference = zoo.build("wan", 3), zoo.build("wan", 3)
    before = tensors_of(model)
    with pytest.raises(RuntimeError) as caught:
        apply_distributed_layerwise_offload(model, host="mapped")
    assert f"these cannot: {NOT_VIEWS}" in str(caught.value) and 'use host="packed"' in str(caught.value)
    assert all(tensor is before[key] for key, tensor in tensors_of(model).items())
    assert not is_distributed_layerwise_offload_enabled(model)
    assert collected(folder) == [] and shared_memory() == []
    assert_equal(run(model, "wan", rank), run(reference, "wan", rank))
    handle = apply_distributed_layerwise_offload(model)
    assert handle.report().host_kind == "packed" and handle.report().host_files_bytes == 0
    assert_equal(run(model, "wan", rank), run(reference, "wan", rank))
    handle.remove()


@pytest.mark.parametrize("size", (1, 2))
def test_a_model_that_is_in_memory_only(size: int, tmp_path: Path) -> None:
    ranks(size, _in_memory_only, tmp_path)


# ------------------------------------------------------------------------------------------------------ nothing left


def _rounds(rank: int, size: int, folder: Path) -> None:
    models = {name: aligned_residents(load(name, folder / name, BF16)) for name in ("wan", "flux")}
    models["toy"] = SOURCES["assigned"].load(folder / "toy")
    counts = []
    for number in range(20):
        for name, model in models.items():
            handle = apply_distributed_layerwise_offload(model, transfer=("all_gather", "local")[number % 2])
            # What was in memory is given back as a view of shared memory, so it is in no file the second time either.
            assert handle.report().host_kind == ("mapped+packed" if name == "wan" else "mapped"), number
            run(model, name, rank)
            handle.remove()
        maps = Path("/proc/self/maps").read_text().splitlines()
        named = [line for line in maps if "/" in line]
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count(), len(named), len(maps)))
    assert len({count[:3] for count in counts[1:]}) == 1, counts
    assert counts[-1][3] <= counts[4][3] + 3, counts
    del models, model, handle
    assert collected(folder) == []


@pytest.mark.parametrize("size", (1, 2))
def test_nothing_grows_with_the_number_of_rounds(size: int, tmp_path: Path) -> None:
    save("wan", tmp_path / "wan", BF16)
    save("flux", tmp_path / "flux", BF16)
    write_toy(tmp_path / "toy")
    ranks(size, _rounds, tmp_path)


def _dropped(rank: int, size: int, folder: Path, name: str, transfer: str) -> None:
    model, weight = load(name, folder), load(name, folder)
    handle = apply_distributed_layerwise_offload(model, host="mapped", transfer=transfer)
    run(model, name, 0)
    key = handle.plan.blocks[1].tensors[0].name
    view, weight = host_view(model, key), weight.get_parameter(key).detach().clone()
    assert collected(folder) != []
    del model, handle
    gc.collect()
    assert torch.equal(view, weight), "what is still in use stays readable"
    del view
    assert collected(folder) == []


@pytest.mark.parametrize("transfer", ("all_gather", "local"))
@pytest.mark.parametrize("name", ("flux", "wan"))
def test_a_model_that_is_dropped_while_it_streams(name: str, transfer: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    ranks(1, _dropped, tmp_path, name, transfer)
