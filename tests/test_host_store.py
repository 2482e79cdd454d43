# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The host stores, on one rank and as several in one process: bits, extents, private copies, nothing left behind."""

import errno
import gc
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
import torch
from torch import nn

from diffusers_dlo import DistributedLayerwiseOffloadConfig as Config
from diffusers_dlo import OffloadPlan, apply_distributed_layerwise_offload, plan_distributed_layerwise_offload
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.distributed.group import World, form_group, introduce
from diffusers_dlo.host import packed, pinned
from diffusers_dlo.host.choice import create_store
from diffusers_dlo.host.packed import PackedStore, image_offsets
from diffusers_dlo.host.pinned import PinnedStore
from diffusers_dlo.host.shared_file import create_shared_file
from diffusers_dlo.host.store import HostStore, copy_range
from tests import toys, zoo
from tests.toys import feed, toy


CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


class Leafy(toys.Leafy):
    """A leaf beside blocks of all dtypes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(toys.MixedBlock(16, width) for width in (24, 40, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "leafy": lambda: toy(Leafy),
    "tied": lambda: toy(toys.Tied),
    "large": lambda: toy(lambda: toys.Stack(3, dim=64, widths=(70, 65))),  # type: ignore[arg-type]
    "wan": lambda: zoo.build("wan", 3, dtype=torch.bfloat16),
}


def up(nbytes: int, step: int = 256) -> int:
    return (nbytes + step - 1) // step * step


def memory_order_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order they lie in memory, from its elements alone."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.detach().permute(order).contiguous().reshape(-1).view(torch.uint8)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def tensors_of(plan: OffloadPlan, model: nn.Module) -> list[list[torch.Tensor]]:
    """The tensors of each unit, looked up by name."""
    state = state_of(model)
    return [[state[tensor.name] for tensor in unit.tensors] for _, unit in plan.units]


def images_of(plan: OffloadPlan, model: nn.Module) -> list[list[tuple[int, torch.Tensor]]]:
    """What each unit's image must hold: bytes by their offset."""
    return [
        [(place.offset, memory_order_bytes(tensor)) for place, tensor in zip(unit.tensors, tensors)]
        for (_, unit), tensors in zip(plan.units, tensors_of(plan, model))
    ]


def image_of(store: HostStore, unit: int, private: bool = False) -> torch.Tensor | None:
    """The image that a unit's views make up; None where this rank has only a shard."""
    if not store.is_whole(unit):
        return None
    layout = store.layouts[unit]
    image = torch.zeros(up(layout.nbytes), dtype=torch.uint8)
    for index, place in enumerate(layout.tensors):
        view = store.private_view(unit, index) if private else store.view(unit, index)
        assert view is not None
        image[place.offset : place.offset + place.nbytes] = memory_order_bytes(view)
    return image


def assert_image(image: torch.Tensor | None, expected: Sequence[tuple[int, torch.Tensor]]) -> None:
    assert image is not None and image.dtype == torch.uint8
    for offset, content in expected:
        assert torch.equal(image[offset : offset + content.numel()], content)


def plan_of(model: nn.Module, host: str, group_size: int, transfer: str = "all_gather") -> OffloadPlan:
    return plan_distributed_layerwise_offload(model, Config(host=host, transfer=transfer), group_size)


def packed_stores(plan: OffloadPlan, platform: Platform | None = None) -> list[PackedStore]:
    """One store for each rank of the plan, over one shared file."""
    fd = create_shared_file(image_offsets(plan)[1])
    try:
        return [PackedStore(plan, rank, platform or Platform(CPU), os.dup(fd)) for rank in range(plan.group_size)]
    finally:
        os.close(fd)


def pinned_stores(plan: OffloadPlan) -> list[PinnedStore]:
    return [PinnedStore(plan, rank, Platform(CPU)) for rank in range(plan.group_size)]


def make_stores(plan: OffloadPlan) -> Sequence[HostStore]:
    return packed_stores(plan) if plan.host == "packed" else pinned_stores(plan)


def fill(stores: Sequence[HostStore], model: nn.Module) -> None:
    for unit, tensors in enumerate(tensors_of(stores[0].plan, model)):
        for store in stores:
            store.write(unit, tensors)


