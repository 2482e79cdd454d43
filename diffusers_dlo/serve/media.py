# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the files that answers consist of: PNG by Pillow, mp4 by diffusers' own writer. Must not know who asked for them.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from diffusers.utils import export_to_video
from PIL import Image


_FIELDS = ("images", "frames", "video", "videos")
"""Where pipelines of diffusers put what they have made."""


def pictures_of(output: Any) -> list[Image.Image]:
    r"""
    The frames of the first sample of a pipeline's output; one frame if it is a picture.

    Args:
        output (`BaseOutput`): of a call with `output_type="pil"`.

    Raises:
        `ValueError`: there are none.
    """
    found = next((output[name] for name in _FIELDS if output.get(name) is not None), None)
    while isinstance(found, (list, tuple)) and len(found) and isinstance(found[0], (list, tuple)):
        found = found[0]
    if isinstance(found, Image.Image):
        found = [found]
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(one, Image.Image) for one in found):
        raise ValueError(f"The pipeline returned no pictures, but {list(output)}. It may have refused the prompt.")
    return list(found)


def png(picture: Image.Image) -> bytes:
    """A picture as a PNG file."""
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return file.getvalue()


def mp4(frames: Sequence[Image.Image], fps: int) -> bytes:
    """Frames as an mp4 file. Sides that are odd lose a pixel: the codec halves colours in both directions."""
    width, height = (side - side % 2 for side in frames[0].size)
    even = [frame.convert("RGB").crop((0, 0, width, height)) for frame in frames]
    # The writer takes a name only. The folder is private, and its name is nobody's choice.
    with tempfile.TemporaryDirectory(prefix="diffusers_dlo-") as folder:
        path = os.path.join(folder, "video.mp4")
        export_to_video(even, path, fps=fps, macro_block_size=2)
        with open(path, "rb") as file:
            return file.read()
