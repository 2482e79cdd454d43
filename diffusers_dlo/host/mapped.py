# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the mapped store: the page cache of the checkpoint's own files, shared by all ranks of the host, page-locked
where this rank copies from it. Must not write to a file, nor read more of it than this rank needs.

[Note: Changed files]
    Weights that stay in a file are only as good as the file. Its size and time of change are noted when it is opened
    and compared before each pass and before values are read, so a file that is written to, cut off or replaced is an
    error and not a picture. What is already page-locked could still be copied; it is refused all the same, because
    another rank, or the next start, would compute something else. A file that another one took the place of (renamed
    over it) is still whole in memory, so its values can be read and given back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from diffusers.utils import logging

from ..checkpoint.mapped import FileRange, FileStamp, map_read_only
from ..checkpoint.read_ahead import read_ahead
from ..device.interface import Platform
from ..offload_plan import OffloadPlan
from .packed import PackedStore
from .store import Extent, apart, tensor_view


logger = logging.get_logger(__name__)


class MappedFile:
    """
    One file that weights are copied from.

    Attributes:
        content (`torch.Tensor`): its bytes, mapped for reading only: a write would end the process. For copies to the
            device.
        values (`torch.Tensor`): the same, mapped so that what is written stays in this process. For users.
    """

    def __init__(self, path: str, expected: FileStamp) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stamp = FileStamp.of(self._fd)
            if self._stamp != expected:
                raise RuntimeError(f"'{path}' was changed while the offload was being enabled; load the model again.")
            self.content = map_read_only(self._fd)
            # By way of the open file, not the path, which may name another file by now. Holds no descriptor.
            storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{self._fd}", False, self._stamp.nbytes)
            self.values = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
        except OSError as error:
            self.close()
            raise RuntimeError(
                f"'{path}' cannot be mapped ({error.strerror or error}). Make it readable for every rank, or use "
                'host="packed".'
            ) from error
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """
        Raises if the file is not what it was ([Note: Changed files]).

        Raises:
            `RuntimeError`: naming the file and what happened to it.
        """
        try:
            now = FileStamp.of(self.path)
        except OSError as error:
            self._refuse(f"cannot be found any more ({error.strerror})")
        if (now.device, now.inode) != (self._stamp.device, self._stamp.inode):
            self._refuse("has been replaced by another file")
        self.check_content()

    def check_content(self) -> None:
        """As `check`, of the file that was opened, wherever it is now."""
        try:
            now = FileStamp.of(self._fd)
        except OSError as error:
            self._refuse(f"cannot be read any more ({error.strerror})")
        if now.nbytes != self._stamp.nbytes:
            self._refuse(f"had {self._stamp.nbytes} bytes and has {now.nbytes} now")
        if now.changed_ns != self._stamp.changed_ns:
            self._refuse("has been written to or touched")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"'{self.path}' {what}, and the weights stream from it. Load the model again and enable the offload anew; "
            'host="packed" keeps a copy that does not depend on the file.'
        )

    def close(self) -> None:
        """Lets go of the mappings. Idempotent; tensors that still show the file keep what they need."""
        self.content = self.values = torch.empty(0, dtype=torch.uint8)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MappedStore(PackedStore):
    """
    Weights in the files that they were loaded from; those that are in no file (cast, computed, changed) in shared
    memory, as in the packed store.

    Args:
        stamps (`Mapping[str, FileStamp]`): every file of the plan, as all ranks saw it.

    Raises:
        `RuntimeError`: a file is not to be had or has changed, or the driver does not page-lock it.
    """

    def __init__(
        self, plan: OffloadPlan, rank: int, platform: Platform, fd: int | None, stamps: Mapping[str, FileStamp]
    ) -> None:
        self._files: dict[str, MappedFile] = {}
        self._prepared: set[int] = set()
        "leaves that were used: one that is never called is neither read nor locked"
        super().__init__(plan, rank, platform, fd)
        try:
            for path in plan.files:
                self._files[path] = MappedFile(path, stamps[path])
            blocks = [unit for unit, layout in enumerate(self.layouts) if not layout.is_leaf]
            places = [place for unit in blocks for _, place in self._pieces(unit)]
            read_ahead(places, show=rank == 0)
            self._lock(places)
        except BaseException:
            self.close()
            raise

    @property
    def kind(self) -> str:
        return "mapped+packed" if self._memory.numel() else "mapped"

    @property
    def shared_nbytes(self) -> int:
        return self.files_nbytes + super().shared_nbytes

    @property
    def files_nbytes(self) -> int:
        return sum(run.nbytes for layout in self.layouts for run in layout.runs)

    def extents(self, unit: int) -> list[Extent]:
        found = []
        for offset, place in self._pieces(unit):
            for source in self._registrations.split(self._files[place.path].content[place.offset :][: place.nbytes]):
                found.append(Extent(offset, source))
                offset += source.numel()
        return found + self._memory_extents(unit)

    def prepare(self, unit: int) -> None:
        if unit in self._prepared:
            return
        places = [place for _, place in self._pieces(unit)]
        read_ahead(places)
        try:
            self._lock(places)
        except RuntimeError as error:
            logger.warning(f"'{self.layouts[unit].name}' is copied from pageable memory, which is slower ({error})")
        self._prepared.add(unit)

    def view(self, unit: int, tensor: int) -> torch.Tensor | None:
        place = self.layouts[unit].tensors[tensor]
        if place.file is None:
            return super().view(unit, tensor)
        values = self._files[place.file.path].values[place.file.offset :][: place.nbytes]
        if values.data_ptr() % getattr(torch, place.dtype).itemsize:
            values = values.clone()  # a tensor of the file that no processor could read in place
        return tensor_view(apart(values), place, base=place.offset)

    def private_view(self, unit: int, tensor: int) -> torch.Tensor | None:
        in_file = self.layouts[unit].tensors[tensor].file is not None
        return self.view(unit, tensor) if in_file else super().private_view(unit, tensor)

    def check(self) -> None:
        for file in self._files.values():
            file.check()

    def check_readable(self, unit: int) -> None:
        for path in {run.path for run in self.layouts[unit].runs}:
            self._files[path].check_content()

    def close(self) -> None:
        super().close()
        while self._files:
            self._files.popitem()[1].close()

    def _pieces(self, unit: int) -> list[tuple[int, FileRange]]:
        """What this rank copies of a unit from files, each with its place in what is fetched."""
        low, high = self.copied_bounds(unit)
        found = []
        for run in self.layouts[unit].runs:
            start, stop = max(low, run.offset), min(high, run.offset + run.nbytes)
            if start < stop:
                place = FileRange(run.path, run.file_offset + start - run.offset, stop - start)
                found.append((start - low, place))
        return found

    def _lock(self, places: Sequence[FileRange]) -> None:
        """Page-locks parts of files, which brings them into memory."""
        self._registrations.add(self._files[p.path].content[p.offset : p.offset + p.nbytes] for p in places)
