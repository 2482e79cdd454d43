# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns who shares weights: the launcher's world, the ranks of one host, their control mesh and their gather group. The
only file that reads launcher variables of the environment. Must not know of weights.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from diffusers.utils import logging

from ..device.interface import Platform
from ..device.platform import HOST_BACKEND, SOCKET_VARIABLES
from ..interrupts import interrupts
from .agreed_error import describe_error, raise_agreed
from .connect import connect
from .control import ControlMesh
from .gather import ShardGather, new_gather_group


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


logger = logging.get_logger(__name__)


class World:
    """All ranks of the launcher, before they know which of them share weights."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None, default: object) -> None:
        self.rank = rank
        self.size = size
        self.default = default
        self._group = group

    def exchange(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank of the world passes in, by rank. JSON, so nothing that arrives is executed."""
        if self._group is None:
            return [value]
        try:
            return self._exchange(json.dumps(value).encode())
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: not all {self.size} ranks took part in enabling, or one of them has ended. All "
                f"ranks of the launcher enable together, between forwards. ({str(error).splitlines()[0]})"
            ) from error

    def _exchange(self, text: bytes) -> list[dict[str, Any]]:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=self._group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        all_data = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_data, padded, group=self._group)
        return [json.loads(bytes(d[: int(n)].tolist())) for d, n in zip(all_data, sizes)]

    @contextmanager
    def agreement(self, said: dict[str, Any], interruptible: bool = True) -> Iterator[list[dict[str, Any]]]:
        """
        Runs the body on every rank, then exchanges `said`, which the body may fill. If the body raised on any rank,
        all raise: the culprit its own error, the others the same type with the culprit's rank. A body that has
        agreements of its own is not `interruptible` but in those.
        """
        replies: list[dict[str, Any]] = []
        error: BaseException | None = None
        try:
            with interrupts.allowed() if interruptible else nullcontext():
                yield replies
        except BaseException as caught:
            error = caught
        try:
            replies += self.exchange({**said, "error": describe_error(error)})
        except RuntimeError:
            if error is not None:
                raise error from None
            raise
        raise_agreed(error, [reply["error"] for reply in replies])


class OffloadGroup:
    """
    The ranks of one host that share weights, as seen by one of them.

    Attributes:
        control (`ControlMesh`): on which main threads agree while they enable and disable.
        passes (`ControlMesh`, *optional*): on which service threads agree on passes; None for a single rank.
    """

    def __init__(
        self, world: World, ranks: Sequence[int], control: ControlMesh, passes: ControlMesh | None = None
    ) -> None:
        self.world = world
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(world.rank)
        self.size = len(self.ranks)
        self.control = control
        self.passes = passes
        self.gather: ShardGather | None = None

    @property
    def usable(self) -> bool:
        """Whether its ranks can still agree on passes."""
        return self.control.usable and (self.passes is None or self.passes.usable)

    def close(self) -> None:
        """Closes its meshes."""
        self.control.close()
        if self.passes is not None:
            self.passes.close()

    @contextmanager
    def agreement(self, what: str, said: Mapping[str, Any] | None = None) -> Iterator[list[dict[str, Any]]]:
        """As `World.agreement`, among the ranks of the group and over the control mesh; `what` names the step."""
        replies: list[dict[str, Any]] = []
        error: BaseException | None = None
        try:
            with interrupts.allowed():
                yield replies
        except BaseException as caught:
            error = caught
        try:
            replies += self.control.exchange(what, error=describe_error(error), **(said or {}))
        except RuntimeError:
            if error is not None:
                raise error from None
            raise
        others = sorted({reply["kind"] for reply in replies} - {what})
        if others and error is None:
            raise RuntimeError(
                f"rank {self.rank} is at '{what}' while another is at '{others[0]}'. Enabling and disabling are done "
                "by all ranks together."
            )
        raise_agreed(error, [reply.get("error") for reply in replies])


_world: World | None = None
_groups: dict[tuple[int, ...], OffloadGroup] = {}
_gather_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
"by their ranks; the same keys on all ranks of the world"


def local_rank() -> int | None:
    """This process's index on its host, as the launcher set it; None without a launcher."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdigit() else None


def _new_control_group(timeout: float) -> dist.ProcessGroup:
    try:
        return dist.new_group(backend=HOST_BACKEND, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: the {dist.get_world_size()} ranks could not connect within {timeout:.0f} s: one "
            "has ended, is late, cannot open sockets, or has made process groups that others have not, which torch "
            "counts (enable_parallelism on some ranks only). All ranks of the launcher enable together, between "
            "forwards, and before what only some of them do. "
            f"({str(error).splitlines()[0]})"
        ) from error


def join_world(device_type: str, timeout: float) -> World:
    """
    The ranks that the launcher started, from torch.distributed; initialised through accelerate where a launcher
    started several processes and nobody has done it yet. Collective over all ranks the first time.
    """
    global _world
    if not dist.is_available() or (not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) == 1):
        return World(0, 1, None, None)
    if not dist.is_initialized():
        from accelerate import PartialState

        PartialState(cpu=device_type == "cpu")
        if not dist.is_initialized():
            raise RuntimeError(
                "The launcher started several processes, but accelerate did not connect them. Create "
                "accelerate.PartialState() (with cpu=True on the CPU) before enabling."
            )
    _warn_of_lone_state()
    default = dist.group.WORLD
    if _world is None or _world.default is not default:
        size = dist.get_world_size()
        group = _new_control_group(timeout) if size > 1 else None
        _world = World(dist.get_rank(), size, group, default)
        for old in _groups.values():
            old.close()
        _groups.clear()
        _gather_groups.clear()
    return _world


def _warn_of_lone_state() -> None:
    """On the CPU, accelerate takes part in torch's world only when told to; every rank would do all the work."""
    from accelerate import PartialState

    known = PartialState._shared_state.get("num_processes")
    if known == 1 and dist.get_world_size() > 1:
        logger.warning(
            f"accelerate.PartialState() believes that it is alone among {dist.get_world_size()} ranks: "
            "'split_between_processes' would give each of them all of the work. Create it with cpu=True, or after "
            "enabling."
        )


