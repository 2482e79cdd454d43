# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns one wave of requests, SPMD: which rank computes which, and how results and failures come together. Must not know
how weights stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers.utils import BaseOutput

from ..config import DistributedLayerwiseOffloadConfig
from ..device.platform import HOST_BACKEND
from ..distributed.agreed_error import describe_error, raise_agreed
from ..distributed.group import World, join_world
from ..handle import OffloadHandle
from .messages import decode, encode
from .requests import check_arguments, describe, first_difference, unequal


_LONGEST_WAIT = timedelta(days=1)
"""How long a rank that has finished waits for one that computes; whoever ends is noticed at once."""
_CHUNK = 64 * 2**20
_UNSENDABLE = "the result cannot be sent to other ranks (use output_type='np' or 'pil', or gather='none'): "


class ConcurrentGenerationError(RuntimeError):
    r"""
    Some requests of a wave failed; the others were computed all the same. Raised on every rank. On a rank where a
    request failed, `__cause__` is the first exception.

    Attributes:
        results (`list`): the results that this rank has, in the order of the requests; None at failed places.
        errors (`dict[int, str]`): the type and text of each failure, by the index of its request.
    """

    def __init__(
        self, message: str, results: Sequence[Any] | None = None, errors: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message)
        self.results = list(results or ())
        self.errors = dict(errors or {})


def generate_concurrently(
    pipe: Callable[..., Any],
    requests: Sequence[Mapping[str, Any]],
    strict: bool = True,
    gather: str = "all",
) -> list[Any] | None:
    r"""
    Computes each request on one rank, different requests at the same time, and returns all results. All ranks of
    `torch.distributed` call it with the same requests; of N ranks, rank r computes the requests r, r + N, r + 2 N, ...
    With `transfer="all_gather"`, ranks with fewer requests do the others' transfers meanwhile.

    Args:
        pipe (`DiffusionPipeline` or `Callable`):
            What to call, with or without offload.
        requests (`Sequence[Mapping[str, Any]]`):
            The keyword arguments of each call. Each request that takes a `torch.Generator` takes one of its own, made
            for this call, on the device of whichever rank it is on.
        strict (`bool`, defaults to `True`):
            Whether every request must give the same `num_inference_steps` and the same `extra_args`, so that ranks
            have equally much to do. `False` accepts mixed requests.
        gather (`str`, defaults to `"all"`):
            `"all"`: every rank gets all results. `"first"`: rank 0 does, the others get None. `"none"`: nothing is
            transferred; each rank gets a list with its own results, and None in place of the others'.

    Returns:
        `list`: the results, in the order of the requests. This rank's own are the pipeline's objects. Those of other
        ranks are equal bit for bit and of the same class, with tensors on the CPU.

    Raises:
        `ValueError` or `TypeError`: the requests cannot be computed together, or differ between ranks; raised on every
        rank before anything is computed. `ConcurrentGenerationError`: requests failed, or a result cannot be sent; the
        others were computed. `RuntimeError`: a rank is gone.
    """
    handle: OffloadHandle | None = getattr(pipe, "distributed_layerwise_offload", None)
    # A rank with forwards left from before the wave is served, instead of waited for.
    failure = _join(handle)
    wire = _connect(handle)
    jobs = _agree(wire, pipe, requests, strict, gather, failure)

    wave = _Wave(len(jobs))
    for index in range(wire.rank, len(jobs), wire.size):
        try:
            wave.results[index] = pipe(**jobs[index])
        except Exception as error:
            wave.fail(index, error)
    failure = _join(handle)
    raise_agreed(failure, [reply["error"] for reply in wire.exchange("the join", {"error": describe_error(failure)})])
    _share(wire, wave, gather)
    if wave.failures:
        raise wave.error(wire.size) from wave.cause
    return None if gather == "first" and wire.rank else wave.results


