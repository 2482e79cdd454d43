# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns the rows about what is installed, and which device is whose."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist

from diffusers_dlo.distributed.group import host_identity

from .context import Context, demand
from .outcome import Failed, Finding


def versions(context: Context) -> Finding:
    """What is installed, and that nothing speaks against it."""
    installed = context.installed
    if installed.mismatch:
        raise Failed(installed.mismatch)
    demand(
        installed.kind != "npu" or "cann" in installed.versions,
        "torch_npu does not find the version of CANN; run `source .../set_env.sh` of CANN in this shell",
    )
    found = {
        name: installed.versions[name] for name in ("torch", "torch_npu", "cann", "cuda") if name in installed.versions
    }
    return Finding(", ".join(f"{name} {version}" for name, version in found.items()), installed.versions)


def backend(context: Context) -> Finding:
    """That torch knows the device by its module and by its collective backend."""
    name = context.platform.backend
    demand(dist.is_backend_available(name), f"torch.distributed knows no backend '{name}'")
    module = torch.get_device_module(context.device).__name__
    value = torch.arange(4, device=context.device).sum().item()
    demand(value == 6, f"the sum of 0 to 3 is {value} on '{context.device.type}'")
    return Finding(f"{module}, {name}")


def devices(context: Context) -> Finding:
    """One device for each rank of a host."""
    if context.device.type == "cpu":
        return Finding("the CPU is one device, whatever the number of ranks")
    count, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    said = context.ranks.exchange([host_identity(), context.device.index, current])
    mine = [index for host, index, _ in said if host == host_identity()]
    demand(
        len(set(mine)) == len(mine), f"{len(mine)} ranks of a host share {count} device(s); start no more than that"
    )
    wrong = [(index, now) for _, index, now in said if index != now]
    demand(not wrong, f"the current device is {wrong[0][1]} after {wrong[0][0]} was set" if wrong else "")
    return Finding(f"{count} device(s), in use: {', '.join(map(str, mine))}", {"devices": count})


def helper_thread(context: Context) -> Finding:
    """What a thread that is not the main one computes on."""
    seen: list[str] = []
    errors: list[BaseException] = []

    def current() -> str:
        return "cpu" if context.device.type == "cpu" else str(torch.accelerator.current_device_index())

    def work() -> None:
        try:
            seen.append(current())
            context.platform.use_in_this_thread()
            seen.append(current())
            value = torch.ones(64, device=context.device.type)
            seen.extend([str(value.device), str((value @ value).item())])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(context.limit)
    if errors:
        raise errors[0]
    demand(len(seen) == 4, "the thread did not end")
    expected = "cpu" if context.device.type == "cpu" else str(context.device.index)
    demand(seen[1] == expected, f"its device is {seen[1]} after {expected} was set")
    demand(seen[2] == str(context.device), f"its tensors are on '{seen[2]}', not on '{context.device}'")
    demand(seen[3] == "64.0", f"it computed {seen[3]} for 64.0")
    return Finding(f"a new thread begins on {seen[0]}, and computes on {seen[1]} once that is set")
