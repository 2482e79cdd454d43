# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns gathers that are in no pass, while offloads are enabled: queueing them, waiting for them with an end, and what
becomes of the group when one fails. Must not decide what is gathered.

[Note: Lone gather]
    No service thread looks at the other ranks here, so whoever waits does, and does not wait for one that has ended or
    given up. A rank that gave up between an agreement and its gather would leave the others waiting: whatever else
    fails, it takes its part in the gather first, and tells the others in the agreement that follows. If the gather
    itself fails, ranks may differ in what they gathered, so the group is over, which the others see while they wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from .device.interface import Event, Platform, Stream
from .device.ring import BlockViews, realign
from .distributed.control import GroupLost, RankLost
from .distributed.group import OffloadGroup


_POLL_SECONDS = 5e-5
"""How often a gather is looked at: far more often than it takes milliseconds, since some are timed."""


class LoneGather:
    """
    Gathers among the ranks of a group that are in no pass ([Note: Lone gather]).

    Args:
        platform (`Platform`): the device.
        group (`OffloadGroup`): the ranks, with a communicator.
        timeout (`float`): seconds for which another rank is waited for.
        on_lost (`Callable[[RankLost], None]`): told when a gather failed: there can be no passes any more.
    """

    def __init__(
        self, platform: Platform, group: OffloadGroup, timeout: float, on_lost: Callable[[RankLost], None]
    ) -> None:
        self._platform = platform
        self._group = group
        self._timeout = timeout
        self._on_lost = on_lost

    def queue(self, stream: Stream, views: BlockViews, after: Sequence[Event], record: Event, what: str) -> None:
        """
        Queues the gather of a block on `stream`, behind the events `after`, and then `record`. Where the host waits
        for collectives, it has ended on return.

        Raises:
            `RankLost`: it failed; the group is over.
        """
        gather = self._group.gather
        assert gather is not None
        pending: list[dist.Work] = []

        def work() -> None:
            if self._platform.waits_on_host:
                pending.append(gather.start(views.image, views.shard))
            else:
                gather(views.image, views.shard)
                realign(views.realigned)

        try:
            self._platform.submit(stream, work, after=after, record=record)
            for begun in pending:
                self._poll(begun.is_completed, what)
                begun.wait()  # raises if it failed
                realign(views.realigned)
        except Exception as error:
            raise self._lose(error, what) from error

    def wait(self, event: Event, what: str) -> None:
        """
        Waits on the host for what was queued before `event`.

        Raises:
            `RankLost`: it failed, or another rank takes no part; the group is over.
        """
        try:
            self._poll(lambda: self._platform.is_done(event), what)
        except Exception as error:
            raise self._lose(error, what) from error

    def _poll(self, is_done: Callable[[], bool], what: str) -> None:
        control, start = self._group.control, time.monotonic()
        while not is_done():
            control.check()
            if time.monotonic() - start > self._timeout:
                raise GroupLost(
                    f"rank {self._group.rank} waited {self._timeout:.0f} s for the gather of {what}, and "
                    f"{control.describe(control.stopped())} took no part. Look for its traceback, or raise 'timeout' "
                    "if it is only slow."
                )
            time.sleep(_POLL_SECONDS)

    def _lose(self, error: Exception, what: str) -> RankLost:
        """What all ranks are told."""
        lost = error if isinstance(error, RankLost) else None
        if lost is None:
            lost = GroupLost(f"the gather of {what} failed on rank {self._group.rank} ({str(error).splitlines()[0]}).")
            try:
                self._group.control.check()
            except RankLost as explained:  # the end of another rank is why
                lost = explained
        self._group.control.give_up(lost)
        self._on_lost(lost)
        return lost
