# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the processes: a fresh set of ranks for each job, started ahead so that the next one has imported its libraries
when the last one ends. Must not know what a job measures.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from worker import Job, work


FAREWELL_SECONDS = 15.0
"""How long the other ranks of a job may go on after one has failed; they may wait for it in vain."""
HERE = Path(__file__).resolve().parent


class JobFailed(Exception):
    """A job that a rank did not finish; the message is the reason, for a table."""


class Crew:
    """One set of ranks: does one job, then is gone."""

    def __init__(self, number: int, size: int, scratch: Path, on_device: bool) -> None:
        # A fork has imported everything already; but a process that asked for devices cannot hand them to its forks.
        context = multiprocessing.get_context("spawn" if on_device else "fork")
        self._logs = [scratch / f"{number:02}-rank{rank}.log" for rank in range(size)]
        self._connections: list[Connection] = []
        self._processes = []
        for rank, log in enumerate(self._logs):
            ours, theirs = context.Pipe()
            arguments = (rank, size, str(scratch / f"{number:02}-store"), str(log), theirs)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, job: Job, deadline: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
        """
        Has all ranks do a job; what each of them found, by rank.

        Raises:
            `JobFailed`: a rank failed or died, or the time (of `time.monotonic`) is over. No process is left.
        """
        try:
            for connection in self._connections:
                connection.send(job)
            return self._collect(deadline, tell)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise JobFailed(f"a rank ended before it had its job{self._last_line(0)}") from error
        finally:
            self.dismiss()

    def _collect(self, deadline: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
        waiting: dict[Any, int] = dict(zip(self._connections, range(len(self._connections))))
        found: dict[int, dict[str, Any]] = {}
        reason: str | None = None
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise JobFailed(reason or "stopped: the time limit was reached while it ran")
            for connection in ready:
                rank = waiting[connection]
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    kind, value = "failed", self._ending(rank)
                if kind == "tell":
                    if rank == 0:
                        tell(value)
                    continue
                del waiting[connection]
                if kind == "done":
                    found[rank] = value
                elif reason is None:
                    reason = value if len(self._processes) == 1 else f"rank {rank}: {value}"
                    deadline = min(deadline, time.monotonic() + FAREWELL_SECONDS)
        if reason is not None:
            raise JobFailed(reason)
        return [found[rank] for rank in range(len(self._processes))]

    def _ending(self, rank: int) -> str:
        code = self._processes[rank].exitcode
        if code == -signal.SIGKILL:
            return "killed, as happens where host memory runs out"
        return f"ended with code {code}{self._last_line(rank)}"

    def _last_line(self, rank: int) -> str:
        try:
            lines = self._logs[rank].read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f" ({lines[-1][:160]})" if lines else ""

    def dismiss(self) -> None:
        """Ends what is left of the ranks."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


def importable() -> None:
    """Lets started processes import the modules of this folder and the package beside it."""
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
