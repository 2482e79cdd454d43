# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The code blocks of the pages, for the tests that run them.

A block that no test can run has its reason just before it: `<!-- not run: reason -->`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from markdown_it import MarkdownIt


ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")))

NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, in what language, what it says, why it is not run ("" if it is)."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def place(self) -> str:
        """The page and the line, for messages."""
        return f"{self.page}:{self.line}"


@lru_cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """All fenced blocks of a page, such as "docs/ranks.md"."""
    found, before = [], None
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text()):
        if token.type == "fence":
            match = NOT_RUN.fullmatch(before.content) if before is not None and before.type == "html_block" else None
            reason = match[1] if match else ""
            found.append(Block(page, token.map[0] + 1, token.info.strip(), token.content, reason))
        before = token
    return tuple(found)


def commands(page: str, program: str = "") -> list[list[str]]:
    """
    The commands in the bash blocks of a page that are run, split into words; those of one program where it is named
    ("curl", or with its subcommand, "diffusers-dlo serve"). Continued lines are one command, and so are quoted ones.
    """
    blocks = [block for block in blocks_of(page) if block.language == "bash" and not block.reason]
    wanted = program.split()
    return [words for block in blocks for words in _split(block.text) if program_of(words)[: len(wanted)] == wanted]


def _split(text: str) -> Iterator[list[str]]:
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation goes on in the next line
            continue
        pending = ""
        if words:
            yield words
    assert not pending, f"a quotation does not end: {pending}"


def program_of(words: list[str]) -> list[str]:
    """A command without the variables that are set before it."""
    start = next((index for index, word in enumerate(words) if not re.fullmatch(r"[A-Z_]+=.*", word)), len(words))
    return words[start:]
