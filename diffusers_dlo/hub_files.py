# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the small files of a checkpoint, in a directory or on the Hub: configurations, indices, and the headers of weight
files. Must not fetch or read weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint.files import find_checkpoint
from .checkpoint.safetensors_file import StoredTensor, peek_header
from .coding.coded_file import METADATA_KEY, CodedFile, parse_coded_file, read_coded_file


_SMALL = ["*model_index.json", "*config.json", "*.safetensors.index.json"]
_PATIENCE = 10
"""Seconds, as for the rest of a header."""
_USUAL = ("diffusion_pytorch_model.safetensors", "model.safetensors")


@dataclass(frozen=True)
class CheckpointFolder:
    """
    A checkpoint's directory; of one on the Hub, its part in the cache. `remote` names the files that the Hub has, and
    `unasked` says why it could not be asked.
    """

    model: str
    root: str
    remote: frozenset[str] = frozenset()
    unasked: str = ""

    @classmethod
    def find(cls, model: str) -> CheckpointFolder:
        """
        The directory `model`, or the checkpoint of that name on the Hub.

        Raises:
            `ValueError`: there is none, or it is a checkpoint neither of a pipeline nor of a model.
        """
        folder = cls(model, model) if os.path.isdir(model) else cls._from_hub(model)
        if all(folder.read_json(name) is None for name in ("model_index.json", "config.json")):
            raise ValueError(
                f"'{model}' has neither a model_index.json nor a config.json, so it is no checkpoint. "
                "Name the directory of a pipeline or of one of its models."
            )
        return folder

    @classmethod
    def _from_hub(cls, model: str) -> CheckpointFolder:
        from huggingface_hub import HfApi, snapshot_download

        if os.path.exists(model) or (os.path.sep in model.strip(os.path.sep) and _begins_here(model)):
            raise ValueError(f"'{model}' is not a directory. Name one that holds a checkpoint.")
        try:
            root = snapshot_download(model, allow_patterns=_SMALL)
        except Exception as error:  # also the HTTP client's own, which changes from release to release
            raise ValueError(
                f"'{model}' is not a directory here, and not to be had from the Hub ({_first_line(error)})."
            ) from error
        try:
            return cls(model, str(root), frozenset(HfApi().list_repo_files(model)))
        except Exception as error:  # offline, see above: what the cache has must do
            return cls(model, str(root), unasked=_first_line(error))

    def path(self, component: str = "") -> str:
        """The directory of a component here."""
        return os.path.join(self.root, component)

    def describe(self, component: str = "") -> str:
        """The checkpoint, or a component of it, for messages."""
        return f"'{os.path.join(self.model, component)}'" if component else f"'{self.model}'"

    def read_json(self, name: str, component: str = "") -> dict[str, Any] | None:
        """
        A configuration, None where there is none.

        Raises:
            `ValueError`: it is damaged.
        """
        path = os.path.join(self.path(component), name)
        if not os.path.isfile(path):
            return None
        try:
            with open(path, encoding="utf-8") as file:
                return dict(json.load(file))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"'{path}' is no configuration ({error}). Download the checkpoint again.") from error

    def weights(self, component: str = "") -> list[str]:
        """
        The names of a component's safetensors files: those of its index, else the one of the usual name, else the only
        one. Empty where there are none.

        Raises:
            `ValueError`: several checkpoints in one directory. `RuntimeError`: an index that is damaged.
        """
        names = self._names(component)
        for usual in _USUAL:
            if f"{usual}.index.json" in names:
                index = self.read_json(f"{usual}.index.json", component) or {}
                found = index.get("weight_map")
                if not isinstance(found, dict):
                    raise ValueError(f"{self.describe(component)} has an index without a 'weight_map'.")
                files = sorted(set(map(str, found.values())))
                for name in files:
                    if name != os.path.basename(name) or name in ("", ".", ".."):
                        raise ValueError(f"{self.describe(component)} has an index that leads out of it, to {name!r}.")
                return files
            if usual in names:
                return [usual]
        others = sorted(name for name in names if name.endswith(".safetensors"))
        if len(others) < 2 or self.remote:
            return others[:1]
        return sorted(os.path.basename(path) for path in find_checkpoint(self.path(component))[1])

    def headers(self, component: str = "") -> list[StoredTensor]:
        """
        What the headers of a component's files say.

        Raises:
            `ValueError`: there are none, or one is missing. `RuntimeError`: one is damaged.
        """
        if not self.weights(component):
            if self.unasked:
                raise ValueError(
                    f"{self.describe(component)} has no safetensors files in the cache, and the Hub cannot be asked "
                    f"({self.unasked}). Download it first, or try again online."
                )
            raise ValueError(
                f"{self.describe(component)} has no safetensors files. Other formats are not read; save it with "
                "save_pretrained(..., safe_serialization=True) first."
            )
        return [stored for name in self.weights(component) for stored in self._header(component, name)]

    def coded_file(self, component: str = "") -> CodedFile | None:
        """
        What a component's file says of its coded blocks; None if it has none.

        Raises:
            as `headers`; `RuntimeError`: it contradicts itself.
        """
        for name in self.weights(component):
            path = os.path.join(self.path(component), name)
            found = read_coded_file(path) if os.path.isfile(path) else self._ask_coded(component, name)
            if found is not None:
                return found
        return None

    def _header(self, component: str, name: str) -> Iterable[StoredTensor]:
        path = os.path.join(self.path(component), name)
        if os.path.isfile(path):
            return peek_header(path)
        return _stored(self._remote(component, name), self._ask(component, name).tensors)

    def _ask_coded(self, component: str, name: str) -> CodedFile | None:
        """As `coded_file`, of one file on the Hub."""
        asked, remote = self._ask(component, name), self._remote(component, name)
        begin = 8 + self._ask_length(remote) if METADATA_KEY in asked.metadata else 0
        return parse_coded_file(f"{self.model}/{remote}", _stored(remote, asked.tensors, begin), asked.metadata)

    def _ask_length(self, remote: str) -> int:
        """Bytes of the header of a file on the Hub, which stand in its first eight."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        try:
            headers = {**build_hf_headers(), "Range": "bytes=0-7"}
            answer = get_session().get(hf_hub_url(self.model, remote), headers=headers, timeout=_PATIENCE)
            hf_raise_for_status(answer)
            return int.from_bytes(answer.content[:8], "little")
        except Exception as error:  # see above
            raise ValueError(f"The header of '{remote}' is not to be had ({_first_line(error)}).") from error

    def _remote(self, component: str, name: str) -> str:
        return f"{component}/{name}" if component else name

    def _ask(self, component: str, name: str) -> Any:
        """The header of a file on the Hub."""
        remote = self._remote(component, name)
        if remote not in self.remote:
            raise ValueError(
                f"{self.describe(component)} has no file '{name}', which belongs to it. "
                "Download the checkpoint again, with all of its files."
            )
        from huggingface_hub import parse_safetensors_file_metadata

        try:
            return parse_safetensors_file_metadata(self.model, remote)
        except Exception as error:  # see above
            raise ValueError(f"The header of '{remote}' is not to be had ({_first_line(error)}).") from error

    def _names(self, component: str) -> set[str]:
        here = self.path(component)
        names = set(os.listdir(here)) if os.path.isdir(here) else set()
        return names | {os.path.basename(name) for name in self.remote if os.path.dirname(name) == component}


def _begins_here(model: str) -> bool:
    """Whether a path leads into a directory that is there: then it is meant as a path."""
    return os.path.isabs(model) or os.path.exists(os.path.dirname(model))


def _stored(remote: str, tensors: Mapping[str, Any], begin: int = 0) -> list[StoredTensor]:
    """What the header of a file on the Hub says of tensors; these begin at byte `begin` of it."""
    return [
        StoredTensor(key, remote, one.dtype, tuple(one.shape), begin + start, stop - start)
        for key, one in tensors.items()
        for start, stop in (one.data_offsets,)
    ]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
