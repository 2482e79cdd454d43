# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what loaders of adapters may do to a component whose weights are not there: names are given without values, small
weights are loaded beside the streamed ones, what reads a placeholder is noticed, and a load that fails is undone. Must
not move weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .adapters import Adapters, tuner_layers
from .managed_tensor import ManagedTensor
from .placeholder_guard import PlaceholderGuard
from .shadows import Shadows, refusal
from .tensor_utils import SMALL_BUFFER_NBYTES, put
from .units import Component


_LOADERS_ON_MODEL = ("add_adapter", "load_lora_adapter", "load_adapter", "save_lora_adapter")
_LOADERS_ON_PIPELINE = ("load_lora_weights", "unload_lora_weights", "load_ip_adapter")
_VOCABULARY_ON_MODEL = ("resize_token_embeddings", "set_input_embeddings")
_VOCABULARY_ON_PIPELINE = ("load_textual_inversion", "unload_textual_inversion")
_MERGED = "it would add to weights that are not on the device. Fuse before enabling"
_NO_VALUE = frozenset({torch.ops.aten._has_compatible_shallow_copy_type.default, torch.ops.aten.detach.default})
"""What `.data =` and `.data` dispatch; whoever reads what the latter gives is noticed then."""
_BY_A_LOADER = (
    "by a loader, when its weights are not on the device. What is loaded is made from it, and was taken out again. "
    "Load it before enabling, or disable first; an adapter from a file also loads with low_cpu_mem_usage=True"
)


class LoaderGuard:
    """
    What the loaders of one component go through.

    Args:
        component (`Component`): its state.
        root (`nn.Module`): the component's module.
    """

    def __init__(self, component: Component, root: nn.Module) -> None:
        self._component = component
        # Blocks hold this, and the engine holds blocks: a model that is dropped has to be free to go.
        self._find_root = weakref.ref(root)
        self._loading = 0
        self._loading_model = 0
        self._shadows = Shadows()

    @property
    def _root(self) -> Any:
        """The component's module, which is there for as long as its methods are called."""
        return self._find_root()

    @property
    def names_only(self) -> bool:
        """Whether a `state_dict` is wanted for its names: by the model's own loaders, which read no value in it."""
        return self._loading_model > 0

    @property
    def loading(self) -> bool:
        """Whether a loader is at work, which would notice if it read a value that this rank does not have."""
        return self._loading > 0

    @contextmanager
    def watching(self, names_only: bool = False) -> Iterator[None]:
        """
        The context of a loader.

        Raises:
            `RuntimeError`: it reads a placeholder. It is undone, as it is where it raises something else.
        """
        before = Adapters(self._root)
        self._loading += 1
        self._loading_model += names_only
        try:
            with PlaceholderGuard(self._component, _NO_VALUE, _BY_A_LOADER):
                yield
            self.refuse_merging()
        except BaseException:
            before.restore()
            raise
        finally:
            self._loading -= 1
            self._loading_model -= names_only

    def replacements(self) -> dict[str, Callable]:
        """What stands in for methods of the model while it is offloaded, by their names."""
        names = [name for name in _LOADERS_ON_MODEL if callable(getattr(self._root, name, None))]
        found: dict[str, Callable] = {name: self._watched(name) for name in names}
        found["load_state_dict"] = self._load_state_dict
        for name in _VOCABULARY_ON_MODEL:
            if callable(getattr(self._root, name, None)):
                found[name] = self._checked(name)
        return found

    def refuse_merging(self) -> None:
        """
        Has the layers of adapters refuse to merge, those that came since too: quantized weights would be made anew
        from placeholders, and show nothing of it.
        """
        refuse = refusal(f"'{self._component.name}'", "merge", _MERGED)
        for _, layer in tuner_layers(self._root):
            if "merge" not in vars(layer):
                self._shadows.put(layer, "merge", refuse)

    def remove(self) -> None:
        """Takes back what is on the layers. Idempotent."""
        self._shadows.remove()

    @property
    def streams_vocabulary(self) -> bool:
        """Whether its input embeddings are a leaf that streams."""
        try:
            weight = self._root.get_input_embeddings().weight
        except (AttributeError, NotImplementedError):
            return False
        held = (h for leaf in self._component.leaves for tensor in leaf.tensors for h in tensor.held)
        return any(tensor is weight for tensor in held)

    def refuse_vocabulary(self, method: str) -> None:
        """
        Refuses a method that would rebuild the vocabulary.

        Raises:
            `ValueError`: it streams.
        """
        if self.streams_vocabulary:
            raise ValueError(
                f"'{method}' is refused while '{self._component.name}' is under distributed layerwise offload: it "
                "would make a vocabulary from placeholders. Call it before enabling, or disable first."
            )

    def _checked(self, name: str) -> Callable:
        original = getattr(type(self._root), name)

        @functools.wraps(original)
        def rebuild(*args: Any, **kwargs: Any) -> Any:
            self.refuse_vocabulary(name)
            return original(self._root, *args, **kwargs)

        return rebuild

    def _watched(self, name: str) -> Callable:
        original = getattr(type(self._root), name)

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            with self.watching(names_only=True):
                return original(self._root, *args, **kwargs)

        return load

    def _load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """
        A stand-in for `nn.Module.load_state_dict`: of adapters' tensors, and of small weights, as some adapters bring
        (norms). The latter stay on the device from then on.

        Raises:
            `ValueError`: it would load into placeholders.
        """
        streamed = self._streamed(state_dict)
        if strict or not all(_may_stay(tensor, state_dict[name]) for name, tensor in streamed.items()):
            raise ValueError(
                f"'load_state_dict' is refused while '{self._component.name}' is under distributed layerwise offload: "
                "it would load into placeholders. Disable first, or load before enabling."
            )
        for tensor in streamed.values():
            value = torch.zeros(tensor.born.shape, dtype=tensor.born.dtype, device=tensor.born.device)
            own = nn.Parameter(value, tensor.born.requires_grad) if isinstance(tensor.born, nn.Parameter) else value
            put([owner for owner in tensor.owners if owner.slots.get(owner.attribute) is tensor.born], own)
        return type(self._root).load_state_dict(self._root, state_dict, strict=strict, assign=assign)

    def _streamed(self, state_dict: Mapping[str, Any]) -> dict[str, ManagedTensor]:
        """Which of the names are those of streamed tensors, by the names they have now: adapters rename."""
        managed = self._component.stand_ins
        found = {}
        for path, module in self._root.named_modules():
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                name = f"{path}.{attribute}" if path else attribute
                if name in state_dict and id(tensor) in managed:
                    found[name] = managed[id(tensor)]
        return found


