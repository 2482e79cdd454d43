# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the endpoints for videos: at once, or as jobs, which are OpenAI's. Must not know how videos are made.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Form, Path, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from .checks import BadRequestError, video_request
from .jobs import Job, Status
from .schemas import ERRORS, ErrorDetail, VideoAnswer, VideoGone, VideoList, VideoRequest
from .service import Service, get_service


router = APIRouter(prefix="/v1/videos", tags=["videos"])

_MP4 = "video/mp4"
_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {_MP4: {"schema": {"type": "string", "format": "binary"}}}},
    **ERRORS,
}
_Form = Annotated[VideoRequest, Form(media_type="multipart/form-data")]
_Service = Annotated[Service, Depends(get_service)]


def find_job(service: _Service, video_id: Annotated[str, Path(max_length=100)]) -> Job:
    """The job that a path names."""
    return service.find(video_id)


_Job = Annotated[Job, Depends(find_job)]


@router.post("/sync", response_class=Response, responses=_FILE)
async def generate(asked: _Form, request: Request, service: _Service) -> Response:
    """Makes a video, and answers with the mp4 file."""
    jobs = service.scheduler.admit([video_request(asked, service.options)], asked.timeout)
    await service.finish(request, jobs)
    return Response(jobs[0].content, media_type=_MP4, headers={"X-Seed": str(jobs[0].request.seed)})


@router.post("", response_model=VideoAnswer, responses=ERRORS)
async def create(asked: _Form, service: _Service) -> VideoAnswer:
    """Queues a video, and answers with its job at once."""
    (job,) = service.scheduler.admit([video_request(asked, service.options)], asked.timeout)
    service.book.add(job)
    return _answer(job, service)


@router.get("", response_model=VideoList, responses=ERRORS)
async def list_jobs(service: _Service) -> VideoList:
    """The jobs that are known, the newest first."""
    videos = [job for job in service.book if job.request.kind == "video"]
    return VideoList(data=[_answer(job, service) for job in reversed(videos)])


@router.get("/{video_id}", response_model=VideoAnswer, responses=ERRORS)
async def retrieve(job: _Job, service: _Service) -> VideoAnswer:
    """A job as it is now."""
    return _answer(job, service)


@router.get("/{video_id}/content", response_class=Response, responses=_FILE)
async def content(job: _Job) -> Response:
    """The mp4 file of a job that is complete."""
    if job.content is None:
        raise BadRequestError("video_id", f"'{job.id}' is {job.status.value} and has no content.", "not_ready", 409)
    return Response(job.content, media_type=_MP4, headers={"X-Seed": str(job.request.seed)})


@router.get("/{video_id}/events", response_class=EventSourceResponse, responses=ERRORS)
async def events(job: _Job, service: _Service) -> AsyncIterable[ServerSentEvent]:
    """The job now and after each change, as server-sent events named by its status; the last one is final."""
    async for _ in job.changes():
        yield ServerSentEvent(event=job.status.value, data=_answer(job, service))


@router.delete("/{video_id}", response_model=VideoGone, responses=ERRORS)
async def delete(job: _Job, service: _Service) -> VideoGone:
    """Cancels a job; one that has ended is deleted, with its content."""
    cancelled = service.scheduler.cancel(job)
    if not cancelled:
        service.book.remove(job.id)
    return VideoGone(id=job.id, deleted=not cancelled, status=job.status.value)


def _answer(job: Job, service: Service) -> VideoAnswer:
    asked = job.request
    failure = job.failure
    return VideoAnswer(
        id=job.id,
        model=service.options.name,
        status=job.status.value,
        progress=job.progress,
        prompt=asked.prompt,
        size="auto" if asked.width is None else f"{asked.width}x{asked.height}",
        seconds=None if asked.num_frames is None else f"{asked.num_frames / asked.fps:.4g}",
        seed=asked.seed,
        created_at=int(job.created),
        completed_at=int(job.ended) if job.ended is not None and job.status is Status.COMPLETED else None,
        step=job.step,
        steps=job.steps,
        rank=job.rank,
        error=None if failure is None else ErrorDetail(message=failure.message, type="error", code=failure.code),
    )
