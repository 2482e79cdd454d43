# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which modules of a model are blocks and which are leaves. Reads class data and module structure only: no device,
no weights, so a meta model will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .block_choice import Container, choose_blocks, members_of, outermost, size_of
from .tensor_utils import OwnedTensor, partition_tensors


_BLOCKS_ATTRIBUTE = "_layerwise_offload_blocks_attrs"


@dataclass(frozen=True)
class Discovery:
    """The modules of a component that stream, by name and in order of registration."""

    blocks: dict[str, nn.Module]
    leaves: dict[str, nn.Module]


def get_blocks_attr_names(model: nn.Module | type[nn.Module]) -> list[str]:
    """The `ModuleList` names set for a model's class by `set_blocks_attr_names`; empty where none were set."""
    cls = model if isinstance(model, type) else type(model)
    return list(getattr(cls, _BLOCKS_ATTRIBUTE, ()))


def set_blocks_attr_names(model: nn.Module | type[nn.Module], names: Sequence[str] | None) -> None:
    """Sets, for a model's class, the `ModuleList`s whose members are its blocks; None takes the setting back."""
    cls = model if isinstance(model, type) else type(model)
    if names is None:
        if _BLOCKS_ATTRIBUTE in vars(cls):
            delattr(cls, _BLOCKS_ATTRIBUTE)
        return
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"The block names of {cls.__name__!r} must be a list of ModuleList names, got {names!r}.")
    setattr(cls, _BLOCKS_ATTRIBUTE, tuple(names))


