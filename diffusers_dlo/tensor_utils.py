# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what is done to single tensors: which of a block's tensors are managed, how their bytes lie in a flat image, the
placeholder that stands in for them, and re-pointing. Must not know of slots, ranks or passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .adapters import adapter_modules
from .casts import cast, pending_casts, run_dtype, run_nbytes, set_pending_casts
from .owned_tensor import SIDE, OwnedTensor, Owner, owned_tensors, put
from .quantized_parameter import has_own_memory, is_known_parameter
from .twins import Twins


_CPU_ALIGNMENT = 64
"""What torch's allocator on the CPU gives."""
SMALL_BUFFER_NBYTES = 1 << 20
"""Buffers of a block up to this many bytes stay on the device."""


def partition_tensors(
    module: nn.Module, units: Sequence[Sequence[nn.Module]], elsewhere: Collection[int] = ()
) -> tuple[list[list[OwnedTensor]], list[OwnedTensor]]:
    """
    Splits the tensors of `module` into those that are managed, for each of `units` (a block, or leaves that share a
    weight), and those that stay on the device. What two units share, or a unit and the rest, stays: be it a tensor,
    its memory or a whole module. So does what is used `elsewhere`, in another component (ids of tensors), a tensor of
    a single element (an expanded placeholder could be written to), one whose bytes are not its value (overlapping,
    with gaps, lazily conjugated or negated), an adapter's, what a quantized parameter needs beside its bytes, and a
    small buffer: forward may write to it in ways that leave no trace (batch norm does).
    """
    homes = _homes(module, units)
    adapters = adapter_modules(module)
    managed: list[list[OwnedTensor]] = [[] for _ in units]
    resident: list[OwnedTensor] = []
    every = owned_tensors(module)
    aliased = _aliased([owned.tensor for owned in every])
    for owned in every:
        tensor = owned.tensor
        where = set().union(*(homes[id(owner.module)] for owner in owned.owners))
        streams = (
            len(where) == 1
            and None not in where
            and tensor.numel() > 1
            and is_dense(tensor)
            and not (tensor.is_conj() or tensor.is_neg())
            and id(tensor) not in aliased
            and id(tensor) not in elsewhere
            and all(owner.kind != SIDE for owner in owned.owners)
            and (owned.owners[0].kind == "parameter" or tensor.numel() * tensor.element_size() > SMALL_BUFFER_NBYTES)
            and not any(id(owner.module) in adapters for owner in owned.owners)
        )
        if streams:
            managed[where.pop()].append(owned)  # type: ignore[index]
        else:
            resident.append(owned)
    return managed, resident


def _aliased(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The ids of tensors whose memory overlaps that of another one: a write to one would show in the other."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.numel() * tensor.element_size(), id(tensor))
        for tensor in tensors
        if not tensor.is_meta and tensor.numel() and has_own_memory(tensor)
    )
    found: set[int] = set()
    device, stop, last = "", 0, 0
    for where, start, nbytes, identity in spans:
        if where == device and start < stop:
            found |= {identity, last}
        if where != device or start + nbytes > stop:
            device, stop, last = where, start + nbytes, identity
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a run of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _homes(module: nn.Module, units: Sequence[Sequence[nn.Module]]) -> dict[int, set[int | None]]:
    """For each module inside `module`, by id, the units it lies in; None stands for the rest of the model."""
    index_of = {id(part): index for index, unit in enumerate(units) for part in unit}
    homes: dict[int, set[int | None]] = {}
    todo: list[tuple[nn.Module, int | None]] = [(module, None)]
    while todo:
        current, home = todo.pop()
        home = index_of.get(id(current), home)
        seen = homes.setdefault(id(current), set())
        if home not in seen:
            seen.add(home)
            todo += [(child, home) for child in current.children()]
    return homes


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a `DTensor`, whose local part `.data =` would silently leave alone."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def typed_view(
    image: torch.Tensor, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A view of `nbytes` bytes at `offset` of a flat `uint8` image, with a dtype, shape and stride."""
    return image[offset : offset + nbytes].view(dtype).as_strided(tuple(shape), tuple(stride))


def make_offload_placeholder(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """
    A stand-in for `tensor` on `device` that costs one element: a NaN (the smallest value of an integer dtype) expanded
    to the true shape. Shape, dtype (after pending casts) and device stay true. A read yields NaN at best; most
    in-place writes raise at once, and the others (`fill_`, `zero_`) at the block's next turn, see
    `ManagedTensor.check_unwritten`.
    """
    dtype = run_dtype(tensor)
    if dtype.is_floating_point or dtype.is_complex:
        value: float | int | bool = float("nan")
    elif dtype == torch.bool:
        value = True
    else:
        value = torch.iinfo(dtype).min
    # Filled in float32 and converted: not every backend fills every dtype (float8 on the CPU).
    if dtype.is_floating_point:
        one = torch.full((1,), value, dtype=torch.float32, device=device).to(dtype)
    else:
        one = torch.full((1,), value, dtype=dtype, device=device)
    return one.expand(tensor.shape) if tensor.dim() else one.reshape(())


def set_tensor_storage(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Points `tensor` at the memory of `view` without a copy; identity, class and `requires_grad` stay."""
    tensor.data = view


