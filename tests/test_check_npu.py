# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The checklist on the CPU, with one rank and with two: what holds passes, what does not is said, and it ends."""

from __future__ import annotations

import getpass
import json
import multiprocessing
import multiprocessing.process
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tests.ranks  # noqa: F401  what its server of processes imports once


ROOT = Path(__file__).parents[1]
NO_STREAMS = {5, 6, 7, 8, 10, 11, 12, 14, 19, 33}
"""The rows that the CPU cannot answer."""
RANKS = {23, 24, 25, 26, 27, 29, 30, 34}
"""The rows that one rank cannot answer."""


def check(arguments: Sequence[str]) -> int:
    """The script, in this process; its exit status."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from check_npu import main

        return main(arguments)
    finally:
        sys.path.remove(str(ROOT / "examples"))


def read_report(folder: Path) -> dict[str, Any]:
    """The one report in a folder."""
    (path,) = folder.glob("check_npu_*.json")
    assert sorted(folder.iterdir()) == [path, path.with_suffix(".md")], "nothing else is left"
    return json.loads(path.read_text())


def results(report: dict[str, Any]) -> dict[int, str]:
    """How each row ended."""
    return {row["row"]: row["result"] for row in report["rows"]}


def text_of(report: dict[str, Any], number: int) -> str:
    """What a row says."""
    return next(row["text"] for row in report["rows"] if row["row"] == number)


def _rank_main(rank: int, port: int, environment: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2"
    )
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    sys.exit(check(arguments))


def start_two(arguments: list[str], **environment: str) -> list[multiprocessing.process.BaseProcess]:
    """The script on two ranks, without a launcher, which would end one as soon as the other fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_rank_main, args=(rank, port, environment, arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


def wait_for_row(folder: Path, number: int) -> None:
    """Until a row has begun, as the report of the moment says."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in folder.glob("check_npu_*.json"):
            if "the script ended" in text_of(json.loads(path.read_text()), number):
                return
        time.sleep(0.01)
    raise AssertionError(f"row {number} has not begun")


def test_one_rank_passes_what_the_cpu_can_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["--device", "cpu", "--out", str(tmp_path)]) == 0
    report = read_report(tmp_path)
    assert report["kind"] == report["device"] == "cpu" and report["ranks"] == 1 and report["complete"]
    skipped = {number for number, result in results(report).items() if result == "skipped"}
    assert skipped == NO_STREAMS | RANKS and len(report["rows"]) == 34
    assert report["passed"] == 34 - len(skipped) and report["skipped"] == len(skipped) and report["failed"] == 0
    assert all("no streams" in text_of(report, number) for number in NO_STREAMS)
    assert all(f"--rows {number}" in text_of(report, number) for number in RANKS)
    assert text_of(report, 28) == "local: pinned, packed, mapped"
    figures = {row["row"]: row["figures"] for row in report["rows"]}
    assert figures[1]["torch"] == report["versions"]["torch"]
    # Eight layers, in one rank's copies whole: 8 * 2 * 4 * 256^2 weights of two bytes.
    assert figures[32]["h2d_bytes"] == 8 * 2 * 4 * 256**2 * 2 and figures[32]["gather_ms"] == 0
    assert figures[15]["nbytes"] == 0 and figures[31]["resident_bytes"] > 0

    (page,) = tmp_path.glob("*.md")
    rows = [line.split(" | ") for line in page.read_text().splitlines() if re.match(r"\| \d", line)]
    assert [(int(row[0][2:]), row[1], row[2]) for row in rows] == [
        (row["row"], row["assumed"], row["result"]) for row in report["rows"]
    ]
    said = capsys.readouterr().out
    assert "34 rows on 'cpu'" in said and f"Written to {page.with_suffix('.json')}" in said
    everything = page.read_text() + page.with_suffix(".json").read_text()
    names = {socket.gethostname(), getpass.getuser()} - {"root"}
    assert not any(name in everything for name in (str(tmp_path), str(ROOT), *names))


def test_two_ranks_by_torchrun_pass_what_needs_two(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += [str(ROOT / "examples" / "check_npu.py"), "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--rows", "3,23-27,29,30,32-34"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path)
    found = results(report)
    assert report["ranks"] == 2 and report["failed"] == 0 and report["settings"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert {number for number, result in found.items() if result == "skipped"} == {33}
    assert set(found) == {3, *range(23, 28), 29, 30, 32, 33, 34}
    assert text_of(report, 29).startswith("all_gather: pinned, packed, mapped; auto: ")
    assert text_of(report, 30) == "passes: 1 + 2 for others, 3 + 0 for others"
    figures = {row["row"]: row["figures"] for row in report["rows"]}
    assert figures[30]["passes"] == [[1, 2], [3, 0]]
    assert figures[32]["h2d_bytes"] == 8 * 2 * 4 * 256**2, "half of the weights"
    assert figures[26]["gathers"] == 20 and figures[26]["gb_s"] > 0


def test_an_assumption_that_does_not_hold_is_shown_as_failed(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--rows", "4,23,24", "--limit", "60"]
    processes = start_two(arguments, GLOO_SOCKET_IFNAME="nosuch0")
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [1, 1]
    report = read_report(tmp_path)
    assert results(report) == {4: "passed", 23: "failed", 24: "skipped"} and report["complete"]
    assert "could not be connected by gloo" in text_of(report, 23) and "nosuch0" in text_of(report, 23)
    assert "could not be connected" in text_of(report, 24)


def test_a_rank_that_hangs_is_a_failed_row_and_the_script_ends(tmp_path: Path) -> None:
    processes = start_two(["--device", "cpu", "--out", str(tmp_path), "--rows", "23,29,30", "--limit", "4"])
    try:
        wait_for_row(tmp_path, 29)
        os.kill(processes[1].pid, signal.SIGSTOP)
        processes[0].join(60)
        assert processes[0].exitcode == 1
    finally:
        for process in processes:
            process.kill()
            process.join()
    report = read_report(tmp_path)
    assert results(report) == {23: "passed", 29: "failed", 30: "skipped"}
    assert "rank 1: gave no answer" in text_of(report, 29)
    assert text_of(report, 30) == "row 29 ended the script; run the others by --rows 30"


def test_an_interrupt_is_in_the_report(tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_for_row(tmp_path, 28)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert check(["--device", "cpu", "--out", str(tmp_path), "--rows", "4,28,31"]) == 130
    thread.join()
    report = read_report(tmp_path)
    assert results(report) == {4: "passed", 28: "failed", 31: "skipped"}
    assert text_of(report, 28) == "interrupted by Ctrl-C" and "--rows 31" in text_of(report, 31)


def test_a_package_that_cannot_be_imported_is_two_failed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, out = tmp_path / "packages", tmp_path / "out"
    (packages / "torch_npu").mkdir(parents=True)
    (packages / "torch_npu" / "__init__.py").write_text(
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n"
    )
    metadata = packages / "torch_npu-1.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.9.0\nRequires-Dist: torch==1.9.*\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", str(packages))
    assert check(["--device", "npu", "--out", str(out)]) == 1
    report = read_report(out)
    assert report["kind"] == "npu" and report["versions"]["torch_npu"] == "1.9.0"
    assert results(report) == {1: "failed", 2: "failed", **dict.fromkeys(range(3, 35), "skipped")}
    first, second = text_of(report, 1), text_of(report, 2)
    assert "torch_npu 1.9.0 do not go together" in first and report["versions"]["torch"] in first
    assert "libhccl.so" in second and "set_env.sh" in second


@pytest.mark.parametrize(
    "arguments,text",
    (
        pytest.param(["--device", "npu"], "'npu' needs torch_npu, which is not installed", id="no_torch_npu"),
        pytest.param(["--rows", "3,99"], "there is no row '99'; they are 1 to 34", id="no_such_row"),
        pytest.param(["--rows", "x"], "'x' is not the number of a row", id="not_a_row"),
        pytest.param(["--limit", "0"], "--limit: '0.0' is not more than 0", id="no_time"),
        pytest.param(["--out", __file__], "cannot be used as a folder", id="a_file"),
    ),
)
def test_wrong_options_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check(arguments)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_texts_are_without_names_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setattr(socket, "gethostname", lambda: "rack-7.example.com")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from npu_checks.report import anonymous

    assert (
        anonymous("cannot open /home/alice/models/secret.safetensors, see ~/x/y") == "cannot open <path>, see <path>"
    )
    assert anonymous("File /usr/lib/libhccl.so.1: no symbol") == "File libhccl.so.1: no symbol"
    assert anonymous("rack-7 lost 10.1.2.3:29500 (fe80::1a2b); Alice's job") == (
        "<name> lost <address> (<address>); <name>'s job"
    )
    assert anonymous("lost 2001:db8::7 and [fd12:3456::1]:80, not 2001:db8:0:0:0:0:0:7") == (
        "lost <address> and [<address>]:80, not <address>"
    )
    kept = "c10d::Store of aten::copy_, 54.6 GB/s, 1/2 of H2D, copied to Ascend910B3 by torch 2.13.0+cpu at 12:30:45"
    assert anonymous(kept) == kept


def test_each_rank_leaves_out_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that writes the report does not know those of other hosts."""
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from check_npu import Checklist
    from npu_checks.rows import Row

    class OfOneRow(Checklist):
        def __init__(self) -> None:
            self.context = None

        def _why_not(self, row: Row) -> str:
            return ""

    said = OfOneRow()._check(Row(1, "", "alice.rows"), 0.0).text  # what others are told
    assert said == "ModuleNotFoundError: No module named 'npu_checks.<name>'"


def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "npu_checks.context", raising=False)
    monkeypatch.setitem(sys.modules, "diffusers_dlo.device.interface", None)
    assert check(["--device", "cpu", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "'diffusers_dlo.device.interface' is not installed" in said and "pip install -e ." in said


def test_the_rows_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from npu_checks.rows import ROWS

    lines = (ROOT / "docs" / "npu.md").read_text().splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ \|", line)]
    assert [(int(cells[0]), cells[1]) for cells in found] == [(row.number, row.title) for row in ROWS]
    assert [row.number for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert {row.number for row in ROWS if "streams" in row.needs} == NO_STREAMS
    assert {row.number for row in ROWS if "several" in row.needs} == RANKS
    assert all(cells[-1] == "never" for cells in found), "the last column: on NPUs"
