# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how the ranks of a host find each other: sockets with abstract names, nobody else let in. Must not say anything
over them but who calls.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from .control import ControlMesh, RankLost


_POLL_SECONDS = 0.05
_LONGEST_CALL = 256
"""Bytes that a rank says of itself when it calls another."""


def connect(rank: int, pids: Sequence[int], secret: str, timeout: float) -> ControlMesh:
    """
    Connects the ranks of a group with each other. Sockets have abstract names, so nothing is left on disk; a
    connection counts only from the same user and with the group's `secret`, which travels over the launcher's process
    group.

    Raises:
        `RuntimeError`: a rank has ended, or could not be reached within `timeout` seconds.
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
                sockets[peer] = _dial(f"{name}-{peer}", peer, pids[peer], deadline)
                sockets[peer].send(f"{rank} {secret}".encode())
            while len(sockets) < size - 1:
                listener.settimeout(max(min(deadline - time.monotonic(), _POLL_SECONDS), 0.001))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    if time.monotonic() > deadline:
                        raise
                    _check_running({peer: pids[peer] for peer in range(rank + 1, size) if peer not in sockets})
                    continue
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


def _check_running(pids: Mapping[int, int]) -> None:
    """
    Raises if one of these ranks, whose processes are given, has ended: it would be waited for in vain. Where the
    system does not tell of processes, nothing is known of it.
    """
    for rank, pid in pids.items():
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            pass
        except (AttributeError, OSError):
            continue
        else:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            has_ended = bool(poll.poll(0))
            os.close(process)
            if not has_ended:
                continue
        raise RankLost(f"rank {rank} has ended. Look for its traceback; one that was killed has none.")


def _dial(name: str, rank: int, pid: int, deadline: float) -> socket.socket:
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
        _check_running({rank: pid})
        time.sleep(0.005)


def _identify(connection: socket.socket, pids: Sequence[int], secret: str, deadline: float) -> int | None:
    """The rank at the other end of a new connection, or None if it is not one of ours."""
    pid, user = _process_of(connection)
    if pid not in pids or user != os.getuid():
        return None
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    claimed, _, said = connection.recv(_LONGEST_CALL).decode(errors="replace").partition(" ")
    connection.settimeout(None)
    return int(claimed) if said == secret and claimed.isdigit() else None


def _process_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", credentials)[:2]
