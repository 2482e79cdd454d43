# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns processes in which the simulated device is torch's "npu": one that imports everything, as a user's script would,
and the ranks forked from it before anything has used the device. Must not know what the cases check.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
Cases = Mapping[str, Callable[[int, int, Path], Any]]


def launch(site: Path, folder: Path, groups: Sequence[str], timeout: float = 75.0) -> list[list[dict[str, Any]]]:
    """
    What the cases returned, by name: for each of `groups` (`_find_cases`), for each rank. `site` has the package
    torch_npu, and `folder` is for whatever they write. Fails with the tracebacks of all cases that raised.
    """
    results = folder / "results"
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.npu.launcher", str(folder), str(results), str(timeout), *groups]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if not results.exists():
        raise AssertionError(f"the launcher ended with {done.returncode}:\n{done.stderr[-8000:]}")
    found = pickle.loads(results.read_bytes())
    errors = [
        f"--- rank {rank} of {len(ranks)}, {name}\n{text}"
        for ranks in found
        for rank, (_, failed) in enumerate(ranks)
        for name, text in failed.items()
    ]
    assert not errors, "\n".join([*errors, done.stderr[-2000:]])
    print(done.stderr)  # how long each case took, where the test fails for another reason
    return [[returned for returned, _ in ranks] for ranks in found]


def _rank_main(rank: int, size: int, folder: Path, cases: Cases, pipe: Any) -> None:
    if size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    returned, failed = {}, {}
    for name, case in cases.items():
        start = time.monotonic()
        try:
            returned[name] = case(rank, size, folder)
        except BaseException:
            failed[name] = traceback.format_exc()
            if size > 1:
                break  # the others may wait for this rank: what comes next would only hide why
        print(f"rank {rank}: {name} took {time.monotonic() - start:.2f} s", file=sys.stderr)
    pipe.send((returned, failed))
    pipe.close()
    os._exit(0)


def _run(size: int, folder: Path, cases: Cases, timeout: float) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """What the cases returned, and the tracebacks of those that raised, for each rank."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank_main, args=(rank, size, folder, cases, sender)))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    deadline = time.monotonic() + timeout
    ranks: list[tuple[dict[str, Any], dict[str, str]]] = []
    for pipe in pipes:
        try:
            ready = pipe.poll(max(deadline - time.monotonic(), 0.1))
            ranks.append(pipe.recv() if ready else ({}, {"all": f"did not end in {timeout} s"}))
        except EOFError:
            ranks.append(({"died": True}, {}))
    for process in processes:
        process.join(2)
        process.kill()
        process.join()
    return ranks


def _find_cases(group: str) -> tuple[int, Cases]:
    """How many ranks, and what they do."""
    from tests.npu.cases import ONE_RANK
    from tests.npu.rank_cases import LOST_RANK, SEVERAL_RANKS

    return {"one": (1, ONE_RANK), "two": (2, SEVERAL_RANKS), "lost": (2, LOST_RANK)}[group]


def _main(folder: Path, results: Path, timeout: float, groups: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)
    cases = [_find_cases(group) for group in groups]
    gc.freeze()  # what was imported is not garbage, and looking through it at each enabling takes most of its time
    found = []
    for group, (size, work) in zip(groups, cases):
        (folder / group).mkdir()
        found.append(_run(size, folder / group, work, timeout))
    results.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
