# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the list of rows: what is assumed, and which function checks it. Must not import torch: where a device's backend
cannot be imported, torch may not be importable either, and the report still lists every row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """
    One assumption.

    Attributes:
        number (`int`): the row of the table in `docs/npu.md`.
        title (`str`): what is assumed, in the words of that table.
        check (`str`): `module.function` of this package; named and not imported.
        needs (`frozenset[str]`): `"streams"`: a device with streams and memory of its own, which the CPU is not.
            `"group"`: the ranks connected, if there are several. `"several"`: several ranks, connected.
    """

    number: int
    title: str
    check: str
    needs: frozenset[str] = frozenset()


STREAMS = frozenset({"streams"})
GROUP = frozenset({"group"})
SEVERAL = frozenset({"group", "several"})

ROWS = (
    Row(1, "The versions of torch, of the device's package and of what it stands on go together", "machine.versions"),
    Row(2, "The device's package can be imported, and its collective backend is there", "machine.backend"),
    Row(3, "There is a device for each rank of a host, and each rank's is its current one", "machine.devices"),
    Row(4, "A helper thread computes on the rank's device once that is set there", "machine.helper_thread"),
    Row(5, "Streams of ordinary and of high priority do their work in order", "streams.priorities", STREAMS),
    Row(6, "A copy on a side stream is asynchronous, and seen after waiting for its event", "streams.side", STREAMS),
    Row(7, "Waiting for an event that was never recorded returns at once", "streams.never_recorded", STREAMS),
    Row(8, "A wait stands for the last recording before it; events can be recorded again", "streams.again", STREAMS),
    Row(9, "Timing events measure what is queued between them", "streams.timing"),
    Row(10, "Copies from the host run beside computing", "streams.beside_computing", STREAMS),
    Row(11, "Page-locked memory can be had, and copies from it do not wait", "memory.pinned", STREAMS),
    Row(12, "Copies from page-locked memory are no slower than from pageable memory", "memory.rates", STREAMS),
    Row(13, "`Tensor.data =` on the same device re-points a parameter and keeps it", "memory.data_view"),
    Row(14, "`Tensor.data =` across devices is not needed (what it does is reported)", "memory.across", STREAMS),
    Row(15, "A parameter born on the device stands for one on the host", "memory.born_on_device"),
    Row(16, "A placeholder is one NaN with strides of 0, and makes what reads it NaN", "memory.placeholder"),
    Row(17, "Device memory is aligned to 256 bytes", "memory.alignment"),
    Row(18, "Bytes at multiples of 256 can be viewed as weights of any dtype and stride", "memory.typed_views"),
    Row(19, "The figures of device memory follow what is allocated", "memory.figures", STREAMS),
    Row(20, "Host memory that others allocated is page-locked where the platform says so", "memory.registration"),
    Row(21, "A product has the same bits in whatever slot the weight lies", "computing.slots"),
    Row(22, "A forward that is repeated has the same bits", "computing.repeated"),
    Row(23, "A gloo group works beside the device's own backend", "collectives.control_group", SEVERAL),
    Row(24, "A gather of bytes in place brings the right ones, whatever the size", "collectives.in_place", SEVERAL),
    Row(25, "A gather of bytes out of place brings the right ones", "collectives.out_of_place", SEVERAL),
    Row(26, "Gathers into the same addresses again and again are right", "collectives.same_addresses", SEVERAL),
    Row(
        27,
        "A second thread gathers while the main thread waits in a collective of another group",
        "collectives.second_thread",
        SEVERAL,
    ),
    Row(28, "A streamed model has the bits of the model on the device, each rank by itself", "streaming.alone", GROUP),
    Row(29, "So it has on several ranks, with every transfer and host store", "streaming.together", SEVERAL),
    Row(30, "So it has when ranks have unequal work and wait elsewhere", "streaming.unequal_work", SEVERAL),
    Row(31, "So it has when a part of the weights stays on the device", "streaming.residents", GROUP),
    Row(32, "What crosses the host link is what was planned (the overlap is reported)", "streaming.overlap", GROUP),
    Row(33, "Enabling and disabling leave no device memory behind", "streaming.memory_back", STREAMS | GROUP),
    Row(34, "Unequal shards are not needed (what they do is reported)", "collectives.unequal_shards", SEVERAL),
)
