# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how diffusers loads a coded checkpoint: the quantizer that it asks for one, and what marks the model. Must not
decode, nor know of the offload.

[Note: Coded models]
    The weights of coded blocks stay on the meta device when a model is loaded, with the shapes and dtypes that they
    will have; all others are loaded as ever. The model is marked with what its file says, and guarded
    (`coded_guard.py`), since nothing can be done with it but to enable the offload. That reads the coded shards
    itself, and then has mark and guards taken off (`release`): to diffusers the model is an ordinary one from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import nn

from ..checkpoint.safetensors_file import damaged, list_some
from .coded_block import CodedTensor
from .coded_file import METHOD, CodedFile, is_shard_key, read_coded_file
from .coded_guard import guard_coded, unguard_coded


_MARK = "distributed_layerwise_offload_coded"
_OF_DIFFUSERS = ("hf_quantizer", "is_quantized", "quantization_method")
"""What diffusers leaves on a quantized model."""
_IN_CONFIG = ("quantization_config", "_pre_quantization_dtype")


class CodedMethod(str, Enum):
    """The quantization method of coded models, in the form that diffusers reads."""

    CODED = METHOD


class CodedConfig(QuantizationConfigMixin):
    """
    What the `config.json` of a coded model says under `quantization_config`.

    Args:
        dtype (`str`): what it was packed in, such as `"bfloat16"`.
    """

    def __init__(self, dtype: str, **_: Any) -> None:
        if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
            raise ValueError(f"'quantization_config' of a coded model names a dtype {dtype!r} that there is not.")
        self.quant_method = CodedMethod.CODED  # type: ignore[assignment]  # diffusers knows only its own
        self.dtype = dtype

    def to_diff_dict(self) -> dict[str, Any]:
        """What there is to show of it, which diffusers asks for."""
        return self.to_dict()


class CodedQuantizer(DiffusersQuantizer):
    """Loads coded checkpoints ([Note: Coded models])."""

    use_keep_in_fp32_modules = True

    def __init__(self, quantization_config: CodedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError(
                f"'{METHOD}' cannot be asked for while a model is loaded: `diffusers-dlo pack --codec` writes a coded "
                "checkpoint, which says itself that it is one."
            )
        self._dtype: torch.dtype = getattr(torch, quantization_config.dtype)
        self._coded: CodedFile | None = None

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuses a `device_map`: what is coded cannot be placed."""
        if device_map is not None:
            raise ValueError(
                f"'device_map' is {device_map!r}, and weights of a coded model are placed by the offload alone. Leave "
                "it out and enable the offload, or decode the checkpoint with `diffusers-dlo pack --decode`."
            )

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype that it was packed in; refuses another."""
        if torch_dtype not in (None, self._dtype):
            raise ValueError(
                f"'dtype' is {torch_dtype}, and this checkpoint is coded in {self._dtype}, which is not cast. Load it "
                f"with dtype={self._dtype}, or decode it with `diffusers-dlo pack --decode` and load that."
            )
        return self._dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """The names that the file holds, with those of weights in the place of coded shards."""
        path = str(checkpoint_files[0])
        is_one = len(checkpoint_files) == 1 and path.endswith(".safetensors")
        # The file itself: it is read again when the offload is enabled, wherever the process works then.
        coded = read_coded_file(os.path.realpath(path)) if is_one else None
        if coded is None:
            raise damaged(path, "its config.json says that it is coded, and it is not")
        if coded.dtype != str(self._dtype).removeprefix("torch."):
            raise damaged(path, f"it is coded in {coded.dtype}, and config.json says {self._dtype}")
        self._coded = coded
        return [key for key in loaded_keys if not is_shard_key(key)] + sorted(coded.tensor_names)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The weights as diffusers is to load them: without coded shards."""
        return {key: tensor for key, tensor in state_dict.items() if not is_shard_key(key)}

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        assert self._coded is not None
        take_values(model, self._coded)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        assert self._coded is not None
        for name in _OF_DIFFUSERS:
            vars(model).pop(name, None)  # diffusers would refuse casts by them, and name no way out
        put_mark(model, self._coded)

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        """Refuses a file that lacks weights: the model would be left without values for them."""
        if missing_keys:
            assert self._coded is not None
            raise damaged(self._coded.path, f"it lacks {list_some(sorted(missing_keys))}")
        return missing_keys

    @property
    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def take_values(model: nn.Module, coded: CodedFile) -> None:
    """
    Puts tensors without values in all the places of those that are coded.

    Raises:
        `RuntimeError`: the model has no such place.
    """
    for block in coded.blocks.values():
        for tensor in block.tensors:
            _put_meta(model, tensor, coded.path)


def put_mark(model: nn.Module, coded: CodedFile) -> None:
    """Marks a model as loaded from a coded file, and guards it."""
    names = coded.tensor_names
    tensors = {name: tensor for name, tensor in _named_tensors(model) if name in names}
    object.__setattr__(model, _MARK, _Mark(coded, tensors))
    guard_coded(model, names)


def _put_meta(model: nn.Module, tensor: CodedTensor, path: str) -> None:
    """Puts a tensor without values in all the places of one that is coded, ties kept."""
    made: torch.Tensor | None = None
    for name in tensor.names:
        owner, _, attribute = name.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError:
            module = nn.Module()
        slots = module._parameters if attribute in module._parameters else module._buffers
        old = slots.get(attribute)
        if old is None or tuple(old.shape) != tensor.shape:
            found = f"is {tuple(old.shape)}" if old is not None else "is not"
            raise damaged(path, f"'{name}' of shape {tensor.shape} {found} in the model that config.json describes")
        if made is None:
            made = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            if isinstance(old, nn.Parameter):
                made = nn.Parameter(made, requires_grad=old.requires_grad)
        slots[attribute] = made  # type: ignore[assignment]  # a buffer among buffers


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, by all names that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class _Mark:
    """What marks a coded model: what its `file` says, and the `tensors` without values that were put in by name."""

    file: CodedFile
    tensors: dict[str, torch.Tensor]


def coded_file_of(module: nn.Module) -> CodedFile | None:
    """What the file says that a coded model was loaded from; None for any other model, and once it is released."""
    mark = vars(module).get(_MARK)
    return mark.file if mark is not None else None


def moved_tensor(module: nn.Module) -> str | None:
    """
    The name of a tensor of a coded model in whose place there is another one by now, None if there is no such: values
    go by names, and those of the file would not be its own. What is gone from the model does not count.
    """
    mark = vars(module).get(_MARK)
    if mark is None:
        return None
    return next((name for name, t in _named_tensors(module) if t is not mark.tensors.get(name, t)), None)


def release(module: nn.Module) -> None:
    """
    Takes from a model all that marks it as coded: its weights are had from elsewhere now, and to diffusers it is an
    ordinary model. Idempotent.
    """
    if coded_file_of(module) is None:
        return
    del vars(module)[_MARK]
    unguard_coded(module)
    for name in _OF_DIFFUSERS:
        vars(module).pop(name, None)
    config = getattr(module, "config", None)
    if isinstance(config, FrozenDict):
        kept = FrozenDict({key: value for key, value in config.items() if key not in _IN_CONFIG})
        module._internal_dict = kept  # type: ignore[assignment]  # where diffusers keeps it; it has no way to remove


def register() -> None:
    """Has diffusers know coded checkpoints. Idempotent."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = CodedConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = CodedQuantizer