def get_blocks_from_dit(model: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """The names of a model's block lists and the blocks themselves, in streaming order."""
    blocks = discover_blocks(model).blocks
    names = list(dict.fromkeys(name.rpartition(".")[0] for name in blocks))
    return names, list(blocks.values())


def discover_blocks(model: nn.Module, names: Sequence[str] | None = None) -> Discovery:
    """
    Finds the blocks of `model`: members of the `ModuleList`s called `names`, else of those set for its class, else the
    members of `ModuleList`s that `choose_blocks` finds. Of nested candidates the outermost is the block, and a
    `ModuleList` is never one itself; a `ModuleDict` counts as a list where it is named. Leaves are the
    `nn.Embedding`s and `nn.Linear`s outside blocks that are at least as large as the largest block.

    Raises:
        `ValueError`: a name that does not exist or is no `ModuleList`, or a model without blocks.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, Container)}
    names = tuple(names) if names is not None else tuple(get_blocks_attr_names(model))
    if names:
        for name in names:
            if name not in lists:
                raise ValueError(
                    f"'{name}' is not a ModuleList of {type(model).__name__!r}; it has: "
                    f"{', '.join(lists) if lists else 'none'}."
                )
        chosen = dict(member for name in names for member in members_of(name, lists[name]))
        blocks = outermost(chosen)
    else:
        blocks = choose_blocks(model, lists)
    if not blocks:
        raise ValueError(
            f"No blocks found in {type(model).__name__!r}: it has "
            f"{'the ModuleLists ' + ', '.join(lists) if lists else 'no ModuleList'}, none with weights. "
            "Name the lists to stream with blocks=[...], or leave this model out with components=[...]."
        )
    return Discovery(blocks, _large_leaves(model, blocks))


@dataclass(frozen=True)
class Selection:
    """The components of a pipeline: those that stream, which of them are text encoders, and those placed whole."""

    streamed: dict[str, nn.Module]
    encoders: frozenset[str]
    placed: dict[str, nn.Module]


_DENOISERS = ("diffusers.models.transformers.", "diffusers.models.unets.", "diffusers.models.controlnets.")


def select_components(
    modules: Mapping[str, nn.Module],
    names: Sequence[str] | None = None,
    blocks_of: Callable[[str], Sequence[str] | None] = lambda name: None,
) -> Selection:
    """
    Which components of a pipeline stream: those called `names`, else its denoisers (diffusers' transformers, UNets and
    ControlNets) and the text encoders that are larger than the largest block of a transformer. The others are placed
    on the device whole. A module that appears under two names counts once.

    Raises:
        `ValueError`: a name that is no component, nothing to stream, or a component without blocks.
    """
    unique = _each_once(modules)
    if names is not None:
        if isinstance(names, str) or not names:
            raise ValueError(f"'components' must be a list of component names, got {names!r}.")
        for name in names:
            if name not in modules:
                raise ValueError(f"'{name}' is not a component with weights; this pipeline has: {', '.join(modules)}.")
        denoisers = _each_once({name: modules[name] for name in names})
    else:
        denoisers = {
            name: module
            for name, module in unique.items()
            if type(module).__module__.startswith(_DENOISERS) or name.startswith(("transformer", "unet"))
        }
    if not denoisers:
        raise ValueError(
            f"This pipeline has no transformer to stream; its components are: {', '.join(modules) or 'none'}. "
            "Name those that should stream with components=[...]."
        )
    largest = max(
        size_of(block)
        for name, module in denoisers.items()
        for block in discover_blocks(module, blocks_of(name)).blocks.values()
    )
    encoders = {
        name: module
        for name, module in unique.items()
        if names is None
        and all(module is not denoiser for denoiser in denoisers.values())
        and _is_text_encoder(module)
        and size_of(module) > largest
        and _has_blocks(module, blocks_of(name))
    }
    streamed = {**denoisers, **encoders}
    placed = {name: m for name, m in unique.items() if all(m is not other for other in streamed.values())}
    named_encoders = {name for name, module in streamed.items() if _is_text_encoder(module)}
    return Selection(streamed, frozenset(named_encoders), placed)


def _each_once(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Every module under the first of its names."""
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if all(module is not other for other in found.values()):
            found[name] = module
    return found


def _is_text_encoder(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _has_blocks(module: nn.Module, names: Sequence[str] | None) -> bool:
    if names is not None:
        return True  # chosen by hand: a wrong name is an error later, not a reason to leave the component out
    try:
        return bool(discover_blocks(module).blocks)
    except ValueError:
        return False


@dataclass(frozen=True)
class FoundUnit:
    """
    A block, or a leaf with those that share its weight (a vocabulary under two names), and the tensors it alone holds.
    """

    name: str
    modules: tuple[nn.Module, ...]
    tensors: list[OwnedTensor]
    is_leaf: bool


def find_units(
    model: nn.Module, names: Sequence[str] | None = None, elsewhere: Collection[int] = ()
) -> tuple[list[FoundUnit], list[OwnedTensor]]:
    """
    The blocks and then the leaves of `model` that have tensors to stream, and the tensors that stay on the device,
    those among them that are used `elsewhere` (by `id`).

    Raises:
        `ValueError`: as `discover_blocks`, or blocks that share all their weights.
    """
    discovery = discover_blocks(model, names)
    every = [(name, (block,)) for name, block in discovery.blocks.items()] + _with_ties(discovery.leaves)
    managed, resident = partition_tensors(model, [modules for _, modules in every], elsewhere)
    units = [
        FoundUnit(name, modules, tensors, is_leaf=index >= len(discovery.blocks))
        for index, ((name, modules), tensors) in enumerate(zip(every, managed))
        if tensors
    ]
    if all(unit.is_leaf for unit in units):
        raise ValueError(
            f"No blocks found to stream in {type(model).__name__!r}: {', '.join(discovery.blocks)} share all their "
            "weights or have only single numbers. Name other lists with blocks=[...], or leave this model out with "
            "components=[...]."
        )
    return units, resident


def _large_leaves(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    largest = max(size_of(block) for block in blocks.values())
    inside = {id(submodule) for block in blocks.values() for submodule in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module) not in inside and size_of(module) >= largest
    }


def _with_ties(leaves: dict[str, nn.Module]) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Leaves with a weight in common are one: whichever of them is called needs the same bytes."""
    tied: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, leaf in leaves.items():
        tied.setdefault(id(leaf.weight), []).append((name, leaf))
    return [(group[0][0], tuple(leaf for _, leaf in group)) for group in tied.values()]
