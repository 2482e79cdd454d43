# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the outline of a checkpoint: its models on the meta device, built from their configurations, in the dtypes that
the headers of its files name. Must not read weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .checkpoint.safetensors_file import DTYPES, StoredTensor
from .coding.coded_file import METHOD, CodedFile, is_shard_key
from .hub_files import CheckpointFolder
from .tensor_utils import owned_tensors


_MISSING_SHARE = 0.1
"""Of a model's elements that the files lack, what is put down to other names and ties; more is an error."""


@dataclass(frozen=True)
class Outline:
    """
    What a checkpoint holds.

    Attributes:
        model (`str`): the directory, or the name on the Hub.
        library (`str`), class_name (`str`): of the pipeline, or of the single model.
        components (`Mapping[str, nn.Module]`): models on the meta device; of a single model, it alone, as `model`.
        is_pipeline (`bool`): whether there is a `model_index.json`.
        dtype (`torch.dtype`): what the weights are loaded in.
        cast_nbytes (`int`): bytes of the weights, as loaded, that lie in the files in another dtype.
        unknown (`tuple[tuple[str, str, int], ...]`): components of a class that is in none of the libraries: name,
            class, bytes.
        chosen (`tuple[str, ...]`): the components that were asked for to stream.
        coded (`Mapping[str, CodedFile]`): what the files of components with coded blocks say of these.
        file_nbytes (`int`): bytes of all weights, as they lie in files.
    """

    model: str
    library: str
    class_name: str
    components: Mapping[str, nn.Module]
    is_pipeline: bool
    dtype: torch.dtype
    cast_nbytes: int
    unknown: tuple[tuple[str, str, int], ...] = ()
    chosen: tuple[str, ...] = ()
    coded: Mapping[str, CodedFile] = field(default_factory=dict)
    file_nbytes: int = 0


def open_outline(model: str, dtype: torch.dtype | None = None, components: Sequence[str] | None = None) -> Outline:
    r"""
    The outline of a checkpoint. From the Hub, configurations and the headers of files are fetched, and no weights.

    Args:
        model (`str`): a directory with a pipeline (`model_index.json`) or a single model (`config.json`), or the name
            of one on the Hub.
        dtype (`torch.dtype`, *optional*): what the weights are loaded in; the most common dtype of the largest
            component's files if None.
        components (`Sequence[str]`, *optional*): those that are to stream, to be kept in the outline.

    Raises:
        `ValueError`: there is no such checkpoint, it has no safetensors, files and configuration differ, or its coded
            weights are in another dtype.
    """
    folder = CheckpointFolder.find(model)
    index = folder.read_json("model_index.json")
    if index is None:
        built = {"model": _Built.of(folder, "", None)}
        library, class_name = built["model"].library, type(built["model"].module).__name__
        unknown: list[tuple[str, str, int]] = []
    else:
        library, class_name = "diffusers", str(index.get("_class_name", "DiffusionPipeline"))
        built, unknown = _build_all(folder, index)
        if not built:
            raise ValueError(f"'{model}' has no model with weights in safetensors files; only these are planned for.")
    largest = max(built.values(), key=lambda one: one.nbytes)
    dtype = dtype if dtype is not None else largest.dtype
    cast = sum(one.load_in(dtype) for one in built.values())
    return Outline(
        model=model,
        library=library,
        class_name=class_name,
        components={name: one.module for name, one in built.items()},
        is_pipeline=index is not None,
        dtype=dtype,
        cast_nbytes=cast,
        unknown=tuple(unknown),
        chosen=tuple(components or ()),
        coded={name: one.coded for name, one in built.items() if one.coded is not None},
        file_nbytes=sum(one.file_nbytes for one in built.values()) + sum(nbytes for _, _, nbytes in unknown),
    )


def _build_all(
    folder: CheckpointFolder, index: Mapping[str, Any]
) -> tuple[dict[str, _Built], list[tuple[str, str, int]]]:
    built, unknown = {}, []
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)):
            continue  # an option, or a component that the pipeline does without
        if folder.read_json("config.json", name) is None and not folder.weights(name):
            continue  # a scheduler, a tokenizer
        cls = _find_class(*entry)
        if cls is None:
            if folder.weights(name):
                unknown.append((name, entry[1], sum(stored.nbytes for stored in folder.headers(name))))
        elif issubclass(cls, nn.Module):
            built[name] = _Built.of(folder, name, cls)
    return built, unknown


def _find_class(library: str, name: str) -> type | None:
    import diffusers
    import transformers

    homes: Sequence[Any] = (diffusers,) if library == "diffusers" else (transformers,)
    if library not in ("diffusers", "transformers"):
        homes = [home for home in (getattr(diffusers.pipelines, library, None),) if home is not None]
    found = next((getattr(home, name) for home in homes if hasattr(home, name)), None)
    return found if isinstance(found, type) else None


