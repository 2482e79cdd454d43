# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The examples as users start them: by python, accelerate and torchrun, with files that hold what they should."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.ranks import run_ranks


ROOT = Path(__file__).parents[1]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def start(launcher: list[str], example: str, folder: Path, *args: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [*launcher, str(ROOT / "examples" / example), *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90)


def _without_offload(rank: int, size: int, example: str, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = [example, "--steps", "2", "--output-dir", "plain", "--no-offload"]
    runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One working folder, so that the tiny checkpoints are built once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("example", ("cosmos_t2v", pytest.param("wan_t2v", marks=pytest.mark.slow)))
def test_videos_are_those_of_the_ordinary_pipeline(example: str, folder: Path) -> None:
    with_offload = start(TWO_RANKS, f"{example}.py", folder, "--steps", "2", "--output-dir", "offloaded")
    assert with_offload.returncode == 0, with_offload.stderr
    for text in ("Offload plan, 2 ranks sharing weights", "all_gather", "Offload report of this rank", "mapped"):
        assert with_offload.stdout.count(text) >= 1, with_offload.stdout
    run_ranks(1, _without_offload, f"{example}.py", str(folder), backend=None)
    strips = sorted((folder / "offloaded").glob("*_strip.png"))
    videos = sorted((folder / "offloaded").glob("*.mp4"))
    assert len(strips) == len(videos) == 2 and all(video.stat().st_size > 1000 for video in videos)
    pictures = [np.asarray(Image.open(strip)) for strip in strips]
    assert all(picture.std() > 5 for picture in pictures) and not np.array_equal(*pictures)
    (first,) = (folder / "plain").glob("*_strip.png")
    assert np.array_equal(np.asarray(Image.open(first)), pictures[0])
    for path in (*strips, *videos, first):
        path.unlink()


def test_a_picture_by_accelerate(folder: Path) -> None:
    done = start(ACCELERATE, "flux_t2i.py", folder, "--steps", "2", "--num-slots", "3", "--output-dir", "flux")
    assert done.returncode == 0, done.stderr
    (picture,) = (folder / "flux").glob("*.png")
    assert np.asarray(Image.open(picture)).std() > 5


@pytest.mark.parametrize(
    "args,text",
    (
        (("--steps", "0"), "'0' is not a whole number of at least 1"),
        (("--model", "nowhere"), "'nowhere' does not exist"),
        (("--prompts", "nowhere.txt"), "'nowhere.txt' is not a file"),
        (("--num-slots", "1"), "'1' is neither 'auto' nor a whole number"),
    ),
    ids=("steps", "model", "prompts", "slots"),
)
def test_bad_arguments_are_one_line(
    args: tuple[str, ...], text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The script itself, though not in an interpreter of its own: it ends before it does anything."""
    script = ROOT / "examples" / "flux_t2i.py"
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), *args])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("flux_t2i.py")]
    assert ended.value.code == 2 and text in line
