# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the control mesh: one Unix-domain socket per pair of ranks of a host, over which they agree. Asking, answering and
noticing that a rank is late or gone are one thing here. Must not know what is agreed on, and carries no weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..interrupts import interrupts


# Not a logger of diffusers: those speak on rank zero only, and this one is about ranks, rank zero among them.
logger = logging.getLogger("diffusers_dlo.ranks")

POLL_SECONDS = 0.05
"""No wait is longer without looking at the clock and at the peers, so every wait can be interrupted."""
LATE_SECONDS = 10.0
"""A rank that others have waited for this long is named in the log."""
_MAX_MESSAGE = 1 << 16
_GONE = "gone"
"""Said by a rank that gave up an agreement."""


def _no_check() -> None:
    """There is a use in waiting."""


class RankLost(RuntimeError):
    """Another rank has ended, given up, not answered in time, or is out of step. The message names it."""


class GroupLost(RankLost):
    """A rank is gone or late, and nothing else is wrong: whoever has the whole weights may go on without the group."""


class GroupEnded(GroupLost):
    """A rank is gone, after all had said that they were done."""


class ControlMesh:
    """
    Messages among the ranks of one group. Every rank calls the same sequence of `exchange`; each returns when all have
    called it, with what each said. Used by one thread at a time, but for `wake` and what only looks.

    Args:
        rank (`int`): this rank's index in the group.
        sockets (`Mapping[int, socket.socket]`): a connected packet socket for each other rank.
        pids (`Sequence[int]`): the process of each rank.
        timeout (`float`): seconds to wait for another rank.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], pids: Sequence[int], timeout: float) -> None:
        self.rank = rank
        self.size = len(sockets) + 1
        self.timeout = timeout
        self._sockets = dict(sockets)
        self._pids = tuple(pids)
        self._round = 0
        self._failed: RankLost | None = None
        self._pidfds: dict[int, int] = {}
        self._doing: dict[int, str] = {}
        "what each rank last said that it was doing"
        self._may_end: set[int] = set()
        self._poller = select.poll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if self._sockets else -1
        if self._sockets:
            self._poller.register(self._wake_fd, select.POLLIN)
        for peer, connection in self._sockets.items():
            self._poller.register(connection, select.POLLIN)
            # A socket stays open in forked children of a dead rank; its process does not.
            try:
                self._pidfds[peer] = os.pidfd_open(self._pids[peer])
                self._poller.register(self._pidfds[peer], select.POLLIN)
            except (AttributeError, OSError) as error:
                logger.info(f"the death of rank {peer} will show as a closed socket only ({error})")

    @property
    def usable(self) -> bool:
        """Whether all ranks still agree on the order of what they say. An exchange that is going on is no fault."""
        return self._failed is None

    def exchange(
        self, kind: str, what: str | None = None, check: Callable[[], None] = _no_check, **payload: Any
    ) -> list[dict[str, Any]]:
        """
        Tells every rank `kind` and `payload` and returns what each said, by rank, this one's own included. A text
        under `doing` is what the others say of this rank if it does not answer any more; `what` names the agreement in
        this one's own messages; `check` is called while it waits, and raises where there is no use in that.

        Raises:
            `RankLost`: a rank is gone or did not answer within the timeout; the message names it.
        """
        own = {"kind": kind, "round": self._round, **payload}
        if self.size == 1:
            self._round += 1
            return [own]
        if self._failed is not None:
            raise self._failed
        message = json.dumps(own).encode()
        if len(message) > _MAX_MESSAGE:
            raise RuntimeError(f"rank {self.rank}: a control message of {len(message)} bytes exceeds {_MAX_MESSAGE}")
        try:
            self._send(message)
            replies = self._receive_all(what or f"'{kind}'", check)
            self._check_nobody_gave_up()
        except RankLost as error:
            self.give_up(error)
            raise
        except BaseException:
            self.give_up(
                RankLost(f"rank {self.rank} was interrupted at '{kind}' while it agreed with the other ranks")
            )
            raise
        replies[self.rank] = own
        said = [replies[rank] for rank in range(self.size)]
        rounds = [reply["round"] for reply in said]
        if any(number != self._round for number in rounds):
            lost = RankLost(f"ranks count their agreements differently ({rounds}): one of them gave up in the middle")
            self.give_up(lost)
            raise lost
        self._round += 1
        return said

    def give_up(self, error: RankLost) -> None:
        """Refuses every later exchange with `error`, and tells the other ranks why. The first reason counts."""
        if self._failed is not None:
            return
        self._failed = error
        final = not isinstance(error, GroupLost)
        self._send(json.dumps({"kind": _GONE, "round": self._round, "why": str(error), "final": final}).encode())

    def wait(self, seconds: float) -> bool:
        """
        Waits until another rank says something, `wake` is called, or the time is over; whether somebody said
        something.

        Raises:
            `RankLost`: a rank has ended that had not said it would.
        """
        if not self._sockets:
            raise GroupLost(f"rank {self.rank} has left the group")
        for fd, _ in self._poller.poll(seconds * 1000):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
        heard = any(self._peek(peer) for peer in self._sockets if peer not in self._may_end)
        if not heard:
            self._check_alive()
        return heard

    def wake(self) -> None:
        """Ends a `wait`, from whatever thread."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def check(self) -> None:
        """
        Looks at the other ranks without waiting for them.

        Raises:
            `RankLost`: one of them has ended, or given up; the message names it.
        """
        self._check_nobody_gave_up()
        self._check_alive()

    def let_leave(self, peer: int) -> None:
        """Rank `peer` may end from now on: that it is gone matters to the next exchange only."""
        self._may_end.add(peer)
        for fd in (self._sockets[peer].fileno(), self._pidfds.get(peer, -1)):
            with contextlib.suppress(KeyError, ValueError):
                self._poller.unregister(fd)

    def describe(self, peers: Iterable[int]) -> str:
        """
        Ranks, or all others if there are none, with what is known of each: what it last said it was doing, and whether
        its process is stopped.
        """
        found = []
        for peer in list(peers) or self._sockets:
            known = [self._doing[peer]] if peer in self._doing else []
            if _is_stopped(self._pids[peer]):
                known.append("its process is stopped (SIGSTOP)")
            found.append(f"rank {peer}" + (f" ({'; '.join(known)})" if known else ""))
        return ", ".join(found)

    def stopped(self) -> list[int]:
        """The other ranks whose processes are stopped."""
        return [peer for peer in self._sockets if _is_stopped(self._pids[peer])]

    def _send(self, message: bytes) -> None:
        for connection in self._sockets.values():
            # A rank that is gone may have answered before: what it last said is read first.
            with contextlib.suppress(OSError):
                connection.send(message, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _peek(self, peer: int) -> bytes | None:
        """The next message of a rank, left where it is; None if there is none, empty at the end."""
        try:
            return self._sockets[peer].recv(_MAX_MESSAGE, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def _check_alive(self) -> None:
        """Raises for a rank that has ended, once all it had said is read."""
        for peer in self._sockets:
            said = self._peek(peer)
            if said is None and peer in self._pidfds and select.select([self._pidfds[peer]], [], [], 0)[0]:
                said = self._peek(peer) or b""
            if said == b"" and peer not in self._may_end:
                raise self._ended(peer)

    def _ended(self, peer: int) -> GroupLost:
        if peer in self._may_end:
            return GroupEnded(f"rank {peer} is finished: all ranks had joined, and its process ended.")
        return GroupLost(f"{self.describe([peer])} has ended. Look for its traceback; one that was killed has none.")

    def _check_nobody_gave_up(self) -> None:
        """A rank that gave up waiting for this one has said its part of the round, and that it gave up, after it."""
        for peer in self._sockets:
            later = self._peek(peer)
            self._refuse_gone(json.loads(later) if later else {})

    def _refuse_gone(self, said: Mapping[str, Any]) -> None:
        if said.get("kind") == _GONE:
            why = f"{said['why']} (as another rank says)"
            raise RankLost(why) if said.get("final", True) else GroupLost(why)

    def _receive_all(self, what: str, check: Callable[[], None]) -> dict[int, dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        start = time.monotonic()
        warned = False
        poller = select.poll()
        by_fd: dict[int, int] = {}
        for peer, connection in self._sockets.items():
            poller.register(connection, select.POLLIN)
            by_fd[connection.fileno()] = peer
            if peer in self._pidfds:
                poller.register(self._pidfds[peer], select.POLLIN)
                by_fd[self._pidfds[peer]] = peer
        while len(replies) < len(self._sockets):
            for fd, _ in poller.poll(POLL_SECONDS * 1000):
                peer = by_fd[fd]
                if peer not in replies:
                    replies[peer] = self._receive(peer)
                if peer in replies:
                    for other, owner in by_fd.items():
                        if owner == peer:
                            with contextlib.suppress(KeyError, FileNotFoundError):
                                poller.unregister(other)
            interrupts.deliver()
            check()
            waited = time.monotonic() - start
            late = sorted(set(self._sockets) - set(replies))
            if late and waited > self.timeout:
                raise GroupLost(
                    f"rank {self.rank} waited {waited:.0f} s at {what} for {self.describe(late[:1])}, which did not "
                    "answer. Look for its traceback, or raise 'timeout' if it is only slow."
                )
            if late and waited > LATE_SECONDS and not warned:
                warned = True
                logger.warning(f"rank {self.rank} has waited {waited:.0f} s at {what} for {self.describe(late)}")
        return replies

    def _receive(self, peer: int) -> dict[str, Any]:
        """The next message of `peer`; what it sent before it died is drained first."""
        try:
            message = self._sockets[peer].recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            message = b""
        if not message:
            raise self._ended(peer)
        said = json.loads(message)
        self._refuse_gone(said)
        if said.get("doing"):
            self._doing[peer] = said["doing"]
        return said

    def send_file(self, fd: int) -> None:
        """Hands an open file to every other rank."""
        for connection in self._sockets.values():
            socket.send_fds(connection, [b'{"kind": "file"}'], [fd])

    def receive_file(self, peer: int) -> int:
        """
        The file that `peer` hands over.

        Raises:
            `RuntimeError`: it did not within the timeout.
        """
        connection = self._sockets[peer]
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if select.select([connection], [], [], POLL_SECONDS)[0]:
                _, fds, _, _ = socket.recv_fds(connection, 64, 1, socket.MSG_CMSG_CLOEXEC)
                if fds:
                    return fds[0]
                break
        raise RankLost(f"rank {self.rank} did not receive a file from rank {peer}")

    def close(self) -> None:
        """Closes every socket; the other ranks see this rank as gone. Idempotent."""
        for connection in self._sockets.values():
            connection.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        for fd in (*self._pidfds.values(), wake_fd):
            if fd >= 0:
                os.close(fd)
        self._sockets.clear()
        self._pidfds.clear()
        self._failed = self._failed or GroupLost(f"rank {self.rank} has left the group")


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger, as the kernel says."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"Tt"
    except OSError:
        return False
