# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
That torch_npu has what is asked of it here, with the arguments it is given, in the newest three releases. Wheels are
opened and read, never imported: this says nothing of what a device does.
"""

import ast
import configparser
import email
import functools
import inspect
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate
import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers.utils.torch_utils import TorchDeviceBackend
from packaging.requirements import Requirement
from packaging.version import Version

import diffusers_dlo
from diffusers_dlo.device import platform
from tests.npu.uses import Use, uses_in_classes, uses_of_class, uses_of_path
from tests.npu.wheels import IndexUnreachable, NoWheel, Wheel, fetch, newest_releases


HEADERS = "torch_npu/include/torch_npu/csrc/"
RELEASES = ("newest", "second", "third")
GUARD = f"{HEADERS}core/npu/impl/NPUGuardImpl.h"
# What functions of torch.accelerator that end in C++ ask of a device's guard (aten/src/ATen/DeviceAccelerator.cpp).
NEEDED_BY_TORCH: dict[str, tuple[str, ...]] = {
    "_accelerator_getAccelerator": (),  # that a backend is registered
    "_accelerator_getDeviceIndex": ("getDevice",),
    "_accelerator_setDeviceIndex": ("setDevice",),
}


@pytest.fixture(scope="module")
def wheels(pytestconfig: pytest.Config) -> list[Wheel]:
    assert pytestconfig.cache is not None
    try:
        return fetch(newest_releases(len(RELEASES)), Path(pytestconfig.cache.mkdir("torch_npu_wheels")))
    except (IndexUnreachable, NoWheel) as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=RELEASES)
def wheel(request: pytest.FixtureRequest, wheels: list[Wheel]) -> Wheel:
    place = RELEASES.index(request.param)
    if place >= len(wheels):
        pytest.skip(f"the package index has {len(wheels)} releases of torch_npu for this Python and platform")
    return wheels[place]


def npu_platform() -> type:
    """The class of an NPU's platform: its own if there is one, else that of every accelerator without."""
    found = [cls for name, cls in vars(platform).items() if inspect.isclass(cls) and name.lower().startswith("npu")]
    return max(found, key=lambda cls: len(cls.__mro__), default=platform.AcceleratorPlatform)


@functools.lru_cache
def package_trees(package: ModuleType) -> dict[str, ast.Module]:
    """The sources of an installed package that speak of torch's device modules, parsed."""
    root = Path(inspect.getfile(package)).parent
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    words = ("torch.npu", "torch_npu", "torch.accelerator", "get_device_module")
    return {name: ast.parse(text) for name, text in sources.items() if any(word in text for word in words)}


@functools.lru_cache
def own_uses() -> frozenset[Use]:
    """All that the package asks of `torch.npu`, by whatever name."""
    uses = uses_of_class(npu_platform(), "_module")
    for name, tree in package_trees(diffusers_dlo).items():
        uses |= uses_of_path(tree, "torch.npu", name)
    return frozenset(uses)


def lacks(wheel: Wheel, use: Use) -> str | None:
    """What is wrong with a use of `torch.npu`, None if nothing is."""
    culprit = f"torch_npu {wheel.release}: 'torch.npu.{use}', used in '{use.where}'"
    found = wheel.find("torch_npu.npu", use.name)
    if found is None:
        return None if use.is_optional else f"{culprit}, is not there"
    home, node = found
    if use.positional is None:
        return None
    signature = wheel.signature(home, node, bound="." in use.name)
    if signature is None:
        return f"{culprit}, cannot be called, or only compiled code knows with what"
    try:
        signature.bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{culprit}, has the signature {signature}: {error}"
    return None


def check(wheel: Wheel, uses: set[Use] | frozenset[Use]) -> None:
    wrong = [reason for use in sorted(uses, key=str) if (reason := lacks(wheel, use)) is not None]
    assert not wrong, "\n".join(wrong)


def check_overrides(wheel: Wheel, header: str, *methods: str) -> None:
    """That a class in a header of the wheel has virtual methods of its own."""
    for method in methods:
        declared = rf"\b{method}\([^;{{]*\)[^;{{]*\boverride\b"
        assert re.search(declared, wheel.text(header)), f"torch_npu {wheel.release}: '{method}' is not in {header}"


def calls(wheel: Wheel, word: str, function: str) -> list[ast.Call]:
    """The calls of what ends in `function`, in the files of the wheel that `word` stands in."""
    nodes = [node for tree in wheel.trees_with(word) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if ast.unparse(node.func).endswith(function)]


def test_all_that_is_asked_of_the_module_is_there(wheel: Wheel) -> None:
    names = {use.name for use in own_uses()}
    assert {"Stream", "Event", "current_stream", "stream", "mem_get_info"} <= names
    assert any(name.startswith("Stream.") for name in names) and any(name.startswith("Event.") for name in names)
    check(wheel, own_uses())


