# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what a prediction starts from and what it says: the work, the machine, ways to stream, their memory and time.
Must not compute predictions (`planner.py`), nor print them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .offload_plan import OffloadPlan
from .residency import ResidentPlan
from .simulation import Links, Simulation


MARGIN = 0.05
"""The share of a device's memory that stays free: allocators, libraries and drivers take some."""


@dataclass(frozen=True)
class Work:
    """
    What is computed in a forward.

    Attributes:
        tokens (`int`, defaults to 4096): of the image or video, all samples together. The default is an image of
            1024 x 1024 pixels in patches of 16 x 16.
        text_tokens (`int`, defaults to 512): of the text beside it.
        compute_seconds (`float`, *optional*): measured time of one forward with all weights on the device. If None, it
            is estimated ([Note: Compute estimate]).
        tflops (`float`, defaults to 500): for the estimate, 10^12 operations per second, of matrices and attention
            together. The default is what 36 layers of Cosmos3-Nano's size and 26,000 tokens came to on an H200.
    """

    tokens: int = 4096
    text_tokens: int = 512
    compute_seconds: float | None = None
    tflops: float = 500.0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.text_tokens < 0:
            raise ValueError(f"'tokens' must be 1 or more, got {self.tokens} and {self.text_tokens} of text.")
        if not self.tflops > 0:
            raise ValueError(f"'tflops' must be above 0, got {self.tflops!r}.")
        if self.compute_seconds is not None and not self.compute_seconds >= 0:
            raise ValueError(f"'compute_seconds' must not be negative, got {self.compute_seconds!r}.")


@dataclass(frozen=True)
class Machine:
    """
    What there is: bytes of memory of each device and of each host, None where not known, and the rates of the links.
    Of weights that are not coded, `coded_ratio` is what coding is assumed to leave of their 16-bit floats. The default
    is what was measured: 0.666 of normally distributed bfloat16 weights, 0.676 of heavy-tailed ones.
    """

    device_nbytes: int | None = None
    host_nbytes: int | None = None
    links: Links = field(default_factory=Links)
    coded_ratio: float = 0.67

    def __post_init__(self) -> None:
        if not 0 < self.coded_ratio <= 1:
            raise ValueError(f"'coded_ratio' must be above 0 and 1 at most, got {self.coded_ratio!r}.")

    @property
    def usable_nbytes(self) -> int | None:
        """Device memory without the margin."""
        return None if self.device_nbytes is None else int(self.device_nbytes * (1 - MARGIN))


@dataclass(frozen=True)
class DeviceMemory:
    """
    Bytes on the device of each rank; `activations` is an estimate, `on_demand` the largest leaf, `decoding` what coded
    shards arrive in, and an upper bound of what decoding takes beside them.
    """

    slots: int
    placed: int
    on_demand: int
    residents: int
    activations: int
    decoding: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.slots + self.placed + self.on_demand + self.residents + self.activations + self.decoding


@dataclass(frozen=True)
class Forward:
    """
    The predicted time of one forward of one component; of a text encoder, one that finds the slots empty. In
    `lookup_seconds` embeddings outside the blocks come whole, over each rank's own link, while computing waits.
    """

    component: str
    is_encoder: bool
    simulation: Simulation
    lookup_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The time."""
        simulated = self.simulation.first_seconds if self.is_encoder else self.simulation.seconds
        return simulated + self.lookup_seconds

    @property
    def limit_seconds(self) -> float:
        """The least that computing and the link allow."""
        simulated = self.simulation
        return max(simulated.compute_seconds, simulated.limit_seconds + self.lookup_seconds)


@dataclass(frozen=True)
class Option:
    """
    One way to stream a plan, and what it is predicted to take.

    Attributes:
        plan (`OffloadPlan`): the plan with this transfer and number of slots.
        transfer (`str`), gather (`str`): of what is not a text encoder; `gather` is empty with `local`.
        budget (`int`, *optional*): `device_budget`.
        residents (`ResidentPlan`): what stays for it.
        memory (`DeviceMemory`): on each device.
        host_nbytes (`int`): weights in host memory, one copy for all ranks of the host (`mapped`, `packed`; of coded
            blocks, what they are coded).
        pinned_nbytes (`int`): the same with `host="pinned"`, all ranks together.
        forwards (`tuple[Forward, ...]`): by component.
        fits (`bool`): whether the device memory suffices, margin included; True where it is not known.
    """

    plan: OffloadPlan
    transfer: str
    gather: str
    budget: int | None
    residents: ResidentPlan
    memory: DeviceMemory
    host_nbytes: int
    pinned_nbytes: int
    forwards: tuple[Forward, ...]
    fits: bool

    @property
    def denoisers(self) -> list[Forward]:
        """The forwards that are no text encoder's."""
        return [forward for forward in self.forwards if not forward.is_encoder]

    @property
    def seconds(self) -> float:
        """Of one forward; where several components take turns (Wan 2.2), their mean."""
        return sum(forward.seconds for forward in self.denoisers) / len(self.denoisers)

    @property
    def limit_seconds(self) -> float:
        """What no schedule can beat, the mean likewise."""
        return sum(forward.limit_seconds for forward in self.denoisers) / len(self.denoisers)

    @property
    def decode_seconds(self) -> float:
        """What decoding takes of a forward, the mean likewise."""
        return sum(forward.simulation.decode_seconds for forward in self.denoisers) / len(self.denoisers)

    @property
    def bound(self) -> str:
        """What sets the time: `copies`, `gathers` or `computing`, whatever takes longest in all."""
        totals = {
            "computing": sum(f.simulation.compute_seconds for f in self.denoisers),
            "copies": sum(f.simulation.copy_seconds for f in self.denoisers),
            "gathers": sum(f.simulation.gather_seconds for f in self.denoisers),
        }
        return max(totals, key=lambda name: totals[name])


@dataclass(frozen=True)
class Scale:
    """The best option on another number of devices, simulated: groups of `option.plan.group_size` on `hosts` hosts."""

    devices: int
    hosts: int
    option: Option


_GAIN = 0.98
"""What takes this part of the time, or less, is faster."""


@dataclass(frozen=True)
class Coding:
    """
    The best option with weights as they are, `plain`, and with coded ones; one of them is an assumption: `is_coded`
    says whether the checkpoint's weights are coded.
    """

    plain: Option
    coded: Option
    is_coded: bool

    @property
    def helps(self) -> bool:
        """Whether a forward is faster with coded weights."""
        return self.coded.seconds <= _GAIN * self.plain.seconds


@dataclass(frozen=True)
class Prediction:
    """
    What a plan is predicted to take, by ways to stream it.

    Attributes:
        machine (`Machine`), work (`Work`): what was assumed.
        options (`tuple[Option, ...]`): what was looked at.
        best (`Option`, *optional*): the recommended one; None where none fits.
        shortfalls (`tuple[str, ...]`): what does not fit: what is needed, what there is, and what would help.
        scaling (`tuple[Scale, ...]`): other numbers of devices.
        coding (`Coding`, *optional*): what coded weights bring; None where nothing is or could be coded.
    """

    machine: Machine
    work: Work
    options: tuple[Option, ...]
    best: Option | None
    shortfalls: tuple[str, ...]
    scaling: tuple[Scale, ...]
    coding: Coding | None = None
