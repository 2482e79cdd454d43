# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the endpoints for pictures and videos as jobs: queueing some, listing all with their settings, their files, and
ending them. The page lives on these alone, so that nothing is lost when it is loaded again. Must not know how they are
made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Response
from pydantic import BaseModel, Field

from .arguments import Request
from .checks import BadRequestError, check_count, image_requests, video_request
from .jobs import Job
from .options import ServeOptions
from .schemas import ERRORS, Common, Count, ErrorDetail, FramesPerSecond, ImageRequest, VideoRequest
from .service import Service, get_service


router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_MEDIA = {"image": "image/png", "video": "video/mp4"}
_SEEDS = 2**63
_Service = Annotated[Service, Depends(get_service)]


class JobRequest(Common):
    """POST /v1/jobs."""

    kind: Literal["image", "video"] = "image"
    n: Count = Field(1, description="jobs; the first has `seed`, the next one more each")
    num_frames: Count | None = Field(None, description="of a video")
    fps: FramesPerSecond | None = Field(None, description="of a video")


class JobSettings(BaseModel):
    """What makes the same picture or video again. What is not set was left to the model."""

    prompt: str
    negative_prompt: str | None
    size: str
    num_frames: int | None
    fps: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    max_sequence_length: int | None
    flow_shift: float | None
    seed: int


class JobAnswer(BaseModel):
    """A job, as it is now."""

    id: str
    object: str = "job"
    kind: Literal["image", "video"]
    status: str
    position: int | None = Field(description="in the queue, from 1")
    progress: int
    step: int
    steps: int | None
    rank: int | None
    created_at: int
    ended_at: int | None
    compute_seconds: float | None
    settings: JobSettings
    error: ErrorDetail | None


class JobList(BaseModel):
    """The jobs that are known, the newest first."""

    object: str = "list"
    data: list[JobAnswer]


class JobGone(BaseModel):
    """A job that was cancelled, or deleted if it had ended."""

    id: str
    object: str = "job.deleted"
    deleted: bool
    status: str


def find_job(service: _Service, job_id: Annotated[str, Path(max_length=100)]) -> Job:
    """The job that a path names."""
    job = service.book.get(job_id)
    if job is None:
        raise BadRequestError(
            "job_id", f"There is no job '{job_id:.100}'; it may have been deleted.", "not_found", 404
        )
    return job


_Job = Annotated[Job, Depends(find_job)]


@router.post("", response_model=JobList, responses=ERRORS)
async def create(asked: JobRequest, service: _Service) -> JobList:
    """Queues `n` pictures or videos, or none of them, and answers with their jobs at once."""
    jobs = service.scheduler.admit(job_requests(asked, service.options), asked.timeout)
    for job in jobs:
        service.book.add(job)
    return JobList(data=[_answer(job, service) for job in jobs])


@router.get("", response_model=JobList, responses=ERRORS)
async def list_jobs(service: _Service) -> JobList:
    """The jobs that are known, videos of /v1/videos among them, the newest first."""
    return JobList(data=[_answer(job, service) for job in reversed(list(service.book))])


@router.get("/{job_id}", response_model=JobAnswer, responses=ERRORS)
async def retrieve(job: _Job, service: _Service) -> JobAnswer:
    """A job as it is now."""
    return _answer(job, service)


@router.get(
    "/{job_id}/content",
    response_class=Response,
    responses={
        200: {"content": {media: {"schema": {"type": "string", "format": "binary"}} for media in _MEDIA.values()}},
        **ERRORS,
    },
)
async def content(job: _Job) -> Response:
    """The PNG or mp4 file of a job that is complete."""
    if job.content is None:
        raise BadRequestError("job_id", f"'{job.id}' is {job.status.value} and has no content.", "not_ready", 409)
    headers = {"X-Seed": str(job.request.seed), "X-Content-Type-Options": "nosniff"}
    return Response(job.content, media_type=_MEDIA[job.request.kind], headers=headers)


@router.delete("/{job_id}", response_model=JobGone, responses=ERRORS)
async def delete(job: _Job, service: _Service) -> JobGone:
    """Cancels a job; one that has ended is deleted, with its content."""
    cancelled = service.scheduler.cancel(job)
    if not cancelled:
        service.book.remove(job.id)
    return JobGone(id=job.id, deleted=not cancelled, status=job.status.value)


def job_requests(asked: JobRequest, options: ServeOptions) -> list[Request]:
    """
    One `Request` for each job, with seeds that follow each other.

    Raises:
        `BadRequestError`: it goes beyond a limit, or asks for a picture with frames.
    """
    common: dict[str, Any] = asked.model_dump(include=set(Common.model_fields))
    if asked.kind == "image":
        for field, value in (("num_frames", asked.num_frames), ("fps", asked.fps)):
            if value is not None:
                raise BadRequestError(field, f"'{field}' is of videos; leave it out, or make 'kind' \"video\".")
        return image_requests(ImageRequest(**common, n=asked.n), options)
    check_count(asked.n, options)
    video: dict[str, Any] = {} if asked.fps is None else {"fps": asked.fps}
    first = video_request(VideoRequest(**common, num_frames=asked.num_frames, **video), options)
    return [replace(first, seed=(first.seed + index) % _SEEDS) for index in range(asked.n)]


def _answer(job: Job, service: Service) -> JobAnswer:
    asked, failure = job.request, job.failure
    is_video = asked.kind == "video"
    return JobAnswer(
        id=job.id,
        kind="video" if is_video else "image",
        status=job.status.value,
        position=service.scheduler.position(job),
        progress=job.progress,
        step=job.step,
        steps=job.steps,
        rank=job.rank,
        created_at=int(job.created),
        ended_at=None if job.ended is None else int(job.ended),
        compute_seconds=job.seconds,
        settings=JobSettings(
            prompt=asked.prompt,
            negative_prompt=asked.negative_prompt,
            size="auto" if asked.width is None else f"{asked.width}x{asked.height}",
            num_frames=asked.num_frames if is_video else None,
            fps=asked.fps if is_video else None,
            num_inference_steps=asked.num_inference_steps,
            guidance_scale=asked.guidance_scale,
            max_sequence_length=asked.max_sequence_length,
            flow_shift=asked.flow_shift,
            seed=asked.seed,
        ),
        error=None if failure is None else ErrorDetail(message=failure.message, type="error", code=failure.code),
    )
