# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""A container's memory limit is seen before memory is taken, and not when the kernel ends the process."""

from pathlib import Path

import pytest
import torch

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.host import memory_limit
from diffusers_dlo.host.memory_limit import ContainerMemory, container_memory
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


GIB = 1 << 30
MIB = 1 << 20


def write_group(folder: Path, limit: str, used: int, page_cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\nshmem 5\ninactive_file {page_cache // 2}\nactive_file {page_cache // 2}\n"
    )


def put_in(root: Path, membership: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "membership").write_text(membership)
    monkeypatch.setattr(memory_limit, "_MEMBERSHIP", root / "membership")
    monkeypatch.setattr(memory_limit, "_CONTROL_GROUPS", root)


def test_the_tightest_group_counts_and_page_cache_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(tmp_path, "0::/pod/box\n", monkeypatch)
    assert container_memory() is None
    write_group(tmp_path / "pod" / "box", "max", 3 * GIB, 0)
    assert container_memory() is None
    write_group(tmp_path / "pod", str(8 * GIB), 6 * GIB, 2 * GIB)
    assert container_memory() == ContainerMemory(4 * GIB, 8 * GIB)
    write_group(tmp_path / "pod" / "box", str(5 * GIB), 3 * GIB, GIB)
    assert container_memory() == ContainerMemory(3 * GIB, 5 * GIB)
    write_group(tmp_path / "pod" / "box", str(5 * GIB), 7 * GIB, GIB)  # lowered below what is in use
    assert container_memory() == ContainerMemory(0, 5 * GIB)


def test_a_path_that_leads_out_of_the_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(tmp_path, "0::/../../other\n", monkeypatch)
    write_group(tmp_path, str(2 * GIB), GIB, 0)
    assert container_memory() == ContainerMemory(GIB, 2 * GIB)


def test_version_1_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(tmp_path, "5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n", monkeypatch)
    folder = tmp_path / "memory" / "box"
    folder.mkdir(parents=True)
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"total_inactive_file {GIB}\ntotal_active_file 0\ninactive_file 7\n")
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert container_memory() is None
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    assert container_memory() == ContainerMemory(2 * GIB, 4 * GIB)


@pytest.mark.parametrize("text", ("", "many\n"))
def test_what_cannot_be_read_is_no_limit(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(tmp_path, "0::/\n", monkeypatch)
    write_group(tmp_path, str(GIB), 0, 0)
    (tmp_path / "memory.current").write_text(text)
    assert container_memory() is None
    monkeypatch.setattr(memory_limit, "_MEMBERSHIP", tmp_path / "nowhere")
    assert container_memory() is None


def _enable_in_a_container(rank: int, size: int, root: str, host: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:  # one that cannot is enough
            patch.setattr(memory_limit, "_MEMBERSHIP", Path(root) / "membership")
            patch.setattr(memory_limit, "_CONTROL_GROUPS", Path(root))
        model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
        parameters = dict(model.named_parameters())
        with pytest.raises(RuntimeError) as caught:
            apply_distributed_layerwise_offload(model, host=host)
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        with torch.no_grad():
            assert torch.equal(model(feed(0)), reference(feed(0)))
        return str(caught.value)


@pytest.mark.parametrize("host", ("packed", "pinned", "auto"))
def test_refused_on_all_ranks_before_memory_is_taken(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(tmp_path, "0::/\n", monkeypatch)
    write_group(tmp_path, str(64 * MIB), 64 * MIB - 1024, 0)
    for text in (
        _enable_in_a_container(0, 1, str(tmp_path), host),
        *run_ranks(2, _enable_in_a_container, str(tmp_path), host),
    ):
        assert text.startswith("The weights cannot be kept in host memory: ")
        assert "left below its limit of 64 MiB, where the kernel ends processes; raise the limit" in text
        assert (host == "auto") == ("packed: " in text and "pinned: " in text)
