# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What the examples share: the command line, the ranks and who generates what, and writing pictures and videos."""

import argparse
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import diffusers
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from diffusers.utils import export_to_video
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from PIL import Image


DEFAULT_PROMPTS = (
    "a red fox runs through fresh snow at sunrise",
    "a paper boat drifts down a rainy street",
    "an old lighthouse on a cliff, seen from a slow flying drone",
    "a robot arm pours coffee into a blue cup",
)


@dataclass(frozen=True)
class Example:
    """What distinguishes one example from another, as far as the command line is concerned."""

    name: str
    pipeline: type[diffusers.DiffusionPipeline]
    build_tiny: Callable[[Path], Path]
    # Arguments of the pipeline call for the tiny checkpoint; a real model has its own defaults.
    tiny_call: Mapping[str, int]
    writes_video: bool


@dataclass(frozen=True)
class Job:
    """One prompt for one rank. `path` has no suffix yet."""

    prompt: str
    seed: int
    path: Path

    @property
    def generator(self) -> torch.Generator:
        # On the CPU: the noise, and so the result, does not depend on the kind of accelerator.
        return torch.Generator("cpu").manual_seed(self.seed)


# ---- Command line ----


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad argument in one line, without the usage text (every rank reports), and exits with 2."""

    def error(self, message: str) -> NoReturn:
        rank = f"[rank {os.environ.get('RANK')}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        self.exit(2, f"{rank}{self.prog}: {message}\n")


def parse_arguments(example: Example) -> argparse.Namespace:
    """Read and check the command line, before any process group or model exists.

    Besides the options, the result has `prompts` (a list) and `call`, the arguments of the pipeline call.
    """
    parser = OneLineParser(description=f"{example.pipeline.__name__} with distributed layerwise offload.")
    parser.add_argument(
        "--model", help="folder or Hub id of a pipeline (default: build a tiny one with random weights)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="text file, one prompt per line (default: built-in prompts)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs") / example.name)
    parser.add_argument("--cache-dir", type=Path, default=Path("outputs") / "tiny", help="where the tiny one is kept")
    parser.add_argument("--steps", type=_whole_number(1), help="denoising steps")
    parser.add_argument("--height", type=_whole_number(16), help="pixels, a multiple of 16")
    parser.add_argument("--width", type=_whole_number(16), help="pixels, a multiple of 16")
    if example.writes_video:
        parser.add_argument("--num-frames", type=_whole_number(1), help="1 + a multiple of 4")
    parser.add_argument("--seed", type=_whole_number(0), default=0)
    parser.add_argument("--transfer", choices=["auto", "all_gather", "local"], default="auto")
    parser.add_argument(
        "--num-slots", type=_auto_or_whole_number, default="auto", help="block-sized buffers on the device"
    )
    parser.add_argument("--host", choices=["auto", "mapped", "packed", "pinned"], default="auto")
    parser.add_argument("--no-offload", action="store_true", help="the ordinary pipeline, to compare with")
    args, unknown = parser.parse_known_args()
    if unknown:
        parser.error(f"'{unknown[0]}' is not an option of this example; see --help")

    for option in ("height", "width"):
        pixels = getattr(args, option)
        if pixels and pixels % 16:
            low = pixels // 16 * 16
            parser.error(f"--{option}: '{pixels}' is not a multiple of 16; use {low} or {low + 16}")
    frames = getattr(args, "num_frames", None)
    if frames and frames % 4 != 1:
        low = max(1, (frames - 1) // 4 * 4 + 1)
        parser.error(f"--num-frames: '{frames}' is not 1 + a multiple of 4; use {low} or {low + 4}")
    if example.writes_video and importlib.util.find_spec("imageio_ffmpeg") is None:
        parser.error("'imageio-ffmpeg' is not installed, it writes the mp4; run `pip install imageio imageio-ffmpeg`")
    try:
        args.one_prompt_each = args.prompts is None
        args.prompts = list(DEFAULT_PROMPTS) if args.prompts is None else _read_prompts(Path(args.prompts))
        if args.model is not None:
            _check_model(args.model, example)
        _make_folder("--output-dir", args.output_dir)
        if args.model is None:
            _make_folder("--cache-dir", args.cache_dir)
    except (OSError, ValueError) as error:
        parser.error(_one_line(error))

    given = {
        "num_inference_steps": args.steps,
        "height": args.height,
        "width": args.width,
        "num_frames": frames,
    }
    args.call = dict(example.tiny_call) if args.model is None else {}
    args.call.update({name: value for name, value in given.items() if value is not None})
    return args


def _whole_number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not a whole number of at least {minimum}; give such a number or leave the option out"
            )
        return int(text)

    return parse


def _auto_or_whole_number(text: str) -> str | int:
    # Two, because one block computes while the next arrives.
    if text != "auto" and (not re.fullmatch(r"\d+", text) or int(text) < 2):
        raise argparse.ArgumentTypeError(f"'{text}' is neither 'auto' nor a whole number of at least 2; give either")
    return text if text == "auto" else int(text)


def _read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"--prompts: '{path}' is not a file; give a text file with one prompt per line")
    try:
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ValueError(
            f"--prompts: '{path}' is not UTF-8 text; save it as plain text, one prompt per line"
        ) from None
    if not prompts:
        raise ValueError(f"--prompts: '{path}' has no prompt in it; write one prompt per line")
    return prompts


def _check_model(model: str, example: Example) -> None:
    """Refuse what `from_pretrained` would refuse later and less clearly; reads `model_index.json` only."""
    if Path(model).is_dir():
        index = str(Path(model) / "model_index.json")
        if not Path(index).is_file():
            raise ValueError(f"--model: '{model}' has no 'model_index.json'; give the folder of a whole pipeline")
    elif not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        raise ValueError(f"--model: '{model}' does not exist; give the folder of a pipeline, or a Hub id 'owner/name'")
    else:
        index = try_to_load_from_cache(model, "model_index.json")
        if not isinstance(index, str):
            try:
                HfApi().model_info(model, timeout=10)  # fails at once where a download would retry for long
                index = hf_hub_download(model, "model_index.json")
            except Exception as error:  # the Hub's client and its transport raise kinds without a common parent
                raise ValueError(
                    f"--model: '{model}' is not a folder here, and the Hub did not give it ({_one_line(error)}); "
                    "check the spelling and the network, and run `hf auth login` if the model is gated"
                ) from None
    found = json.loads(Path(index).read_text(encoding="utf-8")).get("_class_name")
    if found != example.pipeline.__name__:
        raise ValueError(
            f"--model: '{model}' is a '{found}', not a '{example.pipeline.__name__}'; give one, or use another example"
        )


def _make_folder(option: str, path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK) else "no permission to write"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if reason:
        raise ValueError(f"{option}: '{path}' cannot be used as a folder ({reason}); choose another one")


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


# ---- Ranks ----


@dataclass(frozen=True)
class Worker:
    """This process among its peers."""

    rank: int
    world_size: int
    is_local_main: bool
    device: torch.device

    def print(self, message: object) -> None:
        """Print on rank 0 only."""
        if self.rank == 0:
            print(message, flush=True)

    def tell(self, message: object) -> None:
        """Print on this rank, and say which one it is."""
        print(f"rank {self.rank}: {message}" if self.world_size > 1 else message, flush=True)

    def tiny_checkpoint(self, example: Example, cache_dir: Path) -> Path:
        """Build the example's tiny checkpoint once per host; the other ranks wait until it is there."""
        diffusers.utils.logging.disable_progress_bar()  # a load of milliseconds needs no bars
        transformers.utils.logging.disable_progress_bar()
        if self.device.type == "cpu":
            # So little work is done sooner by one thread than by several that wait for each other; and the number of
            # threads changes the last bit of a sum, while results should not depend on how the example was launched.
            torch.set_num_threads(1)
        with PartialState().local_main_process_first():
            return example.build_tiny(cache_dir / example.name)

    def jobs(self, args: argparse.Namespace) -> Iterator[Job]:
        """This rank's share: job i has prompt `i % len(prompts)` and runs on rank `i % world_size`.

        All prompts of a file are run, in several rounds if there are more of them than ranks. Where ranks are more,
        a prompt comes again with another seed, so that no two ranks write the same picture.
        """
        prompts = args.prompts
        count = self.world_size if args.one_prompt_each else max(self.world_size, len(prompts))
        for number in range(self.rank, count, self.world_size):
            yield Job(
                prompt=prompts[number % len(prompts)],
                seed=args.seed + number // len(prompts),
                path=args.output_dir / f"rank{self.rank}_{number:03d}",
            )


