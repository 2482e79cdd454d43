# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the service thread of a rank: the rounds in which ranks agree on passes, and the laps that the main thread does
not drive. Must not know what a lap transfers: that is behind `Laps`.

[Note: Rendezvous]
    A pass begins in a round: every rank says RUN (with what it wants), GHOST or BYE. If any says RUN, all do one pass
    of what the first of them wants, counted from `pass number mod N` upward, so each is served within N passes; who
    wanted something else does the pass for the others and asks again. A round without RUN is legal: the ask was taken
    back. When all say BYE, `join` returns on every rank, in that round.

[Note: Ghost service]
    A rank's answer must not depend on what its main thread is doing: decoding, waiting in a barrier of the user's,
    handling an exception, or at the end of the script. A rank that computed the last pass is *present*: its thread
    waits a while for the main thread to ask, which keeps ranks with equal work in step ([Note: Grace]). Otherwise it
    is *away*, and answers GHOST at once. Whoever begins a lap, it is completed in one place, `Laps.finish_lap`, by the
    service thread: the main thread only hands it over. The rules that keep this free of deadlocks:

    1. What is wanted, what was granted and who owns the lap change under one lock (`Turn`), and the thread looks at
       all causes for a round again after each round, so an ask or a BYE is never missed.
    2. *Lease*: torch runs no hooks after a KeyboardInterrupt. So the thread takes an open lap over once the call that
       drove it is on no stack any more, or when no block is held and none was acquired for a grace (but for ranks that
       compute together, [Note: Companions]). Never while the main thread is between two statements of the engine
       (`Turn.driving`).
    3. SIGINT is deferred there (`DeferredInterrupts`), and delivered at waits.
    4. Every wait is polled. A death is noticed by pidfd; what a rank said before it died is read first, since one that
       leaves after the last round also looks dead.
    5. Who notices a loss tells all others, so nobody stays in a collective; it is kept, and raised by the next hook
       (torch swallows what a hook raises while another exception is on its way).
    6. At exit, and before process groups are destroyed, a rank joins and ends its thread (`process_end`). It stays for
       as long as the others may need it, but not for those who wait for it in a collective, which its end will end. A
       forked child has no thread, and is refused.
    7. While the thread transfers for others, a busy main thread has to give the interpreter up more often.
    8. A join that changes what passes are made of (enabling, disabling) leaves the thread paused in the very round in
       which all said BYE: no rank can begin a pass before its own change is complete.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..config import DistributedLayerwiseOffloadConfig
from .collective_wait import CollectiveWait
from .collective_watch import CollectiveWatch
from .companions import find_conflict, missing_companions
from .control import ControlMesh, GroupLost, RankLost, logger
from .turn import Turn
from .turn_states import Step


_IDLE_SECONDS = 0.5
_SWITCH_SECONDS = 5e-4
"""How long a busy main thread keeps the interpreter from the thread that transfers for other ranks."""


class Laps(Protocol):
    """What the service needs of whoever transfers."""

    def service_thread(self) -> AbstractContextManager[None]:
        """The context that the service thread works in."""

    def describe_state(self) -> dict[str, Any]:
        """What has to be the same on all ranks for their next laps to be the same."""

    def grant(self, replies: list[dict[str, Any]]) -> str | None:
        """Which component the ranks agreed to run, its lap now open; None if nobody gets one. Raises `RankLost`."""

    def is_driven(self, idle_seconds: float) -> bool:
        """Whether the main thread is still in the call that drives the open lap."""

    def take_over(self) -> None:
        """Lets go of what the main thread left held."""

    def finish_lap(self, is_ghost: bool) -> None:
        """Completes the open lap."""

    def all_joined(self, replies: list[dict[str, Any]]) -> tuple[bool, bool]:
        """All ranks said BYE: drops what none needs. Whether nothing is left, and whether this rank wants nothing."""

    def free_dropped(self) -> None:
        """Gives the memory of what was dropped back."""

    def is_intact(self) -> bool:
        """Ranks are lost: whether everything that was computed with, or will be, is right nevertheless."""

    def abort(self) -> None:
        """Ends transfers that will never complete."""


