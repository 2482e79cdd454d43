# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Enabling on several ranks: what is wrong on one rank is an error on all, and the model is as it was."""

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from diffusers_dlo import apply_distributed_layerwise_offload, is_distributed_layerwise_offload_enabled
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.device.platform import CudaPlatform
from diffusers_dlo.distributed.group import refuse_single_queue
from diffusers_dlo.host.packed import PackedStore
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


def state(model: torch.nn.Module) -> tuple:
    """What must not change when enabling fails: parameter objects, values, hooks, attributes, open files."""
    return (
        [(name, id(p), p.dtype, p.stride(), p.detach().clone()) for name, p in model.named_parameters()],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()],
    )


def unchanged(before: tuple, model: torch.nn.Module, allowed: frozenset[str] = frozenset()) -> None:
    parameters, modules = state(model)
    for (name, *facts, value), (_, *facts_before, value_before) in zip(parameters, before[0]):
        assert facts == facts_before and torch.equal(value, value_before), name
    for now, then in zip(modules, before[1]):
        assert now[:2] == then[:2]
        assert set(now[2]) - set(then[2]) <= allowed
    assert not is_distributed_layerwise_offload_enabled(model)
    with torch.no_grad():
        assert torch.equal(model(feed(0)), toy(toys.Stack, 5)(feed(0)))


def works(model: torch.nn.Module, rank: int) -> None:
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        assert torch.equal(model(feed(rank)), toy(toys.Stack, 5)(feed(rank)))
    handle.remove()


def _fails_alike(rank: int, size: int, culprit: int, kind: type[BaseException], text: str, spoil: Callable) -> None:
    """Enabling fails on all ranks with `kind` and `text`, changes nothing, and works afterwards."""
    works(toy(toys.Stack, 5), rank)
    model = toy(toys.Stack, 5)
    options: dict = {}
    before = state(model)
    undo = spoil(model, options) if rank == culprit else None
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind) as caught:
        apply_distributed_layerwise_offload(model, **options)
    assert text in str(caught.value), str(caught.value)
    if rank != culprit and kind is not RuntimeError:
        assert f"rank {culprit} failed" in str(caught.value)
    if undo is not None:
        undo()
    # Weights that had been stored already live in the shared memory now, which keeps one file open as long as they do.
    assert len(os.listdir("/proc/self/fd")) <= files + (1 if spoil is failing_write else 0)
    unchanged(before, model, frozenset({"_diffusers_hook", "forward"} if spoil is group_offloaded else ()))
    works(model, rank)


def bad_option(model: torch.nn.Module, options: dict) -> None:
    options["num_slots"] = 1


def unknown_option(model: torch.nn.Module, options: dict) -> None:
    options["slots"] = 2


def bad_blocks(model: torch.nn.Module, options: dict) -> None:
    options["blocks"] = ["layers"]


def no_such_device(model: torch.nn.Module, options: dict) -> None:
    options["onload_device"] = "xpu:3"


def other_slots(model: torch.nn.Module, options: dict) -> None:
    options["num_slots"] = 3


def group_offloaded(model: torch.nn.Module, options: dict) -> Callable:
    from diffusers.hooks import HookRegistry, ModelHook

    registry = HookRegistry.check_if_exists_or_initialize(model.blocks[2])
    registry.register_hook(ModelHook(), "group_offloading")
    return lambda: registry.remove_hook("group_offloading")


def failing_write(model: torch.nn.Module, options: dict) -> Callable:
    original = PackedStore.write

    def write(self: PackedStore, unit: int, tensors: list) -> None:
        if unit == 3:
            raise MemoryError("no more")
        original(self, unit, tensors)

    PackedStore.write = write
    return lambda: setattr(PackedStore, "write", original)


def failing_hooks(model: torch.nn.Module, options: dict) -> Callable:
    from diffusers_dlo import attachment

    original = attachment.ComponentHooks

    def fail(*args: object) -> None:
        raise OSError("hooks are out")

    attachment.ComponentHooks = fail
    return lambda: setattr(attachment, "ComponentHooks", original)


def interrupted(model: torch.nn.Module, options: dict) -> Callable:
    original = PackedStore.write

    def write(self: PackedStore, unit: int, tensors: list) -> None:
        raise KeyboardInterrupt

    PackedStore.write = write
    return lambda: setattr(PackedStore, "write", original)


