# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is told of a coded file that was written: how large it is, beside what it would be. Must not print.
"""

from __future__ import annotations

import os

from ..byte_size import format_bytes
from ..checkpoint.safetensors_file import peek_header
from ..tables import render_table
from .coded_file import CodedFile, is_shard_key


def render_summary(coded: CodedFile) -> str:
    """What a coded file holds, by dtype, as a table, and its size below."""
    rows = [
        [
            dtype,
            "coded" if after < before else "as it is",
            format_bytes(before),
            format_bytes(after),
            _ratio(after, before),
        ]
        for dtype, (before, after) in sorted(coded.sizes.items())
    ]
    others = sum(one.nbytes for one in peek_header(coded.path) if not is_shard_key(one.key))
    if others:
        rows.append(
            ["what is in no coded block", "as it is", format_bytes(others), format_bytes(others), _ratio(1, 1)]
        )
    shards = f"{coded.ranks} shard{'s' if coded.ranks > 1 else ''} each"
    title = f"{len(coded.blocks)} blocks in {shards}, by {coded.codec} {coded.codec_version}"
    table = render_table(title, ["dtype", "", "weights", "in the file", "ratio"], rows)
    size, plain = os.path.getsize(coded.path), others + sum(block.tensors_nbytes for block in coded.blocks.values())
    return (
        f"{table}\nfile: {format_bytes(size)} for {format_bytes(plain)} of weights, a ratio of {_ratio(size, plain)}"
    )


def _ratio(after: int, before: int) -> str:
    return f"{after / before:.3f}"
