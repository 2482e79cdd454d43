# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how the page reaches a browser: its files, and what the browser is told that the page may do. Must not know what
the page shows: it is a client of the interface like any other, and gets no data from here.

[Note: content security] A prompt of somebody else is on the page of everybody. The script makes text nodes only, and
the policy holds it to that: no script, style or picture but these files, no connection but to this server, no HTML
from a string (trusted types), and no other site may frame the page.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response


router = APIRouter(include_in_schema=False)

PATHS = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""What is served, and of which file and type; all of it without a key, since nothing of it is secret."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the page of an older version would not know what a newer server says
}


def _add(path: str, name: str, media_type: str) -> None:
    body = resources.files(__package__).joinpath("page").joinpath(name).read_bytes()

    @router.get(path)
    async def page_file() -> Response:
        return Response(body, media_type=media_type, headers=_HEADERS)


for _path, (_name, _type) in PATHS.items():
    _add(_path, _name, _type)
