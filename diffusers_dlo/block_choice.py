# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which members of a model's lists are its blocks where nobody has named the lists: by what classes declare, by what
lies in what, and by size. Reads class data and module structure only. Must not know of leaves or components.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from .tensor_utils import nbytes_of, owned_tensors


Container = (nn.ModuleList, nn.ModuleDict)
"""What holds modules and is never called itself."""


def choose_blocks(model: nn.Module, lists: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """
    The blocks of `model` among the members of `lists`, its `ModuleList`s and `ModuleDict`s: members whose class the
    model declares as repeated or unsplittable, with such other members of `ModuleList`s as are no smaller; where none
    is declared, the members of any `ModuleList`. Of nested candidates the outermost is the block, unless it is a
    model, or one declared that consists mostly of others. Unsplittable layers that are not what the model repeats stay
    if they are smaller, all together, than the largest block.
    """
    declared = _declared_classes(model)
    members = {
        name: member
        for container, module in lists.items()
        for name, member in members_of(container, module)
        # Dictionaries also hold what differs from entry to entry, such as embedders by name.
        if isinstance(module, nn.ModuleList) or type(member).__name__ in declared
    }
    # A model in a list (the nets of a multi-ControlNet) is as large as a model: what streams are its own blocks.
    candidates = {name: module for name, module in members.items() if not _is_model(module)} or members
    blocks = outermost(_parts({name: m for name, m in candidates.items() if type(m).__name__ in declared}))
    if not blocks:
        return outermost(candidates)
    blocks = _worth_streaming(model, blocks)
    undeclared = {name: m for name, m in candidates.items() if type(m).__name__ not in declared}
    others = _as_large(undeclared, blocks)
    return {name: module for name, module in candidates.items() if name in blocks or name in others}


def members_of(name: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """
    The members of a list that hold weights; those of an inner list or dictionary, which nobody calls, in its place.
    """
    assert isinstance(container, Container)
    for key, member in container.items() if isinstance(container, nn.ModuleDict) else enumerate(container):
        if isinstance(member, Container):
            yield from members_of(f"{name}.{key}", member)
        elif any(True for _ in member.parameters()):
            yield f"{name}.{key}", member


def outermost(candidates: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Candidates that lie in no other one, each module once however often it is listed, in the order given."""
    inner = {
        id(submodule) for module in candidates.values() for submodule in module.modules() if submodule is not module
    }
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in candidates.items():
        if id(module) not in inner and id(module) not in seen:
            seen.add(id(module))
            found[name] = module
    return found


def size_of(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, in the dtypes they will run in."""
    return nbytes_of(owned_tensors(module))


def _parts(candidates: Mapping[str, nn.Module], limit: int = 0) -> dict[str, nn.Module]:
    """
    Candidates without those of more than `limit` bytes that consist mostly of others: the stage of a UNet is as large
    as a quarter of it, and a slot holds a whole block.
    """
    parts: dict[str, nn.Module] = {}
    for name, module in candidates.items():
        inner = set(map(id, module.modules())) - {id(module)}
        held = outermost({n: m for n, m in candidates.items() if id(m) in inner})
        size = size_of(module)
        if size <= limit or 2 * sum(map(size_of, held.values())) <= size:
            parts[name] = module
    return parts


def _as_large(candidates: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Candidates apart from `blocks` that are no smaller than the smallest; of larger ones than the largest, parts."""
    sizes = [size_of(block) for block in blocks.values()]
    taken = {id(inner) for block in blocks.values() for inner in block.modules()}
    apart = {n: m for n, m in candidates.items() if all(id(inner) not in taken for inner in m.modules())}
    large = [module for module in outermost(apart).values() if size_of(module) >= min(sizes)]
    inside = {id(inner) for module in large for inner in module.modules()}
    return outermost(_parts({name: m for name, m in apart.items() if id(m) in inside}, max(sizes)))


def _worth_streaming(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """
    Without blocks of a class that is declared unsplittable, but not repeated as others are, if all together are
    smaller than the largest block: layers of an encoder inside the model. They would save less than a slot takes, and
    a loop over them would stream everything else once a turn.
    """
    repeated = _declared_classes(model, ("_repeated_blocks",))
    unsplittable = _declared_classes(model, ("_no_split_modules",)) - repeated
    kinds: dict[type[nn.Module], int] = {}
    for block in blocks.values():
        kinds[type(block)] = kinds.get(type(block), 0) + size_of(block)
    if not any(kind.__name__ in repeated for kind in kinds):
        return dict(blocks)
    largest = max(map(size_of, blocks.values()))
    return {
        name: block
        for name, block in blocks.items()
        if type(block).__name__ not in unsplittable or kinds[type(block)] >= largest
    }


def _is_model(module: nn.Module) -> bool:
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    return isinstance(module, (ModelMixin, PreTrainedModel))


def _declared_classes(
    model: nn.Module, attributes: Sequence[str] = ("_repeated_blocks", "_no_split_modules")
) -> set[str]:
    """Class names that the model, or a model inside it (a text encoder's decoder), declares as repeated layers."""
    declared: set[str] = set()
    for module in model.modules():
        for attribute in attributes:
            declared.update(getattr(type(module), attribute, None) or ())
    return declared