def mesh_ranks(mesh: DeviceMesh | None) -> list[int] | None:
    """The world ranks of this rank's row of `mesh`: its last dimension."""
    if mesh is None:
        return None
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of 'mesh'; every rank has to be in one of its rows.")
    return list(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)))


def host_identity() -> str:
    """Equal for processes that can share memory and sockets: the machine's boot, and the namespaces they live in."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
            return " ".join([file.read().strip(), *namespaces])
    except OSError:
        return socket.gethostname()


def introduce(mesh: DeviceMesh | None, backend: str | None = None) -> dict[str, Any]:
    """
    What a rank tells the world about itself, for `form_group`; `backend` is that of its gathers, if it may have any.
    """
    return {
        "host": host_identity(),
        "pid": os.getpid(),
        "secret": secrets.token_hex(16),
        "mesh": mesh_ranks(mesh),
        "backend": backend,
        "spent": [list(ranks) for ranks, group in _groups.items() if not group.usable],
    }


def form_group(world: World, introductions: Sequence[dict[str, Any]], timeout: float) -> OffloadGroup:
    """
    The group of this rank: its row of the mesh, else the ranks of its host. The same on all ranks of the world.

    Raises:
        `ValueError`: a group that spans hosts, or a mesh that not all ranks passed.
    """
    meshes = [said["mesh"] for said in introductions]
    hosts = [said["host"] for said in introductions]
    if any((mesh is None) != (meshes[0] is None) for mesh in meshes):
        raise ValueError("'mesh' was passed on some ranks and not on others; pass the same mesh on all.")
    rows = meshes if meshes[0] is not None else [[r for r in range(world.size) if hosts[r] == h] for h in hosts]
    for rank, row in enumerate(rows):
        if rank not in row or any(hosts[other] != hosts[rank] for other in row):
            raise ValueError(
                f"The ranks {row} that would share weights do not all run on one host. Let 'mesh' put the ranks of a "
                "host in a row; ranks of other hosts are replicas."
            )
    ranks = tuple(rows[world.rank])
    for row in sorted({tuple(row) for row in rows if len(row) > 1}):
        if any(list(row) in introductions[rank]["spent"] for rank in row):
            _gather_groups.pop(row, None)
            _groups.pop(row, None)  # not closed: what is enabled in it is still to be disabled
        backend = introductions[row[0]]["backend"]
        if backend is not None and row not in _gather_groups:
            _gather_groups[row] = new_gather_group(row, backend, timeout)
    if ranks not in _groups:
        rank, pids = ranks.index(world.rank), [introductions[rank]["pid"] for rank in ranks]
        secret = introductions[ranks[0]]["secret"]
        control = connect(rank, pids, secret, timeout)
        passes = connect(rank, pids, f"{secret} passes", timeout) if len(ranks) > 1 else None
        _groups[ranks] = OffloadGroup(world, ranks, control, passes)
    group = _groups[ranks]
    group.control.timeout = timeout
    return group


def open_gather(group: OffloadGroup, platform: Platform, timeout: float, in_place: bool | str, idle: bool) -> None:
    """
    Warms the group's own communicator up, once for each way to gather that is asked for. Collective over the group,
    and over no other rank. `idle` says that nothing streams now.

    Raises:
        `ValueError`: another way is in use. `RuntimeError`: gathers cannot be had, or bring wrong bytes.
    """
    if group.size == 1 or (group.gather is not None and group.gather.asked == in_place):
        return
    if group.gather is not None and not idle:
        raise ValueError(
            f"'gather_in_place' is {in_place!r}, and other components stream already with {group.gather.asked!r}: a "
            "process gathers in one way. Use the same for both, or disable the others first."
        )
    refuse_single_queue(platform)
    try:
        gather = ShardGather(_gather_groups[group.ranks])
        is_right = gather.open(platform, timeout, in_place)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {group.rank}: the communicator of {group.size} ranks could not be opened; a rank may have ended. "
            f"Look for its traceback, and start all ranks again. ({str(error).splitlines()[0]})"
        ) from error
    if not is_right:
        remedy = "leave 'gather_in_place' to \"auto\"" if in_place is True else 'use transfer="local"'
        raise RuntimeError(f"an all-gather of {group.size} ranks returned wrong bytes on this backend; {remedy}")
    if not gather.in_place and group.rank == 0:
        logger.info("Blocks are gathered from memory beside their slots, 1/N of a block for each")
    group.gather = gather


def refuse_single_queue(platform: Platform) -> None:
    """
    Raises:
        `ValueError`: all streams of the device share one hardware queue.
    """
    name = platform.queues_variable
    if name is not None and os.environ.get(name) == "1":
        raise ValueError(
            f"'{name}' is 1: the gathers of a rank that serves others would queue behind the collective it waits in, "
            'for ever. Unset it, or use transfer="local".'
        )


def stay_on_host() -> None:
    """Has the collectives of this process, whose ranks are all of one host, use its loopback interface."""
    for name in SOCKET_VARIABLES:
        os.environ.setdefault(name, "lo")
