# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Checks what the package assumes of a device, row by row, and writes a report to send back: see docs/npu.md.

    python examples/check_npu.py
    accelerate launch --num_processes 2 examples/check_npu.py   # or torchrun --nproc_per_node 2
Made for Ascend NPUs, of which nothing has been seen yet; it checks NVIDIA GPUs and the CPU as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_checks.install import KINDS, Installed, UsageError, look
from npu_checks.outcome import FAILED, SKIPPED, Failed, Finding, Result, Skipped, combine
from npu_checks.report import Report, anonymous, machine_facts, settings
from npu_checks.rows import ROWS, Row
from rich.console import Console


if TYPE_CHECKING:
    from npu_checks.context import Context


_INTERRUPTED = 130
_PATIENCE = 20.0
"""Seconds, at most, for which ranks wait for each other's results beyond the time that a row may take."""
_WIDTH = 140
"""Columns, where there is no terminal that has some."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked; before anything is imported that a broken installation would end."""
    parser = argparse.ArgumentParser(description="Checks what diffusers_dlo assumes of a device; see docs/npu.md.")
    parser.add_argument("--device", choices=KINDS, default="auto", help="default: the NPU if there is one, else a GPU")
    parser.add_argument("--rows", help="only these, such as 3,5,20-24; default: all")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="for the report; default: here")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for each row; default: 120")
    parser.add_argument("--block-mib", type=int, help="of a block of row 32; default: 64, on the CPU 1")
    parser.add_argument("--tokens", type=int, help="that compute in row 32; default: 16384, on the CPU 64")
    args = parser.parse_args(arguments)
    for name in ("limit", "block_mib", "tokens"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: '{value}' is not more than 0; leave it out for the default")
    try:
        args.chosen = choose_rows(args.rows)
        args.out.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out: '{args.out}' cannot be used as a folder ({error.strerror}); choose another one")
    if not os.access(args.out, os.W_OK):
        parser.error(f"--out: '{args.out}' cannot be used as a folder (no permission to write); choose another one")
    try:
        args.installed = look(args.device)
    except UsageError as error:
        parser.error(f"--device: {error}")
    return args


def choose_rows(text: str | None) -> list[Row]:
    """
    The rows that `--rows` names.

    Raises:
        `ValueError`: it names others.
    """
    if text is None:
        return list(ROWS)
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--rows: '{part}' is not the number of a row; give numbers such as 3,5 or 20-24")
        numbers |= set(range(int(first), int(last or first) + 1))
    unknown = sorted(numbers - {row.number for row in ROWS})
    if unknown or not numbers:
        raise ValueError(f"--rows: there is no row '{unknown[0] if unknown else text}'; they are 1 to {len(ROWS)}")
    return [row for row in ROWS if row.number in numbers]


class Checklist:
    """The rows, one after the other, on this rank."""

    def __init__(self, args: argparse.Namespace, context: Context) -> None:
        from npu_checks.watch import Watch

        self.context = context
        self.ranks = context.ranks
        self.limit = args.limit
        self.patience = min(args.limit, _PATIENCE)
        self.report = Report(args.out, collect_facts(args.installed, context), args.chosen, {})
        self.console = make_console(self.ranks.rank)
        self.began = 0.0
        self.watch = Watch(self.ranks, args.limit, self._give_up)

    def run(self) -> int:
        """Checks all rows, and writes the report. The exit status."""
        facts = self.report.facts
        self.console.print(f"Checking {len(self.report.rows)} rows on '{facts['device']}', {facts['ranks']} rank(s)")
        code = 0
        try:
            for row in self.report.rows:
                if self._run(row).is_stuck:
                    self._explain_rest(row.number)
                    break
        except KeyboardInterrupt:
            code = _INTERRUPTED
            done = self.report.results
            for number in [row.number for row in self.report.rows if row.number not in done][:1]:
                result = Result(FAILED, "interrupted by Ctrl-C", is_stuck=True)
                self.ranks.post(number, result.as_json())
                done[number] = result
                self._explain_rest(number)
        return self._finish(code)

    def _run(self, row: Row) -> Result:
        if self.ranks.rank == 0:
            self.report.write(running=row.number)
        start = self.began = time.monotonic()
        self.ranks.begin(row.number)
        with self.watch.watching(row.number):
            mine = self._check(row, start)
            self.ranks.post(row.number, mine.as_json())
        found = self.ranks.collect(row.number, self.limit + self.patience - (time.monotonic() - start))
        found[self.ranks.rank] = mine.as_json()
        return self._note(row, found)

    def _check(self, row: Row, start: float) -> Result:
        reason = self._why_not(row)
        if reason:
            return Result(SKIPPED, reason)
        module, _, function = row.check.partition(".")
        try:
            if "group" in row.needs:
                self.ranks.connect(self.context.platform.backend, self.limit)
            finding: Finding = getattr(importlib.import_module(f"npu_checks.{module}"), function)(self.context)
            status, text, figures = "passed", finding.text, finding.figures
        except Skipped as reason_of_check:
            status, text, figures = SKIPPED, str(reason_of_check), {}
        except Failed as failure:
            status, text, figures = FAILED, str(failure), {}
        except Exception as error:  # whatever a device or its libraries may say
            lines = str(error).strip().splitlines() or ["no reason given"]
            status, text, figures = FAILED, f"{type(error).__name__}: {lines[0]}", {}
        # Each rank by itself: the names of other hosts and users are not known where the report is written.
        return Result(status, anonymous(text), figures, time.monotonic() - start)

    def _why_not(self, row: Row) -> str:
        if "streams" in row.needs and not self.context.has_streams:
            return "the CPU has no streams, no memory of its own and no link to it"
        if "several" in row.needs and self.ranks.size == 1:
            return f"needs two ranks: torchrun --nproc_per_node 2 examples/check_npu.py --rows {row.number}"
        return ""

    def _note(self, row: Row, found: dict[int, dict[str, Any]]) -> Result:
        result = combine({rank: Result(**values) for rank, values in found.items()}, self.ranks.size)
        self.report.results[row.number] = result
        text = f": {anonymous(result.text)}" if result.text else ""
        self.console.print(
            f"{row.number:3} {result.status:7} {result.seconds:6.2f} s  {row.title}{text}", markup=False
        )
        return result

    def _explain_rest(self, stopped: int) -> None:
        rest = [row.number for row in self.report.rows if row.number not in self.report.results]
        if rest:
            again = f"run the others by --rows {','.join(map(str, rest))}"
            for number in rest:
                self.report.results[number] = Result(SKIPPED, f"row {stopped} ended the script; {again}")

    def _give_up(self, number: int, reason: str) -> None:
        """Ends the process while its main thread hangs in a row. Called by another thread."""
        row = next(row for row in self.report.rows if row.number == number)
        mine = Result(FAILED, anonymous(reason), {}, time.monotonic() - self.began, is_stuck=True)
        self.ranks.post(number, mine.as_json(), watching=True)
        found = self.ranks.collect(number, self.patience, watching=True)
        found[self.ranks.rank] = mine.as_json()
        self._note(row, found)
        self._explain_rest(number)
        self._finish(1, watching=True)
        os._exit(1)

    def _finish(self, code: int, watching: bool = False) -> int:
        if self.ranks.rank == 0:
            self.report.write()
            show(self.report, self.console)
        self.ranks.leave(self.patience, watching)
        self.watch.close()
        sys.stdout.flush()
        return code or int(self.report.has_failed)


def make_console(rank: int) -> Console:
    """Where rank 0 prints, and the others do not."""
    return Console(quiet=rank != 0, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)


def show(report: Report, console: Console) -> None:
    """The table, and where the report is."""
    console.print(report.table())
    console.print(f"Written to {report.path} and {report.path.with_suffix('.md').name}", markup=False)


def collect_facts(installed: Installed, context: Context | None) -> dict[str, Any]:
    """What the report says of the machine."""
    return {
        "kind": installed.kind,
        "device": context.device_name if context is not None else installed.kind,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": installed.versions,
        "settings": settings(),
        **machine_facts(),
    }


def report_broken(args: argparse.Namespace) -> int:
    """The report where the device's package cannot be imported: the first two rows say so, the others are skipped."""
    installed: Installed = args.installed
    rows = [row for row in ROWS if row in args.chosen or row.number == 2]
    report = Report(args.out, collect_facts(installed, None), rows, {})
    for row in report.rows:
        result = Result(SKIPPED, "row 2 failed: the device's package cannot be used")
        if row.number == 1:
            result = Result(FAILED, installed.mismatch) if installed.mismatch else Result("passed")
        elif row.number == 2:
            result = Result(FAILED, installed.import_error)
        report.results[row.number] = result
    if int(os.environ.get("RANK", "0")) == 0:
        report.write()
        show(report, make_console(0))
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checklist. The exit status: 0 if no row failed, 1 if one did, 2 for wrong options."""
    args = parse_arguments(arguments)
    if args.installed.import_error:
        return report_broken(args)
    try:
        from npu_checks.context import make_context
    except RuntimeError as error:  # torch_npu is installed, another device is asked for, and diffusers loads both
        print(f"check_npu.py: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        remedy = f"'{error.name}' is not installed for {sys.executable}; run pip install -e . in the checkout"
        print(f"check_npu.py: error: {remedy}", file=sys.stderr)
        return 2
    context = make_context(args)
    checklist = Checklist(args, context)
    code = checklist.run()
    if context.ranks.size > 1:
        if code:
            os._exit(code)  # a rank that failed may have left the others in the middle of something
        context.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
