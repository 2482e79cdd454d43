# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how the ranks talk beside the device: over the launcher's store, so that a hanging collective stops nothing here.
Must not know what they check.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .outcome import Failed, Skipped


_POLL_SECONDS = 0.002
_MARGIN_SECONDS = 60.0
_LONGEST_STORE_WAIT = timedelta(seconds=300)


def _connect_again(store: Any) -> Any:
    """The same store over a connection of its own, where this torch can."""
    return store.clone() if hasattr(store, "clone") else store


class Ranks:
    """
    This rank among those of the launcher.

    Attributes:
        rank (`int`), size (`int`), local_rank (`int`): as the launcher set them; 0, 1, 0 without one.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._row = 0
        self._said = 0
        self._open_error = ""
        self._store: Any = None
        self._watching: Any = None
        if self.size > 1:
            store, _, _ = next(dist.rendezvous("env://", timeout=_LONGEST_STORE_WAIT))
            # Connections of their own: whoever waits in one holds its lock, be it a communicator that never opens.
            self._store = dist.PrefixStore("check_npu", _connect_again(store))
            self._watching = dist.PrefixStore("check_npu", _connect_again(store))
            self._torch_store = dist.PrefixStore("world", store)

    def begin(self, row: int) -> None:
        """What is exchanged from now on belongs to this row, whatever became of earlier ones."""
        self._row, self._said = row, 0

    def exchange(self, value: Any, seconds: float = 60.0) -> list[Any]:
        """
        What each rank passes in, by rank; JSON. Also a barrier.

        Raises:
            `Failed`: another rank has ended this row, or does not come.
        """
        if self.size == 1:
            return [value]
        self._said += 1
        key = f"{self._row}/said/{self._said}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        deadline = time.monotonic() + seconds
        waiting = set(range(self.size))
        while waiting:
            waiting = {rank for rank in waiting if not self._store.check([f"{key}/{rank}"])}
            ended = [rank for rank in waiting if self._store.check([f"{self._row}/result/{rank}"])]
            if ended and not self._store.check([f"{key}/{ended[0]}"]):
                raise Failed(f"rank {ended[0]} has ended this row before this rank did")
            if waiting and time.monotonic() > deadline:
                raise Failed(f"rank {min(waiting)} did not come within {seconds:.0f} s")
            if waiting:
                time.sleep(_POLL_SECONDS)
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]

    def post(self, row: int, result: dict[str, Any], watching: bool = False) -> None:
        """Tells the others how a row ended here. `watching`: from the thread that watches the main one."""
        if self.size > 1:
            store = self._watching if watching else self._store
            store.set(f"{row}/result/{self.rank}", json.dumps(result))

    def posted(self, row: int, watching: bool = False) -> dict[int, dict[str, Any]]:
        """How the row ended on the ranks that have said so."""
        if self.size == 1:
            return {}
        store = self._watching if watching else self._store
        there = [rank for rank in range(self.size) if store.check([f"{row}/result/{rank}"])]
        return {rank: json.loads(store.get(f"{row}/result/{rank}")) for rank in there}

    def collect(self, row: int, seconds: float, watching: bool = False) -> dict[int, dict[str, Any]]:
        """As `posted`, once all have said so, or after `seconds`."""
        if self.size == 1:
            return {}
        deadline = time.monotonic() + seconds
        while len(found := self.posted(row, watching)) < self.size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def leave(self, seconds: float, watching: bool = False) -> None:
        """Waits until rank 0 has written the report: launchers end all ranks as soon as one ends with an error."""
        if self.size == 1:
            return
        store = self._watching if watching else self._store
        if self.rank == 0:
            store.set("written", "1")
        deadline = time.monotonic() + seconds
        while not store.check(["written"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        store.set(f"left/{self.rank}", "1")
        # Rank 0 may hold the store.
        while self.rank == 0 and time.monotonic() < deadline:
            if all(store.check([f"left/{rank}"]) for rank in range(self.size)):
                break
            time.sleep(0.05)

    def connect(self, backend: str, seconds: float) -> None:
        """
        Connects the ranks through torch.distributed, once.

        Raises:
            `Failed`: they cannot be connected. `Skipped`: they could not be when it was first tried.
        """
        if self.size == 1 or dist.is_initialized():
            return
        if self._open_error:
            raise Skipped(f"the ranks could not be connected: {self._open_error}")
        try:
            dist.init_process_group(
                backend,
                store=self._torch_store,
                rank=self.rank,
                world_size=self.size,
                # Longer than a row may take: a backend that ends the process by itself would end the report too.
                timeout=timedelta(seconds=seconds + _MARGIN_SECONDS),
            )
        except Exception as error:
            self._open_error = str(error).splitlines()[0]
            raise Failed(f"the ranks could not be connected by {backend}: {self._open_error}") from error