@pytest.mark.parametrize("culprit", (0, 1))
@pytest.mark.parametrize(
    "spoil,kind,text",
    (
        (bad_option, ValueError, "'num_slots' must be at least 2"),
        (unknown_option, TypeError, "Unknown option 'slots'"),
        (bad_blocks, ValueError, "'layers' is not a ModuleList of 'Stack'; it has: blocks"),
        (no_such_device, ValueError, "'xpu:3' is not available"),
        (group_offloaded, ValueError, "group offloading is active"),
        (other_slots, RuntimeError, "num_slots 3"),
        (failing_write, MemoryError, "no more"),
    ),
)
def test_failure_on_one_rank(spoil: Callable, kind: type[BaseException], text: str, culprit: int) -> None:
    run_ranks(2, _fails_alike, culprit, kind, text, spoil)


def _other_kinds(rank: int, size: int) -> None:
    """Errors whose type the other ranks do not repeat: an odd one becomes a RuntimeError there."""
    for spoil, own in ((failing_hooks, OSError), (interrupted, KeyboardInterrupt)):
        model = toy(toys.Stack, 5)
        before = state(model)
        undo = spoil(model, {}) if rank == 2 else None
        with pytest.raises(own if rank == 2 else RuntimeError):
            apply_distributed_layerwise_offload(model)
        if undo is not None:
            undo()
        unchanged(before, model)
        works(model, rank)


def test_odd_failures_on_one_of_three_ranks() -> None:
    run_ranks(3, _other_kinds)


def _different_models(rank: int, size: int) -> None:
    def variants():
        yield "Stack", toy(toys.Stack, 5), toy(toys.Stack, 4)
        yield "blocks.2", toy(toys.Stack, 5), toy(toys.Stack, 5).to(torch.bfloat16)
        yield "weights of block 'blocks.0' of 'model'", toy(toys.Stack, 5), toy(toys.Stack, 5, seed=1)
        small = toy(toys.Stack, 5)
        with torch.no_grad():
            small.blocks[4].norm.weight.mul_(1.5)
        yield "weights of block 'blocks.4' of 'model'", toy(toys.Stack, 5), small
        changed = toy(toys.Stack, 5)
        with torch.no_grad():
            changed.blocks[3].up.weight.mul_(1.5)
        yield "weights of block 'blocks.3' of 'model'", toy(toys.Stack, 5), changed

    for text, one, other in variants():
        model = one if rank == 0 else other
        values = [p.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="do not have the same model") as caught:
            apply_distributed_layerwise_offload(model)
        message = str(caught.value)
        assert "rank 0: " in message and "rank 1: " in message and "Load the same checkpoint" in message
        if "weights" in text:
            assert text in message, message
        assert all(torch.equal(a, b) for a, b in zip(values, model.parameters()))
    works(toy(toys.Stack, 5), rank)


def test_different_models() -> None:
    run_ranks(2, _different_models)


def _enabling_against_computing(rank: int, size: int) -> None:
    """One rank enables another model while the other still computes: it serves, and waits for it."""
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    second, second_reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        for step in range(6 if rank == 0 else 1):
            assert torch.equal(model(feed(step)), reference(feed(step)))
            time.sleep(0.1)
        apply_distributed_layerwise_offload(second)
        for step in range(3):
            assert torch.equal(second(feed(step)), second_reference(feed(step)))
            assert torch.equal(model(feed(step + rank)), reference(feed(step + rank)))


def test_enabling_against_computing() -> None:
    run_ranks(2, _enabling_against_computing)


def _enabling_alone(rank: int, size: int) -> None:
    model = toy(toys.Stack, 5)
    if rank == 1:
        time.sleep(6)
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="All ranks of the launcher enable together"):
        apply_distributed_layerwise_offload(model, timeout=3.0)
    assert time.monotonic() - start < 15
    assert not is_distributed_layerwise_offload_enabled(model)


def test_enabling_on_one_rank_only_is_an_error_within_the_timeout() -> None:
    run_ranks(2, _enabling_alone)


def _world_mesh(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, mesh=mesh)
    assert handle.plan.group_size == 2
    with torch.no_grad():
        for step in range(2 if rank < 2 else 3):  # replicas need not keep step with each other
            assert torch.equal(model(feed(rank + step)), toy(toys.Stack, 5)(feed(rank + step)))
    handle.remove()
    with pytest.raises(ValueError, match="passed on some ranks"):
        apply_distributed_layerwise_offload(model, mesh=mesh if rank else None)
    with pytest.raises(TypeError, match="'mesh' must be"):
        apply_distributed_layerwise_offload(model, mesh="shard")