def leftovers() -> tuple[int, int]:
    """Mappings of, and descriptors to, shared files of this package in this process."""
    with open("/proc/self/maps") as maps:
        mappings = sum("memfd:diffusers_dlo" in line for line in maps)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            pass
    return mappings, sum("memfd:diffusers_dlo" in link for link in links)


def leftovers_after_collection() -> tuple[int, int]:
    gc.collect()
    return leftovers()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = leftovers()
    yield
    # Collecting is slow, and rarely needed.
    assert leftovers() <= before or leftovers_after_collection() <= before


# -------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("host", ("packed", "pinned"))
@pytest.mark.parametrize("transfer", ("all_gather", "local"))
@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("name", MODELS)
def test_what_is_stored_is_what_was_written(name: str, size: int, transfer: str, host: str) -> None:
    model = MODELS[name]()
    plan = plan_of(model, host, size, transfer)
    stores = make_stores(plan)
    fill(stores, model)
    expected = images_of(plan, model)
    assert len(expected) == len(plan.units) and sum(map(len, expected)) > len(expected)
    for unit, (_, layout) in enumerate(plan.units):
        whole = transfer == "local" or size == 1 or layout.is_leaf
        shard = up(layout.nbytes) if whole else layout.shard_nbytes(size)
        parts = []
        for store in stores:
            # The extents cover the shard, in order, without a gap or an overlap.
            position = 0
            for offset, source, _ in store.extents(unit):
                assert offset == position and source.dtype == torch.uint8 and source.is_contiguous()
                position += source.numel()
            assert position == shard
            parts.append(torch.cat([source for _, source, _ in store.extents(unit)]))
        if whole:
            for part in parts:
                assert_image(part, expected[unit])
        else:
            assert sum(part.numel() for part in parts) == layout.padded_nbytes(size)
            assert_image(torch.cat(parts), expected[unit])
        for store in stores:
            if host == "pinned" and not whole:
                assert not store.is_whole(unit)
                assert store.view(unit, 0) is None and store.private_view(unit, 0) is None
                continue
            assert store.is_whole(unit) and store.writes(unit)
            for private in (False, True):
                assert_image(image_of(store, unit, private), expected[unit])
            for index, tensor in enumerate(tensors_of(plan, model)[unit]):
                view = store.view(unit, index)
                assert view is not None and view.dtype == tensor.dtype and view.stride() == tensor.stride()
                assert view.shape == tensor.shape and torch.equal(view, tensor)
    for store in stores:
        store.close()


@pytest.mark.parametrize("size", (2, 3))
def test_a_rank_writes_its_own_shard_and_no_other(size: int) -> None:
    model = MODELS["leafy"]()
    plan = plan_of(model, "packed", size)
    stores = packed_stores(plan)
    tensors = tensors_of(plan, model)
    for unit, (_, layout) in enumerate(plan.units):
        shard = layout.shard_nbytes(size)
        for rank, store in enumerate(stores):
            store.write(unit, tensors[unit])
            written = min((rank + 1) * shard, up(layout.nbytes))
            for reader in stores:
                image = image_of(reader, unit)
                assert not image[written:].any(), f"rank {rank} wrote beyond its shard of '{layout.name}'"
                end = min(written, layout.nbytes)
                for offset, content in images_of(plan, model)[unit]:
                    there = max(0, min(offset + content.numel(), end) - offset)
                    assert torch.equal(image[offset : offset + there], content[:there])
    for store in stores:
        store.close()


def test_every_range_of_an_image_can_be_copied() -> None:
    """Ranges that begin and end within tensors, and in the gaps between them."""
    model = toy(toys.Stack, 1, toys.MixedBlock)
    plan = plan_of(model, "packed", 1)
    (layout,) = plan.blocks
    (tensors,) = tensors_of(plan, model)
    whole = torch.zeros(up(layout.nbytes), dtype=torch.uint8)
    for offset, content in images_of(plan, model)[0]:
        whole[offset : offset + content.numel()] = content
    edges = sorted({0, 1, 100, up(layout.nbytes)} | {t.offset + d for t in layout.tensors for d in (0, t.nbytes, 3)})
    for index, start in enumerate(edges):
        for stop in edges[index + 1 :]:
            out = torch.zeros(stop - start, dtype=torch.uint8)
            copy_range(layout, tensors, start, out)
            assert torch.equal(out, whole[start:stop])


