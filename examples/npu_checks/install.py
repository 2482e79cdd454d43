# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is installed, and whether the device's package can be imported: tried in a process of its own, since a wrong
version may end the process that tries. Must not import torch before that is known.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version


KINDS = ("auto", "npu", "cuda", "cpu")
_PACKAGES = ("torch", "torch_npu", "diffusers_dlo", "diffusers", "transformers", "accelerate")
_TRY = """
import json, torch, torch_npu
try:
    from torch_npu.npu.utils import get_cann_version
    cann = get_cann_version()
except Exception:
    cann = ""
print("found " + json.dumps({"cann": cann, "devices": torch.npu.device_count()}))
"""
_SECONDS = 120
_CANN_REMEDY = "Install CANN, and run `source .../set_env.sh` of it in this shell"


class UsageError(Exception):
    """The device that was asked for cannot be checked here; the message says why, and the way out."""


@dataclass(frozen=True)
class Installed:
    """
    What there is.

    Attributes:
        kind (`str`): of the device to check: `"npu"`, `"cuda"`, `"cpu"`.
        versions (`dict[str, str]`): by name.
        mismatch (`str`): which versions do not go together, and the remedy; empty if they do.
        import_error (`str`): why the device's package cannot be used, and the remedy; empty if it can.
    """

    kind: str
    versions: dict[str, str]
    mismatch: str = ""
    import_error: str = ""


def look(wanted: str) -> Installed:
    """
    What is installed for the device `wanted`, one of `KINDS`.

    Raises:
        `UsageError`: there is no such device here.
    """
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):  # not there, or broken
            found = ""
        if found or importlib.util.find_spec(name) is not None:
            versions[name] = found or "unknown"
    if wanted == "npu" and "torch_npu" not in versions:
        raise UsageError(
            f"'npu' needs torch_npu, which is not installed; install the one for torch {versions.get('torch')}: "
            f'pip install "torch_npu=={_release(versions.get("torch", "0.0"))}.*"'
        )
    if wanted == "npu" or (wanted == "auto" and "torch_npu" in versions):
        error, found = _try_import()
        devices = int(found.get("devices", 0))
        if found.get("cann"):
            versions["cann"] = str(found["cann"])
        if wanted == "npu" or error or devices:
            if not error and not devices:
                error = "torch_npu is imported, and sees no NPU; look at `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"
            return Installed("npu", versions, compare(versions), error)
    elif "torch_npu" in versions:
        # Where torch_npu cannot be imported, torch could not be either.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
        raise UsageError(f"'cuda' is not there: torch {torch.__version__} {built} and sees no device; see nvidia-smi")
    if has_cuda and wanted != "cpu":
        versions["cuda"] = str(torch.version.cuda)
        return Installed("cuda", versions)
    return Installed("cpu", versions)


def compare(versions: dict[str, str]) -> str:
    """Why the versions of torch, torch_npu and CANN do not go together; empty if nothing speaks against it."""
    torch_version, npu_version = versions["torch"], versions["torch_npu"]
    # Comparing the versions themselves would be wrong: 2.12.0.post3 is for torch 2.12.0.
    specifiers = _wanted_torch()
    try:
        wanted_torch = specifiers[0] if specifiers else f"=={_release(npu_version)}.*"
        base = Version(torch_version).base_version  # of a torch that was built from source, or at night
    except InvalidVersion:
        return ""
    wanted = Requirement(f"torch{wanted_torch}").specifier
    if wanted.contains(torch_version, prereleases=True) or wanted.contains(base, prereleases=True):
        return ""
    return (
        f"torch {torch_version} and torch_npu {npu_version} do not go together; "
        f'pip install "torch{wanted_torch}", or "torch_npu=={_release(torch_version)}.*"'
    )


def _wanted_torch() -> list[str]:
    """The versions of torch that torch_npu's metadata asks for; none where it does not say, or is broken."""
    try:
        lines = importlib.metadata.requires("torch_npu") or ()
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return []
    found = []
    for line in lines:
        try:
            item = Requirement(line)
        except InvalidRequirement:
            continue
        applies = item.marker is None or item.marker.evaluate({"extra": ""})
        if item.name == "torch" and item.specifier and applies:
            found.append(str(item.specifier))
    return found


def _release(version: str) -> str:
    found = Version(version)
    return f"{found.major}.{found.minor}"


def _try_import() -> tuple[str, dict[str, object]]:
    """Why torch_npu cannot be imported, or what it has found."""
    try:
        done = subprocess.run([sys.executable, "-c", _TRY], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"importing torch_npu did not end within {_SECONDS} s", {}
    for line in done.stdout.splitlines():
        if done.returncode == 0 and line.startswith("found {"):
            return "", json.loads(line.removeprefix("found "))
    if done.returncode < 0:
        return f"importing torch_npu ended the process ({signal.Signals(-done.returncode).name})", {}
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if re.search(r"lib\w+\.so|ASCEND", line)), lines[-1] if lines else "no reason"
    )
    remedy = f". {_CANN_REMEDY}" if re.search(r"lib\w+\.so|ASCEND|CANN", reason) else ""
    return f"torch_npu cannot be imported: {reason}{remedy}", {}
