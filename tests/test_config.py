# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The options of an offload: what is refused, with which words, and how a config and overrides are put together."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diffusers_dlo import DistributedLayerwiseOffloadConfig as Config


DEFAULTS = {
    "onload_device": None,
    "transfer": "auto",
    "num_slots": "auto",
    "host": "auto",
    "cache_dir": None,
    "device_budget": None,
    "gather": "auto",
    "gather_in_place": "auto",
    "mesh": None,
    "blocks": None,
    "uneven": "ghost",
    "grace": 1.0,
    "timeout": 1800.0,
}
A_LIST = "list of ModuleList names"

WRONG_TYPES = (
    ("onload_device", ["cpu"], "torch device"),
    ("onload_device", 3.5, "torch device"),
    ("transfer", None, "auto, all_gather, local"),
    ("transfer", 2, "auto, all_gather, local"),
    ("host", None, "auto, coded, mapped, packed, pinned"),
    ("host", b"packed", "auto, coded, mapped, packed, pinned"),
    ("cache_dir", 3, "path of a directory"),
    ("cache_dir", b"/tmp", "path of a directory"),
    ("num_slots", "2", '"auto" or an int'),
    ("num_slots", 3.0, '"auto" or an int'),
    ("num_slots", True, '"auto" or an int'),
    ("num_slots", None, '"auto" or an int'),
    ("device_budget", 1.5, "number of bytes"),
    ("device_budget", True, "number of bytes"),
    ("gather", None, "auto, collective, pull"),
    ("gather_in_place", None, 'True, False or "auto"'),
    ("gather_in_place", 1, 'True, False or "auto"'),
    ("mesh", [0, 1], "DeviceMesh"),
    ("mesh", "hosts", "DeviceMesh"),
    ("blocks", "transformer_blocks", A_LIST),
    ("blocks", 3, A_LIST),
    ("blocks", [1, 2], A_LIST),
    ("blocks", {"transformer_blocks"}, A_LIST),
    ("blocks", {"transformer": "transformer_blocks"}, A_LIST),
    ("blocks", {"transformer": [None]}, A_LIST),
    ("blocks", {1: ["transformer_blocks"]}, "component"),
    ("uneven", None, "ghost, error"),
    ("grace", "1", "number of seconds"),
    ("grace", None, "number of seconds"),
    ("grace", False, "number of seconds"),
    ("timeout", "60", "number of seconds"),
    ("timeout", None, "number of seconds"),
    ("timeout", True, "number of seconds"),
)
WRONG_VALUES = (
    ("onload_device", "warp:0", "must name a torch device"),
    ("onload_device", "cuda:x", "must name a torch device"),
    ("onload_device", "", "must name a torch device"),
    ("onload_device", "meta", "must be a device that computes"),
    ("transfer", "gather", "one of auto, all_gather, local"),
    ("transfer", "LOCAL", "one of auto, all_gather, local"),
    ("transfer", "", "one of auto, all_gather, local"),
    ("host", "ram", "one of auto, coded, mapped, packed, pinned"),
    ("num_slots", 1, "at least 2"),
    ("num_slots", 0, "at least 2"),
    ("num_slots", -2, "at least 2"),
    ("blocks", [], "leave it out"),
    ("blocks", {"transformer": []}, "leave it out"),
    ("device_budget", -1, "must not be negative"),
    ("device_budget", "40 parsecs", "'40GiB'"),
    ("device_budget", "", "'40GiB'"),
    ("device_budget", "-1GiB", "'40GiB'"),
    ("gather", "push", "one of auto, collective, pull"),
    ("gather_in_place", "no", 'True, False or "auto"'),
    ("gather", "pull", "device_budget="),
    ("uneven", "join", "one of ghost, error"),
    ("grace", -0.1, "0 or more"),
    ("grace", float("inf"), "0 or more"),
    ("grace", float("nan"), "0 or more"),
    ("timeout", 0, "positive number of seconds"),
    ("timeout", -1.0, "positive number of seconds"),
    ("timeout", float("inf"), "positive number of seconds"),
    ("timeout", float("nan"), "positive number of seconds"),
)


def ids(cases: Sequence[tuple[str, object, str]]) -> list[str]:
    return [f"{name}={value!r}" for name, value, _ in cases]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_fields_and_their_defaults() -> None:
    config = Config()
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == DEFAULTS


@pytest.mark.parametrize("name,value,remedy", WRONG_TYPES, ids=ids(WRONG_TYPES))
def test_a_wrong_type_is_a_type_error(name: str, value: object, remedy: str) -> None:
    with pytest.raises(TypeError) as caught:
        Config(**{name: value})
    assert f"'{name}" in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize("name,value,remedy", WRONG_VALUES, ids=ids(WRONG_VALUES))
