# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the application: its endpoints, the form of its errors, and its life from the first rank's start to the last one's
end. Must not make pictures.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterable, AsyncIterator
from types import FrameType
from typing import Annotated, Any

import uvicorn
from diffusers.utils import logging
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from .._version import __version__
from . import images, job_endpoints, page_files, videos
from .access import Access, error_body
from .checks import BadRequestError
from .options import ServeOptions
from .scheduler import RefusedError
from .schemas import ERRORS, Health, ModelCard, ModelList
from .service import ClientGoneError, Service, get_service


logger = logging.get_logger(__name__)

_EVENT_SECONDS = 0.1
"""The state is told so often at most."""
_GRACEFUL_SECONDS = 2
"""How long connections may take to end after a signal; what they wait for has been failed by then."""

_Service = Annotated[Service, Depends(get_service)]


def make_app(options: ServeOptions) -> FastAPI:
    """The application, whose ranks start and end with its lifespan. Its `state.service` is the server behind it."""
    service = Service(options)
    app = FastAPI(
        title="diffusers-dlo", version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None, debug=False
    )
    app.state.service = service
    app.state.stop = lambda: None
    app.include_router(images.router)
    app.include_router(videos.router)
    app.include_router(job_endpoints.router)
    app.include_router(page_files.router)
    _add_state(app)
    app.add_exception_handler(BadRequestError, _bad_request)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(ClientGoneError, _gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Access, options=options)  # type: ignore[arg-type]
    return app


def serve(options: ServeOptions) -> None:
    """
    Serves until a signal comes.

    Raises:
        `RuntimeError`: the ranks could not start.
    """
    if not options.loopback and options.api_key is None:
        logger.warning(
            f"'{options.host}' can be reached by other machines, and there is no key: whoever reaches it can use it. "
            "Give --api-key, or listen at 127.0.0.1."
        )
    app = make_app(options)
    server = _Server(
        uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            timeout_graceful_shutdown=_GRACEFUL_SECONDS,
            server_header=False,
            log_level="info",
        ),
        app,
    )
    # A terminal that is closed ends the server as Ctrl-C does; under nohup it does not.
    hangs_up = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if hangs_up:
        signal.signal(signal.SIGHUP, server.handle_exit)
    try:
        server.run()
    except SystemExit as ended:  # its log has told why
        raise RuntimeError(
            f"'{options.host}', port {options.port}, cannot be listened at, for the reason above. Give another --port "
            "or --host."
        ) from ended
    finally:
        if hangs_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    error = app.state.service.scheduler.fleet.error
    if error is not None:
        raise RuntimeError(f"The ranks could not start, so nothing was served. {error}") from error


class _Server(uvicorn.Server):
    """A server whose requests are failed when a signal comes, so that their connections end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        app.state.stop = self._stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.started:
            self._app.state.loop.call_soon_threadsafe(self._app.state.service.scheduler.close)
        super().handle_exit(sig, frame)

    def _stop(self) -> None:
        self.should_exit = True


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    scheduler = app.state.service.scheduler
    app.state.loop = asyncio.get_running_loop()
    running = asyncio.create_task(scheduler.run(app.state.stop))
    try:
        yield
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def _add_state(app: FastAPI) -> None:
    @app.get("/health", response_model=Health, tags=["state"])
    async def health() -> Health:
        """Whether the server runs."""
        return Health(status="ok")

    @app.get("/ready", response_model=Health, responses={503: {"model": Health}}, tags=["state"])
    async def ready(response: Response, service: _Service) -> Health:
        """Whether ranks take requests; those that come meanwhile wait."""
        fleet = service.scheduler.fleet
        if fleet.ready:
            return Health(status="ready")
        response.status_code = 503
        response.headers["Retry-After"] = "5"
        return Health(status=fleet.state, reason=fleet.reason)

    @app.get("/metrics", response_class=Response, responses=ERRORS, tags=["state"])
    async def metrics(service: _Service) -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.page(service.scheduler), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", response_model=ModelList, responses=ERRORS, tags=["state"])
    async def models(service: _Service) -> ModelList:
        """The model that is served."""
        return ModelList(data=[ModelCard(id=service.options.name, created=service.created)])

    @app.get("/v1/events", response_class=EventSourceResponse, responses=ERRORS, tags=["state"])
    async def events(service: _Service) -> AsyncIterable[ServerSentEvent]:
        """The queue and the ranks, now and after each change, as server-sent events."""
        scheduler = service.scheduler
        while True:
            seen, last = scheduler.pulse.beats, scheduler.closed
            yield ServerSentEvent(event="state", data=scheduler.snapshot())
            if last:
                return
            await asyncio.sleep(_EVENT_SECONDS)
            await scheduler.pulse.after(seen)


def _bad_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, BadRequestError)
    body = error_body(str(error), "invalid_request_error", error.param, error.code)
    return JSONResponse(body, error.status)


def _not_valid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [part for part in first["loc"] if isinstance(part, str) and part not in ("body", "query", "path")]
    field = ".".join(where) or None
    message = f"'{field}': {first['msg']}." if field else f"{first['msg']}."
    return JSONResponse(error_body(message, "invalid_request_error", field, first["type"]), 400)


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    failure = error.failure
    kinds = {503: "server_overloaded", 504: "timeout_error"}
    headers = {} if failure.retry_after is None else {"Retry-After": str(failure.retry_after)}
    body = error_body(failure.message, kinds.get(failure.status, "invalid_request_error"), code=failure.code)
    return JSONResponse(body, failure.status, headers)


def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it but the log


def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body: dict[str, Any] = error_body(str(error.detail), "invalid_request_error", code=f"http_{error.status_code}")
    return JSONResponse(body, error.status_code, error.headers)
