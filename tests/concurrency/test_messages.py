# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Messages between processes: round trips bit for bit, what cannot be sent, and what arrives damaged."""

import random
import struct
import tracemalloc
from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from diffusers.utils import BaseOutput
from PIL import Image

from diffusers_dlo.concurrency.messages import MAX_DEPTH, decode, encode


pytestmark = pytest.mark.timeout(60)

TORCH_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
NUMPY_DTYPES = ("?", "i1", "u1", "<i2", ">i4", "<i8", "<u2", "<u4", ">u8", "<f2", "<f4", ">f8", "<c8", "<c16")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "La", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F")
MODES += ("I;16", "I;16B", "I;16L")


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def framed(structure: bytes, bulk: bytes = b"") -> bytes:
    return b"DLOmsg1\n" + len(structure).to_bytes(8, "little") + structure + bulk


def extension(code: int, *items: Any) -> bytes:
    packed = (item if isinstance(item, bytes) else msgpack.packb(item) for item in items)
    return msgpack.packb(msgpack.ExtType(code, b"".join(packed)))


@pytest.mark.parametrize(
    "value",
    (
        *(None, True, False, 0, -1, 2**63, 2**64 - 1, -(2**63), 2**64, -(2**63) - 1, 10**5000, -(16**9000)),
        *(0.0, 5e-324, float("inf"), "", "é\0\U0001f98a", "\ud800", b"", b"\0\xff", [], (), {}),
        [1, (2, [3, ()]), {"a": [None], 0: (), -7: {"": b"x"}, 2**70: "long", "0": 1}],
        list(range(1000)),
    ),
    ids=lambda value: f"{type(value).__name__}",
)
def test_plain_values(value: Any) -> None:
    got = decode(encode(value))
    assert type(got) is type(value) and got == value
    if type(value) is dict:
        assert list(got) == list(value)
    for data in (bytearray(encode(value)), memoryview(encode(value))):
        assert decode(data) == value


def test_types_are_kept_apart_inside() -> None:
    got = decode(encode([(1,), [1], 1, 1.0, True, {"a": (True,)}]))
    assert [type(value) for value in got] == [tuple, list, int, float, bool, dict]
    assert type(got[5]["a"]) is tuple and got[5]["a"][0] is True


@pytest.mark.parametrize("bits", (0x8000000000000000, 0x7FF8000000000123, 0x7FF0000000000001, 0xFFF8DEADBEEF0000))
def test_floats_keep_their_bits(bits: int) -> None:
    (value,) = struct.unpack("<d", struct.pack("<Q", bits))
    assert struct.pack("<d", decode(encode([value]))[0]) == struct.pack("<Q", bits)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_tensors(name: str) -> None:
    dtype = getattr(torch, name)
    for shape in ((), (0,), (3, 0, 2), (7,), (2, 3, 5)):
        count = int(np.prod(shape))
        data = torch.tensor(list(noise(count * dtype.itemsize)), dtype=torch.uint8)
        tensor = (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)
        turned = tensor.permute(tuple(reversed(range(len(shape)))))
        for value in (tensor, turned, torch.nn.Parameter(tensor, requires_grad=False)):
            got = decode(encode(value))
            assert type(got) is torch.Tensor and got.dtype is dtype and got.shape == value.shape
            bits = [part.contiguous().reshape(-1).view(torch.uint8) for part in (got, value)]
            assert torch.equal(*bits) and got.is_contiguous() and got.device.type == "cpu"


def test_tensors_that_are_views() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    for value in (base.conj(), base.conj().imag, base[1:, ::2], base[0, 0], torch.zeros(1).expand(3, 3)):
        assert torch.equal(decode(encode(value)), value)
    grown = torch.ones(2, requires_grad=True) * 2
    got = decode(encode({"x": [grown]}))["x"][0]
    assert not got.requires_grad and torch.equal(got, grown.detach())
    got += 1  # memory of its own
    assert grown.tolist() == [2, 2]


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_arrays(name: str) -> None:
    dtype = np.dtype(name)
    for shape in ((), (0,), (3, 0), (7,), (2, 3, 5)):
        data = np.frombuffer(noise(int(np.prod(shape)) * dtype.itemsize), np.uint8)
        array = (data % 2 if name == "?" else data).view(dtype).reshape(shape)
        for value in (array, array.T, np.asfortranarray(array), *([array[()]] if shape == () else [])):
            got = decode(encode(value))
            assert type(got) is type(value) and got.shape == value.shape and got.tobytes() == value.tobytes()
            # A scalar is always of the machine's byte order.
            assert got.dtype.str == value.dtype.str and (shape == () or got.flags.writeable)


