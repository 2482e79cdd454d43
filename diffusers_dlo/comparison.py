# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what ranks compare before they share weights: plans, options, and the weights themselves. Must not change
anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from .casts import middle_bytes
from .distributed.group import OffloadGroup
from .offload_plan import OffloadPlan
from .tensor_utils import OwnedTensor


def digest_of(lines: Iterable[str]) -> str:
    """A digest of lines of text."""
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def sample_weights(plan: OffloadPlan, owned: Sequence[Sequence[OwnedTensor]], skip: Collection[int] = ()) -> list[str]:
    """
    A line for each unit with a digest of 64 bytes from the middle of each of its tensors: enough to tell another
    checkpoint, adapter or seed from this one without reading all the weights.

    Args:
        owned (`Sequence[Sequence[OwnedTensor]]`): the tensors of each unit, in the plan's order.
        skip (`Collection[int]`): ids of tensors that are compared in another way.
    """
    lines = []
    for (component, unit), tensors in zip(plan.units, owned):
        digest = hashlib.sha256()
        for item in tensors:
            if id(item.tensor) not in skip:
                digest.update(middle_bytes(item.tensor))
        lines.append(f"weights of block '{unit.name}' of '{component.name}': digest {digest.hexdigest()[:12]}")
    return lines


def compare(group: OffloadGroup, said: Sequence[Mapping[str, str]], lines: Sequence[str]) -> None:
    """
    Raises on every rank, naming the first difference, where ranks do not have the same model and options.

    Args:
        said (`Sequence[Mapping[str, str]]`): what each rank said, with the digest of its lines as `"digest"`.
        lines (`Sequence[str]`): this rank's.

    Raises:
        `RuntimeError`: the ranks differ.
    """
    if len({reply["digest"] for reply in said}) == 1:
        return
    short = [hashlib.sha256(line.encode(errors="surrogateescape")).hexdigest()[:6] for line in lines]
    with group.agreement("enable: compare", {"lines": short}) as replies:
        pass
    every = [reply["lines"] for reply in replies]
    first = next(
        (i for i in range(min(map(len, every))) if len({other[i] for other in every}) > 1), min(map(len, every))
    )
    with group.agreement("enable: difference", {"line": lines[first] if first < len(lines) else "nothing"}) as replies:
        pass
    differences = "; ".join(f"rank {rank}: {reply['line']}" for rank, reply in enumerate(replies))
    raise RuntimeError(
        f"The ranks do not have the same model or options, so they cannot share weights. The first difference is: "
        f"{differences}. Load the same checkpoint, with the same adapters, dtype and options, on every rank."
    )