def test_a_wrong_value_is_a_value_error(name: str, value: object, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config(**{name: value})
    assert f"'{name}" in str(caught.value) and remedy in str(caught.value)


def test_the_component_of_a_wrong_blocks_entry_is_named() -> None:
    with pytest.raises(TypeError, match=r"blocks\['text_encoder'\].*'encoder.block'"):
        Config(blocks={"transformer": ["blocks"], "text_encoder": "encoder.block"})
    with pytest.raises(ValueError, match=r"blocks\['text_encoder'\].*empty"):
        Config(blocks={"transformer": ["blocks"], "text_encoder": ()})


@pytest.mark.parametrize("given", ("cpu", "cuda:3", "xpu:1", torch.device("cuda", 1)))
def test_devices_become_devices_and_need_not_exist(given: str | torch.device) -> None:
    assert Config(onload_device=given).onload_device == torch.device(given)


def test_a_mesh_is_kept(mesh: DeviceMesh) -> None:
    assert Config(mesh=mesh).mesh is mesh
    assert Config.resolve(Config(mesh=mesh), {"timeout": 5}).mesh is mesh


def test_everything_about_it_is_frozen() -> None:
    config = Config()
    for name in DEFAULTS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, DEFAULTS[name])
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(config, name)
    with pytest.raises(ValueError, match="num_slots"):
        dataclasses.replace(config, num_slots=1)


def test_the_callers_lists_may_change_afterwards() -> None:
    names = ["transformer_blocks"]
    mapping = {"transformer": names}
    of_list, of_mapping = Config(blocks=names), Config(blocks=mapping)
    names.append("single_transformer_blocks")
    mapping["text_encoder"] = ["encoder.block"]
    assert of_list.blocks_of("model") == ("transformer_blocks",)
    assert of_mapping.blocks_of("transformer") == ("transformer_blocks",)
    assert of_mapping.blocks_of("text_encoder") is None


def test_forms_of_blocks() -> None:
    assert Config(blocks=["a", "b"]) == Config(blocks=("a", "b"))
    assert Config(blocks=["a", "b"]) != Config(blocks=["b", "a"])
    assert Config(blocks={"transformer": ["a"]}) == Config(blocks={"transformer": ("a",)})
    assert Config().blocks_of("transformer") is None
    both = Config(blocks=["a", "b"])
    assert both.blocks_of("transformer") == both.blocks_of("model") == ("a", "b")
    one = Config(blocks={"transformer": ["a"], "transformer_2": ["b"]})
    assert [one.blocks_of(name) for name in ("transformer", "transformer_2", "text_encoder")] == [("a",), ("b",), None]


def test_slots() -> None:
    assert [Config(num_slots=n).slots for n in ("auto", 2, 3, 17)] == [2, 2, 3, 17]


def test_transfer_for_a_group() -> None:
    sizes = (1, 2, 8)
    assert [Config().transfer_for(n) for n in sizes] == ["local", "all_gather", "all_gather"]
    assert [Config(transfer="local").transfer_for(n) for n in sizes] == ["local"] * 3
    assert [Config(transfer="all_gather").transfer_for(n) for n in sizes] == ["all_gather"] * 3


def test_resolve_puts_a_config_and_overrides_together() -> None:
    assert Config.resolve(None, {}) == Config()
    assert Config.resolve(None, {"num_slots": 3}) == Config(num_slots=3)
    base = Config(onload_device="cpu", transfer="local", num_slots=4, host="pinned", blocks=["a"], timeout=7)
    assert Config.resolve(base, {}) == base
    got = Config.resolve(base, {"num_slots": "auto", "blocks": None})
    assert got == Config(onload_device="cpu", transfer="local", host="pinned", timeout=7)
    assert base.num_slots == 4, "the config that was passed is not changed"


def test_resolve_takes_a_mapping_and_leaves_it_alone() -> None:
    mapping = {"host": "packed", "num_slots": 3}
    assert Config.resolve(mapping, {"num_slots": 5, "timeout": 2}) == Config(host="packed", num_slots=5, timeout=2)
    assert mapping == {"host": "packed", "num_slots": 3}
    # An override may mend a wrong value, and what is wrong in the mapping is refused as in the config itself.
    assert Config.resolve({"num_slots": 1}, {"num_slots": 2}) == Config(num_slots=2)
    with pytest.raises(ValueError, match="'num_slots' must be at least 2"):
        Config.resolve({"num_slots": 1}, {})


@pytest.mark.parametrize("config", (None, Config(), {"timeout": 3}), ids=("none", "config", "mapping"))
def test_an_unknown_option_lists_those_there_are(config: object) -> None:
    with pytest.raises(TypeError) as caught:
        Config.resolve(config, {"slots": 3})  # type: ignore[arg-type]
    assert "'slots'" in str(caught.value) and all(name in str(caught.value) for name in DEFAULTS)


def test_an_unknown_option_in_a_mapping_is_refused_too() -> None:
    with pytest.raises(TypeError, match="'device_budgets'.*timeout"):
        Config.resolve({"device_budgets": 3}, {})


@pytest.mark.parametrize("config", ("local", 3, ["transfer"], Config), ids=("str", "int", "list", "class"))
def test_something_else_in_place_of_a_config(config: object) -> None:
    with pytest.raises(TypeError, match="'config' must be a DistributedLayerwiseOffloadConfig, a mapping or None"):
        Config.resolve(config, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ("packed", "pinned"))
def test_a_cache_is_for_weights_that_stream_from_files(host: str) -> None:
    with pytest.raises(ValueError, match="'cache_dir'.*copies them to memory"):
        Config(cache_dir="weights", host=host)
    assert Config(cache_dir=pathlib.Path("weights"), host="mapped").cache_dir == "weights"
