# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the report: two files that are complete at any moment, without names of hosts, users or paths. Must not check
anything, nor import torch.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from .outcome import FAILED, PASSED, SKIPPED, Result
from .rows import Row


FORMAT = 1
_SETTINGS = re.compile(
    r"(HCCL|ASCEND|ACL|ACLNN|NPU|P2P_HCCL|PYTORCH_NPU|TASK_QUEUE|CPU_AFFINITY|MULTI_STREAM|STREAMS_PER|INF_NAN|COMBINED"
    r"|TORCH_HCCL|PYTORCH|NCCL|TORCH_NCCL|CUDA|GLOO|OMP|TORCH_DEVICE_BACKEND)_"
)
"""Variables of the environment that change how devices and collectives behave."""
_PATH = re.compile(r"(?<![\w/.])(?:~|\.{0,2})/(?!/)[^\s'\"`,;()<>|\]]*")
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?|fe80:[0-9a-f:]+|f[cd][0-9a-f]{2}:[0-9a-f:]+|(?:[0-9a-f]{1,4}:){2,6}:[0-9a-f:]*|(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4})(?![\w.])",
    re.IGNORECASE,
)
_COLOURS = {PASSED: "green", FAILED: "bold red", SKIPPED: "yellow"}


def _own_names() -> list[str]:
    names = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    try:
        names.append(getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        pass
    return [name for name in names if len(name) > 2 and name not in ("root", "user", "localhost")]


def anonymous(text: str) -> str:
    """`text` without paths, addresses, and the names of this host and user. Names of libraries and of code stay."""

    def shorten(match: re.Match[str]) -> str:
        name = Path(match.group()).name
        return name if re.fullmatch(r"[\w.+-]+\.(?:py|so(?:\.\d+)*)(?::\d+)?:?", name) else "<path>"

    text = _ADDRESS.sub("<address>", _PATH.sub(shorten, text))
    for name in _own_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text, flags=re.IGNORECASE)
    return text


@dataclass
class Report:
    """
    What came of the rows so far.

    Attributes:
        folder (`Path`): where the files are written.
        facts (`Mapping[str, Any]`): about the machine.
        rows (`Sequence[Row]`): all that were to be checked.
        results (`dict[int, Result]`): of those that ended, by number.
    """

    folder: Path
    facts: Mapping[str, Any]
    rows: Sequence[Row]
    results: dict[int, Result]

    def __post_init__(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.name = (
            f"check_npu_{self.facts['kind']}_{self.facts['ranks']}_{stamp}-{os.getpid()}"  # two may run at once
        )

    @property
    def path(self) -> Path:
        """The file to send back."""
        return self.folder / f"{self.name}.json"

    @property
    def has_failed(self) -> bool:
        """Whether an assumption does not hold."""
        return any(result.status == FAILED for result in self.results.values())

    def write(self, running: int | None = None) -> None:
        """
        Writes both files. `running` is a row that has begun: if nothing is written after this, it is what ended the
        script.
        """
        results = dict(self.results)
        if running is not None:
            results[running] = Result(FAILED, "the script ended while this row ran")
        content = self.as_json(results, is_complete=running is None)
        _replace(self.path, json.dumps(content, indent=1) + "\n")
        _replace(self.path.with_suffix(".md"), self._markdown(content))

    def as_json(self, results: Mapping[int, Result], is_complete: bool) -> dict[str, Any]:
        """What is in the file."""
        rows = []
        for row in self.rows:
            result = results.get(row.number, Result(SKIPPED, "not reached"))
            rows.append(
                {
                    "row": row.number,
                    "assumed": row.title,
                    "result": result.status,
                    "text": anonymous(result.text),
                    "figures": dict(result.figures),
                    "seconds": round(result.seconds, 3),
                }
            )
        counts = {status: sum(row["result"] == status for row in rows) for status in (PASSED, FAILED, SKIPPED)}
        return {"format": FORMAT, **self.facts, "complete": is_complete, **counts, "rows": rows}

    def _markdown(self, content: Mapping[str, Any]) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        settings = ", ".join(f"`{name}={value}`" for name, value in content["settings"].items()) or "none"
        lines = [
            f"# Check of '{content['kind']}' with {content['ranks']} ranks",
            "",
            f"{content['passed']} passed, {content['failed']} failed, {content['skipped']} skipped.",
            "",
            f"- device: {content['device']}, machine: {content['machine']}, date: {content['date']}",
            f"- versions: {versions}",
            f"- settings: {settings}",
            "",
            "| row | what is assumed | result | measured, or why not |",
            "|---|---|---|---|",
        ]
        for row in content["rows"]:
            text = row["text"].replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {row['row']} | {row['assumed']} | {row['result']} | {text} |")
        return "\n".join(lines) + "\n"

    def table(self) -> Table:
        """The rows as they are shown."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("row", justify="right")
        for heading in ("what is assumed", "result", "measured, or why not"):
            table.add_column(heading)
        for row in self.rows:
            result = self.results.get(row.number, Result(SKIPPED, "not reached"))
            colour = _COLOURS[result.status]
            table.add_row(str(row.number), row.title, f"[{colour}]{result.status}[/]", _plain(result.text))
        return table


def _plain(text: str) -> str:
    """`text` as rich shows it, brackets and all."""
    return text.replace("[", "\\[")


def settings() -> dict[str, str]:
    """The variables of the environment that matter, without names."""
    return {name: anonymous(value) for name, value in sorted(os.environ.items()) if _SETTINGS.match(name)}


def machine_facts() -> dict[str, str]:
    """What of the machine may matter."""
    return {"machine": platform.machine(), "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