# ---------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("size", (1, 2, 3))
def test_a_packed_store_is_one_copy_for_all(size: int) -> None:
    model = MODELS["leafy"]()
    plan = plan_of(model, "packed", size)
    offsets, nbytes = image_offsets(plan)
    stores = packed_stores(plan)
    images = [up(unit.nbytes, 256 * size) for _, unit in plan.units]
    assert nbytes % PAGE == 0 and sum(images) <= nbytes < sum(images) + (PAGE + 256 * size) * len(images)
    for offset, following, (_, unit) in zip(offsets, [*offsets[1:], nbytes], plan.units):
        assert offset % PAGE == 0 and offset + unit.padded_nbytes(size) <= following
    for store in stores:
        assert store.private_nbytes == 0 and store.shared_nbytes == nbytes and store.kind == "packed"
        store.close()


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("transfer", ("all_gather", "local"))
def test_a_pinned_store_takes_what_the_plan_says(transfer: str, size: int) -> None:
    model = MODELS["leafy"]()
    plan = plan_of(model, "pinned", size, transfer)
    for store in pinned_stores(plan):
        assert store.private_nbytes == plan.host_nbytes_per_rank and store.shared_nbytes == 0
        assert store.kind == "pinned"


@pytest.mark.parametrize("chunk", (256, 512, 4096))
@pytest.mark.parametrize("size", (1, 2, 3))
def test_parts_that_straddle_pinned_chunks(monkeypatch: pytest.MonkeyPatch, size: int, chunk: int) -> None:
    monkeypatch.setattr(pinned, "_CHUNK_NBYTES", chunk)
    model = MODELS["leafy"]()
    plan = plan_of(model, "pinned", size)
    stores = pinned_stores(plan)
    fill(stores, model)
    expected = images_of(plan, model)
    straddling = 0
    for unit, (_, layout) in enumerate(plan.units):
        parts = []
        for store in stores:
            extents = store.extents(unit)
            straddling += len(extents) > 1
            assert all(source.numel() <= chunk for _, source, _ in extents)
            assert [offset for offset, _, _ in extents] == [
                sum(source.numel() for _, source, _ in extents[:i]) for i in range(len(extents))
            ]
            parts.append(torch.cat([source for _, source, _ in extents]))
        assert_image(parts[0] if layout.is_leaf else torch.cat(parts), expected[unit])
        if layout.is_leaf or size == 1:
            assert_image(image_of(stores[-1], unit), expected[unit])
    assert straddling and all(store.private_nbytes == plan.host_nbytes_per_rank for store in stores)


def test_pinned_memory_comes_from_the_platform() -> None:
    class Counting(Platform):
        asked: list[int] = []

        def pinned_empty(self, nbytes: int) -> torch.Tensor:
            self.asked.append(nbytes)
            return super().pinned_empty(nbytes)

    plan = plan_of(MODELS["wan"](), "pinned", 2)
    store = PinnedStore(plan, 1, Counting(CPU))
    assert sum(Counting.asked) == store.private_nbytes == plan.host_nbytes_per_rank


def test_whole_extents_of_what_is_copied_in_shards() -> None:
    model = MODELS["large"]()
    plan = plan_of(model, "packed", 2)
    stores = packed_stores(plan)
    fill(stores, model)
    before = [[(e.offset, e.source.data_ptr(), e.source.numel()) for e in store.extents(0)] for store in stores]
    images = []
    for store in stores:
        whole = store.whole_extents(0)
        assert [e.offset for e in whole[1:]] == [e.offset + e.source.numel() for e in whole[:-1]]
        images.append(torch.cat([e.source for e in whole]))
        assert images[-1].numel() == plan.blocks[0].padded_nbytes(1)
    shards = torch.cat([store.extents(0)[0].source for store in stores])
    assert torch.equal(*images) and torch.equal(images[0], shards[: images[0].numel()])
    after = [[(e.offset, e.source.data_ptr(), e.source.numel()) for e in store.extents(0)] for store in stores]
    assert before == after, "its own shard is copied as before, in one piece"
    for store in stores:
        store.close()
    pinned = PinnedStore(plan_of(model, "pinned", 2), 0, Platform(CPU))
    with pytest.raises(RuntimeError, match="is not whole on any one rank"):
        pinned.whole_extents(0)


