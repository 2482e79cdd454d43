# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns which blocks of a plan lie in coded shards: those of a coded checkpoint, or, to see what coding would give, all
that could; and the bytes that follow. Pure. Must not decode, nor predict times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from .block_layout import BlockLayout, align
from .checkpoint.mapped import FileRange
from .coding.coded_block import CODED_BUFFERS, CodedBlock, CodedShard
from .coding.coded_file import CodedFile
from .coding.shard_coding import CODED_DTYPES, shard_bounds
from .device.ans_codec import planned_scratch_nbytes
from .offload_plan import ComponentPlan, OffloadPlan


_Coding = Callable[[ComponentPlan, BlockLayout], CodedBlock | None]


def with_coded_blocks(plan: OffloadPlan, files: Mapping[str, CodedFile]) -> OffloadPlan:
    """
    A plan, made without files, with the coded blocks that its components' files hold.

    Args:
        files (`Mapping[str, CodedFile]`): by component.

    Raises:
        `ValueError`: a coded component that does not stream, or blocks that are not those of the file.
    """
    streamed = {component.name for component in plan.components}
    for name in files:
        if name not in streamed:
            raise ValueError(
                f"'{name}' is coded, so it can only stream, and it is not among the components that do. Name it in "
                "components=[...], or decode the checkpoint (`diffusers-dlo pack --decode`)."
            )
    return _with_blocks(plan, lambda c, block: _coded_block(c, block, files[c.name]) if c.name in files else None)


def assume_coded(plan: OffloadPlan, ratio: float, components: Collection[str]) -> OffloadPlan | None:
    """
    A plan as it would be if the 16-bit floats of some components' blocks took `ratio` of their bytes, in shards for
    its ranks; None if there are none.
    """

    def assumed(component: ComponentPlan, block: BlockLayout) -> CodedBlock | None:
        wide = sum(tensor.nbytes for tensor in block.tensors if tensor.dtype in CODED_DTYPES)
        if component.name not in components or component.runs_once or not wide:
            return None
        left = 1 - (1 - ratio) * wide / block.nbytes
        shards = []
        for index in range(plan.group_size):
            start, stop = shard_bounds(block.nbytes, plan.group_size, index)
            place = FileRange("", 0, min(align(round((stop - start) * left)), stop - start))
            shards.append(CodedShard(block.name, start, stop - start, place, "", ()))
        return CodedBlock(block.name, block.digest, block.nbytes, (), tuple(shards))

    coded = _with_blocks(plan, assumed)
    return coded if has_coded_blocks(coded) else None


def without_coded_blocks(plan: OffloadPlan) -> OffloadPlan:
    """The same plan for weights that are not coded."""
    return _with_blocks(plan, lambda component, block: None)


def has_coded_blocks(plan: OffloadPlan) -> bool:
    """Whether any block of a plan lies in coded shards."""
    return any(block.coded is not None for block in plan.blocks)


def as_streamed(plan: OffloadPlan) -> OffloadPlan:
    """The plan as its blocks stream: without coded ones where a host store has them decoded."""
    return plan if plan.host in ("auto", "coded") else without_coded_blocks(plan)


def can_gather(plan: OffloadPlan, ranks: int) -> bool:
    """Whether so many ranks can share the blocks of a plan in shards: coded blocks are cut for one number of ranks."""
    return all(block.coded is None or len(block.coded.shards) == ranks for block in plan.blocks)


def copied_shards(block: BlockLayout, shards: int) -> tuple[int, ...]:
    """
    Bytes of each coded shard that one rank copies of a block that crosses the host link in `shards` shards: its own,
    taken to be the largest, since a gather waits for that; or all, one after the other. Empty if it is not coded.
    """
    if block.coded is None:
        return ()
    sizes = [shard.place.nbytes for shard in block.coded.shards if shard.nbytes]
    return tuple(sizes) if shards == 1 else (max(sizes),)


def decoding_nbytes(plan: OffloadPlan) -> int:
    """
    Device bytes that coded blocks take beside their slots: buffers for the largest coded shard, and scratch memory
    for a codec of the device, as if all of that shard were one segment.
    """
    shards = [shard for block in plan.blocks if block.coded is not None for shard in block.coded.shards]
    if not shards:
        return 0
    scratch = planned_scratch_nbytes(max(shard.nbytes for shard in shards))
    return CODED_BUFFERS * max(shard.place.nbytes for shard in shards) + scratch


def _with_blocks(plan: OffloadPlan, coded: _Coding) -> OffloadPlan:
    return replace(
        plan,
        components=tuple(
            replace(c, blocks=tuple(replace(block, coded=coded(c, block)) for block in c.blocks))
            for c in plan.components
        ),
    )


def _coded_block(component: ComponentPlan, block: BlockLayout, file: CodedFile) -> CodedBlock | None:
    names = {one.name for one in component.blocks}
    missing = [name for name in file.blocks if name not in names]
    found = file.blocks.get(block.name)
    if missing or (found is not None and found.digest != block.digest):
        raise ValueError(
            f"'{component.name}': block '{missing[0] if missing else block.name}' in '{file.path}' is not a block of "
            "this model as its config.json and this version of its library make it. Decode the checkpoint with the "
            "versions that it was packed with (`diffusers-dlo pack --decode`), and pack it anew."
        )
    return found
