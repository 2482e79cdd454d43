# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The codec of devices on a real one: every bit comes back, decoding allocates nothing and nobody waits for it, and what
is damaged is found before the library is given it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from diffusers_dlo.coding.check_sum import CheckSums, as_text
from diffusers_dlo.coding.codec import Codec, check_version
from diffusers_dlo.coding.shard_coding import check_segments, decode_shard, encode_shard, regions_of, shard_bounds
from diffusers_dlo.device.ans_codec import planned_scratch_nbytes
from diffusers_dlo.device.platform import get_platform
from tests.coding.images import (
    EVERY_DTYPE,
    as_bytes,
    extremes,
    image_of,
    layout_of,
    patterns,
    random_bits,
    tensor_of,
    weights,
)


pytestmark = pytest.mark.gpu
CHUNK = 256 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def codec(device: torch.device) -> Codec:
    try:
        return get_platform(device).open_codec("ans")
    except RuntimeError as error:
        if "cannot be loaded" not in str(error):
            raise
        pytest.skip(str(error))


def scratch_for(codec: Codec, nbytes: int) -> torch.Tensor:
    return torch.empty(codec.scratch_nbytes(nbytes), dtype=torch.uint8, device=codec.device)


def check_round_trip(codec: Codec, data: torch.Tensor, name: str) -> torch.Tensor:
    """A run there and back, in the midst of memory that is not to be written; what it is coded."""
    nbytes, source = data.numel(), data.to(codec.device)
    coded = codec.encode(source)
    assert torch.equal(source.cpu(), data), f"{name}: what is coded was changed"
    assert coded.device == codec.device and coded.dtype == torch.uint8 and coded.numel() % 256 == 0, name
    on_host = coded.cpu()
    codec.check(on_host, nbytes)
    around = torch.full((nbytes + 1024,), 0xA5, dtype=torch.uint8, device=codec.device)
    scratch = torch.full((codec.scratch_nbytes(nbytes) + 512,), 0x5A, dtype=torch.uint8, device=codec.device)
    codec.decode(coded, around[512 : 512 + nbytes], scratch[256:-256])
    assert torch.equal(around[512 : 512 + nbytes].cpu(), data), name
    assert bool((around[:512] == 0xA5).all()) and bool((around[512 + nbytes :] == 0xA5).all()), name
    assert bool((scratch[:256] == 0x5A).all()) and bool((scratch[-256:] == 0x5A).all()), name
    assert torch.equal(coded.cpu(), on_host), f"{name}: what is decoded was changed"
    return coded


