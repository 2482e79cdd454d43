# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what runs in a worker: the pipeline, and one request after the other, of which it tells each step and which it
ends between two steps when nobody waits for it any more. Must not know of HTTP, queues or other ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.utils import logging

from ..api import OffloadHandle
from ..checkpoint.loading import mapped_loading
from ..concurrency.conversation import cancelled, tell
from .arguments import Request, pipeline_arguments
from .media import mp4, pictures_of, png


logger = logging.get_logger(__name__)

_DEMO = {"width": 128, "height": 128, "num_frames": 17, "num_inference_steps": 4}
"""What the demo makes where a request does not say: the model's own defaults are those of the large one."""
_SHIFTS = ("flow_shift", "shift")
"""What schedulers call the shift of their noise levels."""


class Cancelled(Exception):
    """Nobody waits for the result any more."""


def build_rank(
    model: str | None, demo_folder: str, dtype: str, vae_tiling: bool, timing: bool, offload: Mapping[str, Any]
) -> Rank:
    r"""
    Loads a pipeline and enables the offload; all ranks do so together.

    Args:
        model (`str`, *optional*): folder or Hub id; None is the demo, on the CPU.
        demo_folder (`str`): where the demo's checkpoint is built, by whichever rank is first.
        dtype (`str`): the name of a dtype of torch.
        vae_tiling (`bool`): whether the VAE decodes in tiles.
        timing (`bool`): whether transfers are timed.
        offload (`Mapping[str, Any]`): options of `enable_distributed_layerwise_offload`.

    Raises:
        `ValueError`: the pipeline has no VAE that can decode in tiles; and as `from_pretrained` and enabling.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    options = dict(offload)
    if model is None:
        from .demo import build_tiny_cosmos3

        # The number of threads changes the last bit of a sum, and several are no faster with so little to do.
        torch.set_num_threads(1)
        options["onload_device"] = "cpu"
        model, defaults = str(build_tiny_cosmos3(f"{demo_folder}/cosmos3")), _DEMO
    else:
        defaults = {}
    with mapped_loading():
        pipe = DiffusionPipeline.from_pretrained(model, dtype=getattr(torch, dtype))
    pipe.set_progress_bar_config(disable=True)
    if vae_tiling:
        vae: Any = getattr(pipe, "vae", None)
        if not hasattr(vae, "enable_tiling"):
            raise ValueError(f"'{type(pipe).__name__}' has no VAE that decodes in tiles; leave --vae-tiling out.")
        vae.enable_tiling()
    return Rank(pipe, pipe.enable_distributed_layerwise_offload(**options), defaults, timing)


class Rank:
    """
    A pipeline and its offload.

    Args:
        pipe (`Any`): the `DiffusionPipeline` that makes pictures or videos.
        handle (`OffloadHandle`): its offload.
        defaults (`Mapping[str, Any]`): arguments of its call that requests need not give.
        timing (`bool`): whether transfers are timed.
    """

    def __init__(self, pipe: Any, handle: OffloadHandle, defaults: Mapping[str, Any], timing: bool) -> None:
        self._pipe = pipe
        self._handle = handle
        self._defaults = defaults
        self._timing = timing

    def figures(self, _: Any = None) -> dict[str, Any]:
        """What the offload tells about itself now, for the page and the metrics."""
        report = self._handle.report()
        names = (
            *("host_kind", "transfer", "passes", "ghost_passes", "h2d_bytes", "gather_bytes", "overlap", "advice"),
            *("device_slot_bytes", "resident_bytes", "device_placed_bytes", "host_private_bytes", "host_shared_bytes"),
        )
        return {name: getattr(report, name) for name in names}

    def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        r"""
        Makes what a `Request` asks for. Says `{"step": ..., "steps": ...}` after each step.

        Returns:
            `dict`: with `outcome`, and
            - "done": `content`, the bytes of a PNG or mp4 file, and `seconds`;
            - "cancelled": nothing else;
            - "refused": `message`, why the pipeline does not do this;
            - "broken": `message`, why this rank can do no more.
        """
        begun = time.monotonic()
        try:
            content = self._make(Request(**request))
        except Cancelled:
            return {"outcome": "cancelled"}
        except torch.OutOfMemoryError as error:
            return {"outcome": "refused", "message": f"This takes more memory than there is; ask for less. {error}"}
        except Exception as error:
            # What the pipeline's checks say tells all; of anything else one wants to know where it came from.
            is_plain = isinstance(error, (ValueError, TypeError))
            logger.warning(f"A request failed: {error if is_plain else traceback.format_exc()}")
            outcome = "broken" if _is_ours(error) else "refused"
            return {"outcome": outcome, "message": str(error) or type(error).__name__}
        return {
            "outcome": "done",
            "content": content,
            "seconds": time.monotonic() - begun,
            "figures": self.figures(),
        }

    def _make(self, request: Request) -> bytes:
        arguments = pipeline_arguments(self._pipe, request, self._defaults)
        arguments["generator"] = torch.Generator("cpu").manual_seed(request.seed)
        wanted = arguments.get("num_inference_steps")

        def after_step(pipe: Any, index: int, timestep: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
            tell({"step": index + 1, "steps": getattr(pipe, "num_timesteps", None) or wanted or index + 1})
            if cancelled():
                raise Cancelled  # between steps: no block is held
            return {}

        if _takes_callback(self._pipe):
            arguments["callback_on_step_end"] = after_step
        if cancelled():
            raise Cancelled
        with self._shifted(request.flow_shift), self._handle.timing() if self._timing else contextlib.nullcontext():
            frames = pictures_of(self._pipe(**arguments, output_type="pil"))
        if cancelled():
            raise Cancelled
        return png(frames[0]) if request.kind == "image" else mp4(frames, request.fps)

    @contextlib.contextmanager
    def _shifted(self, shift: float | None) -> Iterator[None]:
        """The context in which the scheduler has another shift: a scheduler made for it, since they keep state."""
        if shift is None:
            yield
            return
        scheduler = self._pipe.scheduler
        name = next((name for name in _SHIFTS if name in scheduler.config), None)
        if name is None:
            raise ValueError(f"The scheduler '{type(scheduler).__name__}' has no shift; leave 'flow_shift' out.")
        self._pipe.scheduler = type(scheduler).from_config(scheduler.config, **{name: shift})
        try:
            yield
        finally:
            self._pipe.scheduler = scheduler


def _takes_callback(pipe: Any) -> bool:
    return "callback_on_step_end" in inspect.signature(pipe).parameters


def _is_ours(error: BaseException) -> bool:
    """Whether the offload raised it, and not the pipeline: a group that is broken, or a file that has changed."""
    frame = error.__traceback__
    names = []
    while frame is not None:
        names.append(str(frame.tb_frame.f_globals.get("__name__", "")))
        frame = frame.tb_next
    inside = f"{__package__}."
    return names[-1].startswith(f"{inside.split('.')[0]}.") and not names[-1].startswith(inside)