class _Wave:
    """The results and failures of a wave, as far as this rank knows them."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.failures: dict[int, str] = {}
        self.cause: Exception | None = None

    def fail(self, index: int, error: Exception, what: str = "") -> None:
        """Notes that a request failed on this rank."""
        kind, text = describe_error(error) or ("", "")
        self.failures[index] = f"{what}{kind}: {text}"
        self.cause = self.cause or error

    def learn(self, failures: Mapping[str, str]) -> None:
        """Notes what another rank, or this one, has told all."""
        for index, text in failures.items():
            self.failures.setdefault(int(index), text)
            self.results[int(index)] = None

    def error(self, size: int) -> ConcurrentGenerationError:
        """What every rank raises."""
        failures = dict(sorted(self.failures.items()))
        lines = [f"request {index} on rank {index % size}: {text}" for index, text in failures.items()]
        return ConcurrentGenerationError(
            "\n".join([f"{len(lines)} of {len(self.results)} requests failed; 'results' has what there is.", *lines]),
            self.results,
            failures,
        )


class _Wire:
    """
    The way between all ranks, for waves: a group of its own, because ranks may wait for each other longer than they
    may while enabling.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.default = world.rank, world.size, world.default
        self._wave = 0
        self._group = dist.new_group(backend=HOST_BACKEND, timeout=_LONGEST_WAIT) if self.size > 1 else None

    def begin(self) -> None:
        """Counts a wave."""
        self._wave += 1

    def exchange(self, step: str, said: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank says at a step of the wave, by rank. JSON, so nothing that arrives is executed."""
        here = f"{step} of wave {self._wave}"
        if self._group is None:
            return [json.loads(json.dumps(said))]
        data = torch.frombuffer(bytearray(json.dumps({**said, "at": here}).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._do(here, dist.all_gather, sizes, torch.tensor([data.numel()]))
        parts = [data if rank == self.rank else torch.empty(int(n), dtype=torch.uint8) for rank, n in enumerate(sizes)]
        for rank, part in enumerate(parts):
            self._do(here, dist.broadcast, part, rank)
        replies = [json.loads(part.numpy().tobytes()) for part in parts]
        for rank, reply in enumerate(replies):
            if reply["at"] != here:
                raise RuntimeError(
                    f"rank {self.rank} is at {here} while rank {rank} is at {reply['at']}: one was interrupted, or "
                    "calls 'generate_concurrently' where the other does not. Start all ranks again."
                )
        return replies

    def transfer(self, owner: int, data: bytes | None, nbytes: int, to_all: bool) -> memoryview | None:
        """Takes a message from its owner to all ranks, or to rank 0. None where nothing arrives."""
        if self._group is None or not (to_all or self.rank in (0, owner)) or (owner == 0 and not to_all):
            return None
        here = f"the results of wave {self._wave}"
        arrived = None if data is not None else torch.empty(nbytes, dtype=torch.uint8)
        for start in range(0, nbytes, _CHUNK):
            stop = min(start + _CHUNK, nbytes)
            if arrived is not None:
                chunk = arrived[start:stop]
            else:
                chunk = torch.from_numpy(np.frombuffer(data, np.uint8)[start:stop].copy())  # type: ignore[arg-type]
            if to_all:
                self._do(here, dist.broadcast, chunk, owner)
            else:
                self._do(here, dist.recv if self.rank == 0 else dist.send, chunk, owner if self.rank == 0 else 0)
        return None if arrived is None else memoryview(arrived.numpy())  # type: ignore[arg-type]

    def _do(self, here: str, collective: Callable[..., Any], *args: Any) -> None:
        try:
            collective(*args, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited at {here}, and another rank has ended or took no part. Look for its "
                f"traceback, and start all ranks again. ({str(error).splitlines()[0]})"
            ) from error


_wire: _Wire | None = None


def _connect(handle: OffloadHandle | None) -> _Wire:
    """The wire of this process's world, made once. Collective over all ranks the first time."""
    global _wire
    timeout = DistributedLayerwiseOffloadConfig.timeout if handle is None else handle.config.timeout
    world = join_world("accelerator" if torch.accelerator.is_available() else "cpu", timeout)
    if _wire is None or _wire.default is not world.default:
        _wire = _Wire(world)
    _wire.begin()
    return _wire


def _join(handle: OffloadHandle | None) -> Exception | None:
    """Joins the other ranks; an error, which they must hear of instead of waiting for this one."""
    try:
        if handle is not None:
            handle.join()
    except RuntimeError as error:
        return error
    return None


def _agree(
    wire: _Wire, pipe: Any, requests: Any, strict: Any, gather: Any, failure: Exception | None
) -> list[dict[str, Any]]:
    """The requests, once all ranks have the same and may compute them. Raises alike on every rank."""
    said: dict[str, Any] = {}
    error: Exception | None = None
    jobs: list[dict[str, Any]] = []
    try:
        if failure is not None:
            raise failure
        jobs = check_arguments(pipe, requests, strict, gather)
        said = {"options": [len(jobs), gather, strict], "requests": describe(jobs)}
        said["complaint"] = unequal(jobs) if strict else None
    except Exception as caught:
        error = caught
    replies = wire.exchange("the requests", {**said, "error": describe_error(error)})
    raise_agreed(error, [reply["error"] for reply in replies])
    complaints = [first_difference(replies), *(reply["complaint"] for reply in replies)]
    for complaint in complaints:
        if complaint is not None:
            raise ValueError(complaint)
    return jobs


def _share(wire: _Wire, wave: _Wave, gather: str) -> None:
    """Exchanges failures, and results as far as `gather` asks for them."""
    classes: dict[int, list[str] | None] = {}
    messages: dict[int, bytes] = {}
    sends = wire.size > 1 and (gather == "all" or (gather == "first" and wire.rank > 0))
    for index in range(wire.rank, len(wave.results), wire.size) if sends else ():
        if index not in wave.failures:
            try:
                classes[index], body = _take_apart(wave.results[index])
                messages[index] = encode(body)
            except Exception as error:
                wave.fail(index, error, _UNSENDABLE)
    sizes = {index: len(data) for index, data in messages.items()}
    replies = wire.exchange("the results", {"failures": wave.failures, "classes": classes, "sizes": sizes})
    for reply in replies:
        wave.learn(reply["failures"])
    rejected: dict[int, str] = {}
    for index in range(len(wave.results)):
        owner, key = index % wire.size, str(index)
        if key not in replies[owner]["sizes"]:
            continue
        data = wire.transfer(owner, messages.pop(index, None), replies[owner]["sizes"][key], gather == "all")
        if data is not None:
            try:
                wave.results[index] = _put_together(replies[owner]["classes"][key], decode(data))
            except Exception as error:
                wave.cause = wave.cause or error
                rejected[index] = f"rank {wire.rank} cannot take the result: {type(error).__name__}: {error}"
    if gather != "none":
        for reply in wire.exchange("the end", {"failures": rejected}):
            wave.learn(reply["failures"])


def _take_apart(result: Any) -> tuple[list[str] | None, Any]:
    """A result as the name of its class and its fields; anything but a `BaseOutput` as it is."""
    if not isinstance(result, BaseOutput):
        return None, result
    kind = type(result)
    if not is_dataclass(result):
        raise ValueError(f"'{kind.__qualname__}' is not a dataclass, so its fields are not known.")
    body = {field.name: getattr(result, field.name) for field in fields(result)}
    first = next(iter(body.values()))
    unknown = set(result.keys()) - set(body) - set(first if isinstance(first, dict) else ())
    if unknown:
        raise ValueError(f"'{kind.__qualname__}' holds {sorted(unknown)}, which are not fields of it.")
    return [kind.__module__, kind.__qualname__], body


def _put_together(name: list[str] | None, body: Any) -> Any:
    """The result again. Its class is looked for among those that this process knows, and never imported by name."""
    if name is None:
        return body
    kinds: list[type] = [BaseOutput]
    known: dict[tuple[str, ...], type] = {}
    while kinds:
        kind = kinds.pop()
        known[kind.__module__, kind.__qualname__] = kind
        kinds += reversed(kind.__subclasses__())
    if tuple(name) not in known:
        raise ValueError(f"no output class '{'.'.join(name)}' is known here. Import it on every rank.")
    return known[tuple(name)](**body)
