# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns adding tags and the library's name to the metadata of a model card, by insertion: all other characters stay, with
their order and comments, which writing YAML anew would lose. Must not know of files, nor of what is below it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK


_EMPTY_BLOCK = re.compile(r"\s*---\r?\n(?=---[ \t]*(?:\r?\n|\Z))")


def add_metadata(card: str, tags: Sequence[str], library: str, newline: str) -> str:
    r"""
    A card whose metadata has these tags, and a `library_name`; the card itself where it has them.

    Args:
        card (`str`): the whole text.
        tags (`Sequence[str]`): those that are missing come after those that are there.
        library (`str`): `library_name` of a card that names none.
        newline (`str`): the line break of lines that are added.

    Raises:
        `ValueError`: the metadata is damaged, or of a form into which nothing can be inserted.
    """
    empty = _EMPTY_BLOCK.match(card)
    if empty is not None:  # the Hub's expression finds none, or with CRLF one between the two characters
        return f"{empty[0]}{_add_to_yaml('', tags, library, newline)}{newline}{card[empty.end() :]}"
    match = REGEX_YAML_BLOCK.search(card)  # what the Hub takes for metadata
    if match is None:
        if card.lstrip().startswith("---"):
            raise ValueError(
                "The card begins with a line of ---, and no other such line ends its metadata. Add one below the "
                "metadata; or, if there is none, remove the first."
            )
        metadata = ModelCardData(library_name=library, tags=list(tags)).to_yaml()
        return f"---\n{metadata}\n---\n".replace("\n", newline) + card
    start, end = match.span(2)
    return card[:start] + _add_to_yaml(card[start:end], tags, library, newline) + card[end:]


def _add_to_yaml(block: str, tags: Sequence[str], library: str, newline: str) -> str:
    try:
        before = yaml.safe_load(block + newline)
        root = yaml.compose(block, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a date that there is not
        raise ValueError(f"The metadata of the card is not YAML ({' '.join(str(error).split())}). Mend it.") from error
    before = {} if before is None else before
    if not isinstance(before, dict):
        raise ValueError("The metadata of the card is not a mapping of names to values. Mend it.")
    listed = before.get("tags")
    if not isinstance(listed, (list, str, type(None))):
        raise ValueError(f"The tags of the card are no list of names, but {listed!r}. Mend them.")
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    missing = [tag for tag in tags if tag not in listed]
    wanted = {**before, "tags": [*listed, *missing]} if missing else dict(before)
    wanted.setdefault("library_name", library)

    edited, indent = block, " " * (root.start_mark.column if root is not None else 0)
    added = []
    if missing and "tags" in before:
        node = _value_of(root, "tags")
        edited = block if node is None else _insert(block, node, missing, newline)
    elif missing:
        added += [f"{indent}tags:", *(f"{indent}- {tag}" for tag in missing)]
    if "library_name" not in before:
        added.append(f"{indent}library_name: {library}")
    if added:
        edited += (newline if edited else "") + newline.join(added)
    try:
        succeeded = yaml.safe_load(edited + newline) == wanted
    except (yaml.YAMLError, ValueError):
        succeeded = False
    if not succeeded:
        raise ValueError(
            "The metadata of the card is of a form into which nothing can be inserted. Give it these by hand, and the "
            f"command leaves them alone: tags: [{', '.join(map(str, wanted['tags']))}], library_name: "
            f"{wanted['library_name']}."
        )
    return edited


def _value_of(root: Any, key: str) -> Any:
    """None if the value comes from elsewhere, by a merge key. Of a name that is given twice, the last one counts."""
    return next((value for name, value in reversed(root.value) if name.value == key), None)


def _insert(block: str, node: Any, tags: Sequence[str], newline: str) -> str:
    """`block` with tags added to those of a node; what this gets wrong, the caller notices."""
    start, end = node.start_mark.index, node.end_mark.index
    flow = ", ".join(tags)
    if not isinstance(node, yaml.SequenceNode):
        if node.tag != "tag:yaml.org,2002:null":
            return f"{block[:start]}[{block[start:end]}, {flow}]{block[end:]}"
        return f"{block[:start]}{'' if end > start else ' '}[{flow}]{block[end:]}"
    if node.flow_style and not node.value:
        return f"{block[: end - 1]}{flow}{block[end - 1 :]}"
    last = node.value[-1]
    at = last.end_mark.index
    if node.flow_style:
        return f"{block[:at]}, {flow}{block[at:]}"
    line_start = block.rfind("\n", 0, last.start_mark.index) + 1
    item = block[line_start : last.start_mark.index]
    ends = [place for place in (block.find("\r", at), block.find("\n", at)) if place >= 0]
    at = min(ends, default=len(block))  # behind a comment
    return block[:at] + "".join(f"{newline}{item}{tag}" for tag in tags) + block[at:]
