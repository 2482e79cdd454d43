# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""The documentation as a site: it builds without a warning, and its links lead to pages and headings that exist."""

import os
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest


ROOT = Path(__file__).parents[1]
pytest.importorskip("material", reason="needs mkdocs-material")


class Links(HTMLParser):
    """Where a page leads, what it fetches, and the anchors in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.fetched += [values["src"]] if "src" in values else []
        self.fetched += [values["href"]] if tag == "link" and values.get("rel") != "canonical" else []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} | {"readme", "contributing", "changelog"}
    assert {path.parent.name for path in site.glob("*/index.html")} == names and (site / "index.html").is_file()
    assert not list(site.rglob("*.py"))


def test_links_lead_to_pages_and_headings(site: Path) -> None:
    pages = {f"/{path.relative_to(site)}": Links(path.read_text()) for path in site.rglob("index.html")}
    wrong, count = [], 0
    for name, page in pages.items():
        for link in [*page.links, *page.fetched]:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            target = posixpath.join(target, "index.html") if (site / target[1:]).is_dir() else target
            count += 1
            if not (site / target[1:]).is_file() or (anchor and anchor not in pages[target].anchors):
                wrong.append(f"{name}: {link}")
    assert count > 500 and not wrong, "\n".join(wrong)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = [link for path in site.rglob("*.html") for link in Links(path.read_text()).fetched]
    assert len(fetched) > 50 and not [link for link in fetched if re.match(r"([a-z]+:)?//", link)]


def test_tables_pictures_and_code_are_shown(site: Path) -> None:
    readme = (site / "readme" / "index.html").read_text()
    assert 'src="../assets/overview.svg"' in readme and (site / "assets" / "overview.svg").is_file()
    assert "<td><code>device_budget</code></td>" in readme and "enable_distributed_layerwise_offload" in readme
    assert 'href="../concurrency/"' in readme and "](" not in re.sub(r"(?s)<(pre|code).*?</\1>", "", readme)
