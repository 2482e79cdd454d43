# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Measures ways of holding a transformer's weights side by side: resident, this package with each transfer, host store
and budget, and with coded weights, diffusers' group offload, FSDP2 with offload, and accelerate's sequential offload.
One command; it finds the devices and starts a fresh set of processes for each variant.

    python benchmarks/compare.py                                    all GPUs, Cosmos3-Nano's size
    python benchmarks/compare.py --size super --ranks 2 --variants 'resident,all_gather-*,fsdp2'
    python benchmarks/compare.py --variants '*-mapped,*-groups-of-*'  all ranks together, in groups, each for itself
    python benchmarks/compare.py --size 200b --device-cap 16GiB --variants '*-mapped' --markdown cap.md
    python benchmarks/compare.py --where DIR                        a folder on a disk: cold starts too
    python benchmarks/compare.py --device cpu --size tiny           everything, on the CPU, in a minute

Weights are random and written once, as a real sharded checkpoint. Outputs are compared bit by bit with those of the
model without offload. What does not fit is measured with less depth, or not, and the table says so.
"""

from __future__ import annotations

import time


START = time.monotonic()  # before what takes long to import: a time limit is one of the whole command

# ruff: noqa: E402
import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from checkpoint import coded_folder
from crew import importable
from render import plot, print_tables, to_markdown
from results import Comparison
from rich.console import Console
from runner import Plan, Progress, Runner, gather_facts
from sizes import SIZES
from variants import all_variants, choose_variants

from diffusers_dlo.byte_size import parse_bytes


A_DAY = 24 * 3600.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: GPUs if there are any")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU; two on the CPU")
    parser.add_argument("--variants", default="", help="names or patterns, separated by commas; default: all")
    parser.add_argument("--workloads", default="", help="names, separated by commas; default: all three")
    parser.add_argument("--layers", type=int, help="another depth than the size's own")
    parser.add_argument("--vocabulary", type=int, help="another number of embeddings than the model's own")
    parser.add_argument("--repeats", type=int, default=5, help="timed forwards; 2 at most where one is slow")
    parser.add_argument("--where", type=Path, help="the checkpoint's folder; default: a temporary one, in memory")
    parser.add_argument("--host-memory", help="take no more host memory than this, such as 110GiB")
    parser.add_argument("--device-cap", help="let each rank allocate no more device memory than this, such as 16GiB")
    parser.add_argument("--time-limit", type=float, help="seconds; variants for which too little is left are left out")
    parser.add_argument("--interference", action="store_true", help="also measure what copies do to computing")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--plot", type=Path, help="a picture of time against device memory: .png or .svg")
    parser.add_argument("--markdown", type=Path, help="a file for a section of docs/benchmarks.md")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes write; default: thrown away")
    parser.add_argument("--list", action="store_true", help="say which variants there are, and end")
    args = parser.parse_args()
    try:
        _check(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    import torch

    gpus = torch.cuda.device_count()
    args.device = args.device or ("cuda" if gpus else "cpu")
    if args.device == "cuda" and not gpus:
        raise ValueError("'--device cuda' needs a GPU, and none was found; use --device cpu --size tiny.")
    args.ranks = args.ranks if args.ranks is not None else (gpus if args.device == "cuda" else 2)
    for name in ("ranks", "repeats", "layers", "vocabulary"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"'--{name}' must be at least 1, got {value}.")
    if args.device == "cuda" and args.ranks > gpus:
        raise ValueError(f"'--ranks {args.ranks}' needs as many GPUs, and {gpus} were found.")
    if args.plot is not None:
        if args.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"'--plot {args.plot}' must end in .png, .svg or .pdf.")
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise ValueError("'--plot' needs matplotlib; install it, or leave the option out.") from error
    for name in ("json", "plot", "markdown"):
        path = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"'--{name} {path}': there is no folder '{path.parent}'.")
    args.host_memory = parse_bytes(args.host_memory, "--host-memory") if args.host_memory else None
    args.device_cap = parse_bytes(args.device_cap, "--device-cap") if args.device_cap else None
    if args.device_cap and args.device == "cpu":
        raise ValueError("'--device-cap' caps a GPU's memory, and the device is the CPU.")
    known = {workload.name: workload for workload in SIZES[args.size].workloads}
    names = [name for name in args.workloads.split(",") if name] or list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"'{name}' is no workload; there are: {', '.join(known)}.")
    args.workloads = tuple(workload for name, workload in known.items() if name in names)
    args.variants = [pattern for pattern in args.variants.split(",") if pattern]
    choose_variants(all_variants(args.ranks), args.variants)


def main() -> int:
    args = parse_arguments()
    if args.list:
        for variant in all_variants(args.ranks):
            print(variant.name)
        return 0
    importable()
    progress = Progress(Console(stderr=True))
    # The checkpoint is large; who stops the command, as `timeout` does, should not find it left behind.
    signal.signal(signal.SIGTERM, lambda *_: progress.stop())
    facts = gather_facts(args, progress)
    if args.logs is not None:
        args.logs = args.logs.resolve()  # ranks meet at a file there, named by a URL
        args.logs.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="compare-", dir=args.logs))
    try:
        chosen = choose_variants(all_variants(args.ranks), args.variants)
        deadline = START + (args.time_limit or A_DAY)
        runner = Runner(Plan(args, facts, chosen, deadline, scratch), progress)
        comparison = runner.run(lambda so_far: _write(args, so_far))
        _write(args, comparison)
        print_tables(comparison, Console(width=None if sys.stdout.isatty() else 180))
        if args.markdown is not None:
            args.markdown.write_text(to_markdown(comparison))
        if args.plot is not None:
            plot(comparison, args.plot)
        return 0 if comparison.rows else 1
    finally:
        if args.logs is None:
            shutil.rmtree(scratch, ignore_errors=True)
        if args.where is None:
            shutil.rmtree(facts.room.folder, ignore_errors=True)
        shutil.rmtree(coded_folder(facts.room.folder), ignore_errors=True)  # for this number of ranks


def _write(args: argparse.Namespace, comparison: Comparison) -> None:
    comparison.options["command"] = shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]])
    if args.json is not None:
        part = args.json.with_suffix(args.json.suffix + ".part")
        part.write_text(json.dumps(asdict(comparison), indent=1))
        os.replace(part, args.json)


if __name__ == "__main__":
    sys.exit(main())
