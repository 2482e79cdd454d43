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
from .byte_size import format_bytes


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="diffusers-dlo", description="Distributed Layerwise Offload for diffusers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True)
    pack = commands.add_parser(
        "pack",
        help="write a checkpoint in the dtype and the order in which it streams",
        description="Writes a checkpoint in the dtype that it is used in, each block in one piece, so that the "
        "offload streams it from disk as it is. It loads with from_pretrained like any other.",
    )
    pack.add_argument("model", metavar="MODEL", help="directory of a pipeline or a model, or a pipeline on the Hub")
    pack.add_argument("out", metavar="OUT", help="directory to make")
    pack.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="dtype of the weights (default: %(default)s)"
    )
    pack.set_defaults(run=_pack)
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


def _pack(options: argparse.Namespace) -> None:
    from .pack import pack_checkpoint

    for path in pack_checkpoint(options.model, options.out, _DTYPES[options.dtype]):
        print(f"{path}: {format_bytes(os.path.getsize(path))}")
    print(f"'{options.out}' is complete; load it with from_pretrained({options.out!r}, dtype=torch.{options.dtype}).")


if __name__ == "__main__":
    sys.exit(main())
