# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what must hold of a wave's requests before anything is sent or computed: their form, equal work, and that all
ranks have the same. Pure: knows neither processes nor pipelines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .messages import MAX_DEPTH, encode


GATHERS = ("all", "first", "none")

_STEPS = "num_inference_steps"


def check_arguments(pipe: Any, requests: Any, strict: Any, gather: Any) -> list[dict[str, Any]]:
    """A copy of the requests; raises `TypeError` or `ValueError` for arguments of a wrong form."""
    if not callable(pipe):
        raise TypeError(f"'pipe' must be a pipeline or another callable, got '{type(pipe).__name__}'.")
    if not isinstance(strict, bool):
        raise TypeError(f"'strict' must be True or False, got {strict!r}.")
    if gather not in GATHERS:
        raise ValueError(f"'gather' must be one of {GATHERS}, got {gather!r}.")
    if not isinstance(requests, (list, tuple)):
        raise TypeError(f"'requests' must be a list of mappings, got '{type(requests).__name__}'.")
    if not requests:
        raise ValueError("'requests' is empty; pass one mapping of keyword arguments for each call.")
    for index, request in enumerate(requests):
        if not isinstance(request, Mapping):
            raise TypeError(
                f"request {index} must be a mapping of keyword arguments, got '{type(request).__name__}'; write "
                "{'prompt': ...} for a prompt."
            )
        for key in request:
            if not isinstance(key, str):
                raise TypeError(f"request {index} has the key {key!r}; keys are names of keyword arguments.")
    return [dict(request) for request in requests]


def unequal(
    jobs: Sequence[Mapping[str, Any]], remedy: str = "or pass strict=False to accept mixed requests."
) -> str | None:
    """Why the requests are not equally much to do, in full, with the `remedy` beside equality; None if they are."""
    bad = [index for index, job in enumerate(jobs) if type(job.get(_STEPS)) is not int]
    if bad:
        got = ", ".join(f"{repr(jobs[i][_STEPS]) if _STEPS in jobs[i] else 'nothing':.80} in {i}" for i in bad)
        return (
            f"'{_STEPS}' must be an int in every request, got for requests {bad}: {got}. A default may not be "
            f"the same for each of them. Give the same number in each, {remedy}"
        )
    texts = {_STEPS: [str(job[_STEPS]) for job in jobs], "extra_args": []}
    for index, job in enumerate(jobs):
        try:
            extra = json.dumps(job["extra_args"], sort_keys=True) if "extra_args" in job else "not given"
        except (TypeError, ValueError, RecursionError) as error:
            return (
                f"'extra_args' of request {index} cannot be compared, because it is not JSON: {error}. Use plain "
                f"values, {remedy}"
            )
        texts["extra_args"].append(extra)
    for name, values in texts.items():
        if len(set(values)) > 1:
            got = "; ".join(
                f"{text:.200} in requests {[i for i, other in enumerate(values) if other == text]}"
                for text in dict.fromkeys(values)
            )
            return f"'{name}' must be the same in every request, got {got}. Give the same in each, {remedy}"
    return None


def describe(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, list[str]]]:
    """For each field of each request, a digest, and a text for messages."""
    owners: dict[int, int] = {}
    described = []
    for index, job in enumerate(jobs):
        generators: list[torch.Generator] = []
        digests = {}
        for key, value in job.items():
            hasher = hashlib.sha256()
            _feed(hasher, value, generators, 0)
            plain = value is None or type(value) in (bool, int, float, str)
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            digest = hasher.hexdigest()[:16]
            digests[key] = [digest, f"{value!r:.80}" if plain else f"a '{kind}' of digest {digest}"]
        for generator in generators:
            if owners.setdefault(id(generator), index) != index:
                raise ValueError(
                    f"requests {owners[id(generator)]} and {index} share one torch.Generator, so that results would "
                    "depend on the number of ranks. Make a generator for each request."
                )
        described.append(digests)
    return described


def _feed(hasher: Any, value: Any, generators: list[torch.Generator], depth: int) -> None:
    """
    Digests what can be sent by its bytes, generators by kind of device, seed and state, and anything else by its type.
    """
    if isinstance(value, torch.Generator):
        generators.append(value)
        value = ["torch.Generator", value.device.type, value.initial_seed(), value.get_state()]
    elif type(value) in (list, tuple, dict) and depth < MAX_DEPTH:
        hasher.update(f"{type(value).__name__} {len(value)}\n".encode())
        for item in value.items() if type(value) is dict else value:
            _feed(hasher, item, generators, depth + 1)
        return
    try:
        data = encode(value)
    except ValueError:
        data = encode(["object", f"{type(value).__module__}.{type(value).__qualname__}"])
    hasher.update(f"value {len(data)}\n".encode())
    hasher.update(data)


def first_difference(replies: Sequence[Mapping[str, Any]]) -> str | None:
    """The first thing that is not the same on all ranks, in full; None if there is none. `replies` are by rank."""
    for what, values in _compared(replies):
        for rank, (value, text) in enumerate(values):
            if value != values[0][0]:
                return (
                    f"The ranks do not have the same requests. The first difference is {what}: rank 0 has "
                    f"{values[0][1]}, rank {rank} has {text}. Pass the same list on every rank, with generators made "
                    "for this call."
                )
    return None


def _compared(replies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[tuple[Any, str]]]]:
    """What must be equal on all ranks: what it is, and each rank's value with its text."""
    for number, option in enumerate(("the number of requests", "'gather'", "'strict'")):
        yield option, [(value, repr(value)) for value in (reply["options"][number] for reply in replies)]
    for index, of_ranks in enumerate(zip(*(reply["requests"] for reply in replies))):
        for key in dict.fromkeys(key for request in of_ranks for key in request):
            found = [request.get(key, ("", "none")) for request in of_ranks]
            yield f"'{key}' of request {index}", [(digest, text) for digest, text in found]