def test_what_is_not_there_is_reported(wheel: Wheel) -> None:
    def asked(name: str, positional: int | None = None, *keywords: str, is_optional: bool = False) -> str:
        return lacks(wheel, Use(name, positional, keywords, is_optional, "here")) or ""

    for name in ("made_up", "Event.made_up", "made_up.Stream"):
        assert f"torch_npu {wheel.release}: 'torch.npu.{name}', used in 'here', is not there" in asked(name)
    assert not asked("made_up", is_optional=True)
    assert "too many positional arguments" in asked("mem_get_info", 2)
    assert "unexpected keyword argument 'made_up'" in asked("Event", 0, "made_up")
    assert "missing a required argument" in asked("stream", 0)
    assert "cannot be called" in asked("default_generators", 0)


def test_torch_accelerator_finds_what_it_needs(wheel: Wheel) -> None:
    used = {
        use.name
        for name, tree in package_trees(diffusers_dlo).items()
        for use in uses_of_path(tree, "torch.accelerator", name)
    }
    assert {"is_available", "current_device_index"} <= used
    for name in sorted(used):
        tree = ast.parse(inspect.getsource(getattr(torch.accelerator, name)))
        # torch's own functions hold the device's module as `mod`.
        text = ast.unparse(tree).replace("mod.", "torch.npu.")
        check(wheel, uses_of_path(ast.parse(text), "torch.npu", f"torch.accelerator.{name}"))
        for need in uses_of_path(tree, "torch._C", name):
            assert need.name in NEEDED_BY_TORCH, f"'torch.accelerator.{name}' needs '{need.name}': add what that needs"
            check_overrides(wheel, GUARD, *NEEDED_BY_TORCH[need.name])


def test_importing_torch_loads_and_registers_it(wheel: Wheel) -> None:
    entries = configparser.ConfigParser(delimiters="=")
    entries.read_string(wheel.text(".dist-info/entry_points.txt"))
    module, _, function = entries["torch.backends"]["torch_npu"].strip().partition(":")
    found = wheel.find(module, function)
    assert found is not None, f"torch_npu {wheel.release}: the entry point '{module}:{function}' is not there"
    signature = wheel.signature(*found)
    assert signature is not None and not signature.parameters, f"torch_npu {wheel.release}: '{function}{signature}'"
    for word in ("_register_device_module", "rename_privateuse1_backend"):
        names = [ast.unparse(call.args[0]) for call in calls(wheel, word, word)]
        assert "'npu'" in names, f"torch_npu {wheel.release}: '{word}' is called with {names}"


def test_the_torch_it_wants_can_be_told_before_it_is_imported(wheel: Wheel) -> None:
    metadata = email.message_from_string(wheel.text(".dist-info/METADATA"))
    assert (metadata["Name"], Version(metadata["Version"])) == ("torch_npu", wheel.release)
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    (pin,) = [one.specifier for one in wanted if one.name == "torch" and one.marker is None]
    major, minor, patch = wheel.release.release
    for version, fits in (
        (f"{major}.{minor}.{patch}", True),
        (f"{major}.{minor}.{patch}+cpu", True),
        (f"{major}.{minor}.{patch + 1}", False),
        (f"{major}.{minor - 1}.{patch}", False),
        (f"{major}.{minor + 1}.{patch}", False),
    ):
        assert pin.contains(version) is fits, f"torch_npu {wheel.release} wants torch '{pin}', and {version}?"
    found = wheel.find("torch_npu", "__version__")
    assert found is not None, f"torch_npu {wheel.release}: '__version__' is not there"
    home, node = found
    assert home == "torch_npu.version" and isinstance(node, ast.Assign)
    assert Version(ast.literal_eval(node.value)) == wheel.release


def test_its_backend_gathers_bytes_with_our_timeout(wheel: Wheel) -> None:
    registered = {}
    for call in calls(wheel, "register_backend(", "Backend.register_backend"):
        registered[ast.literal_eval(call.args[0])] = {key.arg: ast.unparse(key.value) for key in call.keywords}
    # Torch takes the one that is registered first, and so does the platform.
    name = next(iter(registered))
    assert name == "hccl", f"torch_npu {wheel.release} registers {list(registered)}"
    assert registered[name] == {"extended_api": "True", "devices": "['npu']"}, f"torch_npu {wheel.release}"
    on_npu: Any = object.__new__(npu_platform())  # the constructor would ask the device
    on_npu.device = SimpleNamespace(type="npu", index=0)
    with patch.dict(dist.Backend.default_device_backend_map, npu=name):
        assert on_npu.backend == name

    texts = [ast.unparse(tree) for tree in wheel.trees_with(f'"{name}"')]
    assert any("pg_options._timeout = dist_backend_opts.timeout" in text for text in texts), (
        f"torch_npu {wheel.release}: the 'timeout' of new_group does not reach the backend"
    )
    group = f"ProcessGroup{name.upper()}"
    check_overrides(wheel, f"{HEADERS}distributed/{group}.hpp", "_allgather_base", "getBackendName")
    described = wheel.text("third_party/hccl/inc/hccl/hccl.h").partition("extern HcclResult HcclAllGather(")[0]
    assert "uint8" in described.rpartition("/**")[2], f"torch_npu {wheel.release}: 'HcclAllGather' of uint8"
    missing = wheel.strings_missing("/libtorch_npu.so", ["at::kByte/at::kBool", group])
    assert not missing, f"torch_npu {wheel.release}: the library does not know {missing}"


