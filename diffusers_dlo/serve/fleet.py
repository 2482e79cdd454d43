# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the ranks of the server: it starts them, calls each for itself, and starts all of them anew after one was lost.
Must not know what waits for a rank, or why a call is cancelled.

[Note: a lost rank] A rank that has died fails its own call. The others cannot share its weights any more; they go on
alone and finish what they have begun, but get nothing new. When they are done, all are replaced together, since ranks
join each other only when they start. What waits meanwhile keeps waiting.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from diffusers.utils import logging

from ..concurrency.calls import Call
from ..concurrency.executor import WaveExecutor
from ..concurrency.wave import WaveError
from .arguments import Request
from .options import ServeOptions


logger = logging.get_logger(__name__)

_LOOK_SECONDS = 0.2
"""How often idle ranks are looked at; a busy one that dies is noticed at once."""
_STUCK_SECONDS = 600.0
"""A rank that has not ended a cancelled call for so long is taken for lost: a step may last for minutes."""
_RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""How long after each failed restart the next one begins; the last one counts for all after it."""
_CLOSE_SECONDS = 6.0
"""For taking the ranks down, stuck ones included."""


class RankLostError(RuntimeError):
    """The rank ended, or broke, while it computed."""


class RankGoneError(RuntimeError):
    """The rank was gone before it was called."""


class Fleet:
    r"""
    The ranks. Everything but starting and ending them happens in the event loop's thread.

    Args:
        options (`ServeOptions`): what to start.
        on_change (`Callable[[], None]`): told whenever a rank becomes free or the state changes.
    """

    def __init__(self, options: ServeOptions, on_change: Callable[[], None]) -> None:
        self.size = options.ranks
        self.state = "starting"
        """"starting", "ready", "recovering", "failed" or "closed"."""
        self.reason = "the ranks load the model"
        self.restarts = 0
        self.error: BaseException | None = None
        self.figures: dict[int, dict[str, Any]] = {}
        self._options = options
        self._on_change = on_change
        self._executor: WaveExecutor | None = None
        self._calls: dict[int, Call] = {}
        self._cancelled: dict[int, float] = {}
        self._lost: str | None = None
        self._closing = threading.Event()
        self._ending = asyncio.Lock()
        self._folder = ""  # of the demo

    @property
    def ready(self) -> bool:
        """Whether ranks take requests."""
        return self.state == "ready" and self._lost is None

    @property
    def idle(self) -> list[int]:
        """The ranks that can be called now."""
        return [rank for rank in range(self.size) if rank not in self._calls] if self.ready else []

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return self._executor.pids if self._executor is not None and not self._executor.closed else []

    async def run(self) -> None:
        """Keeps ranks running until `close`. Returns early, with `error` set, if they cannot be started at all."""
        failures = 0
        while not self._closing.is_set():
            self._become("starting" if not self.restarts else "recovering", "the ranks load the model")
            try:
                executor = await asyncio.to_thread(self._start)
            except Exception as error:  # whatever it is, who waits for the ranks has to learn of it
                if self._closing.is_set():
                    return
                if not self.restarts:
                    self.error = error
                    self._become("failed", f"the ranks could not start: {error}")
                    return
                pause = _RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)]
                failures += 1
                reason = f"ranks could not be started again, and will be in {pause:g} s"
                logger.error(f"The {reason}: {error}")
                self._become("recovering", f"the {reason}; the server's log says why")  # anyone may read this
                await self._pause(pause)
                continue
            failures, self._lost, self._executor = 0, None, executor
            if self._closing.is_set():
                await self._end()
                return
            self._cancelled.clear()
            self._become("ready", "")
            await self._watch(executor)
            if self._closing.is_set():
                return
            logger.warning(f"{self._lost}. All ranks are started anew when the others have finished.")
            await self._drain()
            self.restarts += 1
            await self._end()

    async def generate(self, rank: int, request: Request, on_step: Callable[[int, int], None]) -> dict[str, Any]:
        """
        What `Rank.generate` returns on `rank`. `on_step` gets the number of each step and of all.

        Raises:
            `RankGoneError`: it has not begun. `RankLostError`: it has, and is lost.
        """
        loop = asyncio.get_running_loop()

        def hear(note: Any) -> None:
            loop.call_soon_threadsafe(on_step, note["step"], note["steps"])

        assert self._executor is not None
        try:
            call = self._executor.submit(rank, "generate", asdict(request), hear)
        except RuntimeError as error:
            self._lose(str(error))
            raise RankGoneError(str(error)) from error
        self._calls[rank] = call
        try:
            result: dict[str, Any] = await asyncio.wrap_future(call.future)
        except WaveError as error:
            told = error.errors[rank]
            if told.type != "WorkerDied":
                return {"outcome": "refused", "message": f"{told.type}: {told.message}"}
            self._lose(f"rank {rank} {told.message}")
            raise RankLostError(f"Rank {rank} {told.message} while it computed this.") from error
        except RuntimeError as error:
            raise RankLostError(f"Rank {rank} was taken down while it computed this.") from error
        finally:
            self._calls.pop(rank, None)
            self._cancelled.pop(rank, None)
            self._on_change()
        if result["outcome"] == "broken":
            self._lose(f"rank {rank} can do no more: {result['message']}")
            raise RankLostError(f"Rank {rank} broke while it computed this: {result['message']}")
        self.figures[rank] = result.get("figures", self.figures.get(rank, {}))
        return result

    def cancel(self, rank: int) -> None:
        """Tells a rank that nobody waits for what it computes; it ends that between two steps."""
        if rank in self._calls:
            self._calls[rank].cancel()
            self._cancelled.setdefault(rank, time.monotonic())

    def stop(self) -> None:
        """Ends `run` soon, without the ranks that it has started."""
        self._closing.set()

    async def close(self) -> None:
        """
        Takes the ranks down, in about `_CLOSE_SECONDS`, and removes what the demo wrote. `run` has ended before: ranks
        that still start would write it again.
        """
        self._closing.set()
        await self._end()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._become("closed", "the server is shutting down")

    def _start(self) -> WaveExecutor:
        options = self._options
        if options.demo and not self._folder:
            self._folder = tempfile.mkdtemp(prefix="diffusers_dlo-demo-")
        offload = {
            "transfer": options.transfer,
            "host": options.host_store,
            "device_budget": options.device_budget,
        }
        return WaveExecutor(
            "diffusers_dlo.serve.rank:build_rank",
            options.ranks,
            {
                "model": options.model,
                "demo_folder": self._folder,
                "dtype": options.dtype,
                "vae_tiling": options.vae_tiling,
                "timing": options.timing,
                "offload": offload,
            },
            start_timeout=options.start_timeout,
            env={"OMP_NUM_THREADS": "1"} if options.demo else None,
            give_up=self._closing.is_set,
            device="cpu" if options.demo else None,
        )

    async def _end(self) -> None:
        """Takes the executor down, if there is one; by one task at a time."""
        async with self._ending:
            executor, self._executor = self._executor, None
            if executor is not None:
                await asyncio.to_thread(executor.shutdown, _CLOSE_SECONDS)

    async def _watch(self, executor: WaveExecutor) -> None:
        """Until a rank is lost, or the server closes."""
        while self._lost is None and not self._closing.is_set():
            await asyncio.sleep(_LOOK_SECONDS)
            gone = sorted(set(range(self.size)) - set(executor.alive))
            if gone:
                self._lose(f"rank {gone[0]} has ended")
            for rank in self._stuck():
                self._lose(f"rank {rank} has not ended a cancelled call for {_STUCK_SECONDS:g} s")

    async def _pause(self, seconds: float) -> None:
        """For so long, or until the server closes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._closing.is_set():
            await asyncio.sleep(_LOOK_SECONDS)

    async def _drain(self) -> None:
        """Until the ranks that are left have finished what they have begun."""
        while set(self._calls) - set(self._stuck()) and not self._closing.is_set():
            await asyncio.sleep(_LOOK_SECONDS)

    def _stuck(self) -> list[int]:
        limit = time.monotonic() - _STUCK_SECONDS
        return [rank for rank, since in self._cancelled.items() if since < limit]

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._become("recovering", reason)

    def _become(self, state: str, reason: str) -> None:
        if self.state != "closed":
            self.state, self.reason = state, reason
            self._on_change()
