# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Owns outputs of blocks that lie in the memory of their weights. Must not know who calls a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .units import Unit


def own_output(unit: Unit, output: Any) -> Any:
    """
    None if the output of a call has memory of its own; else the output with copies in place of what lies in a slot (a
    block may return a weight, or a view of one).
    """
    memory = unit.memory
    if memory is None or not any(_lies_in(leaf, memory) for leaf in tree_leaves(output)):
        return None
    return tree_map(lambda leaf: leaf.clone() if _lies_in(leaf, memory) else leaf, output)


def _lies_in(value: object, memory: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == memory.untyped_storage()._cdata
