# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the options of the server: its command line, with the names of the original as aliases, and the limits of a
request. Must not start anything, and must not need the extra `serve`.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from ..byte_size import parse_bytes


_MAX_PROMPT = 32_000
"""Characters of a prompt; OpenAI's limit for images."""


@dataclass(frozen=True)
class Limits:
    r"""
    What one request may ask for.

    Args:
        size (`int`): pixels of the longer side.
        steps (`int`): denoising steps.
        frames (`int`): frames of a video.
        n (`int`): pictures.
        prompt (`int`): characters of a prompt, and of a negative one.
        body (`int`): bytes of a request.
        queue (`int`): pictures and videos that wait for a rank.
        seconds (`float`): from admission to the answer.
    """

    size: int = 2048
    steps: int = 100
    frames: int = 241
    n: int = 8
    prompt: int = _MAX_PROMPT
    body: int = 1 << 20
    queue: int = 64
    seconds: float = 1800.0


@dataclass(frozen=True)
class ServeOptions:
    r"""
    All of the command line. What is not explained here is an option of the same name of `WaveExecutor` or of
    `enable_distributed_layerwise_offload`.

    Args:
        model (`str`, *optional*): folder or Hub id of a pipeline; None is the demo.
        name (`str`): what the model is called in answers.
        host (`str`), port (`int`): where to listen.
        ranks (`int`): worker processes.
        wave (`bool`): whether ranks are given requests together, and equal ones only.
        keep (`int`): finished jobs whose content is kept.
        api_key (`str`, *optional*): what every request has to bring.
    """

    model: str | None = None
    name: str = "demo"
    host: str = "127.0.0.1"
    port: int = 8000
    ranks: int = 1
    dtype: str = "bfloat16"
    transfer: str = "auto"
    host_store: str = "auto"
    device_budget: int | str | None = None
    vae_tiling: bool = False
    timing: bool = True
    wave: bool = False
    keep: int = 32
    api_key: str | None = None
    start_timeout: float = 1800.0
    limits: Limits = Limits()

    @property
    def demo(self) -> bool:
        """Whether the tiny model is served, on the CPU."""
        return self.model is None

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host of that name or address; all of 127.0.0.0/8 is its own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the server's options to a command line."""
    limits = Limits()
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder or Hub id of a pipeline (default: --demo)")
    parser.add_argument("--demo", action="store_true", help="serve a tiny model with random weights, on the CPU")
    parser.add_argument("--served-model-name", metavar="NAME", help="what it is called in answers (default: MODEL)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen at (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="what every request has to bring as its bearer token")
    parser.add_argument("--api-key-file", metavar="FILE", help="the key's file: other users see what is in arguments")

    ranks = parser.add_argument_group("ranks and weights")
    ranks.add_argument(
        "--data-parallel-size", "--ranks", dest="ranks", type=_count, default=1, metavar="N",
        help="worker processes, one for each accelerator, that share the weights (default: %(default)s)",
    )  # fmt: skip
    ranks.add_argument(
        "--transfer", choices=("auto", "all_gather", "local"), default="auto", help="how weights reach the devices"
    )
    ranks.add_argument(
        "--dlo-use-allgather",
        dest="transfer",
        action="store_const",
        const="all_gather",
        help="as --transfer all_gather",
    )
    ranks.add_argument(
        "--dlo-no-use-allgather", dest="transfer", action="store_const", const="local", help="as --transfer local"
    )
    ranks.add_argument(
        "--enable-distributed-layerwise-offload", action="store_true", help="accepted, and always so: weights stream"
    )
    ranks.add_argument("--device-budget", type=_budget, metavar="AMOUNT", help="weights that stay: auto, 12GiB")
    ranks.add_argument(
        "--host-store",
        choices=("auto", "coded", "mapped", "packed", "pinned"),
        default="auto",
        help="where weights lie",
    )
    ranks.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of weights (%(default)s)"
    )
    ranks.add_argument(
        "--vae-tiling", "--vae-use-tiling", action="store_true", help="decode in tiles, which takes less memory"
    )
    ranks.add_argument("--no-timing", action="store_true", help="do not time transfers: no figure for their overlap")
    ranks.add_argument(
        "--start-timeout", type=_seconds, default=1800.0, metavar="S", help="for loading (default: %(default)g)"
    )

    work = parser.add_argument_group("requests")
    work.add_argument(
        "--wave", action="store_true", help="give ranks equal requests together, and refuse unequal ones"
    )
    work.add_argument("--max-queue", type=_count, default=limits.queue, metavar="N", help="waiting (%(default)s)")
    work.add_argument(
        "--deadline", type=_seconds, default=limits.seconds, metavar="S", help="until the answer (%(default)g)"
    )
    work.add_argument("--max-size", type=_count, default=limits.size, metavar="PIXELS", help="a side (%(default)s)")
    work.add_argument("--max-steps", type=_count, default=limits.steps, metavar="N", help="steps (%(default)s)")
    work.add_argument("--max-frames", type=_count, default=limits.frames, metavar="N", help="frames (%(default)s)")
    work.add_argument("--max-n", type=_count, default=limits.n, metavar="N", help="pictures (%(default)s)")
    work.add_argument("--max-body", type=_bytes, default=limits.body, metavar="AMOUNT", help="of a request (1MiB)")
    work.add_argument("--keep", type=_count, default=32, metavar="N", help="finished jobs kept (%(default)s)")


def read_options(arguments: argparse.Namespace) -> ServeOptions:
    """
    The options from a parsed command line.

    Raises:
        `ValueError`: two of them contradict each other. `OSError`: the file of the key cannot be read.
    """
    if arguments.demo and arguments.model is not None:
        raise ValueError(f"--demo serves its own model, so '{arguments.model}' is not needed; leave one of them out.")
    key = arguments.api_key
    if arguments.api_key_file is not None:
        if key is not None:
            raise ValueError("--api-key and --api-key-file both give the key; leave one of them out.")
        with open(arguments.api_key_file, encoding="utf-8") as file:
            key = file.read().strip()
    if key is not None:
        key = key.strip()
        if not key:
            raise ValueError("The API key is empty, which would keep nobody out; give one, or leave the option out.")
        if not (key.isascii() and key.isprintable()):
            raise ValueError("The API key has characters that no header carries; make it of printable ASCII.")
    return ServeOptions(
        model=arguments.model,
        name=arguments.served_model_name or arguments.model or "demo",
        host=arguments.host,
        port=arguments.port,
        ranks=arguments.ranks,
        dtype=arguments.dtype,
        transfer=arguments.transfer,
        host_store=arguments.host_store,
        device_budget=arguments.device_budget,
        vae_tiling=arguments.vae_tiling,
        timing=not arguments.no_timing,
        wave=arguments.wave,
        keep=arguments.keep,
        api_key=key,
        start_timeout=arguments.start_timeout,
        limits=Limits(
            size=arguments.max_size,
            steps=arguments.max_steps,
            frames=arguments.max_frames,
            n=arguments.max_n,
            body=arguments.max_body,
            queue=arguments.max_queue,
            seconds=arguments.deadline,
        ),
    )


def _number(lowest: float, highest: float, what: str, kind: type = int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return parse


_count = _number(1, 10**9, "a whole number, 1 or more")
_port = _number(0, 65535, "a port, 0 to 65535")
_seconds = _number(0.001, 10**9, "a number of seconds above 0", float)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "amount")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("'amount' ")) from error


def _budget(text: str) -> int | str:
    return text if text == "auto" else _bytes(text)
