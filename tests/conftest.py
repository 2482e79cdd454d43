# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What every test shares: one thread a process, so that bits do not depend on the machine, and skipping without a GPU.
"""

import gc
from collections.abc import Generator

import pytest
import torch


torch.set_num_threads(1)

# Files whose tests share processes that take long to start. At the beginning of what pytest-xdist hands out they stay
# on one worker, since others take over what comes last; elsewhere they might be cut in two, and start all that twice.
FIRST = ("test_server.py", "test_executor.py", "test_calls.py", "test_page.py", "test_pipeline_calls.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schedules", type=int, default=2000, help="how many schedules tests/test_schedules.py runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.option.markexpr:
        skip = pytest.mark.skip(reason="long, and of a kind with others; run it with -m slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
    items.sort(key=lambda item: item.path.name not in FIRST)


def freeze() -> None:
    """What is here now stays, and looking through it for garbage at each enabling would take most of a test's time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # looking for garbage in what is being imported takes a third of the time
    result = yield
    freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        freeze()  # what the tests of the file have imported and compiled, now that its fixtures have ended
    return result


@pytest.fixture(autouse=True)
def nothing_left_enabled():
    """A test that leaves an offload in force would change the next one."""
    yield
    from diffusers_dlo import process_engine

    left = process_engine._engine is not None and not process_engine._engine.idle
    process_engine._engine = None
    assert not left, "the test left an offload enabled"
