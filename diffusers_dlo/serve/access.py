# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns who may speak to the server, and how much at a time: the API key, the names under which a server of this machine
only may be called, and the size of a body. Must not read bodies.

[Note: other pages] A server that only this machine reaches is reached by every page in a browser on it too. A page of
another site says so in `Origin`; one whose name was made to point here (DNS rebinding) has that name in `Host`. Both
are refused. With a key neither matters, because the page does not have it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from .options import ServeOptions, is_loopback
from .page_files import PATHS


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_OPEN_PATHS = (*PATHS, "/health", "/ready")
"""What is answered without a key: a page that asks for it, and whether the server runs."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error, in OpenAI's form. What it quotes may be text that no answer can hold."""
    return {"error": {"message": _as_text(message), "type": kind, "param": param and _as_text(param), "code": code}}


class Access:
    r"""
    What stands before the application.

    Args:
        app (`Callable`): the application.
        options (`ServeOptions`): the key, the host and the limit of a body.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], options: ServeOptions) -> None:
        self._app = app
        self._key = None if options.api_key is None else _digest(options.api_key.encode())
        self._guarded = options.loopback and options.api_key is None
        self._most = options.limits.body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refuse(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refuse(self, path: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self._key is not None and path not in _OPEN_PATHS:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            # Digests, so that the time does not tell the length of the key either.
            if not hmac.compare_digest(_digest(token.strip()), self._key) or scheme.lower() != b"bearer":
                body = error_body(
                    "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                    "authentication_error",
                    code="invalid_api_key",
                )
                return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        if self._guarded:
            host = headers.get(b"host", b"").decode("latin-1")
            origin = headers.get(b"origin", b"").decode("latin-1")
            if not is_loopback(_parts(f"//{host}").hostname or "") or (origin and _parts(origin).netloc != host):
                body = error_body(
                    f"'{origin or host:.100}' is not this server, which serves this machine only and without a key. "
                    "Call it by 127.0.0.1 or localhost, or start it with --api-key.",
                    "permission_error",
                    code="wrong_host",
                )
                return JSONResponse(body, 403)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            return JSONResponse(
                error_body(self._too_large(), "invalid_request_error", code="body_too_large"),
                413,
                {"Connection": "close"},
            )
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, which counts: a body may come without its length, or with a wrong one."""
        received = 0

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise HTTPException(413, self._too_large())
            return message

        return bounded

    def _too_large(self) -> str:
        return f"The body of the request is too large; this server allows {self._most} bytes (--max-body)."


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _as_text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _parts(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # brackets that hold no address
        return urlsplit("")
