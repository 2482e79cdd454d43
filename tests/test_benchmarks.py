# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The comparison in benchmarks/ on the CPU: which facts it writes, and what it says of what is left out."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniTransformer


ROOT = Path(__file__).parents[1]
TINY = ("--device", "cpu", "--size", "tiny")


def start(folder: Path, *args: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py"), *TINY, *args]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def rooms() -> SimpleNamespace:
    """The modules of benchmarks/, which are no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import compare
        import predicted
        import results
        import scaling
        import sizes
        import variants

        modules = {"compare": compare, "predicted": predicted, "results": results}
        return SimpleNamespace(**modules, scaling=scaling, sizes=sizes, variants=variants)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_coded_weights(tmp_path: Path) -> None:
    chosen = "all_gather-mapped,*-coded"
    files = ("--json", "all.json", "--workloads", "t2i-1024", "--repeats", "2", "--ranks", "2")
    done = start(tmp_path, "--size", "tiny16", "--variants", chosen, *files)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    rows, blocks = {row["variant"]: row for row in found["rows"]}, found["model"]["blocks_nbytes"]
    assert list(rows) == ["resident", "all_gather-mapped", "all_gather-coded", "local-coded"]
    assert all(row["bit_equal"] is True for row in rows.values())
    assert [row["host_kind"] for row in rows.values()] == [None, "mapped", "coded", "coded"]
    shards, whole = rows["all_gather-coded"]["h2d_nbytes"], rows["local-coded"]["h2d_nbytes"]
    assert 0.6 * blocks < 2 * shards < 0.8 * blocks and 0.6 * blocks < whole < 0.8 * blocks
    # What is coded is compared with the bytes of the weights themselves.
    assert rows["all_gather-coded"]["link_ms"] == rows["all_gather-mapped"]["link_ms"]
    assert "coded weights take 0." in done.stderr
    assert not list(Path("/dev/shm").glob("dlo-compare-*-coded"))


def test_a_run_side_by_side(tmp_path: Path, rooms: SimpleNamespace) -> None:
    size = rooms.sizes.SIZES["tiny"]
    full = rooms.sizes.weigh(rooms.sizes.make_config(size, 6, None), size.dtype)
    # Room for three layers and what stays beside them, not for a fourth; then none for copies of them in memory.
    room = 4 * rooms.variants.RANK_NBYTES["cpu"] + full.nbytes - 3 * full.block_nbytes + 1000
    options = ("--ranks", "4", "--host-memory", str(room), "--workloads", "t2i-1024", "--repeats", "2", "--where")
    chosen = "all_gather-mapped,*-groups-of-2,local-mapped,sequential,local-pinned,*-cold"
    files = ("--json", "all.json", "--plot", "all.svg", "--markdown", "all.md", "--logs", "logs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as checkpoint:
        done = start(tmp_path, "--variants", chosen, *options, checkpoint, *files)
        assert done.returncode == 0, done.stderr
        model = Cosmos3OmniTransformer.from_pretrained(checkpoint, dtype=torch.float32)
    found = json.loads((tmp_path / "all.json").read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    # The model without offload comes by itself, since all others are compared with it.
    pairs = "all_gather-mapped-groups-of-2"
    assert list(rows) == ["resident", "all_gather-mapped", "local-mapped", pairs, "sequential"]
    assert all(row["bit_equal"] is True and row["finite"] and row["ranks"] == 4 for row in rows.values())
    assert [row["host_kind"] for row in rows.values()] == [None, "mapped", "mapped", "mapped", None]
    assert "the largest that fits: 3 of 6 layers" in done.stderr
    missing = {row["variant"]: row["reason"] for row in found["not_measured"]}
    assert list(missing) == ["local-pinned", "all_gather-mapped-cold"]
    assert "of host memory" in missing["local-pinned"] and "no cold state" in missing["all_gather-mapped-cold"]
    assert f"not measured: local-pinned: {missing['local-pinned']}" in done.stdout

    blocks = sum(parameter.nbytes for parameter in model.layers.parameters())
    assert len(model.layers) == 3 and found["model"]["blocks_nbytes"] == blocks
    assert found["model"]["nbytes"] == sum(parameter.nbytes for parameter in model.parameters())
    links = found["links"]
    rate = links["h2d_together_bytes_per_s"]
    assert rate == min(links["h2d_together_by_rank"]) and len(links["h2d_together_by_rank"]) == 4
    assert list(links["gather_in_groups"]) == ["2", "4"]
    assert links["gather_in_groups"]["4"] == links["gather_bytes_per_s"]
    assert rows["resident"]["predicted_ms"] is rows["sequential"]["predicted_ms"] is None
    # What crosses the link in a forward, as the offload counts it and as the limit takes it, by the size of groups.
    for name, part in (("all_gather-mapped", 4), (pairs, 2), ("local-mapped", 1)):
        row = rows[name]
        assert blocks / part <= row["h2d_nbytes"] <= 1.01 * blocks / part
        assert row["predicted_ms"] >= 0.999 * row["limit_ms"]
        assert row["link_ms"] == pytest.approx(1e3 * blocks / part / rate)
        assert row["limit_ms"] == max(row["link_ms"], rows["resident"]["median_ms"])
        assert row["to_limit"] == pytest.approx(row["median_ms"] / row["limit_ms"])
        assert row["best_ms"] <= row["median_ms"] and row["repeats"] == 2
        # Two slots and what does not stream, of which the resident model holds all.
        assert 2 * blocks / 3 < row["device_weights_nbytes"] < rows["resident"]["device_weights_nbytes"]
        assert 0 < row["host_private_nbytes"] <= row["host_pss_nbytes"]

    page = (tmp_path / "all.md").read_text()
    assert "## Size 'tiny', 4 ranks" in page and "3 of 6 layers" in page and "--repeats 2" in page
    assert f"`local-pinned`: {missing['local-pinned']}" in page
    assert page.count("| equal |") == 5 and "| predicted, ms |" in page and "in groups of 2 " in page
    assert f"torch {torch.__version__}" in page
    picture = (tmp_path / "all.svg").read_text()
    assert "<svg" in picture and picture.rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    "args,text",
    (
        (("--variants", "nothing-*"), "'nothing-*' fits no variant"),
        (("--workloads", "t2v"), "'t2v' is no workload; there are: t2i-1024"),
        (("--host-memory", "much"), "'--host-memory' must be an amount of memory"),
    ),
)
def test_bad_arguments_are_one_line(
    args: tuple[str, ...], text: str, rooms: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *TINY, *args])
    with pytest.raises(SystemExit) as ended:
        rooms.compare.parse_arguments()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("compare.py: error")]
    assert ended.value.code == 2 and text in line


def test_sizes_and_tokens(rooms: SimpleNamespace) -> None:
    sizes, weigh, make_config = rooms.sizes.SIZES, rooms.sizes.weigh, rooms.sizes.make_config
    assert [workload.tokens for workload in rooms.sizes.VIDEO] == [1024, 3120, 28520]
    facts = {name: weigh(make_config(size, size.layers, None), size.dtype) for name, size in sizes.items()}
    assert facts["nano"].block_nbytes == pytest.approx(736 * 2**20, rel=0.001)
    # Two halves of 930 MiB each, 64 times.
    assert facts["super"].block_nbytes == pytest.approx(2 * 930 * 2**20, rel=0.001)
    assert facts["super"].blocks_nbytes == pytest.approx(124.8e9, rel=0.001)
    assert facts["200b"].block_nbytes == pytest.approx(930e6, rel=0.002) and facts["200b"].layers == 200
    # An embedding streams only where it is larger than a block.
    assert facts["nano"].leaf_nbytes == 151936 * 4096 * 2 and facts["super"].leaf_nbytes == 0


def test_budgets_limits_and_ratios(rooms: SimpleNamespace) -> None:
    facts = rooms.sizes.ModelFacts(
        layers=8, nbytes=8_800_000, blocks_nbytes=8_192_000, block_nbytes=1_024_000, leaf_nbytes=0
    )
    known = {variant.name: variant for variant in rooms.variants.all_variants(2)}
    assert known["budget-half-pull"].pass_nbytes(facts, 2) == 8_192_000 // 4
    assert known["group-block"].pass_nbytes(facts, 2) == known["local-mapped"].pass_nbytes(facts, 2) == 8_192_000
    assert known["fsdp2"].pass_nbytes(facts, 2) == 8_192_000 // 2
    assert known["budget-all-pull"].pass_nbytes(facts, 2) == known["resident"].pass_nbytes(facts, 2) == 0
    budget = rooms.variants.budget_nbytes
    assert [budget(part, facts, 2) // 512_000 for part in (0.5, 0.75, 1.0)] == [4, 8, 8]  # two of staging

    def rank(seconds: list[float], bits: str, h2d: float | None) -> dict[str, Any]:
        memory = {"pss": 100, "private": 40, "uss": 60, "file": 50, "shared_memory": 0}
        forward = {"seconds": seconds, "digests": [bits] * 3, "finite": True, "device_peak_nbytes": 7, "h2d": h2d}
        return {
            "forwards": {"small": forward},
            "host": memory,
            "host_before": memory,
            "weights": 5,
            "enable_s": 1.0,
            "cached": 1.0,
        }

    results = [
        rooms.results.Result(known["resident"], [rank([1.0, 2.0, 3.0], "a", None)] * 2),
        rooms.results.Result(known["budget-auto"], [rank([4.0, 4.0, 9.0], "a", 8e6), rank([3.0, 6.0, 1.0], "b", 6e6)]),
    ]
    workload = rooms.sizes.Workload("small", 64, 64, 1)

    def predict(variant: Any, of: Any, compute: float | None) -> float | None:
        assert (of, compute) == (workload, 2.0)
        return 1.5 * compute if variant.family == "dlo" else None

    base, row = rooms.results.make_rows(results, [workload], facts, 2e6, predict)
    assert (base["predicted_ms"], row["predicted_ms"]) == (None, 3000)
    assert base["bit_equal"] is True and base["limit_ms"] == 2000 and base["to_limit"] == 1
    # The slowest rank of each repetition: 4, 6 and 9; the link takes 4 seconds for what was counted.
    assert (row["median_ms"], row["best_ms"], row["limit_ms"]) == (6000, 4000, 4000)
    assert row["to_limit"] == 1.5 and row["to_compute"] == 3 and row["bit_equal"] is False
    assert row["host_pss_nbytes"] == 200 and row["host_private_nbytes"] == 80 and row["device_peak_nbytes"] == 7


def test_groups_of_ranks(rooms: SimpleNamespace) -> None:
    facts = rooms.sizes.ModelFacts(
        layers=8, nbytes=8_800_000, blocks_nbytes=8_192_000, block_nbytes=1_024_000, leaf_nbytes=0
    )
    sizes = rooms.variants.group_sizes
    assert [sizes(ranks) for ranks in (1, 2, 4, 6, 8)] == [(), (2,), (2, 4), (2, 6), (2, 4, 8)]
    known = {variant.name: variant for variant in rooms.variants.all_variants(8)}
    shares = {"local-mapped": 1, "-groups-of-2": 2, "-groups-of-4": 4, "all_gather-mapped": 8, "-3-slots": 8}
    for name, share in shares.items():
        variant = known[name if "mapped" in name else f"all_gather-mapped{name}"]
        assert (variant.shards(8), variant.pass_nbytes(facts, 8)) == (share, 8_192_000 // share)
    assert known["all_gather-mapped-groups-of-4"].enabling_options(facts, 8)["group"] == 4
    assert known["all_gather-mapped-3-slots"].enabling_options(facts, 8)["num_slots"] == 3
    half = known["budget-half-pull"].enabling_options(facts, 8)["device_budget"]
    assert half == rooms.variants.budget_nbytes(0.5, facts, 8) == round(1.004 * 4 * 128_000)


def test_what_is_predicted_beside_a_row(rooms: SimpleNamespace) -> None:
    """docs/planning.md, the whole transformer with 2 GPUs: 151 GB/s received are 302 of the whole block."""
    links = {"h2d_together_bytes_per_s": 55.2e9, "gather_in_groups": {2: 302e9, 4: 100e9}}
    config = rooms.sizes.make_config(rooms.sizes.SIZES["nano"], 36, 2048)
    known = {variant.name: variant for variant in rooms.variants.all_variants(2)}
    predicted = rooms.predicted.Predicted(config, torch.bfloat16, 2, links)
    expected = {
        "all_gather-mapped": 252,
        "local-mapped": 503,
        "budget-three-quarters-pull": 92.7,
        "budget-all-pull": 64.2,
    }
    for name, ms in expected.items():
        seconds = predicted.seconds(known[name], rooms.sizes.VIDEO[0], 0.0642)
        assert seconds is not None and 1e3 * seconds == pytest.approx(ms, rel=0.003), name
    for name in ("resident", "group-leaf", "budget-auto"):  # others' ways, and a device of unknown size
        assert predicted.seconds(known[name], rooms.sizes.VIDEO[0], 0.0642) is None
    # Of four ranks in pairs: the pairs' rate counts, and with four the gathers, 3/4 of the blocks at 3/4 of the rate.
    predicted = rooms.predicted.Predicted(config, torch.bfloat16, 4, links)
    known = {variant.name: variant for variant in rooms.variants.all_variants(4)}
    times = [
        predicted.seconds(known[name], rooms.sizes.VIDEO[0], 0.0642)
        for name in ("all_gather-mapped-groups-of-2", "all_gather-mapped")
    ]
    assert [1e3 * time for time in times] == pytest.approx([252, 27.8e9 / 100e9 * 1e3], rel=0.01)


@pytest.mark.parametrize("name", ("nano", pytest.param("super", marks=pytest.mark.slow)))
def test_the_tables_of_other_numbers_of_gpus(name: str, rooms: SimpleNamespace) -> None:
    table = rooms.scaling.make_table(name)
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert table in page, f"docs/benchmarks.md lacks what python benchmarks/scaling.py prints:\n{table}"
    assert table.count("| `all_gather`, groups of") == 3
