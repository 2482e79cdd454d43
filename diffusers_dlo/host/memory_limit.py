# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the memory limit of the container that this process runs in, which the kernel enforces by killing: it has to be
seen before memory is taken. Must not allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..byte_size import format_bytes


_MEMBERSHIP = Path("/proc/self/cgroup")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 of control groups writes a number about as large as there are where there is no limit."""


@dataclass(frozen=True)
class ContainerMemory:
    """
    Bytes of host memory.

    Attributes:
        left (`int`): what may still be taken; page cache of files goes when memory is wanted, and counts as free.
        limit (`int`): what may be taken in all.
    """

    left: int
    limit: int


def container_memory() -> ContainerMemory | None:
    """The tightest limit on this process; None where there is none, or the system does not say."""
    found = [memory for memory in _limits() if memory is not None]
    return min(found, key=lambda memory: memory.left, default=None)


def check_container_memory(nbytes: int, what: str, may_be_there: bool = False) -> None:
    """
    Refuses to take more memory than the container may have.

    Args:
        nbytes (`int`): what all ranks of this host will take together.
        what (`str`): for what.
        may_be_there (`bool`): whether the container may have been charged with some of it already, as page cache.

    Raises:
        `RuntimeError`: naming the limit.
    """
    memory = container_memory()
    if memory is not None and nbytes > (memory.limit if may_be_there else memory.left):
        raise RuntimeError(
            f"{format_bytes(nbytes)} of memory for {what} on this host, of which its container has "
            f"{format_bytes(memory.left)} left below its limit of {format_bytes(memory.limit)}, where the kernel "
            "ends processes; raise the limit"
        )


def _limits() -> Iterator[ContainerMemory | None]:
    """What each control group allows that this process is in, or that those are in."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upwards(_CONTROL_GROUPS, path):
                yield _read(folder, "memory.max", "memory.current", ("active_file", "inactive_file"))
        elif "memory" in controllers.split(","):
            files = ("total_active_file", "total_inactive_file")
            for folder in _upwards(_CONTROL_GROUPS / "memory", path):
                yield _read(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", files)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A control group and those around it; in a namespace of its own, `path` may lead out of what can be seen."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:count])


def _read(folder: Path, limit_file: str, used_file: str, page_cache: tuple[str, str]) -> ContainerMemory | None:
    try:
        text = (folder / limit_file).read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            return None
        used = int((folder / used_file).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Shared memory is not in these figures: it stays.
    used -= sum(int(statistics.get(name, 0)) for name in page_cache)
    return ContainerMemory(max(int(text) - max(used, 0), 0), int(text))