def test_every_length_comes_back(codec: Codec) -> None:
    lengths = (256, 512, 768, 4096, CHUNK - 256, CHUNK, CHUNK + 256, 2 * CHUNK - 256, 2 * CHUNK, 2 * CHUNK + 256)
    for nbytes in (*lengths, 5 * CHUNK + 1280, 7 * MIB + 256, 33 * CHUNK):
        for kind, data in (
            ("weights", weights(nbytes // 2, seed=nbytes)),
            ("halves", weights(nbytes // 2, torch.float16, nbytes)),
            ("bits", random_bits(nbytes, nbytes)),
            ("one value", random_bits(2, nbytes).repeat(nbytes // 2)),
            ("zeros", torch.zeros(nbytes, dtype=torch.uint8)),
            ("ones", torch.full((nbytes,), 0xFF, dtype=torch.uint8)),
            ("extremes", extremes(torch.bfloat16, nbytes // 2)),
            ("extremes of halves", extremes(torch.float16, nbytes // 2)),
        ):
            check_round_trip(codec, data, f"{nbytes} bytes of {kind}")


def test_every_pattern_comes_back(codec: Codec) -> None:
    every = patterns()
    shuffled = every.view(-1, 2)[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))].reshape(-1)
    check_round_trip(codec, every, "in order")
    check_round_trip(codec, shuffled.repeat(9), "shuffled")


def test_every_dtype_in_one_image(codec: Codec) -> None:
    """Any bits of every dtype, beside weights, through coded shards of several numbers of ranks."""
    tensors = [
        tensor_of(random_bits(rows * cols * dtype.itemsize, 100 * i + cols), dtype, (rows, cols))
        for rows, cols in ((1, 1), (37, 3), (4_099, 17))
        for i, dtype in enumerate(EVERY_DTYPE)
    ]
    tensors += [tensor_of(weights(300_001, dtype), dtype, (300_001,)) for dtype in (torch.bfloat16, torch.float16)]
    layout = layout_of(tensors)
    image, regions = image_of(layout, tensors).to(codec.device), regions_of(layout)
    scratch, coded_dtypes = scratch_for(codec, image.numel()), set()
    for shards in (1, 2, 3, 8):
        back = torch.full_like(image, 0xA5)
        for index in range(shards):
            start, stop = shard_bounds(layout.nbytes, shards, index)
            coded, found = encode_shard(image[start:stop], (start, stop), regions, codec)
            segments = [segment for segment, _ in found]
            check_segments(coded.cpu(), segments, stop - start, codec)
            decode_shard(coded, segments, back[start:stop], codec, scratch)
            coded_dtypes |= {dtype for segment, dtype in found if segment.is_coded}
        assert torch.equal(back, image), shards
    assert coded_dtypes == {"bfloat16", "float16"}


def test_what_it_makes_smaller(codec: Codec) -> None:
    for std in (0.02, 1.0):
        data = as_bytes((std * torch.randn(32 * MIB, device=codec.device)).bfloat16())
        ratio = codec.encode(data).numel() / data.numel()
        print(f"normal bfloat16, deviation {std}: {ratio:.4f} of the bytes")
        assert ratio <= 0.69
    bits = random_bits(MIB).to(codec.device)
    assert codec.encode(bits).numel() > 0.95 * bits.numel(), "and would be kept as it is"


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_decoding_allocates_nothing_and_waits_for_nothing(codec: Codec) -> None:
    data = weights(20 * MIB).to(codec.device)
    coded, out, scratch = codec.encode(data), torch.zeros_like(data), scratch_for(codec, data.numel())
    codec.decode(coded, out, scratch)  # the library loads its kernels at the first one
    out.zero_()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(codec.device)["allocation.all.allocated"]
    free = torch.cuda.mem_get_info(codec.device)[0]
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # a second or so: whoever waited for the device would find the event done
    with no_waiting():
        for _ in range(10):
            codec.decode(coded, out, scratch)
        busy.record()
    assert not busy.query(), "the host waited"
    assert torch.cuda.memory_stats(codec.device)["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info(codec.device)[0] >= free - MIB, "the library allocates by itself"
    assert torch.equal(out, data)


def test_decoding_follows_the_current_stream(codec: Codec) -> None:
    """On a stream of its own, behind a copy that comes late: the bytes are those that the copy brings."""
    data, before = weights(4 * MIB + 128), weights(4 * MIB + 128, seed=1)
    coded, other = codec.encode(data.to(codec.device)), codec.encode(before.to(codec.device))
    source = coded.cpu().pin_memory()
    late = torch.zeros(max(coded.numel(), other.numel()), dtype=torch.uint8, device=codec.device)
    late[: other.numel()] = other  # sound, so that who does not wait for the copy decodes another content, and no harm
    out, scratch = torch.zeros_like(data, device=codec.device), scratch_for(codec, data.numel())
    codec.decode(late[: other.numel()], out, scratch)
    assert torch.equal(out.cpu(), before)
    side, done = torch.cuda.Stream(codec.device), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late[: coded.numel()].copy_(source, non_blocking=True)
        codec.decode(late[: coded.numel()], out, scratch)
        done.record()
    assert not done.query()
    torch.cuda.current_stream().wait_event(done)
    assert torch.equal(out.cpu(), data)


def test_other_lengths_share_scratch(codec: Codec) -> None:
    """Scratch for the longest run does for all others, one after the other on a stream."""
    lengths = (8 * MIB, 256, CHUNK + 256, 3 * MIB + 512, CHUNK)
    every = [weights(nbytes // 2, seed=nbytes).to(codec.device) for nbytes in lengths]
    coded, outs = [codec.encode(one) for one in every], [torch.zeros_like(one) for one in every]
    needed = [codec.scratch_nbytes(nbytes) for nbytes in sorted(lengths)]
    assert needed == sorted(needed) == [planned_scratch_nbytes(nbytes) for nbytes in sorted(lengths)]
    scratch = torch.empty(max(needed), dtype=torch.uint8, device=codec.device)
    for one, out in zip(coded, outs):
        codec.decode(one, out, scratch)
    assert all(torch.equal(out, one) for out, one in zip(outs, every))


def test_damaged_tables_are_refused(codec: Codec) -> None:
    """By `check`, on the host. The library is given none of them: it would read outside of its memory."""
    nbytes = 5 * CHUNK + 512
    sound = codec.encode(weights(nbytes // 2).to(codec.device)).cpu()
    codec.check(sound, nbytes)
    count = 6
    for place in range(3 * count):
        for number in (-1, 0, 1, 1 << 40, (1 << 63) - 1):
            changed = sound.clone()
            changed[: 24 * count].view(torch.int64)[place] = number
            if count <= place < 2 * count and number == 1:
                continue  # a shorter chunk lies inside, too: that is for check sums to find
            with pytest.raises(ValueError, match="a chunk lies outside|lengths of its chunks"):
                codec.check(changed, nbytes)
    for length in (0, 256, sound.numel() // 2, sound.numel() - 256 - CHUNK // 2):
        with pytest.raises(ValueError, match="fewer than its table|a chunk lies outside"):
            codec.check(sound[:length], nbytes)
    for other in (nbytes - 256, nbytes + 256, nbytes + CHUNK, 256):
        with pytest.raises(ValueError):
            codec.check(sound, other)


def test_check_sums_are_those_of_the_host(codec: Codec) -> None:
    """Of any length and content, also while nobody waits; one changed bit of a coded run changes them."""
    here, there = CheckSums(torch.device("cpu")), CheckSums(codec.device)
    row = 4 << 18
    for nbytes in (0, 4, 256, row - 256, row, row + 256, 16 * row, 17 * row + 1280):
        data = random_bits(nbytes, nbytes)
        assert as_text(there.queue(data.to(codec.device))) == as_text(here.queue(data)), nbytes
    assert as_text(there.queue(patterns().to(codec.device))) == as_text(here.queue(patterns()))
    coded = codec.encode(weights(MIB).to(codec.device))
    around = torch.zeros(coded.numel() + 1024, dtype=torch.uint8, device=codec.device)
    around[256 : 256 + coded.numel()] = coded
    part = around[256 : 256 + coded.numel()]
    torch.cuda.synchronize()
    with no_waiting():
        total = there.queue(part)
    before = as_text(total)
    assert before == as_text(here.queue(coded.cpu()))
    for byte in (0, 100, coded.numel() // 2, coded.numel() - 1):
        part[byte] ^= 0x10
        assert as_text(there.queue(part)) != before, byte
        part[byte] ^= 0x10
    assert as_text(there.queue(part)) == before


def test_its_version(codec: Codec) -> None:
    assert codec.name == "ans" and codec.version.split(".")[0] == "6" and len(codec.version.split(".")) == 3
    check_version(codec, codec.version, "/models/x.safetensors")
    with pytest.raises(RuntimeError, match="was coded by 'ans' of version 5.1.0"):
        check_version(codec, "5.1.0", "/models/x.safetensors")


def test_its_rate_is_shown(codec: Codec) -> None:
    """Printed with `-s`; what is asserted is only that what was timed is right."""
    data = as_bytes((0.02 * torch.randn(193 * MIB, device=codec.device)).bfloat16())
    begin = time.perf_counter()
    coded = codec.encode(data)
    torch.cuda.synchronize()
    encoding = time.perf_counter() - begin
    out, scratch = torch.zeros_like(data), scratch_for(codec, data.numel())
    codec.decode(coded, out, scratch)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        codec.decode(coded, out, scratch)
    stop.record()
    torch.cuda.synchronize()
    decoding = start.elapsed_time(stop) / 20
    print(
        f"{data.numel() / 1e6:.0f} MB of weights in {coded.numel() / data.numel():.4f} of the bytes, scratch "
        f"{scratch.numel() / MIB:.1f} MiB: decoded in {decoding:.3f} ms ({data.numel() / decoding / 1e6:.0f} GB/s), "
        f"coded in {1e3 * encoding:.0f} ms"
    )
    assert torch.equal(out, data)
