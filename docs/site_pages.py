# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What the site has beside the files of `docs/`: the pages of the repository's root, with links that lead to them.

A hook of MkDocs. A link to a file that is no page of the site, such as a script, becomes the name of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"^( *)```.*?^\1```[ ]*$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's pages."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links as they are in the repository into links of the site."""
    names = {place: name for name, place in ROOT_PAGES.items()}
    folder = "" if page.file.src_uri in names else "docs"

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        place = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if place and files.get_file_from_path(place) is not None:
            return f"{mark}[{text}]({place}{'#' * bool(anchor)}{anchor})"
        return text if (ROOT / path).exists() else match[0]

    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])