# ---------------------------------------------------------------------------------------------- private images


def test_a_private_view_is_the_callers_own() -> None:
    """Of a packed store: writing to it changes neither the store nor what other ranks have."""
    model = MODELS["large"]()
    plan = plan_of(model, "packed", 2)
    stores = packed_stores(plan)
    fill(stores, model)
    value = tensors_of(plan, model)[0][0].detach().clone()
    mine, other, neighbour = (stores[rank].private_view(0, index) for rank, index in ((0, 0), (1, 0), (0, 1)))
    mine.fill_(255)
    assert (mine == 255).all()
    for view in (stores[0].view(0, 0), stores[1].view(0, 0), other):
        assert torch.equal(view, value)
    assert torch.equal(neighbour, tensors_of(plan, model)[0][1])
    for store in stores:
        store.close()
    # And it outlives the store.
    assert (mine == 255).all() and torch.equal(other, value)
    neighbour.zero_()
    assert not neighbour.any()


def test_unwritten_pages_of_a_private_view_take_no_memory_of_its_own() -> None:
    """Copy on write, and not a copy: ranks go on sharing what none of them writes to."""
    model = toy(lambda: toys.Stack(1, dim=512, widths=(2048,)))  # type: ignore[arg-type]
    (store,) = packed_stores(plan_of(model, "packed", 1))
    fill([store], model)
    views = [store.private_view(0, index) for index in range(len(store.layouts[0].tensors))]
    assert sum(view.numel() * view.element_size() for view in views) > 8 << 20
    assert sum(float(view.abs().sum()) for view in views) != 0  # every page is read
    assert anonymous_nbytes(views[0]) == 0
    max(views, key=torch.Tensor.numel).view(-1)[5 * PAGE] += 1
    assert 0 < anonymous_nbytes(views[0]) <= 2 * PAGE
    store.close()


def anonymous_nbytes(memory: torch.Tensor) -> int:
    """Bytes of the mapping that holds `memory` which belong to this process alone."""
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, stop = (int(address, 16) for address in first.split("-"))
                inside = start <= memory.data_ptr() < stop
            elif inside and first == "Anonymous:":
                return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


def test_a_private_view_of_pinned_memory_is_a_copy() -> None:
    model = MODELS["leafy"]()
    (store,) = pinned_stores(plan_of(model, "pinned", 1))
    fill([store], model)
    value = tensors_of(store.plan, model)[0][0].detach().clone()
    first, second = store.private_view(0, 0), store.private_view(0, 0)
    first.zero_()
    assert torch.equal(store.view(0, 0), value) and torch.equal(second, value)
    store.close()
    assert torch.equal(second, value)


# ----------------------------------------------------------------------------------------------------- closing


def test_closing_a_packed_store_leaves_nothing() -> None:
    before = leftovers_after_collection()
    model = MODELS["leafy"]()
    plan = plan_of(model, "packed", 3)
    stores = packed_stores(plan)
    fill(stores, model)
    assert leftovers() == (before[0] + 3, before[1] + 6), "a mapping has a descriptor of its own"
    views = [store.view(0, 0) for store in stores] + [store.private_view(1, 0) for store in stores]
    values = [tensors[0].detach().clone() for tensors in tensors_of(plan, model)]
    for _ in range(2):
        for store in stores:
            store.close()
    # What is still in use stays readable, and what is not goes.
    assert all(not store.extents(0)[0].source.numel() for store in stores)
    for unit in (0, 1):
        for rank in range(3):
            assert torch.equal(views[3 * unit + rank], values[unit])
    del views[1:]
    assert leftovers_after_collection()[0] == before[0] + 1
    views.clear()
    assert leftovers() == before


