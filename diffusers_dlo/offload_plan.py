# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the plan: which blocks stream, in which order, how their images are cut into shards, and the bytes that follow.
Pure: works on a meta model and imports no devices and no process groups.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from .block_discovery import FoundUnit, Selection, find_units
from .block_layout import BlockLayout, lay_out
from .checkpoint.mapped import FileRange
from .config import DistributedLayerwiseOffloadConfig
from .residency import Candidate, ResidentPlan, plan_residents
from .selection import select
from .tensor_utils import OwnedTensor, nbytes_of, owned_tensors
from .validation import validate_blocks_option


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class ComponentPlan:
    """One streamed component: its blocks in streaming order, its leaves, and the bytes it keeps on the device."""

    name: str
    class_name: str
    transfer: str
    blocks: tuple[BlockLayout, ...]
    leaves: tuple[BlockLayout, ...]
    placed_nbytes: int
    transient: bool = False
    "Whether its slots exist only while the component runs (a text encoder beside a gathered transformer)."
    runs_once: bool = False
    "Whether it runs once for a prompt, beside a component that runs in every step."

    @property
    def streamed_nbytes(self) -> int:
        """Bytes of all blocks, without padding."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def largest_block(self) -> BlockLayout:
        """The block that sets the size of a slot."""
        return max(self.blocks, key=lambda block: block.nbytes)


@dataclass(frozen=True)
class OffloadPlan:
    """What is streamed, what stays, and what it takes. `print(plan)` shows it as a table."""

    components: tuple[ComponentPlan, ...]
    placed: tuple[tuple[str, str, int], ...]
    "Components that stay on the device whole: name, class, bytes."
    group_size: int
    num_slots: int
    host: str = "auto"
    device_budget: int | str | None = None
    stages: bool = True
    "Whether shards may be gathered from staging buffers ([Note: Staging])."

    @property
    def blocks(self) -> list[BlockLayout]:
        """Every streamed block, in streaming order."""
        return [block for component in self.components for block in component.blocks]

    @property
    def units(self) -> list[tuple[ComponentPlan, BlockLayout]]:
        """Every block and leaf with its component: what a host store holds, in this order."""
        return [(c, unit) for c in self.components for unit in (*c.blocks, *c.leaves)]

    @property
    def files(self) -> list[str]:
        """The paths of the files that units lie in."""
        paths = {run.path for _, unit in self.units for run in unit.runs}
        coded = (unit.coded for _, unit in self.units if unit.coded is not None)
        return sorted(paths | {shard.place.path for block in coded for shard in block.shards})

    @property
    def streamed_nbytes(self) -> int:
        """Bytes of all blocks, without padding."""
        return sum(component.streamed_nbytes for component in self.components)

    @property
    def copied_nbytes(self) -> int:
        """Bytes of all blocks as they are copied: coded ones as their coded shards."""
        return sum(block.nbytes if block.coded is None else block.coded.coded_nbytes for block in self.blocks)

    def shards(self, component: ComponentPlan) -> int:
        """In how many shards the blocks of `component` cross the host link."""
        return self.group_size if component.transfer == "all_gather" else 1

    def slot_nbytes(self, transfer: str) -> int:
        """Bytes of one slot of the ring for `transfer`: the largest block, padded."""
        sizes = [
            block.padded_nbytes(self.shards(c))
            for c in self.components
            if c.transfer == transfer
            for block in c.blocks
        ]
        return max(sizes, default=0)

    @property
    def candidates(self) -> list[Candidate]:
        """The blocks that may stay on the device: those that are needed in every step."""
        return [
            Candidate(c.name, i, block) for c in self.components if not c.runs_once for i, block in enumerate(c.blocks)
        ]

    @property
    def lookups(self) -> list[Candidate]:
        """The leaves that may stay: those that every forward calls."""
        return [
            Candidate(c.name, i, leaf)
            for c in self.components
            if not c.runs_once
            for i, leaf in enumerate(c.leaves)
            if leaf.is_lookup
        ]

    def residents_for(self, budget: int) -> ResidentPlan:
        """What stays on the device of each rank for a budget in bytes."""
        shards = max((self.shards(c) for c in self.components if not c.runs_once), default=1)
        return plan_residents(self.candidates, shards, self.num_slots, budget, self.lookups, self.stages)

    @cached_property
    def residents(self) -> ResidentPlan:
        """What stays for the plan's own budget; nothing yet with `"auto"`."""
        return self.residents_for(self.device_budget) if isinstance(self.device_budget, int) else ResidentPlan()

    @property
    def device_slot_nbytes(self) -> int:
        """Device bytes of all slots, transient ones included."""
        return self.num_slots * sum(self.slot_nbytes(transfer) for transfer in ("all_gather", "local"))

    @property
    def device_placed_nbytes(self) -> int:
        """Device bytes of the weights that are never streamed."""
        return sum(c.placed_nbytes for c in self.components) + sum(nbytes for _, _, nbytes in self.placed)

    def whole_on_rank(self, component: ComponentPlan, unit: BlockLayout) -> bool:
        """Whether a rank copies this unit whole, and not a shard of it."""
        return unit.is_leaf or self.shards(component) == 1

    @property
    def host_nbytes_per_rank(self) -> int:
        """
        Host bytes that one rank accounts for: an equal part of the one copy per host with a packed store; with a
        pinned one its shards, and every unit it copies whole.
        """
        if self.host == "pinned":
            return sum(
                unit.padded_nbytes(1) if self.whole_on_rank(c, unit) else unit.shard_nbytes(self.group_size)
                for c, unit in self.units
            )
        coded = sum(unit.coded.coded_nbytes for _, unit in self.units if unit.coded is not None)
        plain = sum(unit.shard_nbytes(self.group_size) for _, unit in self.units if unit.coded is None)
        return plain + -(-coded // self.group_size)

    def as_local(self) -> OffloadPlan:
        """The plan that `transfer="local"` makes of the same components: they share a ring, which stays."""
        components = tuple(replace(component, transfer="local", transient=False) for component in self.components)
        return replace(self, components=components)

    @cached_property
    def digest(self) -> str:
        """A digest of the whole plan: equal on all ranks or nothing is committed."""
        return hashlib.sha256("\n".join(self.summary_lines()).encode()).hexdigest()[:16]

    def summary_lines(self) -> list[str]:
        """One short line for each fact that ranks must share; a block stands as its name and digest."""
        lines = [
            f"num_slots {self.num_slots}",
            f"device_budget {self.device_budget!r}",
            f"host {self.host!r}",
            f"group size {self.group_size}",
        ]
        for component in self.components:
            lines.append(
                f"component '{component.name}' {component.class_name} {component.transfer}"
                f"{' transient' if component.transient else ''}"
            )
            lines += [f"{unit.name} {unit.digest}" for unit in (*component.blocks, *component.leaves)]
        return lines

    def __str__(self) -> str:
        from .tables import render_plan

        return render_plan(self)


def plan_component(
    name: str,
    module: nn.Module,
    units: Sequence[FoundUnit],
    resident: Sequence[OwnedTensor],
    transfer: str,
    transient: bool = False,
    runs_once: bool = False,
    files: Mapping[int, FileRange] | None = None,
) -> ComponentPlan:
    """
    The plan of one component from what `find_units` found in it. `module` may live on any device, also on meta;
    nothing of it is read but metadata. `files` is as for `lay_out`.
    """
    layouts = [lay_out(unit.name, unit.tensors, unit.is_leaf, files) for unit in units]
    lookups = {u.name for u in units if u.is_leaf and any(isinstance(m, nn.Embedding) for m in u.modules)}
    layouts = [replace(layout, is_lookup=True) if layout.name in lookups else layout for layout in layouts]
    return ComponentPlan(
        name=name,
        class_name=type(module).__name__,
        transfer=transfer,
        blocks=tuple(layout for layout in layouts if not layout.is_leaf),
        leaves=tuple(layout for layout in layouts if layout.is_leaf),
        placed_nbytes=nbytes_of(resident),
        transient=transient,
        runs_once=runs_once,
    )


def transfers_of(selection: Selection, config: DistributedLayerwiseOffloadConfig, group_size: int) -> dict[str, str]:
    """How each component is transferred. Text encoders are `local`: they run once, on each rank for its own prompt."""
    encoders = _encoders_of(selection)
    common = config.transfer_for(group_size)
    return {name: "local" if name in encoders else common for name in selection.streamed}


def build_plan(
    selection: Selection,
    found: Mapping[str, tuple[Sequence[FoundUnit], Sequence[OwnedTensor]]],
    config: DistributedLayerwiseOffloadConfig,
    group_size: int,
    files: Mapping[int, FileRange] | None = None,
    stages: bool = True,
) -> OffloadPlan:
    """
    The plan for chosen components, from the units found in each; with `files` (as for `lay_out`), for the mapped
    store. `stages` is False for devices that do not gather from staging buffers.
    """
    common = config.transfer_for(group_size)
    encoders = _encoders_of(selection)
    counted: set[int] = set()
    return OffloadPlan(
        components=tuple(
            plan_component(
                name,
                selection.streamed[name],
                found[name][0],
                _uncounted(found[name][1], counted),
                transfer,
                transient=transfer == "local" != common,
                runs_once=name in encoders,
                files=files,
            )
            for name, transfer in transfers_of(selection, config, group_size).items()
        ),
        placed=tuple(
            (name, type(module).__name__, nbytes_of(_uncounted(owned_tensors(module), counted)))
            for name, module in selection.placed.items()
        ),
        group_size=group_size,
        num_slots=config.slots,
        host=config.host if files is None else "mapped",
        device_budget=config.device_budget,
        stages=stages,
    )


def _uncounted(tensors: Sequence[OwnedTensor], counted: set[int]) -> list[OwnedTensor]:
    """Those of `tensors` that no component before has counted as its own; notes them."""
    fresh = [owned for owned in tensors if id(owned.tensor) not in counted]
    counted |= {id(owned.tensor) for owned in fresh}
    return fresh


def _encoders_of(selection: Selection) -> Collection[str]:
    """The text encoders that stream beside something else."""
    return selection.encoders if len(selection.encoders) < len(selection.streamed) else ()


def find_all(
    selection: Selection, config: DistributedLayerwiseOffloadConfig
) -> dict[str, tuple[list[FoundUnit], list[OwnedTensor]]]:
    """
    What streams in each chosen component, and what stays.

    Raises:
        `ValueError`: as `find_units`, or a `blocks` option that does not fit the components.
    """
    validate_blocks_option(config, selection.streamed)
    shared = _shared_by(selection)
    return {name: find_units(module, config.blocks_of(name), shared) for name, module in selection.streamed.items()}


def _shared_by(selection: Selection) -> set[int]:
    """
    The ids of tensors that several components have: some ControlNets use embedders and blocks of the transformer. They
    stay on the device, since a block belongs to one component.
    """
    every = [*selection.streamed.values(), *selection.placed.values()]
    counts = Counter(id(owned.tensor) for module in every for owned in owned_tensors(module))
    return {identity for identity, count in counts.items() if count > 1}


def plan_distributed_layerwise_offload(
    module_or_pipeline: nn.Module | DiffusionPipeline,
    config: DistributedLayerwiseOffloadConfig | None = None,
    group_size: int = 1,
    *,
    components: Sequence[str] | None = None,
) -> OffloadPlan:
    r"""
    What enabling would do, without doing it: no device, no process group, no weights read. `print` shows it as a
    table. For several ranks, `transfer="auto"` is `all_gather` here: enabling times both, and may take `local`.

    Args:
        module_or_pipeline (`torch.nn.Module` or `DiffusionPipeline`): may be on the meta device.
        config (`DistributedLayerwiseOffloadConfig`, *optional*): as for enabling.
        group_size (`int`, defaults to 1): how many ranks share the weights.
        components (`Sequence[str]`, *optional*): as for enabling; for a pipeline only.

    Raises:
        `ValueError`: no blocks, a name that does not exist, a group size below 1.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"'group_size' must be a number of ranks, 1 or more; got {group_size!r}.")
    config = config if config is not None else DistributedLayerwiseOffloadConfig()
    selection = select(module_or_pipeline, config, components)
    return build_plan(selection, find_all(selection, config), config, group_size)


get_offload_plan = plan_distributed_layerwise_offload
