# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The checklist on all GPUs: each row has a meaning there, and passes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_every_row_passes(tmp_path: Path) -> None:
    size = torch.cuda.device_count()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(size), "--standalone"]
    command += [str(ROOT / "examples" / "check_npu.py"), "--device", "cuda", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("check_npu_cuda_*.json")
    report = json.loads(written.read_text())
    others = {row["row"]: (row["result"], row["text"]) for row in report["rows"] if row["result"] != "passed"}
    if size == 1:
        assert all(result == "skipped" and "needs two ranks" in text for result, text in others.values()), others
    else:
        assert not others
    assert report["ranks"] == size and report["complete"] and len(report["rows"]) == 34
    figures = {row["row"]: row["figures"] for row in report["rows"]}
    assert len(figures[12]["pinned_gb_s"]) == size and min(figures[12]["pinned_gb_s"]) > 1
    assert figures[20]["registers"] and figures[14]["accepted"]
    assert figures[32]["overlap"] > 0 and figures[32]["h2d_bytes"] == 8 * 64 * 2**20 // size
