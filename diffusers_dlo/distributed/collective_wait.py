# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns waiting for a collective that other ranks take part in, on whichever thread of this rank: with an end, and with
the name of the rank that is to blame. Must not know what is transferred.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..interrupts import interrupts
from .control import LATE_SECONDS, POLL_SECONDS, ControlMesh, GroupLost, RankLost, logger
from .turn import Turn


_TURN = timedelta(seconds=POLL_SECONDS)
_DEVICE_SECONDS = 1e-4
"""How often a device is looked at: it copies for longer than that."""
_EXPLAIN_SECONDS = 2.0
"""How long after a collective has failed the end of another rank may take to show."""


class CollectiveWait:
    """
    What both threads of a rank call (`Laps`). A loss that is met here is kept and told by the service thread.

    Args:
        mesh (`ControlMesh`): on which the service thread looks at the other ranks.
        turn (`Turn`): whether there are passes still, and how patient the rank is.
        service_thread (`threading.Thread`): every other thread is a main one.
    """

    def __init__(self, mesh: ControlMesh, turn: Turn, service_thread: threading.Thread) -> None:
        self._mesh = mesh
        self._turn = turn
        self._service_thread = service_thread

    def check(self) -> None:
        """
        Raises:
            `RankLost`: there are no passes any more.
        """
        if threading.current_thread() is self._service_thread:
            self._turn.check_failure()
        else:
            self._turn.check()

    def wait_for(self, work: dist.Work, what: str) -> None:
        """
        Waits until a collective is complete; `what` names it. Interrupts are delivered, and leave all as it is.

        Raises:
            `RankLost`: it failed, or there is no use in waiting.
        """
        start, warned = time.monotonic(), False
        while not self._is_complete(work, what):
            try:
                warned = self._keep_waiting(what, time.monotonic() - start, warned)
            except RankLost as error:
                self._turn.fail(error)
                raise

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """
        As `wait_for`, until the device `is_done` with what it was given before; in the middle of a fetch, so that no
        interrupt is delivered.

        Raises:
            `RankLost`: there is no use in waiting.
        """
        start, warned = time.monotonic(), False
        while not is_done():
            try:
                warned = self._keep_waiting(what, time.monotonic() - start, warned, interruptible=False)
            except RankLost as error:
                self._turn.fail(error)
                raise
            time.sleep(_DEVICE_SECONDS)

    def lose(self, what: str, error: RuntimeError) -> RankLost:
        """What to raise when a collective failed: the end of another rank, if that is why."""
        lost: RankLost = GroupLost(f"{what} failed on rank {self._mesh.rank} ({str(error).splitlines()[0]}).")
        try:
            self._explain()
        except RankLost as explained:
            lost = explained
        self._turn.fail(lost)
        return lost

    def _is_complete(self, work: dist.Work, what: str) -> bool:
        """Waits for a moment. A collective that completes just after the moment is over has not failed."""
        try:
            return bool(work.wait(_TURN))
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            return bool(work.wait())
        except RuntimeError as error:
            raise self.lose(what, error) from error

    def _keep_waiting(self, what: str, seconds: float, warned: bool, interruptible: bool = True) -> bool:
        """Called at each turn of a wait that has lasted for `seconds`. Whether the log says so by now."""
        self.check()
        if threading.current_thread() is self._service_thread:
            self._mesh.check()
        if interruptible:
            interrupts.deliver()
        if seconds > self._turn.options.timeout:
            raise GroupLost(
                f"rank {self._mesh.rank} waited {seconds:.0f} s for {what}, and {self._blame()} took no part. Look "
                "for its traceback, or raise 'timeout' if it is only slow."
            )
        if seconds > LATE_SECONDS and not warned:
            logger.warning(f"rank {self._mesh.rank} has waited {seconds:.0f} s for {what}, and for {self._blame()}")
            return True
        return warned

    def _blame(self) -> str:
        """The ranks that are stopped, or else all others."""
        return self._mesh.describe(self._mesh.stopped())

    def _explain(self) -> None:
        """Something failed that the end of another rank would explain: raises it, once it shows."""
        if threading.current_thread() is self._service_thread:
            deadline = time.monotonic() + _EXPLAIN_SECONDS
            while time.monotonic() < deadline:
                self._mesh.check()
                time.sleep(0.01)
        else:
            self._turn.await_failure(_EXPLAIN_SECONDS)
            self._turn.check()
