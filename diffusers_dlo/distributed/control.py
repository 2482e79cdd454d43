# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the control mesh: one Unix-domain socket per pair of ranks of a host, over which they agree. Asking, answering and
noticing that a rank is late or gone are one thing here. Must not know what is agreed on, and carries no weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.utils import logging


logger = logging.get_logger(__name__)

_POLL_SECONDS = 0.05
"""No wait is longer without looking at the clock and at the peers, so every wait can be interrupted."""
_LATE_SECONDS = 10.0
"""A rank that others have waited for this long is named in the log."""
_MAX_MESSAGE = 1 << 16
_GONE = "gone"
"""Said by a rank that gave up an agreement."""


class RankLost(RuntimeError):
    """Another rank has ended, given up, not answered in time, or is out of step. The message names it."""


class ControlMesh:
    """
    Messages among the ranks of one group. Every rank calls the same sequence of `exchange`; each returns when all have
    called it, with what each said.

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
        self._round = 0
        self._failed: str | None = None
        self._pidfds: dict[int, int] = {}
        for peer in self._sockets:
            # A socket stays open in forked children of a dead rank; its process does not.
            try:
                self._pidfds[peer] = os.pidfd_open(pids[peer])
            except (AttributeError, OSError) as error:
                logger.info(f"the death of rank {peer} will show as a closed socket only ({error})")

    def exchange(self, kind: str, **payload: Any) -> list[dict[str, Any]]:
        """
        Tells every rank `kind` and `payload` and returns what each said, by rank, this one's own included.

        Raises:
            `RuntimeError`: a rank is gone or did not answer within the timeout; the message names it.
        """
        own = {"kind": kind, "round": self._round, **payload}
        if self.size == 1:
            self._round += 1
            return [own]
        if self._failed is not None:
            raise RankLost(self._failed)
        message = json.dumps(own).encode()
        if len(message) > _MAX_MESSAGE:
            raise RuntimeError(f"rank {self.rank}: a control message of {len(message)} bytes exceeds {_MAX_MESSAGE}")
        self._failed = (
            f"rank {self.rank} was interrupted at '{kind}' while it agreed with the other ranks, so their order is "
            "unknown; start all ranks again"
        )
        try:
            self._send(message)
            replies = self._receive_all(kind)
            self._check_nobody_gave_up()
        except RuntimeError as error:
            self._failed = str(error)
            self._send(json.dumps({"kind": _GONE, "round": self._round, "why": self._failed}).encode())
            raise
        replies[self.rank] = own
        said = [replies[rank] for rank in range(self.size)]
        rounds = [reply["round"] for reply in said]
        if any(number != self._round for number in rounds):
            self._failed = f"ranks count their agreements differently ({rounds}): one of them gave up in the middle"
            raise RankLost(self._failed)
        self._round += 1
        self._failed = None
        return said

    def _send(self, message: bytes) -> None:
        for connection in self._sockets.values():
            # A rank that is gone may have answered before: what it last said is read first.
            with contextlib.suppress(OSError):
                connection.send(message)

    def _check_nobody_gave_up(self) -> None:
        """A rank that gave up waiting for this one has said its part of the round, and that it gave up, after it."""
        for connection in self._sockets.values():
            with contextlib.suppress(BlockingIOError, ConnectionError):
                later = connection.recv(_MAX_MESSAGE, socket.MSG_DONTWAIT | socket.MSG_PEEK)
                self._refuse_gone(json.loads(later) if later else {})

    def _refuse_gone(self, said: Mapping[str, Any]) -> None:
        if said.get("kind") == _GONE:
            raise RankLost(f"{said['why']} (as another rank says)")

    def _receive_all(self, kind: str) -> dict[int, dict[str, Any]]:
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
            for fd, _ in poller.poll(_POLL_SECONDS * 1000):
                peer = by_fd[fd]
                if peer not in replies:
                    replies[peer] = self._receive(peer, kind)
                if peer in replies:
                    for other, owner in by_fd.items():
                        if owner == peer:
                            with contextlib.suppress(KeyError, FileNotFoundError):
                                poller.unregister(other)
            waited = time.monotonic() - start
            late = sorted(set(self._sockets) - set(replies))
            if late and waited > self.timeout:
                raise RankLost(
                    f"rank {self.rank} waited {waited:.0f} s at '{kind}' for rank {late[0]}, which did not answer. "
                    "Look for its traceback, or raise 'timeout' if it is only slow."
                )
            if late and waited > _LATE_SECONDS and not warned:
                warned = True
                logger.warning(f"rank {self.rank} has waited {waited:.0f} s at '{kind}' for ranks {late}")
        return replies

    def _receive(self, peer: int, kind: str) -> dict[str, Any]:
        """The next message of `peer`; what it sent before it died is drained first."""
        try:
            message = self._sockets[peer].recv(_MAX_MESSAGE, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            message = b""
        if not message:
            raise RankLost(
                f"rank {peer} ended while rank {self.rank} waited for it at '{kind}'. Look for its traceback, and "
                "start all ranks again."
            )
        said = json.loads(message)
        self._refuse_gone(said)
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
            if select.select([connection], [], [], _POLL_SECONDS)[0]:
                _, fds, _, _ = socket.recv_fds(connection, 64, 1, socket.MSG_CMSG_CLOEXEC)
                if fds:
                    return fds[0]
                break
        raise RankLost(f"rank {self.rank} did not receive a file from rank {peer}")

    def close(self) -> None:
        """Closes every socket; the other ranks see this rank as gone. Idempotent."""
        for connection in self._sockets.values():
            connection.close()
        for fd in self._pidfds.values():
            os.close(fd)
        self._sockets.clear()
        self._pidfds.clear()


def connect(rank: int, pids: Sequence[int], secret: str, timeout: float) -> ControlMesh:
    """
    Connects the ranks of a group with each other. Sockets have abstract names, so nothing is left on disk; a
    connection counts only from the same user and with the group's `secret`, which travels over the launcher's process
    group.

    Raises:
        `RuntimeError`: a rank could not be reached within `timeout` seconds.
    """
    size = len(pids)
    name = "\0diffusers_dlo-" + hashlib.sha256(secret.encode()).hexdigest()[:32]
    sockets: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout
    if size == 1:
        return ControlMesh(0, {}, pids, timeout)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"{name}-{rank}")
            listener.listen(size)
            for peer in range(rank):
                sockets[peer] = _dial(f"{name}-{peer}", pids[peer], deadline)
                sockets[peer].send(f"{rank} {secret}".encode())
            while len(sockets) < size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = listener.accept()
                caller = _identify(connection, pids, secret, deadline)
                if caller is None or caller in sockets or not rank < caller < size:
                    connection.close()
                else:
                    sockets[caller] = connection
    except BaseException as error:
        for connection in sockets.values():
            connection.close()
        if not isinstance(error, OSError):
            raise
        missing = sorted(set(range(size)) - set(sockets) - {rank})
        raise RankLost(f"rank {rank} could not connect with ranks {missing} in {timeout:.0f} s ({error})") from error
    return ControlMesh(rank, sockets, pids, timeout)


def _dial(name: str, pid: int, deadline: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(name)
            if _process_of(connection) == (pid, os.getuid()):
                return connection
            reason = "somebody else listens"
        except (ConnectionRefusedError, FileNotFoundError):
            reason = "it does not listen"  # not yet
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError(reason)
        time.sleep(0.005)


def _identify(connection: socket.socket, pids: Sequence[int], secret: str, deadline: float) -> int | None:
    """The rank at the other end of a new connection, or None if it is not one of ours."""
    pid, user = _process_of(connection)
    if pid not in pids or user != os.getuid():
        return None
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    claimed, _, said = connection.recv(_MAX_MESSAGE).decode(errors="replace").partition(" ")
    connection.settimeout(None)
    return int(claimed) if said == secret and claimed.isdigit() else None


def _process_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[:2]
