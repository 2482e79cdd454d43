# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which device a rank computes on, and whether two are the same. Must not name a vendor: torch.accelerator knows
what there is.
"""

from __future__ import annotations

import torch

from .platform import load_device_backend, present_device_types


def parse_device(device: str | torch.device, name: str) -> torch.device:
    """
    The device that an option `name` names, whether or not this machine has it.

    Raises:
        `ValueError`: no device is named so. `RuntimeError`: torch cannot be made to know its kind.
    """
    if isinstance(device, str):
        load_device_backend(device.split(":")[0])
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"'{name}' must name a torch device, got {device!r}.") from error


def default_device(local_rank: int | None) -> torch.device:
    """
    The accelerator of this rank, with its index, or the CPU where there is none. Who set a current device is followed;
    otherwise ranks of a host take devices in turn.

    Raises:
        `RuntimeError`: this machine shows an accelerator that torch cannot be made to know.
    """
    if not torch.accelerator.is_available():
        for device_type in present_device_types():
            _load(device_type)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    index = torch.accelerator.current_device_index()
    if index == 0 and local_rank is not None:
        index = local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def _load(device_type: str) -> None:
    try:
        load_device_backend(device_type)
    except RuntimeError as error:
        raise RuntimeError(f'{error} To compute on the CPU all the same, say onload_device="cpu".') from error


def resolve_device(device: torch.device | None, local_rank: int | None = None) -> torch.device:
    """
    `device` with its index made explicit, or the default device of the launcher's `local_rank`.

    Raises:
        `ValueError`: there is no such device on this machine. `RuntimeError`: torch cannot be made to know it.
    """
    if device is None:
        return default_device(local_rank)
    if device.type == "cpu":
        return torch.device("cpu")
    load_device_backend(device.type)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        raise ValueError(
            f"'{device}' is not available: this torch sees {accelerator.type if accelerator else 'no accelerator'}. "
            "Leave 'onload_device' out to use what there is."
        )
    if device.index is None:
        return default_device(local_rank)
    index = device.index
    if index >= torch.accelerator.device_count():
        raise ValueError(f"'{device}' is not available: this process sees {torch.accelerator.device_count()} devices.")
    return torch.device(device.type, index)


def is_same_device(one: torch.device | str | int, other: torch.device | str | int) -> bool:
    """Whether two name one device: the CPU is one, whatever its index; others with no index are the current one."""
    (first, one_index), (second, other_index) = _kind_and_index(one), _kind_and_index(other)
    return first == second and (first == "cpu" or one_index == other_index)


def _kind_and_index(device: torch.device | str | int) -> tuple[str, int]:
    device = torch.device(device)
    if device.index is not None or device.type == "cpu" or not torch.accelerator.is_available():
        return device.type, device.index or 0
    return device.type, torch.accelerator.current_device_index()
