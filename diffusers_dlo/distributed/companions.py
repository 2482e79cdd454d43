# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which ranks compute one request together, and whether all of them ask for the same pass. Must not wait or talk:
the `Turn` and the `PassService` do.

[Note: Companions]
    Context parallelism splits a request among ranks, which then wait for each other inside blocks. Were one of them
    granted a pass while a companion is late, and the companion's service thread did its part, this would never end:
    the first waits in a block for the second, the second for a pass of its own, and that one for the end of the first.
    So a rank says with whom it computes, and its ask counts only in a round in which all of these ask for the same
    component. A pass begins for all of them or for none. A rank whose ask does not count yet leaves the other ranks
    alone, whose passes go on, and does its part in them; the ask of the last companion makes the next round.

    Within a lap, no rank then waits in vain. Look at the one that has come least far. Those it waits for in a
    collective of the model's drive the same lap and are as far, or come there. The gather it waits for has been begun
    by every other rank: by those further along, and by those that compute nothing, which wait for gathers alone. That
    holds for as long as companions keep their lap, so it is not taken from them between blocks, however long they are
    there ([Note: Ghost service], rule 2).

    Where companions are in other groups, which have passes of their own, all ranks of the group begin together:
    otherwise a pass here and a pass there could each wait for a rank that is late in the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .control import LATE_SECONDS, logger


def find_companions(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """The ranks of the world that compute one request of `modules` together, this one among them; or none."""
    for module in modules:
        config = getattr(getattr(module, "_parallel_config", None), "context_parallel_config", None)
        mesh = getattr(config, "_flattened_mesh", None)
        if mesh is not None and mesh.size() > 1:
            return tuple(sorted(dist.get_process_group_ranks(mesh.get_group())))
    return ()


def companions_in_group(companions: Collection[int], ranks: Sequence[int]) -> list[int]:
    """Where in a group of world `ranks` those are for whom a pass begins together: all, if some are elsewhere."""
    if set(companions) <= set(ranks):
        return sorted(ranks.index(rank) for rank in companions)
    return list(range(len(ranks)))


def missing_companions(rank: int, replies: Sequence[Mapping[str, Any]]) -> list[int]:
    """Those of the companions of a rank that asks which do not ask for the same."""
    own = replies[rank]
    return [
        other
        for other in own.get("companions", ())
        if replies[other]["kind"] != "run" or replies[other]["component"] != own["component"]
    ]


def find_conflict(rank: int, replies: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the companions of a rank that asks will never ask for the same; None if they may."""
    own = replies[rank]
    for other in missing_companions(rank, replies):
        said = replies[other]
        doing = None
        if said["kind"] == "bye":
            doing = "has no more work"
        elif said["kind"] == "run" and rank in said.get("companions", ()):
            doing = f"is at a forward of '{said['component']}'"
        if doing is not None:
            return (
                f"rank {rank} is at a forward of '{own['component']}', which it computes together with rank {other} "
                f"(context parallelism), and rank {other} {doing}. Ranks of one request make the same calls, and "
                "'mesh' has them in one row."
            )
    return None


class Hold:
    """
    An ask that does not count yet, because companions are missing.

    Args:
        rank (`int`): this rank, for messages.
        describe (`Callable[[Iterable[int]], str]`): names ranks, for messages.

    Attributes:
        on (`bool`): no round is to be made for it.
    """

    def __init__(self, rank: int, describe: Callable[[Iterable[int]], str]) -> None:
        self.on = False
        self._rank = rank
        self._describe = describe
        self._missing: Sequence[int] = ()
        self._since = 0.0
        self._warned = False

    def end(self) -> None:
        """It counts, or is another ask."""
        self.on, self._warned = False, False

    def begin(self, missing: Sequence[int]) -> None:
        """A round has shown that these companions are missing."""
        if not self.on:
            self._since = time.monotonic()
        self.on, self._missing = True, missing

    def check(self, timeout: float) -> None:
        """
        Called at each turn of the wait.

        Raises:
            `RuntimeError`: they have not come within `timeout` seconds.
        """
        if not self.on:
            return
        waited = time.monotonic() - self._since
        late = f"rank {self._rank} has waited {waited:.0f} s to compute a request together with "
        if waited > timeout:
            raise RuntimeError(
                f"{late}{self._describe(self._missing)}, which did not come. Ranks of one request make the same "
                "calls: look for its traceback, or raise 'timeout' if it is only slow."
            )
        if waited > LATE_SECONDS and not self._warned:
            self._warned = True
            logger.warning(f"{late}{self._describe(self._missing)}")