class PassService:
    """
    The service thread of one rank ([Note: Rendezvous], [Note: Ghost service]).

    Args:
        mesh (`ControlMesh`): nobody else exchanges anything on it while the service runs.
        laps (`Laps`): what is transferred.
        options (`DistributedLayerwiseOffloadConfig`): how patient it is.
        world_rank (`int`): this rank in the launcher's world, which collectives of the user's count by.

    Attributes:
        turn (`Turn`): what the main thread calls.
        waits (`CollectiveWait`): what both call while they wait for other ranks.
    """

    def __init__(
        self, mesh: ControlMesh, laps: Laps, options: DistributedLayerwiseOffloadConfig, world_rank: int
    ) -> None:
        self._mesh = mesh
        self._world_rank = world_rank
        self._laps = laps
        self._watch = CollectiveWatch()
        self._asked_by_leavers = False
        self.turn = Turn(mesh.rank, options, mesh.wake, mesh.describe)
        self._thread = threading.Thread(target=self._serve, name="diffusers_dlo passes", daemon=True)
        self.waits = CollectiveWait(mesh, self.turn, self._thread)

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, whatever it waits for. Idempotent."""
        self.turn.stop()
        if self._thread is not threading.current_thread():
            self._mesh.wake()
            self._thread.join()

    # The thread

    def _serve(self) -> None:
        try:
            with self._laps.service_thread():
                while self._wait_for_cause():
                    self._round()
        except RankLost as error:
            self._give_up(error)
        except BaseException as error:
            logger.error(f"rank {self._mesh.rank}: the service thread failed", exc_info=True)
            self._give_up(
                GroupLost(f"the transfers of rank {self._mesh.rank} failed ({type(error).__name__}: {error})")
            )
        finally:
            self.turn.stop()

    def _wait_for_cause(self) -> bool:
        """Waits until there is a round to make; False once there will be none."""
        heard = False
        while (step := self.turn.next_step(heard)) in (Step.WAIT, Step.PAUSE):
            if step is Step.WAIT:
                heard = self._mesh.wait(_IDLE_SECONDS)
        return step is Step.ROUND

    def _round(self) -> None:
        asked, kind = self.turn.answer(self._mesh.check)
        self._mesh.timeout = self.turn.options.timeout
        own = {"leaving": self.turn.leaving, "doing": _describe(kind, asked, self.turn.leaving), **(asked or {})}
        # Looked for only while somebody waits to leave: it keeps a frame, and with it what the frame computes with.
        own["waits_for"] = self._watch.look(self.turn.driver) if self._asked_by_leavers else []
        own |= self._laps.describe_state()
        replies = self._mesh.exchange(kind, "the beginning of a pass", self.turn.check_failure, **own)
        not_joined = [rank for rank, reply in enumerate(replies) if reply["kind"] != "bye"]
        others = [rank for rank in not_joined if rank != self._mesh.rank]
        self._asked_by_leavers = any(reply["leaving"] for reply in replies)
        if not self._asked_by_leavers:
            self._watch.forget()
        stuck = [rank for rank in others if self._world_rank in replies[rank]["waits_for"]]
        self.turn.round_made(others, stuck)
        if not not_joined:
            for rank, reply in enumerate(replies):
                if reply["leaving"] and rank != self._mesh.rank:
                    self._mesh.let_leave(rank)
            nothing_left, nothing_wanted = self._laps.all_joined(replies)
            self.turn.all_joined(nothing_wanted)  # the main thread goes on, and gets to see nothing of what is freed
            self._laps.free_dropped()
            if nothing_left:
                self.turn.stop()
            return
        if self.turn.options.uneven == "error":
            _refuse_uneven(replies)
        missing = missing_companions(self._mesh.rank, replies)
        if asked is not None and missing:
            self.turn.companions_missing(asked, missing, find_conflict(self._mesh.rank, replies))
            asked = None
        component = self._laps.grant(replies)
        if component is None:
            self.turn.nobody_granted(asked, _refusal(asked, replies))
            return
        mine = self.turn.granted(asked, component)
        if mine:
            self.turn.watch(self._mesh.check, self._laps.is_driven, self._laps.take_over)
            self._laps.finish_lap(is_ghost=False)
        else:
            self._finish_as_ghost()
        self.turn.lap_finished()

    def _finish_as_ghost(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, _SWITCH_SECONDS))
        try:
            self._laps.finish_lap(is_ghost=True)
        finally:
            sys.setswitchinterval(interval)

    def _give_up(self, error: RankLost) -> None:
        """There are no passes any more: tells everybody, and the main thread, which meets it at its next call."""
        first = self.turn.fail(error)
        if first is None:
            return  # this rank is leaving anyway
        self._mesh.give_up(first)
        try:
            intact = self._laps.is_intact()
        except Exception as fault:  # a device may fail for good when another one's memory goes
            intact, first = False, RankLost(f"{first} The device reports: {str(fault).splitlines()[0]}.")
        if not intact:
            first = RankLost(
                f"{first} What rank {self._mesh.rank} computed meanwhile may be wrong. Start all ranks again."
            )
            logger.error(str(first))
        outside = self.turn.end(first, intact)
        if outside is not None:
            _raise_in_thread(outside, str(first))  # before the device goes on with what is wrong
        try:
            self._laps.abort()
        except Exception as fault:
            logger.warning(f"rank {self._mesh.rank}: ending the group's collectives failed ({fault})")


def _describe(kind: str, asked: dict[str, Any] | None, leaving: bool) -> str:
    if asked is not None:
        return f"it was at a forward of '{asked['component']}'"
    if leaving:
        return "it was at its end"
    return "it had no more work" if kind == "bye" else "it was between forwards"


def _refusal(asked: dict[str, Any] | None, replies: list[dict[str, Any]]) -> str | None:
    """The reason why what this rank asked for cannot run, as it or another rank that asked for it says."""
    for rank, reply in enumerate(replies):
        if asked is not None and reply.get("refused") and reply["component"] == asked["component"]:
            return f"rank {rank}: {reply['refused']}"
    return None


def _raise_in_thread(thread: int, message: str) -> None:
    """
    Raises `RankLost` in a thread, wherever it is: it may be about to use what cannot be trusted, with no call of the
    engine before that.
    """

    class Lost(RankLost):
        def __init__(self) -> None:
            super().__init__(message)

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Lost))


def _refuse_uneven(replies: list[dict[str, Any]]) -> None:
    """With `uneven="error"`, all ranks do the same."""
    asking = {rank: reply["component"] for rank, reply in enumerate(replies) if reply["kind"] == "run"}
    done = [rank for rank, reply in enumerate(replies) if reply["kind"] == "bye"]
    if asking and done:
        rank, component = next(iter(asking.items()))
        raise RankLost(
            f"rank {done[0]} has no more work while rank {rank} is at a forward of '{component}', and "
            'uneven="error" demands the same number of forwards on all ranks'
        )
    if len(set(asking.values())) > 1:
        raise RankLost(
            f'ranks are at forwards of different components ({asking}), and uneven="error" demands the same order on '
            "all ranks"
        )
