# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the form of requests and answers, which is that of OpenAI's interface where it has one, and the description of the
interface that is made from it. Must not know of limits: they are a server's own, see `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


_SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"
_LARGEST_SEED = 2**63 - 1

Size = Annotated[str, Field(pattern=_SIZE, description="WIDTHxHEIGHT in pixels, or auto: what the model does best")]
Word = Annotated[str, Field(max_length=100_000)]  # with a length, it is also checked to be Unicode
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED, description="of the noise; drawn by the server if not given")]
Scale = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Shift = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
FramesPerSecond = Annotated[int, Field(ge=1, le=240)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, description="until the answer, if not sooner")]


class Strict(BaseModel):
    """A request: a field that is not known is an error, so that none is silently without effect."""

    model_config = ConfigDict(extra="forbid")


class Common(Strict):
    """What pictures and videos have in common. What is not given is left to the model."""

    prompt: Text
    model: Word | None = Field(None, description="the name that /v1/models tells; may be left out")
    negative_prompt: Word | None = None
    size: Size = "auto"
    num_inference_steps: Count | None = None
    guidance_scale: Scale | None = None
    max_sequence_length: Count | None = None
    flow_shift: Shift | None = None
    seed: Seed | None = None
    timeout: Seconds | None = None
    user: Word | None = Field(None, description="accepted, without effect")


class ImageRequest(Common):
    """POST /v1/images/generations."""

    n: Count = Field(1, description="pictures; the first has `seed`, the next one more each")
    response_format: Literal["b64_json", "png"] = Field("b64_json", description="png: the file itself, for n = 1")
    extra_params: dict[str, JsonValue] | None = Field(None, description="further scalar arguments of the pipeline")
    output_format: Literal["png"] = "png"
    quality: Word | None = Field(None, description="accepted, without effect")
    style: Word | None = Field(None, description="accepted, without effect")
    background: Literal["auto", "opaque"] | None = Field(None, description="accepted, without effect")
    moderation: Word | None = Field(None, description="accepted, without effect")


class VideoRequest(Common):
    """POST /v1/videos and /v1/videos/sync, as a form."""

    num_frames: Count | None = None
    seconds: Annotated[int, Field(ge=1, le=3600)] | None = Field(None, description="in place of num_frames")
    fps: FramesPerSecond = 24
    extra_params: Word | None = Field(None, description="a JSON object of further scalar arguments of the pipeline")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The body of each answer that is an error."""

    error: ErrorDetail


class ImageData(BaseModel):
    """A picture."""

    b64_json: str
    seed: int


class ImageAnswer(BaseModel):
    """The pictures of a request."""

    created: int
    data: list[ImageData]
    output_format: str = "png"
    size: str


class VideoAnswer(BaseModel):
    """A job, as it is now."""

    id: str
    object: str = "video"
    model: str
    status: str
    progress: int
    prompt: str
    size: str
    seconds: str | None
    seed: int
    created_at: int
    completed_at: int | None
    step: int
    steps: int | None
    rank: int | None
    error: ErrorDetail | None


class VideoList(BaseModel):
    """The jobs that are known, the newest first."""

    object: str = "list"
    data: list[VideoAnswer]


class VideoGone(BaseModel):
    """A job that was cancelled, or deleted if it had ended."""

    id: str
    object: str = "video.deleted"
    deleted: bool
    status: str


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "diffusers-dlo"


class ModelList(BaseModel):
    """The models that are served: one."""

    object: str = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Whether the server runs, or takes requests."""

    status: str
    reason: str = ""


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The request is wrong, or the model cannot do it."},
    401: {"model": ErrorAnswer, "description": "The API key is missing or wrong."},
    404: {"model": ErrorAnswer, "description": "There is no such thing."},
    413: {"model": ErrorAnswer, "description": "The request is too large."},
    503: {"model": ErrorAnswer, "description": "Not now: see Retry-After."},
    504: {"model": ErrorAnswer, "description": "The deadline has passed."},
    "4XX": {"model": ErrorAnswer, "description": "Another error of the request."},
}
"""The errors of each endpoint, for its description."""
