# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how a request becomes the arguments of a pipeline's call: by the names in its signature, so that a server of any
pipeline refuses what that pipeline does not take. Pure: knows no weights, and lets no request name a file, a tensor or
a callback.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


_OWN = {
    *("prompt", "negative_prompt", "width", "height", "num_frames", "fps", "num_inference_steps", "guidance_scale"),
    *("max_sequence_length", "generator", "output_type", "return_dict"),
}
"""Arguments that have a field of their own in requests, or are the server's."""
_AMOUNTS = ("num_images_per_prompt", "num_videos_per_prompt")
"""Arguments that would pass by the limits of a request."""
_MAX_NUMBER, _MAX_TEXT = 1e9, 200
"""Extra parameters are switches and scales, not data."""


@dataclass(frozen=True)
class Request:
    r"""
    One picture or video, as it travels to a rank. None is the pipeline's own default.

    Args:
        kind (`str`): "image" or "video".
        prompt (`str`): what to make.
        seed (`int`): of the noise, which is drawn on the CPU, so that it does not depend on the kind of accelerator.
        fps (`int`): frames per second of a video.
        flow_shift (`float`, *optional*): of the scheduler.
        extra_args (`Mapping[str, Any]`, *optional*): further scalar arguments of the pipeline's call.
    """

    kind: str
    prompt: str
    seed: int
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: int = 24
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    flow_shift: float | None = None
    extra_args: Mapping[str, Any] | None = None


def check_extra(extra: Any) -> dict[str, Any]:
    """
    A copy of the extra arguments of a request.

    Raises:
        `ValueError`: one is not a scalar, too large, or not the request's to give.
    """
    if not isinstance(extra, dict):
        raise ValueError(f"'extra_params' is a '{type(extra).__name__}'; it has to be a JSON object of scalars.")
    for name, value in extra.items():
        if not (_is_unicode(name) and _is_unicode(value)):
            raise ValueError(f"{name!r} in 'extra_params' is not Unicode: half of a surrogate pair is no character.")
        if name in _OWN or name in _AMOUNTS:
            raise ValueError(
                f"'{name}' cannot be given in 'extra_params'; use the field of that name, if there is one."
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and not abs(value) <= _MAX_NUMBER:  # False of nan too
            raise ValueError(f"'{name}' in 'extra_params' is {value!r:.40}; numbers are {_MAX_NUMBER:.0e} at most.")
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise ValueError(f"'{name}' in 'extra_params' has {len(value)} characters; {_MAX_TEXT} are allowed.")
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"'{name}' in 'extra_params' is a '{type(value).__name__}'; only scalars are allowed.")
    return dict(extra)


def pipeline_arguments(call: Callable[..., Any], request: Request, defaults: Mapping[str, Any]) -> dict[str, Any]:
    r"""
    The keyword arguments of a pipeline for a request, without its generator and callback.

    Args:
        call (`Callable`): the pipeline.
        request (`Request`): what is asked for.
        defaults (`Mapping[str, Any]`): what the server takes where neither the request nor the pipeline's signature
            should decide.

    Raises:
        `ValueError`: the pipeline does not take something of it.
    """
    parameters = inspect.signature(call).parameters
    name = type(call).__name__
    given = {
        "negative_prompt": request.negative_prompt,
        "width": request.width,
        "height": request.height,
        "num_frames": request.num_frames,
        "num_inference_steps": request.num_inference_steps,
        "guidance_scale": request.guidance_scale,
        "max_sequence_length": request.max_sequence_length,
    }
    arguments = {key: value for key, value in given.items() if value is not None}
    if request.kind == "image":
        arguments.pop("num_frames", None)
        if "num_frames" in parameters:
            arguments["num_frames"] = 1
    elif "num_frames" not in parameters:
        raise ValueError(f"'{name}' makes pictures only; ask for one at /v1/images/generations.")
    elif "fps" in parameters:
        arguments["fps"] = request.fps
    extra = check_extra(dict(request.extra_args or {}))
    for key, value in extra.items():
        if key in parameters and not _is_scalar(parameters[key]):
            raise ValueError(f"'{key}' of '{name}' is not a scalar, and cannot be given in 'extra_params'.")
        arguments[key] = value
    unknown = [key for key in arguments if key not in parameters]
    if unknown:
        raise ValueError(f"'{name}' does not take '{unknown[0]}'; leave it out.")
    known = {key: value for key, value in defaults.items() if key in parameters}
    return {**known, **arguments, "prompt": request.prompt}


def _is_unicode(value: Any) -> bool:
    return not (isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value))


def _is_scalar(parameter: inspect.Parameter) -> bool:
    """Whether a parameter can only be a number, a switch or a word: something else may be read as a file's name."""
    words = str(parameter.annotation).removeprefix("<class '").removesuffix("'>")
    kinds = {word.strip() for word in words.replace("typing.", "").replace("Optional[", "").strip("]").split("|")}
    return kinds <= {"bool", "int", "float", "str", "None", "NoneType"}
