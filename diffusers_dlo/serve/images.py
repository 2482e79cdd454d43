# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the endpoint for pictures, which is OpenAI's. Must not know how they are made.
"""

from __future__ import annotations

import base64
import io
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from PIL import Image

from .checks import image_requests
from .schemas import ERRORS, ImageAnswer, ImageData, ImageRequest
from .service import Service, get_service


router = APIRouter(prefix="/v1/images", tags=["images"])

_PNG = "image/png"


@router.post(
    "/generations",
    response_model=ImageAnswer,
    responses={200: {"content": {_PNG: {"schema": {"type": "string", "format": "binary"}}}}, **ERRORS},
)
async def generate(asked: ImageRequest, request: Request, service: Annotated[Service, Depends(get_service)]) -> Any:
    """Makes `n` pictures, as JSON or, with `Accept: image/png`, as the file itself."""
    if _PNG in request.headers.get("accept", ""):
        asked.response_format = "png"
    jobs = service.scheduler.admit(image_requests(asked, service.options), asked.timeout)
    await service.finish(request, jobs)
    pictures = [(job.request.seed, job.content or b"") for job in jobs]
    if asked.response_format == "png":
        seed, content = pictures[0]
        return Response(content, media_type=_PNG, headers={"X-Seed": str(seed)})
    with Image.open(io.BytesIO(pictures[0][1])) as first:
        size = "{}x{}".format(*first.size)
    data = [ImageData(b64_json=base64.b64encode(content).decode(), seed=seed) for seed, content in pictures]
    return ImageAnswer(created=int(time.time()), data=data, size=size)