class PipelineLoaderGuards:
    """
    The same for the loaders of a pipeline, which work on several models; taken back together.

    Args:
        pipeline (`DiffusionPipeline`): the object that users call them on.
        find (`Callable`): finds what guards a component, None if it is not offloaded.
    """

    def __init__(self, pipeline: Any, find: Callable[[nn.Module], LoaderGuard | None]) -> None:
        self._pipeline = weakref.ref(pipeline)  # one that the user drops has to be free to go
        self._find = find
        self._shadows = Shadows()
        for names, make in ((_LOADERS_ON_PIPELINE, self._watched), (_VOCABULARY_ON_PIPELINE, self._checked)):
            for name in names:
                if callable(getattr(pipeline, name, None)):
                    self._shadows.put(pipeline, name, make(name, getattr(type(pipeline), name)))

    def remove(self) -> None:
        """Takes them back. Idempotent."""
        self._shadows.remove()

    def _watched(self, name: str, original: Callable) -> Callable:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            pipeline: Any = self._pipeline()
            with ExitStack() as stack:
                for module in pipeline.components.values():
                    guard = self._find(module) if isinstance(module, nn.Module) else None
                    if guard is not None:
                        stack.enter_context(guard.watching())
                return original(pipeline, *args, **kwargs)

        return load

    def _checked(self, name: str, original: Callable) -> Callable:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            pipeline: Any = self._pipeline()
            named = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
            encoder = getattr(pipeline, "text_encoder", None)
            for module in named or ([encoder] if isinstance(encoder, nn.Module) else []):
                guard = self._find(module)
                if guard is not None:
                    guard.refuse_vocabulary(name)
            return original(pipeline, *args, **kwargs)

        return load


def refuse_adapters_of_placeholders(root: nn.Module, component: Component) -> None:
    """
    Refuses adapters that functions which cannot be guarded, PEFT's own for one, made from placeholders: these are NaN,
    or a layer that was exchanged to fit them is.

    Raises:
        `RuntimeError`: naming the layer.
    """
    streamed = component.stand_ins
    found = [
        (path, tensor)
        for path, layer in tuner_layers(root)
        for tensor in layer.parameters()
        if id(tensor) not in streamed and tensor.is_floating_point() and not tensor.is_meta
    ]
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for _, tensor in found:
        flags.setdefault(tensor.device, []).append(tensor.detach().isnan().any())
    if not any(torch.stack(some).any() for some in flags.values()):  # one wait for each device
        return
    path = next(path for path, tensor in found if tensor.detach().isnan().any())
    raise RuntimeError(
        f"An adapter of '{path}' in '{component.name}' is NaN, or the layer is: it was made from weights that are not "
        "on the device while they stream. Delete it, and load it before enabling."
    )


def _may_stay(tensor: ManagedTensor, value: Any) -> bool:
    born = tensor.born
    small = born.numel() * born.element_size() <= SMALL_BUFFER_NBYTES and len(tensor.held) == 1
    return small and isinstance(value, torch.Tensor) and value.shape == born.shape