@pytest.mark.parametrize("mode", MODES)
def test_images(mode: str) -> None:
    for size in ((9, 3), (1, 1), (0, 4), (4, 0)):
        image = Image.new(mode, size)
        if min(size):
            image = Image.frombytes(mode, size, noise(len(image.tobytes())))
        got = decode(encode([image]))[0]
        assert type(got) is Image.Image and (got.mode, got.size) == (mode, size)
        assert got.tobytes() == image.tobytes() and got.getpalette() == image.getpalette()


@pytest.mark.parametrize("mode,colors", (("RGB", 5), ("RGB", 256), ("RGBA", 7)))
def test_palettes(mode: str, colors: int) -> None:
    image = Image.frombytes("P", (4, 4), bytes(range(16)))
    image.putpalette(noise(colors * len(mode)), mode)
    got = decode(encode(image))
    assert got.palette.mode == mode and got.getpalette(mode) == image.getpalette(mode)
    assert got.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def cycle() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value,path,reason",
    (
        ({"images": [object()]}, "value['images'][0]", "a 'builtins.object' has no representation"),
        ([0, ({1: {2}},)], "value[1][0][1]", "a 'builtins.set' has no representation"),
        ({"a": {1.5: 2}}, "value['a']", "the key 1.5 is a 'float'"),
        ({True: 2}, "value", "the key True is a 'bool'"),
        (OrderedDict(a=1), "value", "a 'collections.OrderedDict' has no representation"),
        (BaseOutput(), "value", "a 'diffusers.utils.outputs.BaseOutput' has no representation"),
        ([np.array([None])], "value[0]", "arrays of dtype object have no representation"),
        (np.array(["a"]), "value", "arrays of dtype <U1 have no representation"),
        (np.zeros(2, np.longdouble), "value", "arrays of dtype float128 have no representation"),
        (np.zeros(2, "i4,f4"), "value", "arrays of dtype [('f0', '<i4'), ('f1', '<f4')] have no representation"),
        (np.ma.array([1]), "value", "has no representation"),
        (torch.zeros(2).to_sparse(), "value", "it is a sparse or nested tensor"),
        (torch.zeros(2, device="meta"), "value", "it is on the meta device and has no data"),
        (print, "value", "a 'builtins.builtin_function_or_method' has no representation"),
        (Image.new("L", (0, 2**17)), "value", "it has no pixels"),
        (cycle(), "value" + "[0]" * MAX_DEPTH, f"it lies more than {MAX_DEPTH} deep"),
    ),
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,  # no addresses: workers compare them
)
def test_what_cannot_be_sent_is_named(value: Any, path: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        encode(value)
    text = str(caught.value)
    assert text.startswith(f"'{path}' cannot be sent: ") and reason in text and text.endswith(".")


@pytest.mark.parametrize(
    "leaf",
    ([], {}, 5, "x", 2**80, torch.ones(2), np.ones(2), Image.new("L", (1, 1))),
    ids=lambda leaf: type(leaf).__name__,
)
def test_as_deep_as_allowed(leaf: Any) -> None:
    value = leaf
    for level in range(MAX_DEPTH - (leaf in ([], {}) if isinstance(leaf, (list, dict)) else 0)):
        value = {"x": value} if level % 2 else [value]
    got = decode(encode(value))
    while type(got) in (list, dict) and got:
        got = got[0] if type(got) is list else got["x"]
    assert type(got) is type(leaf) and encode(got) == encode(leaf)
    deeper = [value] if type(leaf) in (list, dict) else extension(1, encode(value)[16:])
    with pytest.raises(ValueError, match="deep|malformed"):
        encode(deeper) if isinstance(deeper, list) else decode(framed(extension(1, deeper)))


MALFORMED = {
    "no bytes": "text",
    "nothing": b"",
    "another start": b"x" * 40,
    "cut off": encode([1, 2])[:-1],
    "too much": encode(1) + b"\0",
    "two values": framed(b"\1\2"),
    "no value": framed(b""),
    "a msgpack list": framed(msgpack.packb([1])),
    "a msgpack dict": framed(msgpack.packb({"a": 1})),
    "a msgpack date": framed(msgpack.packb(msgpack.Timestamp(1))),
    "an unused code": framed(b"\xc1"),
    "an unknown extension": framed(extension(99, 1)),
    "not UTF-8": framed(b"\xa1\xff"),
    "an int that is code": framed(extension(4, b"1_0")),
    "an empty int": framed(extension(4, b"")),
    "half a dict": framed(extension(3, "a")),
    "a dict with a bool for a key": framed(extension(3, True, 1)),
    "a dict with an unhashable key": framed(extension(3, extension(1), 1)),
    "a dict with a key twice": framed(extension(3, "a", 1, "a", 2)),
    "a tensor without a shape": framed(extension(5, "uint8"), b"xx"),
    "a tensor of a list for a size": framed(extension(5, "uint8", extension(1, 2)), b"xx"),
    "a tensor of an attribute of torch": framed(extension(5, "load", 2), b"xx"),
    "a tensor with too few bytes": framed(extension(5, "int16", 2), b"xxx"),
    "a tensor with too many bytes": framed(extension(5, "int16", 2), b"xxxxx"),
    "a tensor of a negative size": framed(extension(5, "uint8", -2)),
    "a tensor of a boolean size": framed(extension(5, "uint8", True), b"x"),
    "a tensor of too many dimensions": framed(extension(5, "uint8", *[1] * 65), b"x"),
    "an array of a wide empty shape": framed(extension(6, "<i8", 0, 2**62, 2**62)),
    "a tensor of an absurd size": framed(extension(5, "uint8", *[2**62] * 60), b"x"),
    "an array of objects": framed(extension(6, "|O", 2), b"x" * 16),
    "an array of records": framed(extension(6, "i4,f4", 2), b"x" * 16),
    "an array of an absurd size": framed(extension(6, "<f8", 2**62), b"x"),
    "a scalar with a shape": framed(extension(7, "|u1", 2), b"xx"),
    "an image of one size": framed(extension(8, "L", None, None, 2), b"xx"),
    "an image of an unknown mode": framed(extension(8, "X", None, None, 1, 2), b"xx"),
    "an image that is tall and empty": framed(extension(8, "L", None, None, 0, 2**31 - 1)),
    "an image that is wide and empty": framed(extension(8, "L", None, None, 2**62, 0)),
    "an image of an absurd size": framed(extension(8, "1", None, None, 2**30, 2**30), b"x"),
    "a palette where none belongs": framed(extension(8, "RGB", "RGB", b"\xc4\3abc", 1, 1), b"xxx"),
    "a palette that is too long": framed(extension(8, "P", "RGB", b"\xc5\4\0" + b"x" * 1024, 1, 1), b"x"),
    "a palette of another mode": framed(extension(8, "P", "CMYK", b"\xc4\4abcd", 1, 1), b"x"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode(MALFORMED[name])
    assert type(caught.value) is ValueError and "essage" in str(caught.value)


def peak_of_decoding(data: bytes) -> int:
    tracemalloc.start()
    try:
        decode(data)
    except ValueError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    "structure",
    (
        *(b"\xdd\xff\xff\xff\xff" * 20000, b"\xdd\0\1\0\0" * 20000, b"\xdf\0\1\0\0" * 20000, b"\x91" * 100000),
        *(b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\1", b"\xc9\x7f\xff\xff\xff\5x"),
        b"\xc7\xff\1" * 30000,
    ),
)
def test_lying_lengths_take_no_memory(structure: bytes) -> None:
    data = framed(structure)
    assert peak_of_decoding(data) < 8 * len(data) + 2**16
    with pytest.raises(ValueError):
        decode(data)


def test_damaged_messages_raise_nothing_else() -> None:
    value = {
        "a": [1, (2, 3.5, -0.0), None, True, []],
        **{3: b"xx", "long": 10**50, "text": "é", "array": np.arange(3)},
        **{"tensor": torch.arange(6.0).reshape(2, 3), "half": torch.ones(1).half()},
        **{"images": [Image.new("P", (3, 4)), Image.new("1", (9, 2))]},
    }
    message, chance = encode(value), random.Random(0)
    assert encode(decode(message)) == message
    for length in range(len(message)):
        with pytest.raises(ValueError):
            decode(message[:length])
    read = 0
    for _ in range(20000):
        data = bytearray(message)
        for _ in range(chance.choice((1, 1, 2, 5))):
            place = chance.randrange(len(data) + 1)
            match chance.randrange(5):
                case 0:
                    del data[place:]
                case 1:
                    data[place:place] = chance.randbytes(chance.randrange(6))
                case _:
                    data[place : place + 1] = bytes([chance.choice((chance.randrange(256), 255, 0, 0xDD, 0xC9, 0xC7))])
        try:
            decode(bytes(data))
            read += 1
        except ValueError as error:
            assert type(error) is ValueError
    for length in range(3000):
        for data in (noise(length % 300), framed(noise(length % 60), noise(length % 7))):
            try:
                decode(data)
            except ValueError as error:
                assert type(error) is ValueError
    assert 0 < read < 10000  # damage to bulk data is another value
