# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What the pages claim a test proves, a test of that name has to be there for."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PAGES = ("composability.md", "failure_modes.md")
PROOF = re.compile(r"`(tests/[^`]*)`")


@lru_cache
def find_tests(path: Path) -> frozenset[str]:
    """The tests of a file, those of a class also as `Class::test`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        inner = [(f"{node.name}::", item) for item in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for owner, item in inner:
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test"):
                found.add(owner + item.name)
    return frozenset(found)


def rows(page: str) -> list[str]:
    """The rows of all tables of a page, without their headings."""
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("|")]
    rules = [index for index, line in enumerate(lines) if set(line) <= set("|-: ")]
    return [line for index, line in enumerate(lines) if index not in rules and index + 1 not in rules]


@pytest.mark.parametrize("page", PAGES)
def test_every_proof_exists(page: str, request: pytest.FixtureRequest) -> None:
    collected: dict[str, set[str]] = {}
    for item in request.session.items:
        file, _, name = item.nodeid.partition("::")
        collected.setdefault(file, set()).add(name)
    proofs = PROOF.findall((ROOT / "docs" / page).read_text())
    assert proofs
    wrong = []
    for proof in proofs:
        file, _, name = proof.partition("::")
        path, found = ROOT / file, collected.get(file, set())
        is_there = path.is_file() and name.partition("[")[0] in find_tests(path)
        # Which parameters there are is known where a whole file has been collected.
        if is_there and "[" in name and find_tests(path) <= {test.partition("[")[0] for test in found}:
            is_there = name in found
        if not is_there:
            wrong.append(proof)
    assert not wrong, f"docs/{page} names tests that are not there: {wrong}"


def test_every_combination_has_a_proof_or_a_limit() -> None:
    without = [row for row in rows("composability.md") if not PROOF.search(row) and "limit: " not in row]
    assert len(rows("composability.md")) > 150 and not without


def test_every_kind_of_fault_has_a_proof() -> None:
    without = [row for row in rows("failure_modes.md") if not PROOF.search(row)]
    assert len(rows("failure_modes.md")) == 45 and not without
