# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The codec of the host: every bit comes back, and what is damaged is refused before anything is allocated or decoded for
it. And the choice of a codec by name.
"""

import random
import struct
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import zstandard
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from diffusers_dlo.coding.codec import ON_HOST, check_version
from diffusers_dlo.coding.zstd import ZstdCodec
from diffusers_dlo.device.platform import AcceleratorPlatform, get_platform
from tests.coding.images import EVERY_DTYPE, as_bytes, random_bits, runs, tensor_of, up, weights


HEADER = 256
CODEC = ZstdCodec()
NOTHING = torch.empty(0, dtype=torch.uint8)
CHECKED = settings(max_examples=60, deadline=None, database=None)


def decoded(coded: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The decoded run, whose surroundings are as they were."""
    CODEC.check(coded, nbytes)
    around = torch.full((nbytes + 512,), 0xA5, dtype=torch.uint8)
    CODEC.decode(coded, around[256 : 256 + nbytes], NOTHING)
    assert bool((around[:256] == 0xA5).all()) and bool((around[256 + nbytes :] == 0xA5).all())
    return around[256 : 256 + nbytes]


def test_every_bit_comes_back() -> None:
    for name, data in runs().items():
        kept = data.clone()
        coded = CODEC.encode(data)
        assert torch.equal(data, kept), f"{name}: what is coded was changed"
        assert coded.dtype == torch.uint8 and coded.numel() % 256 == 0, name
        assert torch.equal(coded, CODEC.encode(data)), f"{name}: coded in two ways"
        kept = coded.clone()
        assert torch.equal(decoded(coded, data.numel()), data), name
        assert torch.equal(coded, kept), f"{name}: what is decoded was changed"


