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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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
from diffusers_dlo.device.platform import Platform
from diffusers_dlo.host.mapped import FileStamp, MappedStore
from diffusers_dlo.host.packed import create_shared_file, image_offsets
from diffusers_dlo.offload_plan import OffloadPlan, build_plan, find_all, select
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


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    assert open_files(tmp_path) == [] or collected(tmp_path) == []
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
        assert bool(kept) == (name in ("wan", "cosmos3") and dtype == BF16)
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


def _odd_paths(rank: int, size: int, folder: str) -> None:
    for name in ("a b", "two  spaces ", "ä€", "gone (deleted)", "line\nfeed", "back\\slash", "carriage\rreturn"):
        (Path(folder) / name).mkdir()
        path = toy_file(Path(folder) / name)
        tensors = load_file(path)
        located = locate_tensors(tensors.values())
        located_exactly(tensors, located)
        assert {place.path for place in located.ranges.values()} == {str(path)}


def test_paths_with_odd_characters(tmp_path: Path) -> None:
    run_ranks(1, _odd_paths, str(tmp_path))  # a file that confuses is mapped as long as the process lives


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
    before = open_files(tmp_path), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        assert len(locate_tensors(tensors.values()).ranges) == 2
    assert (open_files(tmp_path), len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    os.truncate(path, 100)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            locate_tensors(tensors.values())
    assert (collected(tmp_path), len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def _unreadable(rank: int, size: int, folder: str) -> None:
    path = toy_file(Path(folder))
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
    other = Path(folder) / "other"
    other.write_bytes(bytes(100_000))
    if own_mounts():
        assert LIBC.mount(bytes(other), bytes(path), None, MS_BIND, None) == 0
        refused(tensors, f"their file '{path}' has been replaced since it was loaded")


def own_mounts() -> bool:
    """Has this process mount things for itself alone."""
    return LIBC.unshare(CLONE_NEWNS) == 0 and LIBC.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None) == 0


@needs_root
def test_files_that_may_not_be_read_any_more(public_path: Path) -> None:
    run_ranks(1, _unreadable, str(public_path))


def _without_proc(rank: int, size: int, folder: str) -> bool:
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
    if run_ranks(1, _without_proc, str(tmp_path)) == [False]:
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
    **{f"odd sizes at {remainder}": by_hand(lambda: toy(OddLeafy), remainder) for remainder in range(0, 8, 1)},
    **{f"large at {remainder}": by_hand(lambda: toy(Wide), remainder) for remainder in (0, 4, 5)},
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


def _bits(rank: int, size: int, folder: str) -> None:
    other = {"transfer": "local" if size > 1 else "all_gather", "num_slots": 3, "host": "mapped"}
    for index, name in enumerate(SOURCES):
        if size != 3 or index % 2:
            check_bits(name, Path(folder), rank, True)
        if size != 3 or not index % 2:
            check_bits(name, Path(folder), rank, False, **other)
        assert collected(folder) == [], name


@pytest.mark.parametrize("size", (1, 2, 3))
def test_bits_are_those_of_ordinary_loading(size: int, checkpoints: Path) -> None:
    run_ranks(size, _bits, str(checkpoints))


def test_what_stays_on_the_device_is_aligned_too(checkpoints: Path, tmp_path: Path) -> None:
    """
    On the CPU nothing is moved, and weights between the blocks would be used where the file has them: with streamed
    ones aligned, that gives the bits of neither kind of loading.
    """
    for name, folder in (("flux", tmp_path / "flux"), ("hunyuanvideo", checkpoints / "small shards")):
        if name == "flux":
            save("flux", folder, max_shard_size="20KB")
        reference, model = unmapped(load(name, folder)), load(name, folder)
        handle = apply_distributed_layerwise_offload(model, host="mapped")
        try:
            assert_equal(run(model, name, 0), run(reference, name, 0), name)
        finally:
            handle.remove()


def _few_extents(rank: int, size: int, folder: str) -> None:
    for name in ("cosmos3", "wan", "flux"):
        for dtype in (FP32, BF16):
            path = Path(folder) / f"{name} {dtype}"
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
    run_ranks(size, _few_extents, str(tmp_path))


def _each_its_own(rank: int, size: int, folder: str) -> None:
    """Ranks that loaded different files share weights if they are the same, and are told if they are not."""
    same, other = Path(folder) / f"same {rank}", Path(folder) / f"other {rank}"
    torch.manual_seed(0)
    save("wan", same)
    zoo.build("wan", 3, seed=rank).save_pretrained(other)
    model, reference = load("wan", same), unmapped(load("wan", same))
    with pytest.raises(RuntimeError, match="the ranks loaded them from different files"):
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
    run_ranks(2, _each_its_own, str(tmp_path))
