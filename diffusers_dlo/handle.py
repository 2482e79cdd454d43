# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what enabling returns: the plan, the report, joining, and disabling. Must not enable.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from .attachment import Attachment
from .config import DistributedLayerwiseOffloadConfig
from .distributed.control import RankLost, logger
from .engine import Engine
from .host.store import HostStore
from .interrupts import interrupts
from .loader_guards import LoaderGuard
from .offload_plan import OffloadPlan
from .report import OffloadReport, ReportSources, make_report
from .tensor_utils import move_tensors, owned_tensors
from .timing import Timing
from .transfer_choice import TransferTiming
from .validation import is_moved_by_others


class OffloadHandle:
    r"""
    What enabling returns.

    Attributes:
        plan (`OffloadPlan`): what streams, in which blocks, and the memory it takes; `print` it.
        config (`DistributedLayerwiseOffloadConfig`): the options.
        transfer_timing (`TransferTiming`, *optional*): what `transfer="auto"` was decided by; None where nothing was
            timed.
    """

    def __init__(
        self,
        config: DistributedLayerwiseOffloadConfig,
        plan: OffloadPlan,
        engine: Engine,
        parts: Sequence[Attachment],
        placed: Mapping[str, nn.Module],
        store: HostStore,
        transfer_timing: TransferTiming | None = None,
    ) -> None:
        self.config = config
        self.plan = plan
        self.transfer_timing = transfer_timing
        self._engine = engine
        self._parts = tuple(parts)
        # A user who is done with one may drop it, and have its memory.
        self._placed = [weakref.ref(module) for module in placed.values()]
        self._store: HostStore | None = store
        self._undo: list[Callable[[], None]] = []
        self._start = replace(engine.counters)
        self._last_report: OffloadReport | None = None
        self._timing: Timing | None = None

    def __repr__(self) -> str:
        names = ", ".join(component.name for component in self.plan.components)
        return f"OffloadHandle({names}; host={self.plan.host!r}, enabled={self.enabled})"

    def on_removal(self, undo: Callable[[], None]) -> None:
        """Has `undo` called when the offload is taken off."""
        self._undo.append(undo)

    @property
    def enabled(self) -> bool:
        """Whether the offload is still in force."""
        return self._store is not None

    @property
    def device(self) -> torch.device:
        """The device it streams to."""
        return self._engine.platform.device

    @property
    def _transfers(self) -> set[str]:
        """How its components reach the device now."""
        return {part.component.plan.transfer for part in self._parts}

    def report(self) -> OffloadReport:
        """
        What this process has moved so far, the memory in use, and the times of the last `timing`, for which it waits
        until the device is idle; after `remove`, as it was then.
        """
        if self._store is not None:
            return make_report(
                ReportSources(
                    engine=self._engine,
                    start=self._start,
                    plan=self.plan,
                    config=self.config,
                    store=self._store,
                    transfers=self._transfers,
                    timing=self._timing,
                )
            )
        assert self._last_report is not None
        return self._last_report

    @contextmanager
    def timing(self) -> Iterator[None]:
        """
        The context in which passes are timed, for the report: how long each block is copied, gathered and computed,
        and for how long computing waits for it. The report has means over the last passes of each component, 16 at
        most. It begins anew each time, and may be entered on some ranks only. The first forward of a component is
        slower than others: leave it out.

        Raises:
            `ValueError`: the offload has been disabled.
        """
        if not self.enabled:
            raise ValueError("Nothing is timed, because this offload has been disabled. Enable it again first.")
        with self._engine.timed() as self._timing:
            yield

    def loaders_of(self, module: nn.Module) -> LoaderGuard | None:
        """What loaders of adapters for `module` go through; None where it is not one of its components."""
        return next((part.loaders for part in self._parts if part.module is module), None)

    def join(self) -> None:
        """
        Tells the other ranks that this one has no more work, and returns when all have joined. Its shards are
        transferred for them meanwhile, as they are without it; but they do not wait the `grace` for a rank that has
        joined. More work may follow, if the others have not ended. It happens by itself when an offload is removed
        and when the process ends.

        Raises:
            `RuntimeError`: the shards of a rank are lost with it, and no rank has all weights; the message names it.
        """
        if self.enabled:
            self._engine.join()

    def remove(self) -> None:
        """
        Disables the offload on all ranks: joins, then gives every module ordinary parameters on the CPU, which share
        memory between ranks until one writes to them. Idempotent.

        Raises:
            `ValueError`: the ranks disable different offloads; nothing was changed. `RuntimeError`: weights are lost,
            with a rank that held their shards or with a file that changed; the model has to be loaded again.
        """
        if self._store is None:
            return
        for part in self._parts:
            part.quiet()
        with interrupts:  # which are delivered while it waits for other ranks
            try:
                try:
                    self._engine.join(pause=True)
                    self._agree_to_remove()
                except RankLost as error:
                    logger.warning(f"rank {self._engine.group.rank} disables without the other ranks: {error}")
                self._remove(self._store)
            finally:
                self._engine.resume()

    def _remove(self, store: HostStore) -> None:
        self._last_report = self.report()
        self._store = None
        while self._undo:
            self._undo.pop()()
        lost: RuntimeError | None = None
        cpu = torch.device("cpu")
        with torch.inference_mode(False), torch.no_grad():
            for part in self._parts:
                try:
                    part.detach(cpu)
                except RuntimeError as error:
                    lost = error
            placed = [module for find in self._placed if (module := find()) is not None]
            for module in (*(part.module for part in self._parts), *(m for m in placed if not is_moved_by_others(m))):
                move_tensors(owned_tensors(module), cpu, [])
        store.close()
        if lost is not None:
            remedy = "" if "Load the model again" in str(lost) else " Load the model again."
            raise RuntimeError(
                f"The offload is off, but some weights are lost, and any use of them raises: {lost}{remedy}"
            ) from lost

    def _agree_to_remove(self) -> None:
        mine = [part.component.name for part in self._parts]
        with self._engine.group.agreement("disable", {"components": mine}) as replies:
            pass
        for rank, reply in enumerate(replies):
            if reply["components"] != mine:
                raise ValueError(
                    f"rank {rank} disables {reply['components']} while rank {self._engine.group.rank} disables "
                    f"{mine}. All ranks disable the same offload, in the same order; nothing was changed."
                )
