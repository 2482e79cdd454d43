# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the command `diffusers-dlo`: its arguments, and what it prints. Must not do the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from ._version import __version__
from .byte_size import format_bytes, parse_bytes
from .serve.options import add_arguments, read_options


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="diffusers-dlo", description="Distributed Layerwise Offload for diffusers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    pack = commands.add_parser(
        "pack",
        help="write a checkpoint in the dtype and the order in which it streams, coded or not",
        description="Writes a checkpoint in the dtype that it is used in, each block in one piece, so that the "
        "offload streams it from disk as it is. It loads with from_pretrained like any other. With --codec, blocks "
        "are coded without loss: bfloat16 takes about two thirds of the bytes on disk, in memory and on the way to "
        "the device, which decodes it.",
    )
    pack.add_argument("model", metavar="MODEL", help="directory of a pipeline or a model, or a pipeline on the Hub")
    pack.add_argument("out", metavar="OUT", help="directory to make")
    pack.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: bfloat16)")
    pack.add_argument(
        "--codec",
        choices=("ans", "zstd"),
        help="code blocks: ans, which devices that have it decode, or zstd, on the host",
    )
    pack.add_argument(
        "--ranks", type=_count, metavar="N", help="with --codec: ranks that will share weights (default: 1)"
    )
    pack.add_argument(
        "--decode", action="store_true", help="the other way: write the ordinary checkpoint that MODEL was coded from"
    )
    pack.set_defaults(run=_pack)
    _add_plan(commands)
    card = commands.add_parser(
        "card",
        help="add to a checkpoint's model card how it is offloaded, and what it takes",
        description="Adds tags, code and a table of predicted memory and time to the README.md of a checkpoint, or "
        "renews them. Everything else in it stays as it is.",
    )
    card.add_argument("model", metavar="MODEL_DIR", help="directory of a pipeline or a model")
    card.add_argument("--plan", metavar="FILE", help="show the figures of this file, which plan --json has written")
    card.add_argument("--name", metavar="NAME", help="what the code loads (default: the directory's name)")
    card.add_argument("--dry-run", action="store_true", help="print the new card, and write nothing")
    card.set_defaults(run=_card)
    _add_serve(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"diffusers-dlo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("diffusers-dlo: interrupted", file=sys.stderr)
        return 130
    return 0


def _add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict the memory and the time of a checkpoint, before anything is loaded",
        description="Says what a checkpoint takes on devices and hosts, how long a forward takes for each way to "
        "stream it, and which settings to use; from configurations and the headers of files alone.",
    )
    plan.add_argument("model", metavar="MODEL", help="directory of a pipeline or a model, or a name on the Hub")
    plan.add_argument("--ranks", type=_count, default=1, help="ranks of one host (default: %(default)s)")
    plan.add_argument("--device-memory", type=_bytes, metavar="AMOUNT", help="of each device, such as 64GiB")
    plan.add_argument("--host-memory", type=_bytes, metavar="AMOUNT", help="of each host, such as 256GiB")
    plan.add_argument("--device-budget", type=_budget, metavar="AMOUNT", help="what may stay on devices: auto, 12GiB")
    plan.add_argument("--num-slots", type=_count, metavar="K", help="slots (default: what is best)")
    plan.add_argument("--components", nargs="+", metavar="NAME", help="components to stream")
    plan.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: that of the files)")
    plan.add_argument("--tokens", type=_count, default=4096, help="of the image or video (default: %(default)s)")
    plan.add_argument(
        "--text-tokens", type=_number, default=512, metavar="N", help="of the text (default: %(default)s)"
    )
    plan.add_argument("--compute", type=_rate, metavar="MS", help="measured milliseconds of a resident forward")
    plan.add_argument(
        "--tflops", type=_rate, default=500.0, help="without --compute: 10^12 operations/s (default: %(default)g)"
    )
    plan.add_argument(
        "--h2d", type=_rate, default=55.0, metavar="GB/S", help="host to each device (default: %(default)g)"
    )
    plan.add_argument(
        "--gather", type=_rate, default=270.0, metavar="GB/S", help="between devices (default: %(default)g)"
    )
    plan.add_argument(
        "--gather-slowdown", type=float, default=0.0, metavar="X", help="of computing meanwhile (default: %(default)g)"
    )
    plan.add_argument(
        "--coded-ratio", type=_rate, default=0.67, metavar="X", help="left by coding weights (default: %(default)g)"
    )
    plan.add_argument(
        "--decode",
        type=_rate,
        default=940.0,
        metavar="GB/S",
        help="weights that a device decodes (default: %(default)g)",
    )
    plan.add_argument("--json", metavar="FILE", help="write everything there too")
    plan.add_argument("--plot", metavar="FILE", help="draw the recommended forward there")
    plan.set_defaults(run=_plan)


