# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns enabling: validate, compute, commit, each step agreed by all ranks, everything undone if one fails.
Must not stream: that is the engine's, driven by hooks.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging
from torch import nn

from .attachment import Attachment, get_handle
from .block_discovery import Selection
from .checkpoint.mapped import FileRange, FileStamp, Located, locate_tensors
from .coding.loading import release as release_coded
from .comparison import compare, digest_of, sample_weights
from .config import DistributedLayerwiseOffloadConfig
from .device.interface import Platform
from .device.onload import resolve_device
from .device.platform import get_platform
from .distributed.control import RankLost
from .distributed.group import OffloadGroup, World, form_group, introduce, join_world, local_rank, open_gather
from .engine import Engine
from .guards import is_guarded
from .handle import OffloadHandle
from .host.cache import WeightCache
from .host.choice import create_store
from .host.coded_weights import CodedWeights, find_coded
from .host.offer import files_digest, offer_mapped, rank_plans, usable_ranges
from .interrupts import interrupts
from .offload_plan import OffloadPlan, build_plan, find_all, transfers_of
from .process_engine import get_engine, pausing
from .resident_memory import ResidentMemory
from .selection import select
from .store_filling import fill_store
from .tensor_utils import Move, OwnedTensor, move_tensors, owned_tensors, put_back
from .transfer_choice import choose_transfer
from .validation import refuse_changed_before_cast, refuse_enabled, validate_module, validate_placed


logger = logging.get_logger(__name__)

_WORTH_CACHING = 0.1
"""With a smaller part of the weights in no file, writing all of them to a cache would save little."""


def apply_distributed_layerwise_offload(
    module: nn.Module,
    config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None = None,
    **overrides: Any,
) -> OffloadHandle:
    r"""
    Streams the blocks of a module from host memory, as `apply_group_offloading` does, with one copy of the weights for
    all ranks of a host. Collective: all ranks call it.

    Args:
        module (`torch.nn.Module`):
            A model whose layers are members of `ModuleList`s. Its parameters may be anywhere but on the meta device.
        config (`DistributedLayerwiseOffloadConfig`, *optional*):
            The options; keyword arguments of the same names override it.

    Raises:
        `ValueError` or `TypeError`: an option or the module cannot be used, with the remedy. `RuntimeError`: memory or
        another rank failed. The same on every rank, and the module is as it was.
    """
    return enable(lambda resolved: select(module, resolved, None), config, overrides)


def remove_distributed_layerwise_offload(module: nn.Module) -> None:
    """Takes the offload off `module` and whatever was enabled with it; see `OffloadHandle.remove`."""
    handle = get_handle(module)
    if handle is None:
        raise ValueError(f"'{type(module).__name__}' is not under distributed layerwise offload.")
    handle.remove()


def is_distributed_layerwise_offload_enabled(module: nn.Module) -> bool:
    """Whether blocks of `module` are streamed."""
    return get_handle(module) is not None


def enable(
    choose: Callable[[DistributedLayerwiseOffloadConfig], Selection],
    config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
) -> OffloadHandle:
    """
    The whole of enabling. `choose` picks the components once the options are known to be good; it runs, like all that
    can fail for one rank alone, inside an agreement, so that the others do not wait for a rank that has given up.
    """
    with interrupts:  # agreed on like any other error
        return _enable(choose, config, overrides)


def _enable(
    choose: Callable[[DistributedLayerwiseOffloadConfig], Selection],
    config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
) -> OffloadHandle:
    resolved, error = _resolve(config, overrides)
    timeout = resolved.timeout if resolved is not None else DistributedLayerwiseOffloadConfig.timeout
    wanted = resolved.onload_device if resolved is not None else None
    wanted_type = torch.device(wanted).type if wanted is not None else None
    world = join_world(wanted_type or ("cpu" if not torch.accelerator.is_available() else "accelerator"), timeout)
    said: dict[str, Any] = {}
    with world.agreement(said) as introductions:
        if error is not None:
            raise error
        assert resolved is not None
        platform = get_platform(resolve_device(resolved.onload_device, local_rank()))  # type: ignore[arg-type]
        said.update(introduce(resolved.mesh, None if resolved.transfer == "local" else platform.known_backend))
    group = form_group(world, introductions, timeout)
    # What was dropped on one rank only would make the ranks' engines differ.
    gc.collect()
    with pausing(group) as failure:
        return _enable_in_group(choose, resolved, world, platform, group, failure)


