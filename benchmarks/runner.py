# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns a run: how deep the model is to fit, which variant comes when, what is left out and why, and telling how far it
is. Must not measure, nor show what was measured.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crew import Crew, JobFailed
from measure import SLOW_SECONDS, WARM_UP
from predicted import Predicted
from results import Comparison, Result, make_rows, merge_links, slowest
from rich.console import Console
from room import Room, available_host_nbytes, choose_folder, look
from sizes import SIZES, ModelFacts, make_config, weigh
from variants import CODING_RATE, REFERENCE, Variant
from worker import Job

from diffusers_dlo.byte_size import format_bytes


CLOSING_SECONDS = 8.0
"""Of a time limit, what is kept for writing down what was measured."""
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors")


class Progress:
    """Says what is being done, since all of it takes minutes; and remembers it."""

    def __init__(self, console: Console) -> None:
        self.lines: list[str] = []
        self.prefix = ""
        self._stopped = False
        self._console = console
        self._start = time.monotonic()

    def stop(self) -> None:
        """Ends the run; at the next word if the exception is lost, as it is where Python forks."""
        self._stopped = True
        raise SystemExit(143)

    def __call__(self, text: str) -> None:
        if self._stopped:
            self.stop()
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        line = f"[{minutes}:{seconds:02}] {self.prefix}{text}"
        self.lines.append(line)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Facts:
    """The model that will be measured, and the room for it."""

    config: dict[str, Any]
    model: ModelFacts
    full_layers: int
    room: Room


def gather_facts(args: argparse.Namespace, progress: Progress) -> Facts:
    """Chooses the folder and the depth; says so where the whole model does not fit."""
    size = SIZES[args.size]
    full = args.layers or size.layers
    model = weigh(make_config(size, full, args.vocabulary), size.dtype)
    folder = args.where or choose_folder(model.nbytes, args.ranks, args.device, args.host_memory)
    room = look(folder, args.host_memory)
    layers = room.layers_that_fit(model, args.ranks, args.device)
    if layers == 0:
        if args.where is None:
            folder.rmdir()
        raise SystemExit(
            f"compare.py: error: '{folder}' has {room.free_nbytes / 1e9:.1f} GB free and the host "
            f"{room.host_nbytes / 1e9:.1f} GB of memory, which is not enough for one layer of '{args.size}'; name "
            "another folder with --where."
        )
    if layers < full:
        progress(
            f"the largest that fits: {layers} of {full} layers. All of '{args.size}' are {model.nbytes / 1e9:.0f} GB; "
            f"'{folder}' has {room.free_nbytes / 1e9:.0f} GB free, the host {room.host_nbytes / 1e9:.0f} GB of memory"
        )
    config = make_config(size, layers, args.vocabulary)
    return Facts(config, weigh(config, size.dtype), size.layers, room)


@dataclass(frozen=True)
class Plan:
    """What a run is to do; `deadline` is of `time.monotonic`."""

    args: argparse.Namespace
    facts: Facts
    variants: list[Variant]
    deadline: float
    scratch: Path