def test_its_backend_ends_collectives_by_a_call_of_its_own(wheel: Wheel) -> None:
    """Which the platform makes: what torch calls is a method that the backend does not have."""
    source = inspect.getsource(npu_platform().abort)
    called = re.findall(r"backend\.(\w+)\(", source)
    assert called == ["abort_hccl_comm"]
    missing = wheel.strings_missing("/libtorch_npu.so", called)
    assert not missing, f"torch_npu {wheel.release}: the library does not know {missing}"
    in_python = [ast.unparse(tree) for tree in wheel.trees_with(called[0])]
    assert any("_get_backend(torch.device('npu')).abort_hccl_comm('reinit')" in text for text in in_python), (
        f"torch_npu {wheel.release}: 'abort_hccl_comm' is not called with a reason alone"
    )


def test_host_memory_can_be_page_locked(wheel: Wheel) -> None:
    check_overrides(wheel, f"{HEADERS}core/npu/NPUHooksInterface.h", "getPinnedMemoryAllocator", "isPinnedPtr")
    assert "getHostAllocator(at::kPrivateUse1)" in wheel.text(f"{HEADERS}core/npu/CachingHostAllocator.h"), (
        f"torch_npu {wheel.release}: torch's caching host allocator does not serve NPUs"
    )


def test_what_accelerate_and_diffusers_ask_is_there(wheel: Wheel) -> None:
    (backend,) = ast.parse(inspect.getsource(TorchDeviceBackend)).body
    assert isinstance(backend, ast.ClassDef)
    backend.body = [node for node in backend.body if getattr(node, "name", "") != "__getattr__"]  # which asks for any
    uses = uses_in_classes([backend], "module")
    for package in (accelerate, diffusers):
        for name, tree in package_trees(package).items():
            uses |= uses_of_path(tree, "torch.npu", f"{package.__name__}/{name}", is_ours=False)
    assert {"is_available", "device_count", "empty_cache", "mem_get_info"} <= {use.name for use in uses}
    check(wheel, uses)


SOURCE = """
class Base:
    def both(self, event: Event) -> None:
        event.only_in_the_base()

    def extended(self) -> None:
        self._module.in_the_base()


class Derived(Base):
    def both(self, event: Event) -> None:
        event.record()

    def extended(self) -> None:
        super().extended()
        module = self._module
        module.in_a_name(1, width=2)

    def make(self) -> Stream:
        return self._module.Stream(priority=-1)

    def order(self, after: Sequence[Event], timed: tuple[Event, Event] | None) -> None:
        stream = self.make()
        for event in after:
            stream.wait_event(event)
        timed[0].record(stream)
        self._module.current_stream(0).synchronize()
        find = getattr(self._module, "maybe", None)
        return [event.query() for event in after] if find is None else find(self)
"""


def uses_in(source: str) -> set[str]:
    family = [node for node in reversed(ast.parse(source).body) if isinstance(node, ast.ClassDef)]
    return {f"{use}{'?' * use.is_optional}" for use in uses_in_classes(family, "_module")}


def test_no_use_is_overlooked() -> None:
    assert uses_in(SOURCE) == {
        *("in_the_base()", "in_a_name(_, width=_)", "Stream(priority=_)", "current_stream(_)", "maybe?", "maybe(_)?"),
        *("Stream.wait_event(_)", "Stream.synchronize()", "Event.record()", "Event.record(_)", "Event.query()"),
    }
    for unreadable in ("helper(self._module)", "self._module.f(*after)", "getattr(self._module, name)()"):
        with pytest.raises(ValueError, match="order"):
            uses_in(SOURCE.replace("self._module.current_stream(0).synchronize()", unreadable))


def test_nobody_but_the_platform_holds_the_module() -> None:
    holding = {
        name
        for name, tree in package_trees(diffusers_dlo).items()
        if any(use.name == "get_device_module" for use in uses_of_path(tree, "torch", name, is_ours=False))
    }
    assert holding == {"device/platform.py"}
