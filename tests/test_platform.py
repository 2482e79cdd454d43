# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Vendors: named in one place, and a backend that is a package of its own is loaded, or refused with what to do."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import diffusers_dlo
from diffusers_dlo import DistributedLayerwiseOffloadConfig, apply_distributed_layerwise_offload
from diffusers_dlo.device import backend_package, platform
from diffusers_dlo.device.onload import default_device, resolve_device
from diffusers_dlo.device.platform import load_device_backend, load_device_backends
from tests.toys import Stack, feed, toy


PACKAGE = Path(diffusers_dlo.__file__).parent
VENDOR = re.compile(
    r"cuda|nvidia|nccl|\bnpu|torch_npu|\bascend\b|huawei|hccl|\bcann\b|\bxpu|xccl|\bintel\b|gloo|\brocm|\bhip\b|\bmps\b",
    re.IGNORECASE,
)
TORCH = torch.__version__.split("+")[0]
"""Its metadata need not have the rest."""
SERIES = ".".join(TORCH.split(".")[:2])
OTHER = "2.3" if SERIES != "2.3" else "2.4"
LIBRARIES = "raise ImportError('libhccl.so: cannot open shared object file')"
"""What a backend does whose libraries are missing."""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package 'torch_npu' of some release, made for some torch, that does `code` when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(
        code: str, release: str = f"{SERIES}.0", wanted: str | None = f"{SERIES}.*", autoload: bool = False
    ) -> None:
        (tmp_path / "torch_npu.py").write_text(code)
        info = tmp_path / f"torch_npu-{release}.dist-info"
        info.mkdir()
        requirement = "" if wanted is None else f"Requires-Dist: torch=={wanted}\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {release}\n{requirement}")
        if autoload:
            (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")

    yield make
    sys.modules.pop("torch_npu", None)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[None]:
    """A machine whose driver shows a device."""
    (tmp_path / "davinci0").touch()
    with patch.dict(platform._DEVICE_FILES, npu=(str(tmp_path), "davinci[0-9]*")):
        yield


def test_vendors_are_named_in_the_platform_room_only() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [name for name, text in files.items() if VENDOR.search(text)] == [
        "device/ans_codec.py",
        "device/platform.py",
    ]


def test_a_missing_backend() -> None:
    with pytest.raises(RuntimeError) as caught:
        DistributedLayerwiseOffloadConfig(onload_device="npu:1")
    said = str(caught.value)
    assert "'npu' devices need the package 'torch_npu', which is not installed" in said
    assert TORCH in said and f'pip install "torch_npu=={SERIES}.*"' in said


@pytest.mark.parametrize("kind", ("cpu", "cuda", "xpu", "none"))
def test_what_torch_knows_needs_nothing(kind: str) -> None:
    load_device_backend(kind)


def test_a_backend_for_another_torch_is_not_even_imported(install: Install) -> None:
    install("raise SystemExit('imported')", release=f"{OTHER}.0.post2", wanted=f"{OTHER}.0.*")
    with pytest.raises(RuntimeError) as caught:
        load_device_backend("npu")
    said = str(caught.value)
    assert f"'torch_npu' {OTHER}.0.post2 was made for torch =={OTHER}.0.*" in said and TORCH in said
    assert f'pip install "torch=={OTHER}.0.*"' in said and f'pip install "torch_npu=={SERIES}.*"' in said


@pytest.mark.parametrize(
    "code",
    (
        "raise ImportError('libhccl.so: cannot open shared object file\\n more')",
        "raise Exception('libhccl.so: cannot')",
        "raise SystemExit('libhccl.so: cannot')",
    ),
    ids=("import error", "any error", "an end"),
)
def test_libraries_that_are_missing(install: Install, code: str) -> None:
    install(code, wanted=None)
    with pytest.raises(RuntimeError) as caught:
        load_device_backend("npu")
    said = str(caught.value)
    assert f"'torch_npu' {SERIES}.0 cannot be loaded into torch {torch.__version__} (" in said
    assert "libhccl.so: cannot" in said and ("it ends the process: " in said) == ("SystemExit" in code)
    assert "source set_env.sh" in said and "\n" not in said


METADATA = {
    "none": None,
    "empty": b"",
    "no version": b"Metadata-Version: 2.1\nName: torch_npu\n",
    "not utf-8": b"Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.0\nAuthor: \xe9\xff\n",
    "no requirement that can be read": b"Metadata-Version: 2.1\nName: torch_npu\nVersion: x\nRequires-Dist: @torch\n",
    "another's extra": b"Metadata-Version: 2.1\nName: torch_npu\nVersion: 1\nRequires-Dist: torch==1; extra == 'a'\n",
}


@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_that_says_nothing_of_torch(metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the package goes with this torch is then seen when it is imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch_npu.py").write_text("raise ImportError")
    content, info = METADATA[metadata], tmp_path / "torch_npu-1.0.dist-info"
    if content is not None:
        info.mkdir()
        (info / "METADATA").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"'torch_npu' .* cannot be loaded into torch .* \(ImportError\)"):
        load_device_backends()
    (tmp_path / "torch_npu.py").unlink()
    importlib.invalidate_caches()
    load_device_backends()  # what was left behind by a package is not one
    with pytest.raises(RuntimeError, match="which is not installed"):
        load_device_backend("npu")


@pytest.mark.parametrize(
    "found,fits",
    (("2.3.0a0+git1", True), ("2.3.0.dev2024", True), ("2.4.0a0", False)),
    ids=("from source", "at night", "of the next"),
)
def test_a_torch_from_before_a_release(install: Install, found: str, fits: bool) -> None:
    install("", wanted="2.3.0")
    with patch.object(backend_package, "version", lambda package: found if package == "torch" else "2.3.0"):
        assert (backend_package.describe_mismatch("torch_npu") is None) == fits


def test_a_backend_is_loaded(install: Install) -> None:
    install("import torch\ntorch.npu = 'loaded'")
    try:
        load_device_backend("npu")
        assert torch.npu == "loaded"
        sys.modules.pop("torch_npu")
        load_device_backend("npu")
        assert "torch_npu" not in sys.modules, "once is enough"
    finally:
        del torch.npu


def test_a_device_that_cannot_be_used_is_not_passed_over(install: Install, shown: None) -> None:
    install(LIBRARIES)
    with patch.object(torch.accelerator, "is_available", lambda: False):
        with pytest.raises(RuntimeError, match=r'cannot be loaded .*say onload_device="cpu"'):
            default_device(None)
        assert resolve_device(torch.device("cpu")) == torch.device("cpu")
        model, reference = toy(Stack, 3), toy(Stack, 3)
        with pytest.raises(RuntimeError, match="cannot be loaded"):
            apply_distributed_layerwise_offload(model)
        handle = apply_distributed_layerwise_offload(model, onload_device="cpu")
        with torch.no_grad():
            assert torch.equal(model(feed(0)), reference(feed(0)))
        handle.remove()


def test_where_no_device_is_shown_the_cpu_computes() -> None:
    with patch.object(torch.accelerator, "is_available", lambda: False):
        assert default_device(None) == torch.device("cpu")


@pytest.mark.parametrize("autoload", ("0", "1"), ids=("by us", "by torch"))
@pytest.mark.parametrize("wanted", (f"{OTHER}.0.*", f"{SERIES}.*"), ids=("another torch", "no libraries"))
def test_importing_says_what_is_wrong_with_a_backend(
    install: Install, tmp_path: Path, wanted: str, autoload: str
) -> None:
    """Torch, or else diffusers, loads it in an import, and says at most that it failed."""
    install(LIBRARIES, "2.3.0", wanted, autoload=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import diffusers_dlo"
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and "'torch_npu' 2.3.0" in last, done.stderr
    assert f"torch {TORCH}" in last
    if wanted.startswith(OTHER):
        assert f"was made for torch =={wanted}" in last
    else:
        remedy = "source set_env.sh" if autoload == "0" else "in the shell that starts Python"
        assert "(libhccl.so: cannot open shared object file)" in last and remedy in last
        assert "uninstall it" in last


def test_the_platform_of_each_kind() -> None:
    kinds = {"cpu": "Platform", "cuda": "CudaPlatform", "npu": "NpuPlatform", "xpu": "AcceleratorPlatform"}
    with patch.object(torch, "get_device_module", lambda device: nn), patch.object(torch, "device", _Device):
        for kind, name in kinds.items():
            made = platform.get_platform(_Device(kind))
            assert type(made).__name__ == name
            assert made.gathers_from_slots_only == (kind == "npu")
            assert made.registers_host_memory == (kind in ("cpu", "cuda"))


def test_gathers_are_ended_by_the_backend_where_torch_cannot() -> None:
    """Torch's call reaches a method that this backend does not have; the backend's own goes first."""
    said: list[str] = []

    class Backend:
        def abort_hccl_comm(self, reason: str) -> None:
            said.append(reason)

    class Group:
        def _get_backend(self, device: object) -> Backend:
            assert device is made.device
            return Backend()

    with patch.object(torch, "get_device_module", lambda device: nn):
        made = platform.NpuPlatform(torch.device("privateuseone"))
    with pytest.raises(ValueError, match="Invalid process group"):  # from torch, which comes second
        made.abort(Group())
    assert said == ["a rank is lost"]


class _Device:
    """A device of a kind that this torch may not know."""

    def __init__(self, kind: str) -> None:
        self.type = kind
