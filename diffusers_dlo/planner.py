# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the prediction of memory and time from a plan: ways to stream it, what each would take, and which to choose. Pure:
needs no weights, no device and no process group. Must not print, nor know where a plan comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .block_layout import BlockLayout
from .byte_size import format_bytes
from .compute_estimate import Tokens, activation_nbytes, block_flops
from .offload_plan import ComponentPlan, OffloadPlan
from .planned_coding import (
    as_streamed,
    can_gather,
    copied_shards,
    decoding_nbytes,
    has_coded_blocks,
    without_coded_blocks,
)
from .prediction import MARGIN, Coding, DeviceMemory, Forward, Machine, Option, Prediction, Scale, Work
from .residency import STAGING_BUFFERS, ResidentPlan
from .simulation import SimulatedBlock, Streaming, simulate_forward


PROCESS_NBYTES = 2 << 30
"""Host memory of one process beside the weights, an allowance: libraries, and pinned buffers."""

RANKS_PER_HOST = 8
"""Of how many devices of one host the scaling table makes a group, at most; more are further hosts."""

SCALES = (1, 2, 4, 8, 64)
"""Numbers of devices that the scaling table shows."""

_AS_GOOD = 1.02
"""What takes up to this much longer counts as equally fast; the one that takes less device memory is recommended."""

_AS_SMALL = 1.01
"""What takes up to this much more memory counts as equally small; `all_gather` then comes first."""

_MIB = 1 << 20


