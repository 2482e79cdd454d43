# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what must hold of a request before it is queued: a server's own limits, each named in the refusal; and its seed.
Pure but for drawing a seed.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from .arguments import Request, check_extra
from .options import Limits, ServeOptions
from .schemas import Common, ImageRequest, VideoRequest


_SEEDS = 2**31


class BadRequestError(ValueError):
    """A request that is refused: the field, and why."""

    def __init__(self, param: str | None, message: str, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


def image_requests(asked: ImageRequest, options: ServeOptions) -> list[Request]:
    """
    One `Request` for each picture, with seeds that follow each other.

    Raises:
        `BadRequestError`: it goes beyond a limit.
    """
    check_count(asked.n, options)
    if asked.response_format == "png" and asked.n > 1:
        raise BadRequestError("n", f"'n' is {asked.n}, and one answer is one file with 'png'; ask for b64_json.")
    common = _common(asked, options, _extra(asked.extra_params))
    first = common.pop("seed")
    return [Request(kind="image", seed=(first + index) % 2**63, **common) for index in range(asked.n)]


def video_request(asked: VideoRequest, options: ServeOptions) -> Request:
    """
    The `Request` of a video.

    Raises:
        `BadRequestError`: it goes beyond a limit.
    """
    frames = asked.num_frames
    if asked.seconds is not None:
        if frames is not None:
            raise BadRequestError("seconds", "'seconds' and 'num_frames' say the same; give one of them.")
        frames = asked.seconds * asked.fps + 1  # the first frame is at 0 s
    _at_most("num_frames", frames, options.limits.frames, "--max-frames")
    extra: Any = None
    if asked.extra_params:
        try:
            extra = json.loads(asked.extra_params)
        except (ValueError, RecursionError) as error:
            raise BadRequestError("extra_params", f"'extra_params' is not JSON: {error}") from error
    return Request(kind="video", num_frames=frames, fps=asked.fps, **_common(asked, options, _extra(extra)))


def check_count(n: int, options: ServeOptions) -> None:
    """
    Whether one request may ask for `n` pictures or videos.

    Raises:
        `BadRequestError`: it may not.
    """
    _at_most("n", n, options.limits.n, "--max-n")
    _at_most("n", n, options.limits.queue, "--max-queue")  # all of them are queued at once, or never


def _common(asked: Common, options: ServeOptions, extra: dict[str, Any] | None) -> dict[str, Any]:
    limits: Limits = options.limits
    if asked.model is not None and asked.model != options.name:
        raise BadRequestError(
            "model", f"The model '{asked.model:.100}' is not served here; '{options.name}' is.", "model_not_found", 404
        )
    for field, text in (("prompt", asked.prompt), ("negative_prompt", asked.negative_prompt or "")):
        if len(text) > limits.prompt:
            raise BadRequestError(field, f"'{field}' has {len(text)} characters; {limits.prompt} are allowed.")
    width, height = (None, None) if asked.size == "auto" else map(int, asked.size.split("x"))
    _at_most("size", max(width or 0, height or 0), limits.size, "--max-size")
    _at_most("num_inference_steps", asked.num_inference_steps, limits.steps, "--max-steps")
    _at_most("max_sequence_length", asked.max_sequence_length, limits.prompt, "the longest prompt")
    return {
        "prompt": asked.prompt,
        "negative_prompt": asked.negative_prompt,
        "width": width,
        "height": height,
        "num_inference_steps": asked.num_inference_steps,
        "guidance_scale": asked.guidance_scale,
        "max_sequence_length": asked.max_sequence_length,
        "flow_shift": asked.flow_shift,
        "seed": secrets.randbelow(_SEEDS) if asked.seed is None else asked.seed,
        "extra_args": extra,
    }


def _extra(extra: Any) -> dict[str, Any] | None:
    try:
        return None if extra is None else check_extra(extra)
    except ValueError as error:
        raise BadRequestError("extra_params", str(error)) from error


def _at_most(field: str, value: int | None, limit: int, option: str) -> None:
    if value is not None and value > limit:
        raise BadRequestError(field, f"'{field}' asks for {value}; this server allows {limit} ({option}).", "limit")
