# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which requests may be computed in one wave: those that are equal in what `concurrency/requests.py` compares. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..concurrency.requests import unequal
from .arguments import Request


def differences(requests: Sequence[Request]) -> dict[int, str]:
    """
    Why requests cannot be in the wave of the first one, by their index; empty if all can. The first is among them only
    if it could be in no wave.
    """
    terms = [_terms(request) for request in requests]
    reasons = {index: unequal([terms[0], own], "or ask a server without --wave.") for index, own in enumerate(terms)}
    return {
        index: f"A wave is of equal requests, and this one (1) is not equal to its first (0): {reason}"
        for index, reason in reasons.items()
        if reason is not None
    }


def _terms(request: Request) -> dict[str, Any]:
    """What has to be equal, under the names that `unequal` knows."""
    terms: dict[str, Any] = {"extra_args": dict(request.extra_args or {})}
    if request.num_inference_steps is not None:
        terms["num_inference_steps"] = request.num_inference_steps
    return terms