def test_every_dtype_comes_back() -> None:
    for dtype in EVERY_DTYPE:
        tensor = tensor_of(random_bits(17 * 6 * 16), dtype, (17, 6))
        data = as_bytes(tensor)[: tensor.numel() * dtype.itemsize // 2 * 2]
        assert torch.equal(decoded(CODEC.encode(data), data.numel()), data), dtype


@seed(0)
@CHECKED
@given(st.integers(1, 5000), st.sampled_from(("bits", "weights", "few", "one")), st.integers(0, 1 << 30))
def test_any_length_comes_back(count: int, kind: str, number: int) -> None:
    data = {
        "bits": lambda: random_bits(2 * count, number),
        "weights": lambda: weights(count, seed=number),
        "few": lambda: random_bits(2 * count, number) & 0x81,
        "one": lambda: random_bits(2, number).repeat(count),
    }[kind]()
    assert torch.equal(decoded(CODEC.encode(data), 2 * count), data)


def test_what_it_makes_smaller() -> None:
    normal = weights(1 << 20)
    assert CODEC.encode(normal).numel() <= 0.67 * normal.numel()  # their entropy is 0.659 of them
    assert CODEC.encode(torch.zeros(1 << 20, dtype=torch.uint8)).numel() <= (1 << 19) + HEADER + 256
    bits = random_bits(1 << 20)
    assert bits.numel() <= CODEC.encode(bits).numel() <= 1.001 * bits.numel()


def test_the_form_of_a_run() -> None:
    """By hand, since other versions have to read it: of a rotated value the high byte in the frame, the low beside."""
    values = [0x3F80, 0xBF80, 0x7FC1, 0x8000, 0x0001]
    coded = CODEC.encode(as_bytes(torch.tensor(values, dtype=torch.int32).to(torch.int16))).numpy().tobytes()
    frame, count = struct.unpack("<qq", coded[:16])
    assert count == 5 and not any(coded[16:HEADER])
    assert coded[HEADER : HEADER + 5] == bytes((0x00, 0x01, 0x82, 0x01, 0x02)) and not any(coded[HEADER + 5 : 512])
    assert zstandard.ZstdDecompressor().decompress(coded[512 : 512 + frame]) == bytes((0x7F, 0x7F, 0xFF, 0x00, 0x00))
    assert len(coded) == 512 + up(frame) and not any(coded[512 + frame :])


# What is damaged


def run_with(frame: bytes, data: torch.Tensor, claimed: int | None = None) -> torch.Tensor:
    """A run for `data` with another frame in it, whatever that says of itself."""
    coded = CODEC.encode(data)
    low = HEADER + up(data.numel() // 2)
    other = torch.zeros(low + up(len(frame)), dtype=torch.uint8)
    other[:low] = coded[:low]
    other[low : low + len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    other[:8] = torch.tensor([len(frame) if claimed is None else claimed]).view(torch.uint8)
    return other


def high_plane(data: torch.Tensor) -> bytes:
    coded, low = CODEC.encode(data), HEADER + up(data.numel() // 2)
    frame = coded[low : low + int(coded[:8].view(torch.int64))]
    return zstandard.ZstdDecompressor().decompress(frame.numpy().tobytes())


def refuse(coded: torch.Tensor, nbytes: int, *words: str) -> None:
    """Refused by what looks at a run, and by what decodes one that nobody has looked at; `out` is not touched."""
    with pytest.raises(ValueError) as looked:
        CODEC.check(coded, nbytes)
    out = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="'zstd' cannot be decoded: .*make it anew") as tried:
        CODEC.decode(coded, out, NOTHING)
    assert all(word in str(error.value) for error in (looked, tried) for word in words), (looked.value, tried.value)
    assert bool((out == 0xA5).all())


@pytest.mark.parametrize("claimed", (1 << 36, 1 << 62, (1 << 64) - 2))
def test_a_frame_may_not_claim_more_than_it_is(claimed: int) -> None:
    """The library would allocate all of it."""
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0100]) + struct.pack("<Q", claimed) + b"\x01\0\0" + bytes(4)
    refuse(run_with(frame, weights(500)), 1000, f"a frame of {claimed}")


def test_frames_that_are_others() -> None:
    data = weights(500)
    plane = high_plane(data)
    assert len(plane) == 500
    with_sum = zstandard.ZstdCompressor(write_checksum=True)
    frame = with_sum.compress(plane)
    assert torch.equal(decoded(run_with(frame, data), 1000), data), "what follows would be refused for another reason"
    refuse(run_with(with_sum.compress(plane[:-1]), data), 1000, "a frame of 499")
    refuse(run_with(with_sum.compress(plane + b"\0"), data), 1000, "a frame of 501")
    refuse(run_with(zstandard.ZstdCompressor().compress(plane), data), 1000, "without a check sum")
    unknown = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(plane)
    refuse(run_with(unknown, data), 1000, "a run of 500 values")
    refuse(run_with(struct.pack("<II", 0x184D2A50, 500) + bytes(500), data), 1000, "without a check sum")
    refuse(run_with(random_bits(200).numpy().tobytes(), data), 1000, "no frame")
    for more in (b"\0", frame):
        coded = run_with(frame + more, data)
        with pytest.raises(RuntimeError, match="unused data"):
            CODEC.decode(coded, torch.empty(1000, dtype=torch.uint8), NOTHING)


def test_headers_that_are_others() -> None:
    data = weights(500)
    coded = CODEC.encode(data)
    for bit in range(64, 128):  # how many values it says it has
        changed = coded.clone()
        changed[bit // 8] ^= 1 << bit % 8
        refuse(changed, 1000, "a run says that it has")
    frame = int(coded[:8].view(torch.int64))
    room = coded.numel() - HEADER - 512
    for claimed in (0, -1, -frame, -(1 << 63), room + 1, 1 << 40, (1 << 63) - 1):
        changed = coded.clone()
        changed[:8] = torch.tensor([claimed]).view(torch.uint8)
        refuse(changed, 1000, f"in {claimed} bytes")
    for nbytes in (998, 1002, 2, 1 << 20):
        with pytest.raises(ValueError, match="a run says that it has 500 values"):
            CODEC.check(coded, nbytes)


def test_runs_that_are_cut_off() -> None:
    data = weights(500)
    coded = CODEC.encode(data)
    low, frame = HEADER + 512, int(coded[:8].view(torch.int64))
    for nbytes in (0, 1, 8, 15, 16, 255):
        refuse(coded[:nbytes], 1000, f"a run has {nbytes} bytes, fewer than its own header")
    for nbytes in (256, 257, low - 1, low, low + 1, low + frame - 1):
        refuse(coded[:nbytes], 1000, f"a run says that it has 500 values in {frame} bytes, of 500 in {nbytes}")
    assert torch.equal(decoded(coded[: low + frame], 1000), data), "all that is needed"
    content = coded[low : low + frame].numpy().tobytes()
    for nbytes in range(1, frame):
        with pytest.raises(RuntimeError, match="cannot be decoded"):
            CODEC.decode(run_with(content[:nbytes], data), torch.empty(1000, dtype=torch.uint8), NOTHING)


def test_each_changed_bit_of_a_frame_is_refused_or_harmless() -> None:
    """
    A frame has a bit that means nothing, and bits that say the same in another way. Whatever is decoded is right, or
    refused; what a bit of the other plane changes is for check sums to find.
    """
    data = weights(300)
    coded = CODEC.encode(data)
    low, frame = HEADER + 512, int(coded[:8].view(torch.int64))
    out, harmless = torch.empty(600, dtype=torch.uint8), 0
    for bit in range(8 * frame):
        changed = coded.clone()
        changed[low + bit // 8] ^= 1 << bit % 8
        try:
            CODEC.decode(changed, out, NOTHING)
        except RuntimeError:
            continue
        harmless += 1
        assert torch.equal(out, data), f"bit {bit} of the frame"
    assert harmless <= 0.01 * 8 * frame, harmless


@seed(0)
@CHECKED
@given(st.data())
def test_garbage_is_refused(drawn: st.DataObject) -> None:
    """Never another error than the two that are said, and never another content."""
    data = weights(drawn.draw(st.integers(1, 600)))
    coded = CODEC.encode(data)
    begin = HEADER + up(data.numel() // 2) if drawn.draw(st.booleans()) else 0
    noise = random.Random(drawn.draw(st.integers(0, 1 << 30)))
    for _ in range(drawn.draw(st.integers(1, 20))):
        place = noise.randrange(begin, coded.numel())
        if not HEADER <= place < HEADER + data.numel() // 2:
            coded[place] = noise.randrange(256)
    out = torch.empty_like(data)
    try:
        CODEC.decode(coded[: noise.choice((coded.numel(), noise.randrange(coded.numel())))], out, NOTHING)
    except RuntimeError as error:
        assert "cannot be decoded" in str(error)
    else:
        assert torch.equal(out, data)


def test_threads_share_it() -> None:
    """The library's own objects end the process when two threads decode with one at a time."""
    every = [weights(200_000, seed=i) for i in range(4)]
    wrong: list[int] = []

    def work(index: int) -> None:
        coded, out = CODEC.encode(every[index]), torch.empty_like(every[index])
        for _ in range(15):
            out.zero_()
            CODEC.decode(coded, out, NOTHING)
            if not torch.equal(out, every[index]) or not torch.equal(
                CODEC.encode(every[index][:20_000]), starts[index]
            ):
                wrong.append(index)

    starts = [CODEC.encode(one[:20_000]) for one in every]
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# The choice


def test_a_codec_by_name() -> None:
    platform = get_platform(torch.device("cpu"))
    codec = platform.open_codec(ON_HOST)
    assert isinstance(codec, ZstdCodec) and codec.name == "zstd" and codec.device == torch.device("cpu")
    assert codec.version == ".".join(map(str, zstandard.ZSTD_VERSION)) and codec.scratch_nbytes(1 << 30) == 0
    assert platform.codecs == ("zstd",)


@pytest.mark.parametrize("make", (get_platform, AcceleratorPlatform), ids=("the_host", "a_device"))
def test_devices_without_the_codec(make: Callable[[torch.device], AcceleratorPlatform]) -> None:
    platform = make(torch.device("cpu"))
    assert "ans" not in platform.codecs
    with pytest.raises(RuntimeError, match="^'cpu' devices have no codec 'ans'.*pack --decode.*pack --codec zstd"):
        platform.open_codec("ans")
    assert isinstance(platform.open_codec(ON_HOST), ZstdCodec), "the host's codec works beside any device"


def test_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RuntimeError, match=r"'zstd' needs the package 'zstandard'.*diffusers-dlo\[coded\]"):
        get_platform(torch.device("cpu")).open_codec(ON_HOST)


def test_versions_of_another_series() -> None:
    major = zstandard.ZSTD_VERSION[0]
    for same in (CODEC.version, f"{major}.0.0", f"{major}.99"):
        check_version(CODEC, same, "/models/x.safetensors")
    for other in (f"{major + 1}.5.7", f"{major}0.1", "", "x"):
        with pytest.raises(RuntimeError) as caught:
            check_version(CODEC, other, "/models/x.safetensors")
        said = str(caught.value)
        assert said.startswith(f"'/models/x.safetensors' was coded by 'zstd' of version {other}, ")
        assert f"version {CODEC.version}" in said and "pack --decode" in said