def test_mesh_of_two_groups() -> None:
    run_ranks(4, _world_mesh)


def _hosts(rank: int, size: int) -> None:
    """Ranks that do not share a host are replicas; a mesh that would join them is refused."""
    from torch.distributed.device_mesh import init_device_mesh

    from diffusers_dlo.distributed import group

    group.host_identity = lambda: f"host {rank // 2}"
    model = toy(toys.Stack, 5)
    mesh = init_device_mesh("cpu", (size,))
    with pytest.raises(ValueError, match="do not all run on one host"):
        apply_distributed_layerwise_offload(model, mesh=mesh)
    handle = apply_distributed_layerwise_offload(model)
    assert handle.plan.group_size == (2 if rank < 2 else 1)
    assert handle.plan.components[0].transfer == ("all_gather" if rank < 2 else "local")
    with torch.no_grad():
        assert torch.equal(model(feed(rank)), toy(toys.Stack, 5)(feed(rank)))
    handle.remove()


def test_ranks_of_other_hosts_are_replicas() -> None:
    run_ranks(3, _hosts)


def _other_hosts_option(rank: int, size: int) -> None:
    model = toy(toys.Stack, 5)
    for options in (
        {"host": ("auto", "pinned")[rank]},
        {"host": ("packed", "pinned")[rank]},
        {"timeout": 50.0 + rank},
    ):
        with pytest.raises(RuntimeError, match="do not have the same model or options.*(host|timeout)"):
            apply_distributed_layerwise_offload(model, **options)
    for name, options in (
        ("device_budget", {"device_budget": (None, "auto")[rank]}),  # `num_slots` differs too
        ("device_budget", {"device_budget": ("1MiB", "2MiB")[rank]}),
        ("gather", {"device_budget": "1MiB", "gather": ("auto", "collective")[rank]}),
    ):
        with pytest.raises(RuntimeError, match=f"first difference is: rank 0: {name} .*; rank 1: {name} "):
            apply_distributed_layerwise_offload(model, **options)
    works(model, rank)


def test_options_that_differ_are_named() -> None:
    run_ranks(2, _other_hosts_option)


def _opposite_removal(rank: int, size: int) -> None:
    models = [toy(toys.Stack, 5), toy(toys.Stack, 5, seed=1)]
    handles = [apply_distributed_layerwise_offload(model, host="pinned") for model in models]
    with pytest.raises(ValueError, match="All ranks disable the same offload.*nothing was changed"):
        handles[rank].remove()
    with torch.no_grad():
        for seed, model in enumerate(models):
            assert torch.equal(model(feed(rank)), toy(toys.Stack, 5, seed=seed)(feed(rank)))
        for handle in handles:
            handle.remove()
        for seed, model in enumerate(models):
            assert torch.equal(model(feed(rank)), toy(toys.Stack, 5, seed=seed)(feed(rank)))


def test_disabling_in_different_orders_is_refused() -> None:
    run_ranks(2, _opposite_removal)


def _groups_of_the_user(rank: int, size: int) -> None:
    """What the package makes for itself does not get in the way of process groups that the user makes later."""
    import torch.distributed as dist

    from diffusers_dlo.distributed import group

    group.host_identity = lambda: f"host {rank // 2}"
    model = toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model)
    mine = dist.new_group(list(range(size)))
    value = torch.ones(1)
    dist.all_reduce(value, group=mine)
    assert value == size
    handle.remove()
    spoiled = toy(toys.Stack, 5)
    if rank == 2:
        spoiled.blocks[1] = torch.jit.script(spoiled.blocks[1])
    with pytest.raises(NotImplementedError, match="TorchScript"):  # on the other host too
        apply_distributed_layerwise_offload(spoiled)
    works(model, rank)


def test_groups_of_the_user_work_beside() -> None:
    run_ranks(3, _groups_of_the_user)


def test_a_single_hardware_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = Platform(torch.device("cpu")), object.__new__(CudaPlatform)
    refuse_single_queue(cuda)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    refuse_single_queue(cpu)
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS.*for ever. Unset it"):
        refuse_single_queue(cuda)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    refuse_single_queue(cuda)


def _earlier_groups_of_the_user(rank: int, size: int) -> None:
    """A group of some ranks only, made before: torch names groups by how many a rank is in."""
    dist.new_group([1, 2])
    works(toy(toys.Stack, 5), rank)


def test_groups_that_the_user_made_before_do_not_matter() -> None:
    run_ranks(3, _earlier_groups_of_the_user, timeout=60)
