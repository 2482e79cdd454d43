# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the package torch_npu of a machine without NPUs: a folder to put on the path, in which it is installed as the real
one is, so that torch, accelerate and diffusers load it by themselves. Must not run in the process of the tests: a
process has the name of its device for ever.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch


SOURCES = [Path(__file__).with_name(name) for name in ("simulated_device.cpp", "simulated_machine.h")]
LIBRARY = "simulated_device.so"


def compiler() -> str | None:
    """The C++ compiler that builds the device; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build(folder: Path) -> Path:
    """
    The folder with the package torch_npu, built if `folder` has none of this source and this torch. Processes that
    come at the same time wait for the one that builds.
    """
    content = [*(path.read_bytes() for path in SOURCES), torch.__version__.encode(), sys.version.encode()]
    site = folder / f"simulated-{hashlib.sha256(b''.join(content)).hexdigest()[:16]}"
    version = torch.__version__.split("+")[0]
    package, info = site / "torch_npu", site / f"torch_npu-{version}.dist-info"
    for part in (package, info):
        part.mkdir(parents=True, exist_ok=True)
    with (site / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        (package / "__init__.py").write_text(
            f"from tests.npu.simulation import install\n\n__version__ = {version!r}\ninstall(globals())\n"
        )
        if not (package / LIBRARY).exists():
            _compile(package / LIBRARY)
    return site


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension  # takes a second, and who installs has no use for it

    # Not by `torch.utils.cpp_extension.load`, which would also load the library into this process.
    unfinished = library.with_suffix(".part")
    command = [str(compiler()), "-std=c++20", "-O0", "-fPIC", "-shared", str(SOURCES[0]), "-o", str(unfinished)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"'{command[0]}' cannot build the simulated device:\n{done.stderr[-4000:]}")
    unfinished.rename(library)


def install(package: dict[str, object]) -> None:
    """Makes the simulated device torch's "npu", and gives `package` (the names of torch_npu) what is called of it."""
    torch.ops.load_library(str(Path(str(package["__file__"])).with_name(LIBRARY)))
    torch.utils.rename_privateuse1_backend("npu")
    from tests.npu import device_module

    torch._register_device_module("npu", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    package |= {
        "npu": device_module,
        "npu_rms_norm": _rms_norm,
        "npu_geglu": _geglu,
        "npu_fusion_attention": _fusion_attention,
        "_autoload": _join_torch_distributed,
    }


def _join_torch_distributed() -> None:
    """torch calls it when all of torch is there."""
    import torch.distributed as dist

    from tests.npu.collectives import SimulatedGroup

    dist.Backend.register_backend("hccl", SimulatedGroup, extended_api=True, devices=["npu"])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch_npu.npu_rms_norm`: the result, and one over the root of the mean of squares."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x * scale).to(weight.dtype) * weight, scale


def _geglu(x: torch.Tensor, dim: int = -1, approximate: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch_npu.npu_geglu`: the result, and the activated half."""
    left, gate = x.chunk(2, dim=dim)
    gate = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    return left * gate, gate


def _fusion_attention(*args: object, **kwargs: object) -> None:
    """Is there to be imported: nobody calls it who has not asked for it."""
    raise NotImplementedError("'npu_fusion_attention' is not simulated")