class Runner:
    """One run."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan = plan
        self._tell = progress
        self._crews = 0
        self._standby: Crew | None = None
        self._results: list[Result] = []
        self._missing: list[dict[str, str]] = []
        self._is_coded = False
        self._compute: dict[str, float] = {}

    def run(self, save: Callable[[Comparison], None]) -> Comparison:
        """
        Prepares, measures every variant, and draws it together. What fails is a line of the result. `save` gets what
        there is after each variant, so that a run that is killed was not for nothing.
        """
        try:
            return self._run(save)
        finally:
            if self._standby is not None:
                self._standby.dismiss()

    def _run(self, save: Callable[[Comparison], None]) -> Comparison:
        plan, facts = self._plan, self._plan.facts
        self._tell.prefix = "preparing: "
        self._tell(f"{facts.model.layers} layers, {format_bytes(facts.model.nbytes)}, in {facts.room.folder}")
        self._standby = self._next_crew()
        try:
            prepared = self._do(self._job("prepare"))
        except JobFailed as error:
            raise SystemExit(f"compare.py: error: nothing could be prepared: {error}") from error
        self._prepared = prepared[0]
        self._links = merge_links(prepared)
        self._device_nbytes = prepared[0]["device_nbytes"]
        capacity, dtype = self._capacity if self._device_nbytes else None, SIZES[plan.args.size].dtype
        self._predicted = Predicted(facts.config, dtype, plan.args.ranks, self._links, capacity)
        queue = list(plan.variants)
        total = len(queue)
        while queue:
            variant = queue.pop(0)
            self._tell.prefix = f"{total - len(queue)}/{total} {variant.name}: "
            done = self._measure(variant, last=not queue)
            if variant.family == "resident" and not done:
                queue.insert(0, REFERENCE)
                total += 1
            save(self._compare())
        self._tell.prefix = ""
        return self._compare()

    def _compare(self) -> Comparison:
        args, facts = self._plan.args, self._plan.facts
        h2d, predict = self._links["h2d_together_bytes_per_s"], self._predicted.seconds
        rows = make_rows(self._results, args.workloads, facts.model, h2d, predict)
        size = SIZES[args.size]
        return Comparison(
            machine={
                "device": f"{args.ranks} x {self._prepared['device']}" if args.device != "cpu" else _processor(),
                "device_nbytes": self._device_nbytes,
                "cuda": self._prepared.get("driver_cuda"),
                "versions": {name: version(name) for name in PACKAGES},
                "date": date.today().isoformat(),
                "checkpoint_in_memory": facts.room.in_memory,
            },
            options={
                "ranks": args.ranks,
                "device": args.device,
                "repeats": args.repeats,
                "device_cap_nbytes": args.device_cap,
                "time_limit_s": args.time_limit,
            },
            model={
                "class": "Cosmos3OmniTransformer",
                "size": args.size,
                "layers": facts.model.layers,
                "full_layers": facts.full_layers,
                "nbytes": facts.model.nbytes,
                "blocks_nbytes": facts.model.blocks_nbytes,
                "block_nbytes": facts.model.block_nbytes,
                "leaf_nbytes": facts.model.leaf_nbytes,
                "dtype": str(size.dtype).removeprefix("torch."),
                "config": facts.config,
            },
            links=self._links,
            workloads={workload.name: workload.title for workload in args.workloads},
            rows=rows,
            not_measured=self._missing,
            log=self._tell.lines,
        )

    def _measure(self, variant: Variant, last: bool) -> bool:
        """Measures a variant, or notes why not; whether it was measured."""
        reason = self._refusal(variant)
        if reason is None:
            try:
                if variant.is_coded and not self._is_coded:
                    self._do(self._job("code"))
                    self._is_coded = True
                found = self._do(self._job("measure", variant), last)
            except JobFailed as error:
                reason = str(error)
        if reason is not None:
            self._tell(f"not measured: {reason}")
            self._missing.append({"variant": variant.name, "reason": reason})
            return False
        self._results.append(Result(variant, found))
        self._say(variant, found)
        return True

    @property
    def _capacity(self) -> int:
        """Bytes that a rank may take of its device."""
        return min(self._plan.args.device_cap or 1 << 62, self._device_nbytes or 1 << 62)

    def _refusal(self, variant: Variant) -> str | None:
        """Why a variant is not to be started; None if it is."""
        args, model = self._plan.args, self._plan.facts.model
        if variant.family == "resident" and model.nbytes > self._capacity:
            return f"{model.nbytes / 1e9:.0f} GB of weights do not fit a device with {self._capacity / 1e9:.0f} GB"
        if variant.is_coded and SIZES[args.size].dtype.itemsize != 2:
            return f"weights in {SIZES[args.size].dtype} are not coded; name a size in bfloat16"
        if variant.cold and self._plan.facts.room.in_memory:
            return "the checkpoint is in shared memory, which has no cold state; name a folder on a disk with --where"
        host = available_host_nbytes()
        if args.host_memory is not None:
            used = model.nbytes if self._plan.facts.room.in_memory else 0
            host = min(host, args.host_memory - used)
        needed = variant.host_nbytes(model, args.ranks, args.device)
        if needed > host:
            return f"needs up to {needed / 1e9:.0f} GB of host memory, and {host / 1e9:.0f} GB are free"
        left = self._plan.deadline - time.monotonic() - CLOSING_SECONDS
        expected = self._expected_seconds(variant)
        if left < expected:
            return f"left out: about {expected:.0f} s are needed, and {max(left, 0):.0f} s of the time limit are left"
        return None

    def _expected_seconds(self, variant: Variant) -> float:
        """About how long a variant takes, from the rates of this machine as far as they are known."""
        args, model = self._plan.args, self._plan.facts.model
        if args.size.startswith("tiny"):
            return 5.0
        # Unpinned memory is copied at a fraction of the link's rate.
        slow = 6.0 if variant.family == "sequential" else 1.0
        link_nbytes = variant.pass_nbytes(model, args.ranks)
        link = slow * (model.nbytes if link_nbytes is None else link_nbytes) / self._links["h2d_together_bytes_per_s"]
        seconds = variant.enable_seconds(model, args.ranks)
        if variant.is_coded and not self._is_coded:
            seconds += model.nbytes / CODING_RATE
        for workload in args.workloads:
            forward = max(link, self._compute.get(workload.name, 0.0))
            seconds += forward * (3 if forward > SLOW_SECONDS else WARM_UP + args.repeats)
        return seconds

    def _job(self, kind: str, variant: Variant | None = None) -> Job:
        args, facts = self._plan.args, self._plan.facts
        options = {} if variant is None else variant.enabling_options(facts.model, args.ranks)
        return Job(
            kind=kind,
            folder=facts.room.folder,
            config=facts.config,
            dtype=SIZES[args.size].dtype,
            device=args.device,
            workloads=args.workloads,
            repeats=args.repeats,
            cap_nbytes=args.device_cap,
            variant=variant if variant is None else replace(variant, options={}),
            options=options,
            block_nbytes=facts.model.block_nbytes,
            interference=args.interference,
        )

    def _do(self, job: Job, last: bool = False) -> list[dict[str, Any]]:
        crew = self._standby or self._next_crew()
        # The next ranks import their libraries while these work.
        self._standby = None if last else self._next_crew()
        return crew.run(job, self._plan.deadline - CLOSING_SECONDS, self._tell)

    def _next_crew(self) -> Crew:
        self._crews += 1
        return Crew(self._crews, self._plan.args.ranks, self._plan.scratch, self._plan.args.device != "cpu")

    def _say(self, variant: Variant, found: list[dict[str, Any]]) -> None:
        times = []
        for name, forwards in found[0]["forwards"].items():
            best = min(slowest([rank["forwards"][name] for rank in found], "seconds"))
            if variant.is_base:
                self._compute[name] = min(forwards.get("compute", [best]))
            times.append(f"{name} {best * 1e3:.1f} ms")
        peaks = [f["device_peak_nbytes"] for rank in found for f in rank["forwards"].values()]
        device = "" if None in peaks else f"; device peak {max(peaks) / 2**30:.2f} GiB"
        pss = sum(rank["host"]["pss"] for rank in found) / 2**30
        private = sum(rank["host"]["private"] for rank in found) / 2**30
        copies = pss * 2**30 / self._plan.facts.model.nbytes
        host = f"host PSS of all ranks {pss:.1f} GiB ({copies:.2f} x the weights), private {private:.1f} GiB"
        self._tell(f"{', '.join(times)}{device}; {host}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