def test_closing_a_pinned_store_lets_its_memory_go(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[weakref.ref[torch.Tensor]] = []

    class Watching(Platform):
        def pinned_empty(self, nbytes: int) -> torch.Tensor:
            chunk = super().pinned_empty(nbytes)
            chunks.append(weakref.ref(chunk))
            return chunk

    monkeypatch.setattr(pinned, "_CHUNK_NBYTES", 4096)
    model = MODELS["leafy"]()
    store = PinnedStore(plan_of(model, "pinned", 1), 0, Watching(CPU))
    fill([store], model)
    view, value = store.private_view(0, 0), tensors_of(store.plan, model)[0][0].detach().clone()
    assert len(chunks) > 2 and all(chunk() is not None for chunk in chunks)
    for _ in range(2):
        store.close()
        assert store.private_nbytes == 0 and all(chunk() is None for chunk in chunks)
    assert torch.equal(view, value)


def test_the_file_has_no_name_and_is_reserved_in_full() -> None:
    """Reserved by the ranks, each its own shards, when they map the file; before anything is written."""
    plan = plan_of(MODELS["large"](), "packed", 1)
    nbytes = image_offsets(plan)[1]
    fd = create_shared_file(nbytes)
    kept = os.dup(fd)
    try:
        status = os.fstat(kept)
        assert status.st_size == nbytes and status.st_nlink == 0 and not os.get_inheritable(fd)
        store = PackedStore(plan, 0, Platform(CPU), fd)
        stored = sum(unit.padded_nbytes(1) for _, unit in plan.units)
        assert os.fstat(kept).st_blocks * 512 >= stored
        store.close()
    finally:
        os.close(kept)


# ---------------------------------------------------------------------------------------------------- failures


def no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_memory_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(packed, "_MADV_POPULATE_WRITE", 9999)  # as a kernel that does not know it
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    plan = plan_of(MODELS["large"](), "packed", 1)
    nbytes = image_offsets(plan)[1]
    with pytest.raises(RuntimeError) as caught:
        PackedStore(plan, 0, Platform(CPU), create_shared_file(nbytes))
    text = str(caught.value)
    assert f"{nbytes / 2**30:.2f} GiB of shared memory on rank 0" in text and "No space left on device" in text
    assert "Free host memory or raise the container's limit." in text
    del caught  # its traceback holds the mapping
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptors_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", too_many)
    with pytest.raises(RuntimeError, match="Too many open files"):
        create_shared_file(PAGE)


def test_enabling_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`packed` raises and leaves the model as it was; `auto` says so and takes the next kind."""
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    parameters = dict(model.named_parameters())
    monkeypatch.setattr(packed, "_MADV_POPULATE_WRITE", 9999)  # as a kernel that does not know it
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(RuntimeError, match="cannot be kept in host memory: packed: .*No space left"):
        apply_distributed_layerwise_offload(model, host="packed")
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
        handle = apply_distributed_layerwise_offload(model)
        try:
            assert handle.report().host_kind == handle.plan.host == "pinned"
            assert torch.equal(model(feed(1)), reference(feed(1)))
        finally:
            handle.remove()


class Registering(Platform):
    """A device that page-locks memory as CUDA does: in whole pages, each once, mapped from first to last."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(CPU)
        self.fail_at = fail_at
        self.calls = 0
        self.ranges: dict[int, int] = {}
        self.undone = 0

    def register_host_memory(self, address: int, nbytes: int) -> None:
        if self.calls == self.fail_at:
            raise RuntimeError("the driver refused")
        self.calls += 1
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes > 0
        for start, length in self.ranges.items():
            assert address + nbytes <= start or start + length <= address, "a page is registered twice"
        assert self.mapped(address, nbytes)
        self.ranges[address] = nbytes

    def unregister_host_memory(self, address: int) -> None:
        # Unregistering memory that is not mapped any more is an error of the driver.
        assert self.mapped(address, self.ranges.pop(address))
        self.undone += 1

    @staticmethod
    def mapped(address: int, nbytes: int) -> bool:
        with open("/proc/self/maps") as maps:
            for line in maps:
                start, stop = (int(text, 16) for text in line.split()[0].split("-"))
                if start <= address and address + nbytes <= stop:
                    return "memfd:diffusers_dlo" in line
        return False


@pytest.mark.parametrize("transfer", ("all_gather", "local"))
@pytest.mark.parametrize("size", (1, 2, 3))
def test_what_a_rank_copies_is_page_locked(size: int, transfer: str) -> None:
    model = MODELS["large"]()
    plan = plan_of(model, "packed", size, transfer)
    fd = create_shared_file(image_offsets(plan)[1])
    for rank in range(size):
        platform = Registering()
        store = PackedStore(plan, rank, platform, os.dup(fd))
        locked = 0
        for unit in range(len(plan.units)):
            for _, source, _ in store.extents(unit):
                start, stop = source.data_ptr(), source.data_ptr() + source.numel()
                assert any(low <= start and stop <= low + length for low, length in platform.ranges.items())
                locked += source.numel()
        assert sum(platform.ranges.values()) < locked + 2 * PAGE * len(plan.units), "and hardly anything else"
        store.close()
        store.close()
        assert platform.ranges == {} and platform.undone == platform.calls
        del source
    os.close(fd)


@pytest.mark.parametrize("refused", (False, True))
@pytest.mark.parametrize("size", (2, 3))
def test_a_rank_that_goes_on_alone_copies_what_the_others_did(size: int, refused: bool) -> None:
    """All of each unit, page-locked where the driver lets it; no copy crosses a border between registrations."""
    model = MODELS["large"]()
    plan = plan_of(model, "packed", size)
    platforms = [Registering() for _ in range(size)]
    fd = create_shared_file(image_offsets(plan)[1])
    stores = [PackedStore(plan, rank, platform, os.dup(fd)) for rank, platform in enumerate(platforms)]
    os.close(fd)
    fill(stores, model)
    for store, platform in zip(stores, platforms):
        platform.fail_at = platform.calls + 1 if refused else None
        for unit, (layout, expected) in enumerate(zip(store.layouts, images_of(plan, model))):
            store.copy_whole(unit)
            image = torch.zeros(layout.padded_nbytes(size), dtype=torch.uint8)
            for offset, source, _ in store.extents(unit):
                image[offset : offset + source.numel()] = source
                start, stop = source.data_ptr(), source.data_ptr() + source.numel()
                touched = [(a, a + n) for a, n in platform.ranges.items() if a < stop and start < a + n]
                assert all(low <= start and stop <= high for low, high in touched)
                assert touched or refused
            assert_image(image, expected)
        del source
        store.close()
        assert platform.ranges == {}


@pytest.mark.parametrize("fail_at", range(4))
def test_a_registration_that_fails_takes_the_others_back(fail_at: int) -> None:
    before = leftovers_after_collection()
    plan = plan_of(MODELS["leafy"](), "packed", 2)
    assert len(plan.units) == 5
    platform = Registering(fail_at)
    fd = create_shared_file(image_offsets(plan)[1])
    with pytest.raises(RuntimeError, match="the driver refused"):
        PackedStore(plan, 0, platform, fd)
    assert platform.ranges == {} and platform.undone == platform.calls == fail_at
    with pytest.raises(OSError):
        os.fstat(fd)  # the store had taken it over
    assert leftovers_after_collection() == before


@pytest.mark.parametrize("fail_at", (0, 2))
def test_the_choice_after_a_registration_that_fails(fail_at: int) -> None:
    group = form_group(World(0, 1, None, None), [introduce(None)], 10.0)
    plan = plan_of(MODELS["leafy"](), "packed", 1)
    plans = [plan, replace(plan, host="pinned")]
    platform = Registering(fail_at)
    store = create_store(plans, group, platform)
    assert isinstance(store, PinnedStore) and store.plan.host == "pinned" and platform.ranges == {}
    store.close()
    platform = Registering(fail_at)
    with pytest.raises(RuntimeError, match="cannot be kept in host memory: packed: the driver refused"):
        create_store([plan], group, platform)
    assert platform.ranges == {}
    store = create_store(plans, group, Registering())
    assert isinstance(store, PackedStore) and store.plan.host == "packed"
    store.close()