class _Built:
    """A model on the meta device, and what its files say of its weights."""

    def __init__(
        self,
        module: nn.Module,
        library: str,
        headers: Sequence[StoredTensor],
        where: str,
        coded: CodedFile | None = None,
    ) -> None:
        self.module = module
        self.library = library
        self.coded = coded
        self.file_nbytes = sum(stored.nbytes for stored in headers)
        self._where = where
        if coded is not None:
            headers = [*(one for one in headers if not is_shard_key(one.key)), *_decoded_headers(coded)]
        self._headers = {stored.key: stored for stored in headers}
        sizes: Counter[str] = Counter()
        for stored in headers:
            if stored.dtype in DTYPES and DTYPES[stored.dtype].is_floating_point:
                sizes[stored.dtype] += stored.nbytes
        self.dtype = DTYPES[sizes.most_common(1)[0][0]] if sizes else torch.float32
        self.nbytes = sum(stored.nbytes for stored in headers)
        self._check(headers)

    @classmethod
    def of(cls, folder: CheckpointFolder, name: str, model_class: type | None) -> _Built:
        """
        The model in a directory of the checkpoint, of the class that its `config.json` names unless one is given.

        Raises:
            `ValueError`: no configuration, an unknown class, or no safetensors files.
        """
        where = folder.describe(name)
        config = folder.read_json("config.json", name)
        if config is None:
            raise ValueError(
                f"{where} has neither a model_index.json nor a config.json, so it is no checkpoint. "
                "Name the directory of a pipeline or of one of its models."
            )
        coded = _read_coding(folder, name, config)
        library = "diffusers" if "_class_name" in config else "transformers"
        if model_class is None:
            named = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
            model_class = _find_class(library, str(named))
            if model_class is None or not issubclass(model_class, nn.Module):
                raise ValueError(f"{where} holds a '{named}', which this {library} does not have.")
        headers = folder.headers(name)
        config.pop("quantization_config", None)
        try:
            module = _build_on_meta(model_class, config, folder.path(name))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{where}: no '{model_class.__name__}' can be built from its config.json ({error})."
            ) from error
        return cls(module, library, headers, where, coded)

    def _check(self, headers: Sequence[StoredTensor]) -> None:
        """The files belong to this configuration: what has the same name has the same shape, and enough is there."""
        needed = sum(owned.tensor.numel() for owned in self._parameters())
        for name, parameter in self.module.named_parameters():
            stored = self._headers.get(name)
            if stored is not None and stored.shape != tuple(parameter.shape):
                raise ValueError(
                    f"{self._where}: '{name}' has the shape {stored.shape} in its file, and {tuple(parameter.shape)} "
                    "by its config.json. They do not belong together; download the checkpoint again."
                )
        there = sum(torch.Size(stored.shape).numel() for stored in headers)
        if there < (1 - _MISSING_SHARE) * needed:
            raise ValueError(
                f"{self._where}: its safetensors files hold {there:,} of the {needed:,} numbers that "
                f"'{type(self.module).__name__}' has. Download the checkpoint again, with all of its files."
            )

    def _parameters(self) -> list[Any]:
        return [owned for owned in owned_tensors(self.module) if owned.owners[0].kind == "parameter"]

    def load_in(self, dtype: torch.dtype) -> int:
        """
        Sets the dtype of each weight as `from_pretrained(dtype=...)` would; bytes of those that are cast.

        Raises:
            `ValueError`: coded weights are in another dtype.
        """
        if self.coded is not None and str(dtype) != f"torch.{self.coded.dtype}":
            raise ValueError(
                f"{self._where} is coded in {self.coded.dtype}, and coded weights cannot be cast to "
                f"{str(dtype).removeprefix('torch.')}. Load it in {self.coded.dtype}, or decode it first "
                "(`diffusers-dlo pack --decode`)."
            )
        kept = _kept_in_fp32(self.module, dtype)
        cast = 0
        for owned in self._parameters():
            parameter = owned.tensor
            if not parameter.is_floating_point():
                continue
            path = owned.name.split(".")
            wanted = torch.float32 if kept.intersection(path) else dtype
            stored = self._headers.get(owned.name)
            found = DTYPES.get(stored.dtype, self.dtype) if stored is not None else self.dtype
            parameter.data = parameter.data.to(wanted)
            cast += parameter.numel() * wanted.itemsize * (found != wanted)
        return cast


def _read_coding(folder: CheckpointFolder, name: str, config: Mapping[str, Any]) -> CodedFile | None:
    """What a coded model's file says of its blocks; None for a model that is not quantized."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    where = folder.describe(name)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        raise ValueError(f"{where} is quantized; sizes are known for weights as they are computed with only.")
    coded = folder.coded_file(name)
    if coded is None:
        raise ValueError(
            f"{where} is coded by its config.json, and its file holds no coded blocks. They do not belong together; "
            "pack or download the checkpoint again."
        )
    return coded


def _decoded_headers(coded: CodedFile) -> list[StoredTensor]:
    """The tensors in coded blocks, as the header of a file that is not coded would describe them."""
    names = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
    return [
        StoredTensor(name, coded.path, names[tensor.dtype], tensor.shape, 0, tensor.nbytes)
        for block in coded.blocks.values()
        for tensor in block.tensors
        for name in tensor.names
    ]


def _kept_in_fp32(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of modules that stay in fp32: diffusers heeds its list always, transformers only that for the dtype."""
    from diffusers import ModelMixin

    lists = ["_keep_in_fp32_modules"]
    if not isinstance(module, ModelMixin):
        lists = ["_keep_in_fp32_modules_strict"] if dtype in (torch.float16, torch.bfloat16) else []
        lists += ["_keep_in_fp32_modules"] if dtype == torch.float16 else []
    return {name for attribute in lists for name in getattr(module, attribute, None) or ()}


def _build_on_meta(model_class: Any, config: Mapping[str, Any], path: str) -> nn.Module:
    """A model without weights. diffusers' are built as their `from_pretrained` does, transformers' all on meta."""
    from accelerate import init_empty_weights
    from diffusers import ModelMixin
    from diffusers.models.modeling_utils import no_init_weights

    if issubclass(model_class, ModelMixin):
        with no_init_weights(), init_empty_weights():
            return model_class.from_config(dict(config)).eval()
    settings = model_class.config_class.from_pretrained(path)
    with torch.device("meta"):
        module = model_class(settings)
    module.tie_weights()
    return module.eval()
