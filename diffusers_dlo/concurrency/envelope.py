# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the form of requests to workers and of their replies, as the side of the caller writes and reads them. Must not
send anything. See [Note: messages] in `worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .messages import decode, encode
from .wave import WorkerError
from .worker import MAX_MESSAGE


def make_request(kind: str, wave_id: int, method: str, payload: Any, what: str, notes: bool = False) -> bytes:
    """
    The bytes of a request; `what` names the payload in errors, and `notes` says whether its caller listens to notes.

    Raises:
        `ValueError`: the payload cannot be sent.
    """
    try:
        data = encode({"kind": kind, "wave_id": wave_id, "method": method, "payload": payload, "notes": notes})
    except ValueError as error:
        raise ValueError(f"{what} cannot be sent: {error}") from error
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"{what} takes {len(data)} bytes, and a message {MAX_MESSAGE} at most. Send less.")
    return data


def read_reply(data: memoryview | None, wave_id: int) -> dict[str, Any] | WorkerError | None:
    """A reply to `wave_id`, or what is wrong with it; None if it is one to an older wave."""
    try:
        if data is None:
            raise ValueError("it is not one frame")
        reply = decode(data)
        if not isinstance(reply, dict) or type(reply.get("wave_id")) is not int:
            raise ValueError("it has no 'wave_id'")
        if reply["wave_id"] > wave_id:
            raise ValueError(f"it answers wave {reply['wave_id']}, which has not been sent")
        texts: list[Any] = [reply.get(key) for key in ("type", "message", "traceback")]
        is_error = reply.get("ok") is False and all(isinstance(text, str) for text in texts)
        if not is_error and not (reply.get("ok") is True and "value" in reply):
            raise ValueError("it is neither a value nor an error")
    except ValueError as error:
        return WorkerError("MalformedReply", f"a reply could not be read: {error}")
    if reply["wave_id"] < wave_id:
        return None
    return WorkerError(*texts) if is_error else reply


def read_note(data: memoryview | None, wave_id: int) -> Mapping[str, Any] | None:
    """The message, if it is a note of the call `wave_id`: what it says is under "note"."""
    try:
        message = None if data is None else decode(data)
    except ValueError:
        return None
    if not isinstance(message, dict) or "note" not in message or message.get("wave_id") != wave_id:
        return None
    return message
