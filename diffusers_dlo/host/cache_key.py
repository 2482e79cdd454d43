# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what tells the weights in a cache from all others: their layout, the files they came from, and the content of
those that came from none. Must not write anything.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

from ..casts import flat_bytes, middle_bytes, pending_casts
from ..checkpoint.container import Entry, is_storable
from ..checkpoint.mapped import Located
from ..offload_plan import OffloadPlan
from ..tensor_utils import OwnedTensor


_VERSION = "1"
_LONGEST_HEADER = 100_000_000
"""Bytes; what safetensors allows."""


class WeightIdentity:
    """
    The streamed weights of a plan as they go into a cache, and what they are known by.

    Args:
        plan (`OffloadPlan`): what streams, laid out for a store without files.
        owned (`Sequence[Sequence[OwnedTensor]]`): the tensors of each unit, in the plan's order.
        located (`Located`): where they lie in files.

    Attributes:
        groups (`list[list[Entry]]`): the tensors of each unit that a file can hold.
    """

    def __init__(self, plan: OffloadPlan, owned: Sequence[Sequence[OwnedTensor]], located: Located) -> None:
        self._plan = plan
        self._located = located
        self._sources: dict[str, str] = {}
        self.groups = [
            [Entry(f"{component.name}.{item.name}", item.tensor) for item in tensors if is_storable(item.tensor)]
            for (component, _), tensors in zip(plan.units, owned)
        ]

    @property
    def entries(self) -> list[Entry]:
        """All tensors that a file can hold."""
        return [entry for group in self.groups for entry in group]

    def describe(self) -> Iterator[str]:
        """What the weights are, but for the content of those that are in no file."""
        yield f"version {_VERSION}"
        for component, unit in self._plan.units:
            yield f"{component.name} {unit.describe()}"
        files = self._sources
        files.clear()
        for entry in self.entries:
            place = self._located.ranges.get(id(entry.tensor))
            if place is not None:
                if place.path not in files:
                    files[place.path] = _describe_file(place.path)
                found = f"{entry.tensor.dtype} at {place.offset} of {files[place.path]}"
                yield f"{entry.name} {found} {middle_bytes(entry.tensor).hex()}"

    def digest_loose(self, rank: int, size: int) -> dict[int, str]:
        """
        For every `size`-th unit, from number `rank`, a digest of the content of its tensors that are in no file. All
        of it is read: there is no other way to know these weights again.
        """
        found = {}
        for unit in range(rank, len(self.groups), size):
            loose = [entry.tensor for entry in self.groups[unit] if id(entry.tensor) not in self._located.ranges]
            if loose:
                digest = hashlib.sha256()
                for tensor in loose:
                    digest.update(f"{tensor.dtype} {pending_casts(tensor)} ".encode())
                    digest.update(flat_bytes(tensor).cpu().numpy().data)
                found[unit] = digest.hexdigest()[:32]
        return found

    def sole_writers(self, size: int) -> dict[str, int]:
        """
        Tensors that one rank writes alone: those that are known by what this rank has read of them. The others may
        have something else in memory.
        """
        return {
            entry.name: unit % size
            for unit, entries in enumerate(self.groups)
            for entry in entries
            if id(entry.tensor) not in self._located.ranges
        }

    def check_sources(self) -> None:
        """
        Makes sure that the files which weights came from are as they were when they were described.

        Raises:
            `RuntimeError`: naming one that is not.
        """
        for path, described in self._sources.items():
            if _describe_file(path) != described:
                raise RuntimeError(
                    f"'{path}', where weights were loaded from, was changed while they were written to a cache. Load "
                    "the model again."
                )


def _describe_file(path: str) -> str:
    """What tells a file of weights from every other, without reading the weights."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            length = min(int.from_bytes(os.pread(fd, 8, 0), "little"), _LONGEST_HEADER)
            header = hashlib.sha256(os.pread(fd, length, 8)).hexdigest()
        finally:
            os.close(fd)
    except OSError as error:
        raise RuntimeError(
            f"'{path}', where weights were loaded from, cannot be read ({error.strerror}). Load the model again."
        ) from error
    return f"{status.st_size} bytes, changed {status.st_mtime_ns}, header {header}"
