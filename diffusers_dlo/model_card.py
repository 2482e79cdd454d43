# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the section about the offload in the model card of a checkpoint: where it stands, renewing it, and writing the
card. What lies outside the section's two marks stays, byte for byte. Must not say what the section says.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import ModelCard

from .card_metadata import add_metadata
from .card_section import CardFigures, render_section
from .checkpoint_plan import plan_checkpoint
from .outline import Outline
from .prediction import Machine, Work
from .prediction_values import as_values


BEGIN = "<!-- diffusers-dlo card: begin; what stands between the two marks is renewed by this command -->"
END = "<!-- diffusers-dlo card: end -->"
TAG = "distributed-layerwise-offload"

_NAME = "README.md"


@dataclass(frozen=True)
class RenewedCard:
    """
    A model card with its section.

    Attributes:
        path (`str`): the file.
        content (`bytes`): what the file should hold.
        is_changed (`bool`): whether it holds something else, or is not there.
    """

    path: str
    content: bytes
    is_changed: bool

    @property
    def text(self) -> str:
        """The content."""
        return self.content.decode("utf-8-sig")

    def write(self) -> None:
        """
        Writes the file, all of it or nothing, with the permissions that it has. Where it holds the content already, it
        is left alone.

        Raises:
            `RuntimeError`: it cannot be written.
        """
        if not self.is_changed:
            return
        folder, temporary = os.path.dirname(self.path), ""
        try:
            mode = stat.S_IMODE(os.stat(self.path).st_mode) if os.path.exists(self.path) else 0o644
            fd, temporary = tempfile.mkstemp(prefix=f".{_NAME}-", dir=folder)
            with open(fd, "wb") as file:
                file.write(self.content)
                os.fchmod(fd, mode)
                file.flush()
                os.fsync(fd)
            os.replace(temporary, self.path)
            temporary = ""
        except OSError as error:
            raise RuntimeError(
                f"'{self.path}' cannot be written ({error.strerror or error}); it is what it was. Make room, or see "
                "to the permissions of its directory."
            ) from error
        finally:
            if temporary:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)


def renew_card(model_dir: str, plan: str | None = None, name: str | None = None) -> RenewedCard:
    r"""
    The model card of a checkpoint, with tags and a section about the offload, made anew from its configurations and
    the headers of its files. Writes nothing.

    Args:
        model_dir (`str`): the directory of a pipeline or of a single model.
        plan (`str`, *optional*): a file that `diffusers-dlo plan --json` has written of this checkpoint; its memory
            and times are shown. If None, they are predicted with the defaults.
        name (`str`, *optional*): what the section's code loads, such as the name on the Hub; the directory's name if
            None.

    Raises:
        `ValueError`: no such directory, no checkpoint, a plan that is damaged or of another model, or a card into
            which the section cannot be put: damaged marks or metadata, not UTF-8, a link that leads out of the
            directory.
    """
    if not os.path.isdir(model_dir):
        raise ValueError(f"'{model_dir}' is not a directory. Name the one that holds the checkpoint.")
    path = _find_card(model_dir)
    present, mark = _read_card(path)
    name = name or os.path.basename(os.path.realpath(model_dir))
    outline, figures = _predict(model_dir, plan)
    text = present if present is not None else f"\n# {' '.join(name.split())}\n"
    newline = _line_break(text)
    try:
        text = add_metadata(text, [outline.library, TAG], outline.library, newline)
        head = len(text) - len(ModelCard(text, ignore_metadata_errors=True).text)
    except (TypeError, ValueError) as error:  # a TypeError: a name in the metadata that is no text
        raise ValueError(f"'{path}': {error}") from error
    section = f"{BEGIN}\n{render_section(outline, figures, name)}\n{END}".replace("\n", newline)
    text = text[:head] + _put(text[head:], section, newline, path)
    content = mark + text.encode("utf-8")
    return RenewedCard(path, content, present is None or content != mark + present.encode("utf-8"))


def _find_card(model_dir: str) -> str:
    """The card's file; a link is followed inside the directory only, since what lies elsewhere may be others' too."""
    path, root = os.path.join(model_dir, _NAME), os.path.realpath(model_dir)
    if os.path.islink(path):
        target = os.path.realpath(path)
        if os.path.commonpath([root, target]) != root or not os.path.isfile(target):
            raise ValueError(
                f"'{path}' is a link to '{os.readlink(path)}', which is no file inside the directory, and the command "
                "writes nothing elsewhere. Put a copy of the card in place of the link."
            )
        return target
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"'{path}' is no file, so it holds no model card. Move it away.")
    return path


def _read_card(path: str) -> tuple[str | None, bytes]:
    """The card's text, None where there is none, and the byte order mark before it."""
    if not os.path.exists(path):
        return None, b""
    with open(path, "rb") as file:
        content = file.read()
    mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    try:
        return content[len(mark) :].decode("utf-8"), mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{path}' is not UTF-8 (byte {len(mark) + error.start}: {error.reason}), which model cards have to be. "
            "Convert it first."
        ) from error


