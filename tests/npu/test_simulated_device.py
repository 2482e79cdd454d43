# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The whole package on a simulated device of torch's PrivateUse1 that is called "npu": what torch demands of devices
that are not its own, and what an NPU and HCCL demand beside that. It shows nothing of the kernels of an NPU, or of its
speed.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.npu.launcher import launch
from tests.npu.simulation import build, compiler


pytestmark = pytest.mark.skipif(
    compiler() is None, reason="needs a C++ compiler: there is no g++, and CXX names no other"
)
OTHER_DEVICE = "`variable` and `tensor` have incompatible tensor type"
MODELS = {
    "five unequal blocks", "dtypes, strides and buffers", "buffers that are written", "tied weights",
    "weights that are returned", "large leaves", "cosmos3", "wan", "flux",
}  # fmt: skip


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Path:
    """The package torch_npu of the simulated device: built once, and again when its source or torch changes."""
    return build(Path(request.config.cache.mkdir("simulated_npu")))


def check_pipeline(found: dict[str, Any], transfer: str, index: int) -> None:
    assert found["transfers"] == {"transformer": transfer, "text_encoder_2": "local"}
    assert found["host"] == "pinned"
    if index == 0:  # the first rank of a host logs for all
        said = "Streaming to 'npu:0' from a pinned host store: transformer, text_encoder_2"
        assert any(said in line for line in found["log"]), found["log"]


def test_one_rank_and_two(site: Path, tmp_path: Path) -> None:
    """In one test, since importing everything where the device is torch's takes longer than all cases together."""
    (alone,), together, (survivor, lost) = launch(site, tmp_path, ("one", "two", "lost"))
    check_one_rank(alone)
    check_two_ranks(together)
    assert lost == {"died": True}
    said = survivor["lost_rank"]
    assert "Lost: " in said and "rank 1 (it was at a forward of 'model') has ended" in said, said


def check_one_rank(found: dict[str, Any]) -> None:
    assert found["the_device"] == {
        "version": torch.__version__.split("+")[0],
        "accelerator": "npu",
        "default": "npu:0",
        "accelerate": "npu",
        "backend": "hccl",
        "registers": False,
        "platform": "NpuPlatform",
        "codecs": [],
        "ans": "'npu' devices have no codec 'ans'. Where it works, `diffusers-dlo pack --decode` makes an ordinary "
        "checkpoint of a coded one; `pack --codec zstd` makes one that is read everywhere.",
        "name": "npu",
    }

    rules = found["its_rules"]
    assert rules.keys() == {"host parameter, device data", "device parameter, host data", "registration", "a thread"}
    assert (
        OTHER_DEVICE in rules["host parameter, device data"] and OTHER_DEVICE in rules["device parameter, host data"]
    )
    assert "cannot page-lock" in rules["registration"] and "never called torch.npu.set_device" in rules["a thread"]
    assert "freed before the copy was done" in found["its_streams"]

    assert found["models"] == dict.fromkeys(MODELS, "pinned")
    assert found["already_there"] == "cpu"
    assert "OutOfMemoryError: simulated npu out of memory" in found["without_room"]
    check_pipeline(found["pipeline"], "local", 0)
    assert found["host_memory"] == "packed"
    assert found["budget"]["resident"] > 0 and found["budget"]["gathers"] == []

    memory = found["memory"]
    slots, on_device = 2 * memory["largest block"], memory["rest"] + memory["inputs"]
    # Alignment to 256 bytes of the six tensors of a block in each slot, and the placeholders, are beside that.
    assert 0 <= memory["enabled"] - slots - on_device <= 2 * 6 * 256 + 1024, memory
    assert memory["enabled"] <= memory["peak"] <= memory["enabled"] + 64 * 1024, "a pass takes memory for weights"
    assert memory["host waits"] == 0 and memory["copies"] == 3 * 7
    assert memory["pinned while enabled"] > 0 and memory["pinned after"] == 0
    assert memory["after"] <= on_device


def check_two_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["connect"] == {
            "device": f"npu:{rank}",
            "backend": "hccl",
            "group": "SimulatedGroup",
            "processes": 2,
            "default": f"npu:{rank}",
        }
        assert found["group_rules"] == [
            "hccl: 8 bytes do not hold 2 x 3",
            "hccl: 8 bytes do not hold 2 x 5",
            "hccl gathers inputs of one size, not of [3, 4] bytes",
        ]
        # Pinned leaves would be whole on both ranks, far more than one shared copy.
        kinds = dict.fromkeys(MODELS, "all_gather pinned") | {"large leaves": "all_gather packed"}
        assert found["gathered_models"] == kinds
        assert "simulated npu out of memory" in found["without_room"]
        check_pipeline(found["pipeline"], "all_gather", rank)
        assert found["host_memory"] == "packed"
        check_addresses(found["addresses"])
        check_budget(found["budget"])
    assert ranks[0]["without_room"].startswith("RuntimeError: rank 1 failed: ")
    (passes, ghosts), (other_passes, other_ghosts) = (found["unequal_work"] for found in ranks)
    assert (passes, other_passes) == (3, 1) and other_ghosts >= 2 and passes + ghosts == other_passes + other_ghosts


def check_addresses(found: dict[str, Any]) -> None:
    """HCCL registers memory by its address: a slot has one output and one input, whatever the pass and the block."""
    gathers = found["gathers"]
    assert len(gathers) >= 5 * 5 and all(in_place for *_, in_place in gathers)
    assert len(set(gathers)) == len({output for output, *_ in gathers}) == found["num_slots"] == 2
    assert found["host waits"] == 0, "the host waits for a stream"


def check_budget(found: dict[str, Any]) -> None:
    """
    With weights that stay on the device, too: a resident shard is copied into its slot. What stays whole is gathered
    once, where it stays.
    """
    assert found["resident"] > 0 and found["gathers"]
    assert all(in_place for *_, in_place in found["gathers"])
    often = {gather for gather, count in Counter(found["gathers"]).items() if count > 1}
    assert len(often) == found["num_slots"], often
