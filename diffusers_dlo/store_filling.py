# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns filling a host store with the weights that are in no file as they stream. Must not choose the store, nor know what
streams to where.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffusers.utils import logging

from .attachment import Attachment
from .distributed.group import OffloadGroup
from .host.coded_weights import CodedWeights
from .host.store import HostStore


def fill_store(parts: Sequence[Attachment], store: HostStore, group: OffloadGroup, coded: CodedWeights | None) -> None:
    """
    Fills the store, unit by unit, with what is in no file. A unit's originals are let go once all ranks have written
    it, where the store could give the whole of it back: the peak is one copy of the model and not two.

    Args:
        coded (`CodedWeights`, *optional*): where the values of coded blocks come from that do not stream as they lie.

    Raises:
        `RuntimeError`: a coded block is damaged, or its file is not to be had any more; on all ranks.
    """
    units = [(part, unit) for part in parts for unit in part.component.units if store.writes(unit.key)]
    if not units:
        return
    with logging.tqdm(
        total=sum(unit.layout.nbytes - unit.layout.memory_offset for _, unit in units),
        desc=f"Storing weights ({store.kind})",
        unit="B",
        unit_scale=True,
        disable=None if group.rank == 0 else True,
        leave=False,
    ) as bar:
        for part, unit in units:
            with group.agreement("enable: store"):
                values = [tensor.original for tensor in unit.tensors]
                if coded is not None and any(value.is_meta for value in values):
                    values = coded.values(part.component.plan.name, unit.layout)
                store.write(unit.key, values)
            if store.is_whole(unit.key):
                part.drop_originals(unit)
            bar.update(unit.layout.nbytes - unit.layout.memory_offset)