def _line_break(text: str) -> str:
    """The line break that most lines have."""
    return "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n"


def _put(body: str, section: str, newline: str, path: str) -> str:
    """The body with the section in place of the one that is there, or at its end."""
    blocks, is_closed = _code_blocks(body)
    begins, ends = (
        [
            found
            for found in re.finditer(rf"(?m)^{re.escape(mark)}[ \t]*(?=\r?$)", body)
            if not any(start <= found.start() < end for start, end in blocks)
        ]
        for mark in (BEGIN, END)
    )
    if not begins and not ends and not is_closed:
        raise ValueError(
            f"'{path}' ends in a block of code that begins with '{body[blocks[-1][0] :].splitlines()[0]:.40}' and has "
            "no end, so what comes after it would be code as well. End it."
        )
    if not begins and not ends:
        gap = "" if not body or body.endswith(2 * newline) else newline if body.endswith("\n") else 2 * newline
        return f"{body}{gap}{section}{newline}"
    if len(begins) != 1 or len(ends) != 1 or begins[0].start() > ends[0].start():
        raise ValueError(
            f"'{path}': the marks of the section are damaged: {len(begins)} lines begin it and {len(ends)} end it, "
            "where one of each is needed, in this order. Remove these lines, and what is left of the section: "
            f"'{BEGIN}' and '{END}'."
        )
    return body[: begins[0].start()] + section + body[ends[0].end() :]


def _code_blocks(body: str) -> tuple[list[tuple[int, int]], bool]:
    """Where the fenced blocks of code are, in which marks are only shown, and whether the last of them has an end."""
    blocks: list[tuple[int, int]] = []
    fence, start = "", 0
    for line in re.finditer(r"(?m)^ {0,3}(`{3,}(?=[^`\r\n]*\r?$)|~{3,})[ \t]*([^\r\n]*)", body):
        if not fence:
            fence, start = line[1], line.start()
        elif line[1].startswith(fence) and not line[2]:
            blocks.append((start, line.end()))
            fence = ""
    return (blocks, True) if not fence else ([*blocks, (start, len(body))], False)


def _predict(model_dir: str, plan: str | None) -> tuple[Outline, CardFigures]:
    """The outline of a checkpoint, and the figures of a plan of it, or of one with the defaults."""
    if plan is None:
        outline, prediction = plan_checkpoint(model_dir, 1, Machine(), Work())
        return outline, CardFigures.of(as_values(outline, prediction))
    values = _read_plan(plan)
    try:
        figures = CardFigures.of(values)
        dtype = getattr(torch, values["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"no dtype: {values['dtype']!r}")
        described = _described(values)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"'{plan}' is no plan that this version of 'diffusers-dlo plan --json' has written "
            f"({type(error).__name__}: {error}). Write it anew."
        ) from error
    if not figures.rows:
        raise ValueError(f"'{plan}' says that the model does not fit: plan with other amounts, or without any.")
    outline, prediction = plan_checkpoint(model_dir, 1, Machine(), Work(), dtype=dtype)
    here = _described(as_values(outline, prediction))
    streamed = [name for name, component in described.items() if component["transfer"] != "placed"]
    if described.keys() == here.keys() and streamed != [n for n, one in here.items() if one["transfer"] != "placed"]:
        outline, prediction = plan_checkpoint(model_dir, 1, Machine(), Work(), dtype=dtype, components=streamed)
        here = _described(as_values(outline, prediction))
    if values["class"] != outline.class_name or _sizes(described) != _sizes(here):
        names = [name for name in {**here, **described} if _sizes(here).get(name) != _sizes(described).get(name)]
        differs = f"'{names[0]}' differs" if names else f"it is of a '{values['class']}'"
        raise ValueError(
            f"'{plan}' is a plan of another model than the '{outline.class_name}' in '{model_dir}': {differs}. "
            f"Write one with: diffusers-dlo plan {model_dir} --json {plan}"
        )
    return outline, figures


def _read_plan(plan: str) -> Mapping[str, Any]:
    try:
        with open(plan, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise ValueError(f"'{plan}' cannot be read ({error.strerror or error}). Name a file that is there.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{plan}' is not JSON ({error}). Name what 'diffusers-dlo plan --json' wrote.") from error
    if not isinstance(values, dict):
        raise ValueError(f"'{plan}' is no plan: it holds a {type(values).__name__}, and no names with values.")
    return values


def _described(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The components in a plan's values, by name."""
    return {str(component["name"]): {"transfer": "", **component} for component in values["components"]}


def _sizes(components: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """All but the transfer, which depends on the number of ranks."""
    return {
        name: {key: value for key, value in component.items() if key not in ("transfer", "name")}
        for name, component in components.items()
    }
