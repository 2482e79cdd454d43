# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns whether weights can stay in the files they lie in: what one rank can offer, and the order in which kinds of host
store are tried once all have said it. Must not open or map anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from diffusers.utils import logging

from ..byte_size import format_bytes
from ..casts import pending_casts
from ..checkpoint.mapped import FileRange, FileStamp, Located
from ..comparison import digest_of
from ..device.interface import Platform
from ..offload_plan import OffloadPlan
from ..tensor_utils import OwnedTensor, nbytes_of


logger = logging.get_logger(__name__)

_MOST_PINNED = 1.5
"""With `host="auto"`, pinned memory may take so many times what one copy for all ranks does."""


@dataclass(frozen=True)
class Offer:
    """
    The weights of one rank as they lie in files.

    Attributes:
        plan (`OffloadPlan`, *optional*): the plan of a mapped store; None where no weight can stay where it is.
        stamps (`dict[str, FileStamp]`): the files of that plan.
        loose (`float`): the part of the weights' bytes that would not be in files, 0 to 1.
        reason (`str`): why that is so.
    """

    plan: OffloadPlan | None
    stamps: dict[str, FileStamp]
    loose: float
    reason: str

    @property
    def digest(self) -> str | None:
        """Equal on two ranks if they can share a mapped store."""
        if self.plan is None:
            return None
        return digest_of([*self.plan.summary_lines(), *(f"{path} {stamp}" for path, stamp in self.stamps.items())])


def offer_mapped(
    build: Callable[[Mapping[int, FileRange]], OffloadPlan],
    owned: Sequence[Sequence[OwnedTensor]],
    ranges: Mapping[int, FileRange],
    reason: str,
    stamps: Mapping[str, FileStamp],
) -> Offer:
    """
    What this rank can offer.

    Args:
        build (`Callable`): makes the plan of a mapped store, from the file ranges of tensors by id.
        owned (`Sequence[Sequence[OwnedTensor]]`): the tensors of each unit.
        ranges (`Mapping[int, FileRange]`): where they lie in files as they are to be used, by id.
        reason (`str`): why others do not.
        stamps (`Mapping[str, FileStamp]`): of the files, from before they were looked at.
    """
    sizes = {id(item.tensor): nbytes_of([item]) for unit in owned for item in unit}
    usable = {key: ranges[key] for key in sizes if key in ranges}
    loose = 1 - sum(sizes[key] for key in usable) / sum(sizes.values())
    if not usable:
        return Offer(None, {}, loose, reason)
    plan = build(usable)
    return Offer(plan, {path: stamps[path] for path in plan.files}, loose, reason)


def usable_ranges(
    located: Located, owned: Sequence[Sequence[OwnedTensor]]
) -> tuple[dict[int, FileRange], str, dict[str, FileStamp]]:
    """
    Where tensors lie in files as they are to be used, and why the others do not: one that is still to be cast does
    not.
    """
    cast = {id(item.tensor) for unit in owned for item in unit if pending_casts(item.tensor)}
    reason = "they are cast to another dtype than their file has" if cast else located.main_reason
    return {key: place for key, place in located.ranges.items() if key not in cast}, reason, located.stamps


def files_digest(located: Located, owned: Sequence[Sequence[OwnedTensor]]) -> str:
    """Equal on two ranks if all weights that lie in files lie in the same places of the same files."""
    tensors = [item.tensor for unit in owned for item in unit]
    places = [located.ranges.get(id(tensor)) for tensor in tensors]
    casts = [pending_casts(tensor) for tensor in tensors]
    stamps = {place.path: located.stamps[place.path] for place in places if place is not None}
    return digest_of([*map(str, places), *map(str, casts), *map(str, sorted(stamps.items()))])


def rank_plans(
    kind: str, plan: OffloadPlan, offer: Offer, digests: Sequence[str | None], platform: Platform
) -> list[OffloadPlan]:
    """
    The plans to try, in order, for a `host` option; the same on all ranks.

    Args:
        kind (`str`): the option.
        plan (`OffloadPlan`): that of a store which needs no files.
        offer (`Offer`): this rank's.
        digests (`Sequence[str | None]`): what `Offer.digest` is on each rank.
        platform (`Platform`): the onload device.

    Raises:
        `RuntimeError`: the option asks for what this device or these weights cannot do, with the reason.
    """
    if kind == "coded":
        raise RuntimeError(
            'host="coded" has weights stream from a coded checkpoint, and these were loaded from an ordinary one. '
            'Make one with `diffusers-dlo pack --codec`, or use host="auto".'
        )
    if kind == "mapped" and not platform.registers_host_memory:
        raise RuntimeError(
            f"host={kind!r} needs a device that copies from memory it did not allocate, and "
            f"'{platform.device.type}' devices do not. "
            'Use host="pinned", or host="packed", which is copied there through page-locked buffers.'
        )
    if kind == "auto" and not platform.registers_host_memory:
        return _rank_allocated(plan, platform)
    if kind in ("packed", "pinned"):
        return [plan]
    reason = None
    if None in digests:
        reason = offer.reason if offer.plan is None else f"rank {digests.index(None)} did not load them from files"
    elif len(set(digests)) > 1:
        reason = "ranks loaded them from different files; load the same on all"
    if reason is None:
        assert offer.plan is not None
        others = [] if kind == "mapped" else [replace(plan, host="packed"), replace(plan, host="pinned")]
        return [offer.plan, *others]
    if kind == "mapped":
        raise RuntimeError(
            f'host="mapped" has weights stream from their files, and these cannot: {reason}. Load safetensors with '
            "from_pretrained in the dtype of the file, write them in the wanted dtype with `diffusers-dlo pack` or "
            'cache_dir=, or use host="packed".'
        )
    logger.info(f"The weights do not stay in their files ({reason}); they are copied into one shared copy per host")
    return [replace(plan, host="packed"), replace(plan, host="pinned")]


def _rank_allocated(plan: OffloadPlan, platform: Platform) -> list[OffloadPlan]:
    """The plans to try where a device reads only memory that it allocated: pinned, unless that takes far more."""
    pinned, packed = replace(plan, host="pinned"), replace(plan, host="packed")
    all_pinned, shared = (tried.host_nbytes_per_rank * plan.group_size for tried in (pinned, packed))
    ranks = "on one rank" if plan.group_size == 1 else f"on {plan.group_size} ranks together"
    why = (
        f"'{platform.device.type}' devices copy only from memory that they allocated; pinned memory takes "
        f"{format_bytes(all_pinned)} {ranks}, one shared copy {format_bytes(shared)}"
    )
    if all_pinned > _MOST_PINNED * shared:
        logger.info(f"One shared copy ('packed') is taken, and copied through page-locked buffers: {why}")
        return [packed, pinned]
    logger.info(f"Pinned memory is taken, which needs no second copy on the host: {why}")
    return [pinned, packed]