def predict(
    plan: OffloadPlan,
    machine: Machine | None = None,
    work: Work | None = None,
    *,
    num_slots: int | str = "auto",
    device_budget: int | str | None = None,
    coded_plan: OffloadPlan | None = None,
) -> Prediction:
    r"""
    What a plan takes, for each way to stream it, and which one to choose.

    Args:
        plan (`OffloadPlan`): from `plan_distributed_layerwise_offload`; its group size counts, not its transfer.
        machine (`Machine`, *optional*), work (`Work`, *optional*): the assumptions.
        num_slots (`int` or `"auto"`, defaults to `"auto"`): as for enabling.
        device_budget (`int` or `"auto"`, *optional*): a budget to look at alone, `"auto"` for what the device leaves
            free. If None, several are compared.
        coded_plan (`OffloadPlan`, *optional*): the plan as it would be with coded weights (`assume_coded`), to say
            what these would bring. Of a plan with coded blocks, it is said in any case.

    Raises:
        `ValueError`: `device_budget="auto"` without the device's memory.
    """
    machine = machine if machine is not None else Machine()
    work = work if work is not None else Work()
    if device_budget == "auto" and machine.device_nbytes is None:
        raise ValueError("'device_budget' is \"auto\", which depends on the device's memory; say how much there is.")
    planner = _Planner(plan, machine, work, num_slots, device_budget)
    options = list(planner.options(plan.group_size))
    scaling = []
    for devices in SCALES:
        group = min(devices, max(RANKS_PER_HOST, plan.group_size))
        found = _best(list(planner.options(group)))
        if found is not None:
            scaling.append(Scale(devices, -(-devices // group), found))
    best = _best(options)
    return Prediction(
        machine,
        work,
        tuple(options),
        best,
        tuple(planner.shortfalls(best or options[0])),
        tuple(scaling),
        _compare(planner, best, plan, coded_plan),
    )


def _compare(
    planner: _Planner, best: Option | None, plan: OffloadPlan, coded_plan: OffloadPlan | None
) -> Coding | None:
    """The best option beside that of the same weights coded, or not coded."""
    is_coded = has_coded_blocks(as_streamed(plan))
    other = without_coded_blocks(plan) if is_coded else coded_plan
    compared = _best(list(planner.of(other).options(plan.group_size))) if other is not None else None
    if best is None or compared is None:
        return None
    return Coding(compared, best, True) if is_coded else Coding(best, compared, False)


def _best(options: Sequence[Option]) -> Option | None:
    fitting = [option for option in options if option.fits]
    if not fitting:
        return None
    fastest = min(option.seconds for option in fitting)
    fast = [option for option in fitting if option.seconds <= _AS_GOOD * fastest]
    least = min(option.memory.total for option in fast)
    return next(option for option in fast if option.memory.total <= _AS_SMALL * least)


class _Planner:
    """Makes the options of one prediction."""

    def __init__(
        self, plan: OffloadPlan, machine: Machine, work: Work, num_slots: int | str, budget: int | str | None
    ) -> None:
        self._plan = as_streamed(plan)
        self._machine = machine
        self._work = work
        self._num_slots = num_slots
        self._budget = budget
        self._encoders = {c.name for c in plan.components if c.runs_once}

    def of(self, plan: OffloadPlan) -> _Planner:
        """The same for another plan."""
        return _Planner(plan, self._machine, self._work, self._num_slots, self._budget)

    def options(self, group_size: int) -> Iterator[Option]:
        """The ways to stream the plan with groups of this size."""
        gathers = group_size > 1 and can_gather(self._plan, group_size)
        for transfer in ("all_gather", "local") if gathers else ("local",):
            plain = self._variant(transfer, group_size, 2 if self._num_slots == "auto" else int(self._num_slots))
            if self._budget is None or self._budget == 0:
                yield self._option(plain, transfer, "collective", None)
            if self._num_slots != "auto":
                yield from self._with_budgets(plain, transfer)
                continue
            usual = list(self._with_budgets(replace(plain, num_slots=3), transfer))
            yield from usual
            fastest = min((option.seconds for option in usual if option.fits), default=float("inf"))
            for option in self._with_budgets(plain, transfer):  # the third slot's bytes may serve better elsewhere
                if option.fits and _AS_GOOD * option.seconds < fastest:
                    yield option

    def _with_budgets(self, plan: OffloadPlan, transfer: str) -> Iterator[Option]:
        for budget in self._budgets(plan):
            kept = self._option(plan, transfer, "collective", budget)
            yield kept
            if kept.gather and kept.residents and not self._streams(kept):
                yield self._option(plan, transfer, "pull", budget)

    def shortfalls(self, option: Option) -> Iterator[str]:
        """What of the machine does not suffice for an option."""
        usable, memory = self._machine.usable_nbytes, option.memory
        if usable is not None and memory.total > usable:
            slot = max(option.plan.slot_nbytes(transfer) for transfer in ("all_gather", "local"))
            help_by = ["a device with more memory"]
            if memory.residents:
                free = self._free(option.plan)
                help_by.append(f"a 'device_budget' of {format_bytes(free)} at most" if free else "no 'device_budget'")
            if option.plan.num_slots > 2:
                help_by.append("'num_slots' of 2")
            if memory.activations > memory.slots:
                help_by.append("fewer tokens")
            if memory.placed > memory.slots:
                help_by.append("streaming more components (components=[...])")
            decoding = f"decoding {format_bytes(memory.decoding)}; " if memory.decoding else ""
            yield (
                f"The device memory does not suffice: {format_bytes(memory.total)} are needed of each device "
                f"({option.plan.num_slots} slots, the largest of {format_bytes(slot)}: {format_bytes(memory.slots)}; "
                f"placed {format_bytes(memory.placed)}; on demand {format_bytes(memory.on_demand)}; "
                f"residents {format_bytes(memory.residents)}; {decoding}activations, an estimate, "
                f"{format_bytes(memory.activations)}), and there are {format_bytes(usable)} of "
                f"{format_bytes(self._machine.device_nbytes or 0)}, less {MARGIN:.0%} margin. "
                f"What would help: {_list(help_by)}. More ranks would not: slots hold whole blocks."
            )
        there = self._machine.host_nbytes
        needed = option.host_nbytes + PROCESS_NBYTES * option.plan.group_size
        if there is not None and needed > there:
            yield (
                f"The host memory does not suffice: {format_bytes(needed)} are needed of each host "
                f"({format_bytes(option.host_nbytes)} of weights, once for all its ranks, and an allowance of "
                f"{format_bytes(PROCESS_NBYTES)} for each of {option.plan.group_size} processes), and there are "
                f"{format_bytes(there)}. What would help: more host memory, a smaller dtype, or fewer components that "
                "stream. What does not fit in the page cache is read from the disk again in every forward."
            )

    def _variant(self, transfer: str, group_size: int, num_slots: int) -> OffloadPlan:
        components = tuple(
            replace(
                c,
                transfer="local" if c.name in self._encoders else transfer,
                transient=c.name in self._encoders and transfer != "local",
            )
            for c in self._plan.components
        )
        return replace(self._plan, components=components, group_size=group_size, num_slots=num_slots)

    def _shares(self, plan: OffloadPlan) -> int:
        return max(plan.shards(c) for c in plan.components if c.name not in self._encoders)

    def _budgets(self, plan: OffloadPlan) -> list[int]:
        """Budgets to look at: half, three quarters and all of the shards; whole blocks; what the device leaves."""
        if isinstance(self._budget, int):
            return [self._budget] if self._budget else []
        if self._machine.usable_nbytes is None:
            return []
        shares = self._shares(plan)
        layouts = [candidate.layout for candidate in plan.candidates]
        shards = sum(layout.shard_nbytes(shares) for layout in layouts)
        whole = sum(layout.padded_nbytes(shares) for layout in layouts)
        lookups = sum(leaf.layout.padded_nbytes(1) for leaf in plan.lookups)
        shards, whole = shards + lookups, whole + lookups
        most = min(_round_down(self._free(plan)), _round_up(whole))
        if self._budget == "auto":
            return [most] if most > 0 else []
        staging = STAGING_BUFFERS * max(layout.shard_nbytes(shares) for layout in layouts)
        wanted = (shards // 2, 3 * shards // 4 + (staging if shares > 1 else 0), shards, whole, most)
        return sorted({_round_up(budget) for budget in wanted if 0 < _round_up(budget) <= most} | {most} - {0})

    def _free(self, plan: OffloadPlan) -> int:
        """Device bytes that the margin and everything else leaves for what stays."""
        return max(0, (self._machine.usable_nbytes or 0) - self._memory(plan, ResidentPlan()).total)

    def _memory(self, plan: OffloadPlan, residents: ResidentPlan) -> DeviceMemory:
        return DeviceMemory(
            slots=plan.device_slot_nbytes,
            placed=plan.device_placed_nbytes,
            on_demand=max((leaf.nbytes for c in plan.components for leaf in _fetched(c, residents)), default=0),
            residents=residents.nbytes,
            activations=max(
                activation_nbytes(block, self._tokens(c.name)) for c in plan.components for block in c.blocks
            ),
            decoding=decoding_nbytes(plan),
        )

    def _tokens(self, component: str) -> Tokens:
        return Tokens(0 if component in self._encoders else self._work.tokens, self._work.text_tokens)

    def _option(self, plan: OffloadPlan, transfer: str, gather: str, budget: int | None) -> Option:
        residents = ResidentPlan()
        if budget:
            residents = plan.residents_for(budget)
        memory = self._memory(plan, residents)
        usable = self._machine.usable_nbytes
        return Option(
            plan=plan,
            transfer=transfer,
            gather=gather if transfer == "all_gather" else "",
            budget=budget,
            residents=residents,
            memory=memory,
            host_nbytes=sum(
                unit.coded.coded_nbytes if unit.coded is not None else unit.padded_nbytes(plan.group_size)
                for _, unit in plan.units
            ),
            pinned_nbytes=replace(plan, host="pinned").host_nbytes_per_rank * plan.group_size,
            forwards=tuple(self._forward(plan, c, residents, gather) for c in plan.components),
            fits=usable is None or memory.total <= usable,
        )

    def _forward(self, plan: OffloadPlan, component: ComponentPlan, residents: ResidentPlan, gather: str) -> Forward:
        seconds = self._compute_seconds(component)
        shards, whole = (stay.get(component.name, frozenset()) for stay in (residents.shards, residents.whole))
        blocks = [
            SimulatedBlock(
                block.nbytes,
                time,
                "whole" if i in whole else "shard" if i in shards else "",
                copied_shards(block, plan.shards(component)),
            )
            for i, (block, time) in enumerate(zip(component.blocks, seconds))
        ]
        streaming = Streaming(
            component.transfer,
            plan.shards(component),
            plan.num_slots,
            STAGING_BUFFERS if residents.staging_nbytes else 0,
            gather,
        )
        is_encoder = component.name in self._encoders
        simulation = simulate_forward(blocks, streaming, self._machine.links)
        lookups = sum(leaf.nbytes for leaf in _fetched(component, residents) if leaf.is_lookup)
        return Forward(component.name, is_encoder, simulation, lookups / self._machine.links.h2d)

    def _compute_seconds(self, component: ComponentPlan) -> list[float]:
        flops = [block_flops(block, self._tokens(component.name)) for block in component.blocks]
        measured = self._work.compute_seconds
        if measured is None or component.name in self._encoders:
            return [one / (self._work.tflops * 1e12) for one in flops]
        shares = flops if sum(flops) else [block.nbytes for block in component.blocks]
        return [measured * share / sum(shares) for share in shares]

    def _streams(self, option: Option) -> bool:
        """Whether anything is copied in every pass."""
        return any(forward.simulation.h2d_nbytes for forward in option.denoisers)


def _fetched(component: ComponentPlan, residents: ResidentPlan) -> list[BlockLayout]:
    """The leaves of a component that do not stay."""
    kept = residents.leaves.get(component.name, frozenset())
    return [leaf for index, leaf in enumerate(component.leaves) if index not in kept]


def _round_down(nbytes: int) -> int:
    """To whole MiB, where there are any: an amount that can be written down."""
    return nbytes // _MIB * _MIB if nbytes >= _MIB else nbytes


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _MIB) * _MIB if nbytes >= _MIB else nbytes


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
