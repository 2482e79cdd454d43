# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Real ranks for tests: processes joined by gloo, forked from a server that has imported all they need once."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.rank_server"])


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    expect_death: tuple[int, ...] = (),
    backend: str | None = "gloo",
) -> list[Any]:
    """
    Runs `work(rank, size, *args)`, a top-level function, on `size` ranks and returns what each returned. Fails with
    the traceback of the first rank that raised, or by name if ranks do not end in time. Ranks in `expect_death` may be
    killed. Without a backend they are no ranks: processes that know nothing of each other.
    """
    # A process that has asked for devices cannot hand them to forked children.
    context = multiprocessing.get_context("spawn") if backend not in ("gloo", None) else _context
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, size, f"{folder}/store", backend, sender, work, args)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        try:
            waiting = dict(zip(pipes, range(size)))
            while waiting:
                ready = multiprocessing.connection.wait(list(waiting), max(deadline - time.monotonic(), 0))
                if not ready:
                    raise AssertionError(
                        f"ranks {sorted(waiting.values())} did not end in {timeout} s; errors: {errors}"
                    )
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        ok, value = pipe.recv()
                    except EOFError:
                        ok, value = (rank in expect_death), f"rank {rank} died"
                    (results if ok else errors)[rank] = value
            for process in processes:
                process.join(max(deadline - time.monotonic(), 1))
                assert process.exitcode is not None, "a rank returned and did not exit"
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        if errors:
            raise AssertionError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(size)]


def _rank_main(
    rank: int, size: int, store: str, backend: str | None, pipe: Any, work: Callable[..., Any], args: tuple
) -> None:
    if backend is not None:
        os.environ.update(
            GLOO_SOCKET_IFNAME="lo",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
        )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not garbage, and looking through it at each enabling takes most of its time
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if backend is not None:
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
            )
        value = (True, work(rank, size, *args))
    except BaseException:
        value = (False, traceback.format_exc())
    pipe.send(value)
    pipe.close()
    if dist.is_initialized() and value[0]:
        dist.destroy_process_group()