def _add_serve(commands: argparse._SubParsersAction) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve pictures and videos over HTTP, from ranks that share one copy of the weights",
        description="Serves a pipeline over HTTP, in the form of OpenAI's interface, from ranks that share one copy "
        "of the weights. Without MODEL it serves a tiny one with random weights, on the CPU.",
    )
    add_arguments(serve)
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    read = read_options(options)
    try:
        from .serve.app import serve
    except ModuleNotFoundError as error:
        raise RuntimeError(f"The server needs '{error.name}'; run: pip install \"diffusers-dlo[serve]\"") from error
    serve(read)


def _plan(options: argparse.Namespace) -> None:
    from .checkpoint_plan import plan_checkpoint, write_json, write_timeline
    from .config import DistributedLayerwiseOffloadConfig
    from .prediction import Machine, Work
    from .prediction_page import render_prediction
    from .simulation import Links
    from .usage_code import code_to_paste

    links = Links(
        h2d=options.h2d * 1e9,
        gather=options.gather * 1e9,
        gather_slowdown=options.gather_slowdown,
        decode=options.decode * 1e9,
    )
    compute = None if options.compute is None else options.compute / 1e3
    outline, prediction = plan_checkpoint(
        options.model,
        options.ranks,
        Machine(options.device_memory, options.host_memory, links, options.coded_ratio),
        Work(options.tokens, options.text_tokens, compute, options.tflops),
        dtype=_DTYPES[options.dtype] if options.dtype else None,
        config=DistributedLayerwiseOffloadConfig(
            num_slots=options.num_slots or "auto", device_budget=options.device_budget
        ),
        components=options.components,
    )
    print(render_prediction(outline, prediction))
    if options.json:
        write_json(outline, prediction, options.json)
    if options.plot:
        write_timeline(prediction, options.plot)
    if prediction.shortfalls:
        raise ValueError("\n".join(prediction.shortfalls))
    print(f"\nRecommended:\n\n{code_to_paste(outline, prediction)}", end="")


def _card(options: argparse.Namespace) -> None:
    from .model_card import renew_card

    card = renew_card(options.model, options.plan, options.name)
    if options.dry_run:
        sys.stdout.write(card.text)
    elif card.is_changed:
        card.write()
        print(f"'{card.path}' is written.")
    else:
        print(f"'{card.path}' is up to date; nothing is written.")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "amount")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("'amount' ")) from error


def _budget(text: str) -> int | str:
    return text if text == "auto" else _bytes(text)


def _pack(options: argparse.Namespace) -> None:
    from .coding.coded_file import read_coded_file
    from .coding.summary import render_summary
    from .pack import decode_checkpoint, pack_checkpoint

    if options.decode:
        given = [name for name in ("dtype", "codec", "ranks") if getattr(options, name) is not None]
        if given:
            raise ValueError(f"'--{given[0]}' does not go with --decode, which writes weights in the dtype they have.")
        paths, how = decode_checkpoint(options.model, options.out), "it loads with from_pretrained, like any other"
    else:
        dtype = options.dtype or "bfloat16"
        how = f"load it with from_pretrained({options.out!r}, dtype=torch.{dtype})"
        paths = pack_checkpoint(options.model, options.out, _DTYPES[dtype], options.codec, options.ranks)
    for path in paths:
        print(f"{path}: {format_bytes(os.path.getsize(path))}")
        coded = read_coded_file(path)
        if coded is not None:
            print(f"\n{render_summary(coded)}\n")
    print(f"'{options.out}' is complete; {how}.")


if __name__ == "__main__":
    sys.exit(main())