def _enable_in_group(
    choose: Callable[[DistributedLayerwiseOffloadConfig], Selection],
    resolved: DistributedLayerwiseOffloadConfig,
    world: World,
    platform: Platform,
    group: OffloadGroup,
    failure: RankLost | None,
) -> OffloadHandle:
    # Everything below undoes itself: gradients and inference tensors are none of its business.
    with torch.inference_mode(False), torch.no_grad():
        with world.agreement({}, interruptible=False):  # the groups of a mesh, or of several hosts, refuse together
            prepared = _prepare(choose, resolved, platform, group, failure)
        return _commit(prepared, platform, group)


def _resolve(
    config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> tuple[DistributedLayerwiseOffloadConfig | None, Exception | None]:
    try:
        return DistributedLayerwiseOffloadConfig.resolve(config, overrides), None
    except Exception as error:
        return None, error


@dataclass(frozen=True)
class _Prepared:
    """What enabling will do, once all ranks know that they can."""

    config: DistributedLayerwiseOffloadConfig
    selection: Selection
    plans: list[OffloadPlan]
    "The plan for each kind of host store that may be used, in order of preference."
    stamps: dict[str, FileStamp]
    engine: Engine
    parts: list[Attachment]
    coded: CodedWeights | None = None


def _prepare(
    choose: Callable[[DistributedLayerwiseOffloadConfig], Selection],
    config: DistributedLayerwiseOffloadConfig,
    platform: Platform,
    group: OffloadGroup,
    failure: RankLost | None,
) -> _Prepared:
    said: dict[str, Any] = {}
    with group.agreement("enable: plan", said) as replies:
        if failure is not None:
            raise failure
        selection = choose(config)
        coded = find_coded(selection, platform)
        config = coded.fit(config, group.size) if coded is not None else config
        located = _validate(selection, transfers_of(selection, config, group.size))
        found = find_all(selection, config)
        if coded is not None:
            coded.check_streams({name: resident for name, (_, resident) in found.items()})
        stages = not platform.gathers_from_slots_only
        plan = build_plan(selection, found, config, group.size, stages=stages)
        engine = get_engine(platform, group)
        parts = [Attachment(selection.streamed[c.name], *found[c.name], engine) for c in plan.components]
        owned = [tensors for part in parts for tensors in part.owned]

        def build(files: Mapping[int, FileRange]) -> OffloadPlan:
            return build_plan(selection, found, config, group.size, files, stages)

        offer = offer_mapped(build, owned, *usable_ranges(located, owned))
        lines = [f"streaming already: {engine.names}", f"device {platform.device.type}", f"timeout {config.timeout}"]
        lines += [f"grace {config.grace}", f"uneven {config.uneven}"]
        lines += [f"cache_dir {config.cache_dir and os.path.realpath(config.cache_dir)}"]
        lines += [f"device_budget {config.device_budget!r}"]  # `num_slots` follows from it
        lines += [f"gather {config.gather}", f"gather_in_place {config.gather_in_place}"]
        lines += [*plan.summary_lines(), f"transfer {config.transfer}"]
        lines += coded.lines() if coded is not None else ()
        unread = {id(item.tensor) for tensors in owned for item in tensors if item.tensor.is_meta}
        loose_lines = sample_weights(plan, owned, skip=located.ranges.keys() | unread) if group.size > 1 else []
        said |= {"digest": digest_of(lines), "weights": digest_of(loose_lines)}
        said |= {"files": files_digest(located, owned), "mapped": offer.digest, "loose": offer.loose}
    compare(group, replies, lines)
    same_files = len({reply["files"] for reply in replies}) == 1
    if same_files:
        compare(group, [{"digest": reply["weights"]} for reply in replies], loose_lines)
    else:
        _compare_all_weights(plan, owned, group, unread)
    cached = None
    if coded is not None and config.cache_dir is not None:
        logger.info(f"'{config.cache_dir}' is not used: weights stream from a coded checkpoint")
    elif _caches(config, max(reply["loose"] for reply in replies), platform):
        cached = WeightCache(str(config.cache_dir), plan, owned, located, group).open()
    digests = [reply["mapped"] for reply in replies]
    if cached is not None:
        with group.agreement("enable: cache", said) as replies:
            offer = offer_mapped(build, owned, *cached)
            said["mapped"] = offer.digest
        digests = [reply["mapped"] for reply in replies]
    if coded is not None:
        # Coded files are the same on all ranks by now; those of other weights may not be, which are then copied.
        others = usable_ranges(located, owned)[0] if same_files else {}
        from_shards = coded.attach(build(others), owned)
        plans = coded.rank_plans(config.host, plan, from_shards)
        return _Prepared(config, selection, plans, {**located.stamps, **coded.stamps}, engine, parts, coded)
    plans = rank_plans(config.host, plan, offer, digests, platform)
    return _Prepared(config, selection, plans, offer.stamps, engine, parts)


def _caches(config: DistributedLayerwiseOffloadConfig, loose: float, platform: Platform) -> bool:
    """Whether the weights, of which a part `loose` is in no file, go into a cache; the same on all ranks."""
    if config.cache_dir is None:
        return False
    if not platform.registers_host_memory:
        logger.info(f"'{config.cache_dir}' is not used: '{platform.device.type}' devices cannot copy from files")
        return False
    if loose <= _WORTH_CACHING:
        logger.info(f"'{config.cache_dir}' is not used: {1 - loose:.0%} of the weights are in files as they are")
        return False
    return True


def _compare_all_weights(
    plan: OffloadPlan, owned: Sequence[Sequence[OwnedTensor]], group: OffloadGroup, unread: Collection[int]
) -> None:
    """Each rank has files of its own: are they the same weights, but for `unread` ones? Raises as `compare`."""
    said: dict[str, Any] = {}
    with group.agreement("enable: weights", said) as replies:
        lines = sample_weights(plan, owned, skip=unread)
        said["digest"] = digest_of(lines)
    compare(group, replies, lines)


def _validate(selection: Selection, transfers: Mapping[str, str]) -> Located:
    """Refuses components that cannot be offloaded or placed; where the tensors of the others lie in files."""
    for name, transfer in transfers.items():
        validate_module(selection.streamed[name], name, transfer)
    for name, module in selection.placed.items():
        validate_placed(module, name)
    every = {**selection.streamed, **selection.placed}
    for name, module in every.items():
        refuse_enabled(name, any(get_handle(part) is not None or is_guarded(part) for part in module.modules()))
    located = locate_tensors(owned.tensor for module in every.values() for owned in owned_tensors(module))
    for name, module in every.items():
        refuse_changed_before_cast(module, name, located.written)
    return located


def _commit(prepared: _Prepared, platform: Platform, group: OffloadGroup) -> OffloadHandle:
    config, selection, engine, parts = prepared.config, prepared.selection, prepared.engine, prepared.parts
    codec = prepared.coded.codec if prepared.coded is not None else None
    if any(component.transfer == "all_gather" for component in prepared.plans[0].components):
        with group.agreement("enable: communicator"):
            open_gather(group, platform, config.timeout, config.gather_in_place, engine.idle)
    store = create_store(prepared.plans, group, platform, prepared.stamps, codec)
    moved: list[Move] = []
    with ExitStack() as undo:
        undo.callback(store.close)
        if store.codec is not None:
            with group.agreement("enable: check sums"):
                store.check_sums()
        undo.callback(put_back, moved)
        for part in parts:
            undo.callback(part.detach)
        with group.agreement("enable: device"):
            for part, component in zip(parts, store.plan.components):
                part.attach_to_engine(component, store, config)
            move_tensors(_resident(parts, selection.placed), platform.device, moved, aligned=True)
        fill_store(parts, store, group, prepared.coded)
        components = [part.component for part in parts]
        plan, timing = choose_transfer(store.plan, components, engine, config)
        residents = ResidentMemory(engine, plan, config)
        with group.agreement("enable: residents"):
            undo.callback(residents.close)
            residents.attach(components, selection.placed.values())
        residents.fill()
        handle = OffloadHandle(config, plan, engine, parts, selection.placed, store, timing)
        handle.on_removal(residents.close)
        with group.agreement("enable: hooks"):
            for part in parts:
                part.attach_to_module(handle, handle.remove)
            residents.end_with([part.module for part in parts])
        undo.pop_all()
    for part in parts:  # nobody can fail any more
        part.drop_all_originals()
        release_coded(part.module)
    names = ", ".join(part.component.name for part in parts)
    logger.info(f"Streaming to '{platform.device}' from a {store.kind} host store: {names}")
    return handle


def _resident(parts: Sequence[Attachment], placed: Mapping[str, nn.Module]) -> list[OwnedTensor]:
    """
    The tensors that stay on the device: those of streamed components that do not stream, and the placed components.
    """
    return [owned for part in parts for owned in part.resident] + [
        owned for module in placed.values() for owned in owned_tensors(module)
    ]
