# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""`docs/models.md` names every class that diffusers exports, and says what the script beside it finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import diffusers
import pytest
import transformers

from .registries import COMMON, MODELS, REASONS


FOLDER = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_models", FOLDER / "make_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for the names in its annotations
    spec.loader.exec_module(module)
    return module


def page() -> str:
    return (FOLDER / "models.md").read_text(encoding="utf-8")


def test_every_exported_class_is_tested_or_has_a_reason(maker: ModuleType) -> None:
    exported = {name for title, names in maker.sections().items() if not title.startswith("Text") for name in names}
    assert len(exported) > 100
    unknown = exported - MODELS.keys() - COMMON.keys() - REASONS.keys()
    assert not unknown, (
        f"diffusers {diffusers.__version__} exports {sorted(unknown)}: add tiny models of them to a registry in "
        "tests/compose, or to its REASONS why they cannot stream; then run python docs/make_models.py"
    )
    unlisted = {name for name in exported if f"| `{name}`" not in page()}
    assert not unlisted, f"docs/models.md lacks {sorted(unlisted)}: run python docs/make_models.py"
    assert not REASONS.keys() & (MODELS.keys() | COMMON.keys()), "it streams, or it does not"


def test_a_class_that_nobody_has_tested_is_refused(maker: ModuleType) -> None:
    with pytest.raises(ValueError, match="'NewTransformer2DModel' is new in diffusers: add a tiny model"):
        maker.tiny("NewTransformer2DModel")


EVERY_NTH = 9


@pytest.mark.parametrize("step", (EVERY_NTH, pytest.param(1, marks=pytest.mark.slow)))
def test_the_page_is_what_the_script_writes(step: int, maker: ModuleType) -> None:
    """Some rows of each table; all of them take long."""
    versions = f"diffusers {diffusers.__version__} and transformers {transformers.__version__}"
    if versions not in page():
        pytest.skip(f"the page is of other versions than {versions}")
    rows = maker.render({title: names[::step] for title, names in maker.sections().items()}).splitlines()
    assert sum(row.startswith("| `") for row in rows) > 100 / step
    assert set(rows) <= set(page().splitlines()), "run python docs/make_models.py"
    assert step > 1 or rows == page().splitlines(), "run python docs/make_models.py"
