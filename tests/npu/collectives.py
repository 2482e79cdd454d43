# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the process group that is "hccl" on the simulated device: gathers of device memory, by gloo, on a thread that lags
behind, with the rules of the real one enforced. Must not forgive: what HCCL would refuse raises here.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from typing import NamedTuple

import torch
import torch.distributed as dist


_ops = torch.ops.simulated_npu


class Gather(NamedTuple):
    """The addresses of one all-gather, its input's bytes, and whether that lies where it belongs in the output."""

    output: int
    input: int
    nbytes: int
    in_place: bool


gathers: list[Gather] = []
"""All of this process so far."""


def host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a simulated device's tensor, as a tensor of the CPU."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8)


class QueuedWork(dist._Work):
    """A collective that ends in its own time: `wait` has the current stream wait, and the host goes on."""

    def __init__(self, moment: int) -> None:
        super().__init__()
        self._moment = moment
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._ended.is_set():
                return  # it was ended before
            self._error = error
            self._ended.set()
        _ops.reach(self._moment)

    def wait(self, timeout: object = None) -> bool:
        if self._error is not None:
            raise self._error
        _ops.wait_for(self._moment)
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error


class SimulatedGroup(dist.ProcessGroup):
    """
    The ranks of an "hccl" group. All inputs of a gather have one size, the output is as large as all of them, and both
    lie on the device and are contiguous.
    """

    def __init__(self, options: dist.distributed_c10d._DistributedBackendOptions, _: object = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._name = options.group_id
        self._todo: queue.SimpleQueue = queue.SimpleQueue()
        self._begun: list[QueuedWork] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def getBackendName(self) -> str:
        return "hccl"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: object = None) -> QueuedWork:
        rank, size, count = self.rank(), self.size(), input.nbytes
        for tensor in (output, input):
            if tensor.device.type != "npu" or not tensor.is_contiguous():
                raise RuntimeError(f"hccl gathers contiguous memory of its device, not '{tensor.device}'")
        if output.nbytes != size * count or output.dtype != input.dtype:
            raise RuntimeError(f"hccl: {output.nbytes} bytes do not hold {size} x {count}")
        base = output.data_ptr()
        gathers.append(Gather(base, input.data_ptr(), count, input.data_ptr() == base + rank * count))
        before, work = torch.npu.Event(), QueuedWork(_ops.new_moment())
        before.record(torch.npu.current_stream())
        self._begun = [*(other for other in self._begun if not other.is_completed()), work]
        self._todo.put((before, work, output, input))
        return work

    _allgather_base = all_gather_single

    def _get_backend(self, device: torch.device) -> SimulatedGroup:
        return self

    def abort(self) -> None:
        """Ends nothing, as that of torch_npu: what torch calls is not overridden there."""

    def abort_hccl_comm(self, reason: str) -> None:
        """Ends what was begun; what it was to fill is garbage after."""
        for work in self._begun:
            work.end(RuntimeError(f"hccl: aborted, {reason}"))

    def barrier(self, opts: object = None) -> dist.Work:
        return self._gloo.barrier()

    def _serve(self) -> None:
        while True:
            before, work, output, input = self._todo.get()
            before.synchronize()
            try:
                self._gather(host_bytes(output), host_bytes(input))
            except RuntimeError:
                continue  # a rank has ended: the device waits for it, for good, unless somebody ends that
            work.end()

    def _gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        sizes = torch.empty(self.size(), dtype=torch.int64)
        self._gloo._allgather_base(sizes, torch.tensor([input.numel()])).wait()
        if len(set(sizes.tolist())) > 1:
            _ops.fail(f"hccl gathers inputs of one size, not of {sizes.tolist()} bytes")
            return
        self._gloo._allgather_base(output, input.clone()).wait()
