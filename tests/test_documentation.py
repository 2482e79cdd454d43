# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What the pages claim a test proves, a test of that name has to be there for; and where they lead, something is."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token


ROOT = Path(__file__).parents[1]
PAGES = ("composability.md", "failure_modes.md")
DOCS = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
LINKED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS)
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
    assert len(rows("failure_modes.md")) == 46 and not without


# Links


@lru_cache
def tokens_of(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


@lru_cache
def anchors_of(page: str) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    anchors = []
    for token, inline in zip(tokens_of(page), tokens_of(page)[1:]):
        if token.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            anchors.append(slug if slug not in found else f"{slug}-{found[slug]}")
            found[slug] = found.get(slug, 0) + 1
    return frozenset(anchors)


def links_of(page: str) -> list[str]:
    """Where the links and pictures of a page lead."""
    children = [child for token in tokens_of(page) for child in token.children or ()]
    return [str(child.attrs[key]) for child in children for key in ("href", "src") if key in child.attrs]


def fault_of(page: str, link: str) -> str:
    """What is wrong with a link of a page, "" if nothing is."""
    path, _, anchor = link.partition("#")
    if "://" in path:
        return "" if path.startswith("https://") else "is not https"
    target = (ROOT / page).parent / path if path else ROOT / page
    target = target.resolve()
    if not target.is_relative_to(ROOT.resolve()) or not target.exists():
        return "is not there"
    if anchor and (target.suffix != ".md" or anchor not in anchors_of(str(target.relative_to(ROOT.resolve())))):
        return "has no such heading"
    return ""


def test_every_link_leads_somewhere() -> None:
    links = [(page, link) for page in LINKED for link in links_of(page)]
    wrong = [f"{page}: '{link}' {fault}" for page, link in links if (fault := fault_of(page, link))]
    assert len(links) > 100 and not wrong, "\n".join(wrong)


def test_faults_of_links_are_seen() -> None:
    assert fault_of("docs/ranks.md", "nowhere.md") == "is not there"
    assert fault_of("docs/ranks.md", "../../outside.md") == fault_of("docs/ranks.md", "/README.md") == "is not there"
    assert fault_of("docs/ranks.md", "concurrency.md#nothing") == "has no such heading"
    assert fault_of("README.md", "docs/how_it_works.md#who-drives-a-pass") == ""
    assert fault_of("README.md", "#optionen") == "has no such heading"
    assert fault_of("README.md", "http://example.org") == "is not https"
    assert anchors_of("docs/device_budget.md") >= {"keeping-weights-on-the-device", "device_budgetauto"}


def test_every_page_is_listed() -> None:
    pages = set(DOCS) - {"docs/index.md"}
    assert pages <= set(links_of("README.md")), "the README's list lacks a page"
    assert pages <= {f"docs/{link}" for link in links_of("docs/index.md")}, "the list of docs/index.md lacks a page"