@contextmanager
def launched() -> Iterator[Worker]:
    """Join the other ranks, whether started by `accelerate launch`, `torchrun` or, as the only one, by `python`."""
    # Without `cpu=True` a machine with no accelerator gets a process group that accelerate then does not know of.
    state = PartialState(cpu=not torch.accelerator.is_available())
    worker = Worker(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        is_local_main=state.is_local_main_process,
        device=torch.device("cpu") if state.device.type == "cpu" else state.device,  # never "cpu:0"
    )
    if not worker.is_local_main:
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()

    yield worker

    # Not in a `finally`: after an error on this rank the others notice its end; a barrier would only delay that.
    if dist.is_initialized():
        state.wait_for_everyone()
        dist.destroy_process_group()


# ---- Results ----


def save_image(image: Image.Image, path: Path) -> str:
    """Write `path` + ".png". Returns what was written, in words."""
    file = path.with_name(f"{path.name}.png")
    image.save(file)
    return f"written to {file}"


def save_video(frames: Sequence[Image.Image], path: Path, fps: int) -> str:
    """Write `path` + ".mp4", and "_strip.png" with some of its frames. Returns what was written, in words."""
    video, strip = path.with_name(f"{path.name}.mp4"), path.with_name(f"{path.name}_strip.png")
    export_to_video(list(frames), str(video), fps=fps)
    picture_strip(frames).save(strip)
    return f"written to {video} and {strip.name}"


def picture_strip(frames: Sequence[Image.Image], count: int = 6, gap: int = 4) -> Image.Image:
    """Evenly spaced frames side by side, the first and the last among them."""
    count = min(count, len(frames))
    chosen = [frames[round(i * (len(frames) - 1) / max(1, count - 1))] for i in range(count)]
    width, height = chosen[0].size
    strip = Image.new("RGB", (count * (width + gap) - gap, height), "white")
    for i, frame in enumerate(chosen):
        strip.paste(frame, (i * (width + gap), 0))
    return strip
