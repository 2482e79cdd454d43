# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the options of an offload and their validation. Must not touch a module, a device or a process group."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from .byte_size import parse_bytes
from .device.onload import parse_device


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


TRANSFERS = ("auto", "all_gather", "local")
_LONGEST_TIMEOUT = 7 * 24 * 3600
UNEVEN = ("ghost", "error")
HOSTS = ("auto", "coded", "mapped", "packed", "pinned")
GATHERS = ("auto", "collective", "pull")


@dataclass(frozen=True)
class DistributedLayerwiseOffloadConfig:
    r"""
    How the weights of a model are kept in host memory and streamed to the device. Validates itself: a wrong type is a
    `TypeError`, a wrong value a `ValueError`, both naming the field.

    Args:
        onload_device (`str` or `torch.device`, *optional*):
            Where blocks are computed. Defaults to the launcher's device of this rank: the current accelerator, or the
            CPU where there is none.
        transfer (`str`, defaults to `"auto"`):
            `"all_gather"`: each rank of a host copies 1/N of a block and an all-gather rebuilds it. `"local"`: each
            rank copies whole blocks over its own link. `"auto"`: `"local"` for one rank. For more, the largest block
            is timed both ways when the offload is enabled, and all ranks take what is faster;
            `handle.transfer_timing` has the figures. `"all_gather"` without timing where there is no link to time
            (the CPU), and where each rank has only its shards (the host store is `"pinned"`).
        num_slots (`int` or `"auto"`, defaults to `"auto"`):
            How many block-sized buffers the device holds, 2 or more. `"auto"` is 2 (one computes, one arrives), and 3
            with a `device_budget`.
        host (`str`, defaults to `"auto"`):
            Where the bytes live. `"mapped"`: in the safetensors files they were loaded from, whose page cache all
            ranks of a host share; weights that are in no file (cast, changed) as with `"packed"`. `"coded"`: in the
            coded checkpoint they were loaded from, decoded by the device. `"packed"`: one shared-memory file per host.
            `"pinned"`: page-locked memory of each rank (its shard with `all_gather`, whole blocks with `local`).
            `"auto"`: `"coded"` for a coded checkpoint, else the first of the others that works on all ranks; on
            devices that read only memory which they allocated, `"pinned"`, or `"packed"` where that takes far less.
        cache_dir (`str` or `os.PathLike`, *optional*):
            A directory to stream from. Where more than a tenth of the weights is in no file as it is used, because it
            was cast or changed, all that streams is written there once, and later starts find it.
        device_budget (`int` or `str`, *optional*):
            Bytes of device memory of each rank, or text such as `"40GiB"`, for weights that stay there and are not
            copied in every pass, beyond slots and the weights that never stream. `"auto"`: what the first pass leaves
            free. None: nothing stays.
        gather (`str`, defaults to `"auto"`):
            With `all_gather`, how shards that stay on the devices become blocks. `"collective"`: by the backend's
            all-gather. `"pull"`: each rank copies from the memory of the others, which takes no part of the compute
            units and no agreement. `"auto"`: `"pull"` where all shards stay, and devices can map each other's memory.
        gather_in_place (`bool` or `"auto"`, defaults to `"auto"`):
            With `all_gather`, whether a rank's shard is gathered from its place in the block. False takes 1/N of a
            block more memory for each slot. `"auto"`: in place, unless that brings wrong bytes when it is tried as the
            offload is enabled.
        mesh (`torch.distributed.device_mesh.DeviceMesh`, *optional*):
            The ranks that share weights: a one-dimensional mesh, or the last dimension of a larger one. Defaults to
            the ranks of one host.
        blocks (`Mapping[str, Sequence[str]]` or `Sequence[str]`, *optional*):
            Names of the `ModuleList`s whose members are streamed, for each component; a plain sequence for one module.
            Defaults to what the model's class declares.
        uneven (`str`, defaults to `"ghost"`):
            With `all_gather`, what ranks with unequal work do. `"ghost"`: whoever has none at the moment transfers its
            shards for the others. `"error"`: different numbers of forwards, or components in a different order, are an
            error on every rank.
        grace (`float`, defaults to `1.0`):
            Seconds, at most, for which a rank that took part in the last pass is waited for in the next one, before
            the others compute without it. Less where passes are short and ranks were close together so far.
        timeout (`float`, defaults to `1800.0`):
            Seconds a rank waits for another that does not answer, before it goes on without it or raises an error
            naming it.
    """

    onload_device: str | torch.device | None = None
    transfer: str = "auto"
    num_slots: int | str = "auto"
    host: str = "auto"
    cache_dir: str | os.PathLike[str] | None = None
    device_budget: int | str | None = None
    gather: str = "auto"
    gather_in_place: bool | str = "auto"
    mesh: DeviceMesh | None = None
    blocks: Mapping[str, Sequence[str]] | Sequence[str] | None = None
    uneven: str = "ghost"
    grace: float = 1.0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.onload_device is not None:
            if not isinstance(self.onload_device, (str, torch.device)):
                raise TypeError(f"'onload_device' must be a torch device or its name, got {self.onload_device!r}.")
            object.__setattr__(self, "onload_device", parse_device(self.onload_device, "onload_device"))
            if self.onload_device.type == "meta":  # type: ignore[union-attr]
                raise ValueError("'onload_device' must be a device that computes, got 'meta'.")
        _check_choice("transfer", self.transfer, TRANSFERS)
        _check_choice("host", self.host, HOSTS)
        if self.cache_dir is not None:
            if not isinstance(self.cache_dir, (str, os.PathLike)) or not isinstance(os.fspath(self.cache_dir), str):
                raise TypeError(f"'cache_dir' must be the path of a directory, got {self.cache_dir!r}.")
            if self.host not in ("auto", "mapped"):
                raise ValueError(
                    f"'cache_dir' has weights stream from a file, and host={self.host!r} copies them to memory; "
                    'leave one of the two out, or use host="mapped".'
                )
            if not os.fspath(self.cache_dir) or "\0" in os.fspath(self.cache_dir):
                raise ValueError(
                    f"'cache_dir' must name a directory ('.' is the working one), got {self.cache_dir!r}."
                )
            object.__setattr__(self, "cache_dir", os.fspath(self.cache_dir))
        if self.num_slots != "auto":
            if isinstance(self.num_slots, bool) or not isinstance(self.num_slots, int):
                raise TypeError(f"'num_slots' must be \"auto\" or an int, got {self.num_slots!r}.")
            if self.num_slots < 2:
                raise ValueError(
                    f"'num_slots' must be at least 2, got {self.num_slots}: one block computes while the next arrives."
                )
        _check_choice("gather", self.gather, GATHERS)
        if self.device_budget is not None and self.device_budget != "auto":
            object.__setattr__(self, "device_budget", parse_bytes(self.device_budget, "device_budget"))
        if self.gather == "pull" and not isinstance(self.device_budget, int):
            raise ValueError(
                "'gather' is \"pull\", which copies shards that stay on the devices; say how much may stay, such as "
                'device_budget="40GiB".'
            )
        if not isinstance(self.gather_in_place, bool) and self.gather_in_place != "auto":
            error_type = ValueError if isinstance(self.gather_in_place, str) else TypeError
            raise error_type(f"'gather_in_place' must be True, False or \"auto\", got {self.gather_in_place!r}.")
        _check_choice("uneven", self.uneven, UNEVEN)
        if isinstance(self.grace, bool) or not isinstance(self.grace, (int, float)):
            raise TypeError(f"'grace' must be a number of seconds, got {self.grace!r}.")
        if not 0 <= self.grace <= _LONGEST_TIMEOUT:
            raise ValueError(f"'grace' must be a number of seconds, 0 or more, a week at most; got {self.grace!r}.")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
            raise TypeError(f"'timeout' must be a number of seconds, got {self.timeout!r}.")
        if not (math.isfinite(self.timeout) and 0 < self.timeout <= _LONGEST_TIMEOUT):
            raise ValueError(f"'timeout' must be a positive number of seconds, a week at most; got {self.timeout!r}.")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", _freeze_blocks(self.blocks))
        if self.mesh is not None:
            from torch.distributed.device_mesh import DeviceMesh

            if not isinstance(self.mesh, DeviceMesh):
                raise TypeError(f"'mesh' must be a torch.distributed DeviceMesh, got {type(self.mesh).__name__!r}.")

    @classmethod
    def resolve(
        cls, config: DistributedLayerwiseOffloadConfig | Mapping[str, Any] | None, overrides: Mapping[str, Any]
    ) -> DistributedLayerwiseOffloadConfig:
        """The configuration that a call's `config` and keyword `overrides` name together; the overrides win."""
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        if isinstance(config, cls):
            values = {name: getattr(config, name) for name in names}
        elif isinstance(config, Mapping):
            values = dict(config)
        elif config is not None:
            raise TypeError(f"'config' must be a {cls.__name__}, a mapping or None, got {type(config).__name__!r}.")
        values.update(overrides)
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise TypeError(f"Unknown option {unknown[0]!r}; the options are: {', '.join(names)}.")
        return cls(**values)

    @property
    def slots(self) -> int:
        """`num_slots` as a number."""
        if self.num_slots == "auto":
            return 3 if self.device_budget else 2
        return int(self.num_slots)

    def transfer_for(self, group_size: int) -> str:
        """`transfer` with `"auto"` decided for a group of this many ranks, as far as that goes without timing."""
        if self.transfer != "auto":
            return self.transfer
        return "local" if group_size == 1 else "all_gather"

    def blocks_of(self, component: str) -> tuple[str, ...] | None:
        """The `ModuleList` names chosen for `component`, or None where the model's class decides."""
        if isinstance(self.blocks, Mapping):
            return self.blocks.get(component)  # type: ignore[return-value]
        return self.blocks  # type: ignore[return-value]


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"'{name}' must be a string, one of {', '.join(choices)}; got {value!r}.")
    if value not in choices:
        raise ValueError(f"'{name}' must be one of {', '.join(choices)}; got {value!r}.")


def _freeze_blocks(
    blocks: Mapping[str, Sequence[str]] | Sequence[str],
) -> Mapping[str, tuple[str, ...]] | tuple[str, ...]:
    def names(value: object, where: str) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(n, str) for n in value):
            raise TypeError(f"{where} must be a list of ModuleList names, got {value!r}.")
        if not value:
            raise ValueError(f"{where} is empty; leave it out to let the model's class decide.")
        return tuple(value)

    if isinstance(blocks, Mapping):
        for component in blocks:
            if not isinstance(component, str):
                raise TypeError(f"'blocks' must map names of components to lists, got the name {component!r}.")
        return {component: names(value, f"'blocks[{component!r}]'") for component, value in blocks.items()}
    return names(blocks, "'blocks'")
