# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how much a machine has room for: host memory, folders, and the depth of a model that fits. Must not allocate.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkpoint import is_in_memory
from sizes import ModelFacts
from variants import RANK_NBYTES

from diffusers_dlo.host.memory_limit import container_memory


SHARED_MEMORY = Path("/dev/shm")
SPARE_NBYTES = 1 << 30
"""Left free in a folder."""
MOST = 0.9
"""Of the host memory that is available, the part that a run takes."""


def available_host_nbytes() -> int:
    """Host memory that can be taken now: what the kernel says, or what a container's limit leaves of it."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    container = container_memory()
    return min(available, container.left) if container is not None else available


@dataclass(frozen=True)
class Room:
    """A folder for a checkpoint, and what it and the host have room for in bytes."""

    folder: Path
    in_memory: bool
    free_nbytes: int
    host_nbytes: int

    def most_nbytes(self, ranks: int, device: str) -> int:
        """The largest checkpoint with which the leanest way of streaming still has what it needs."""
        # Files on a disk are streamed from the page cache, so they have to fit into memory as well.
        host = self.host_nbytes - ranks * RANK_NBYTES[device]
        return min(self.free_nbytes - SPARE_NBYTES, host)

    def layers_that_fit(self, facts: ModelFacts, ranks: int, device: str) -> int:
        """How many layers of a model of these facts there is room for."""
        rest = facts.nbytes - facts.blocks_nbytes
        return max(0, min(facts.layers, (self.most_nbytes(ranks, device) - rest) // facts.block_nbytes))


def look(folder: Path, host_limit: int | None) -> Room:
    """What a folder, which need not exist yet, and the host have room for."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    # What an earlier run wrote there is there to be used.
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    in_memory = is_in_memory(folder)
    host = round(MOST * (available_host_nbytes() + (written if in_memory else 0)))
    host = min(host, host_limit or host)
    return Room(folder, in_memory, shutil.disk_usage(existing).free + written, host)


def choose_folder(nbytes: int, ranks: int, device: str, host_limit: int | None) -> Path:
    """A new temporary folder: in shared memory if a checkpoint of this size has room there, else where more has."""
    disk = Path(tempfile.gettempdir())
    parents = [disk]
    if SHARED_MEMORY.is_dir():
        rooms = {path: look(path, host_limit).most_nbytes(ranks, device) for path in (SHARED_MEMORY, disk)}
        parents = [SHARED_MEMORY] if rooms[SHARED_MEMORY] >= min(nbytes, rooms[disk]) else [disk]
    return Path(tempfile.mkdtemp(prefix="dlo-compare-", dir=parents[0]))