def born_on_device(original: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:
    """
    What takes the place of `original` in its modules while it is managed: of the same kind, but born on the onload
    device, since a backend outside torch's own may not exchange the memory of a tensor with that of another device.
    """
    if is_known_parameter(original):
        born = torch.Tensor._make_subclass(type(original), placeholder, original.requires_grad)
    elif isinstance(original, nn.Parameter):
        born = nn.Parameter(placeholder, requires_grad=original.requires_grad)
    else:
        born = placeholder.view(placeholder.shape)
    for key, value in vars(original).items():
        setattr(born, key, value)
    set_pending_casts(born, ())
    return born


def of_kind(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, of the class of `tensor` and with its attributes where that is a quantized parameter's."""
    return born_on_device(tensor, value) if is_known_parameter(tensor) else value


def nbytes_of(tensors: Iterable[OwnedTensor]) -> int:
    """Bytes of the given tensors, once pending casts are done."""
    return sum(run_nbytes(owned.tensor) for owned in tensors)


def iter_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in the arguments or the output of a call."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Move(NamedTuple):
    """A tensor that was cast or moved to another device: what it was, so that it can be put back."""

    owners: list[Owner]
    tensor: torch.Tensor
    memory: torch.Tensor
    casts: tuple[torch.dtype, ...]
    twins: Twins


def move_tensors(
    tensors: Iterable[OwnedTensor], device: torch.device, moved: list[Move], aligned: bool = False
) -> None:
    """
    Does pending casts and moves tensors to `device` as `nn.Module.to` does, keeping their identity where the backend
    allows it and ties always. What was done is added to `moved` as it happens.

    Args:
        aligned (`bool`): whether those on the CPU that a file shows at an odd address get one as memory has it, on
            which the last bits of results depend.
    """
    for owned in tensors:
        _move(owned, device, moved, aligned)
        for owner in owned.owners:
            if owner.wrapper is not None:
                owner.wrapper.settle(device)


def _move(owned: OwnedTensor, device: torch.device, moved: list[Move], aligned: bool) -> None:
    tensor, casts = owned.tensor, pending_casts(owned.tensor)
    copies = aligned and device.type == "cpu" and _lies_oddly(tensor)
    if tensor.device == device and not casts and not copies:
        return
    value = cast(tensor).detach().to(device, copy=copies)
    points = _can_point_at(owned, value)
    born = value if points or not isinstance(tensor, nn.Parameter) else born_on_device(tensor, value)
    twins = Twins(owned, tensor if points else born, value)
    moved.append(Move(owned.owners, tensor, tensor.data, casts, twins))
    set_pending_casts(tensor, ())
    if points:
        tensor.data = value
        twins.point_originals(value)
    else:
        put(owned.owners, born)
        twins.insert()


def _can_point_at(owned: OwnedTensor, value: torch.Tensor) -> bool:
    """
    Whether `.data =` makes `value` what a tensor is. Not for another device, where a wrapper around it says where it
    is, and where what is beside a parameter may be a table that all of its package share.
    """
    tensor = owned.tensor
    if not (torch._has_compatible_shallow_copy_type(tensor, value) and has_own_memory(tensor)):
        return False
    bound = any(owner.wrapper is not None or owner.holder is not None for owner in owned.owners)
    return not tensor.is_inference() and not (bound and value.device != tensor.device)


def _lies_oddly(tensor: torch.Tensor) -> bool:
    """Whether an ordinary tensor, the only one in its memory, is not where the CPU's allocator would have put it."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.data_ptr() % _CPU_ALIGNMENT != 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def put_back(moved: list[Move]) -> None:
    """Undoes `move_tensors`."""
    while moved:
        owners, tensor, memory, casts, twins = moved.pop()
        if not tensor.is_inference():
            tensor.data = memory
            twins.point_originals(memory)
        set_pending_casts(tensor, casts)
        put(owners, tensor)
        twins.remove()
