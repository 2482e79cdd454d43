# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns how values travel between processes: msgpack for the structure, raw bytes for tensors, arrays and images. Must not
execute or import anything that a message names, and must not know of ranks or pipelines.

[Note: Lying headers]
A message may be damaged or made up, and `decode` must neither fail oddly nor allocate more than a small multiple of
its size. msgpack's own arrays and maps announce how many elements follow, and its parser makes room for them at once,
at every level of nesting. So neither is used: a list, tuple or dict is an extension, whose payload is its elements one
after another, and an extension exists only once all of its bytes are there. Bulk data lies behind the structure, in
the order in which the structure mentions it; dtype, shape, mode and size say how much of it is whose, and are checked
against what is there before memory is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
import torch
from PIL import Image


MAX_DEPTH = 32
"""How deep lists, tuples and dicts may lie in each other."""

_MAGIC = b"DLOmsg1\n"
_HEADER = len(_MAGIC) + 8
_LONGEST = 2**32 - 1
"""What msgpack can announce as the length of one item."""
_MAX_DIMENSIONS = 64
_TALLEST_EMPTY = 2**16
"""Rows of an image without columns: Pillow allocates for each row."""

_LIST, _TUPLE, _DICT, _INT, _TENSOR, _ARRAY, _SCALAR, _IMAGE = range(1, 9)

_TORCH_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    )
    if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_NUMPY_DTYPES = {
    *("|b1", "|i1", "|u1"),
    *(f"{order}{kind}" for order in "<>" for kind in ("i2", "i4", "i8", "u2", "u4", "u8")),
    *(f"{order}{kind}" for order in "<>" for kind in ("f2", "f4", "f8", "c8", "c16")),
}
_PIXEL_NBYTES = {
    **{"L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2},
    **{"RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBA": 4, "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 4, "F": 4},
}


def encode(value: Any) -> bytes:
    r"""
    The bytes of a message, from which `decode` makes the value again, bit for bit.

    Args:
        value (`Any`):
            None, a bool, int of any size, float, str, bytes, a list, a tuple, a dict with keys of str or int, a dense
            torch tensor, a numpy array or scalar of numbers or bools, or a PIL image; nested up to `MAX_DEPTH` deep.

    Returns:
        `bytes`: the message.

    Raises:
        `ValueError`: something cannot be represented. The message says where in `value` it is, why, and what to do.
    """
    writer = _Writer()
    structure = writer.pack(value, "value", 0)
    header = _MAGIC + len(structure).to_bytes(8, "little")
    return b"".join((header, structure, *writer.buffers))


def decode(data: bytes | bytearray | memoryview) -> Any:
    r"""
    The value that `encode` was given. Tensors come back contiguous and on the CPU and without their gradient, arrays
    contiguous and writable, images with their mode, size, pixels and palette and without their file's metadata.

    Args:
        data (`bytes`, `bytearray` or `memoryview`):
            A message. Nothing that it names is executed or imported.

    Raises:
        `ValueError`: this is not a message of `encode`, or not a whole one.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise ValueError(f"A message is bytes, got '{type(data).__name__}'.") from error
    if len(view) < _HEADER or view[: len(_MAGIC)] != _MAGIC:
        raise ValueError("This is not a message of 'encode': it does not start as one.")
    length = int.from_bytes(view[len(_MAGIC) : _HEADER], "little")
    if length > len(view) - _HEADER:
        raise ValueError(f"The message is cut off: {length} bytes are announced, {len(view) - _HEADER} follow.")
    reader = _Reader(view[_HEADER + length :])
    items = reader.unpack(view[_HEADER : _HEADER + length], 0)
    if len(items) != 1 or reader.left:
        raise _malformed(f"{len(items)} values and {reader.left} bytes of no value")
    return items[0]


def _malformed(reason: str | BaseException) -> ValueError:
    text = (str(reason) or type(reason).__name__).splitlines()[0][:200].rstrip(".")
    return ValueError(f"The message is malformed: {text}.")


def _unsendable(path: str, reason: str, remedy: str) -> ValueError:
    return ValueError(f"'{path}' cannot be sent: {reason}. {remedy}")


class _Writer:
    """Packs one message: returns the structure, and collects what lies behind it."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        self._packer = msgpack.Packer(strict_types=True, unicode_errors="surrogatepass")

    def pack(self, value: Any, path: str, depth: int) -> bytes:
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return self._packer.pack(value)
        if kind is int:
            return self._pack_int(value, path)
        if kind in (str, bytes):
            if len(value) > _LONGEST // (3 if kind is str else 1):
                raise _unsendable(path, f"a {kind.__name__} of {len(value)} is too long", "Send it as a uint8 array.")
            return self._packer.pack(value)
        if kind in (list, tuple, dict):
            if depth == MAX_DEPTH:
                raise _unsendable(path, f"it lies more than {MAX_DEPTH} deep", "Send a flatter value without cycles.")
            return self._pack_container(value, path, depth)
        if kind in (torch.Tensor, torch.nn.Parameter):
            return self._pack_tensor(value, path)
        if kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
            return self._pack_array(value, path)
        if isinstance(value, Image.Image):
            return self._pack_image(value, path)
        raise _unsendable(
            path,
            f"a '{kind.__module__}.{kind.__qualname__}' has no representation",
            "Make it of tensors, arrays, images, numbers, str, bytes, and plain lists, tuples and dicts.",
        )

    def _extension(self, code: int, payload: bytes, path: str) -> bytes:
        if len(payload) > _LONGEST:
            raise _unsendable(path, f"its structure takes {len(payload)} bytes", "Use arrays instead of long lists.")
        return self._packer.pack(msgpack.ExtType(code, payload))

    def _pack_int(self, value: int, path: str) -> bytes:
        if -(2**63) <= value < 2**64:
            return self._packer.pack(value)
        return self._extension(_INT, f"{value:x}".encode(), path)

    def _pack_container(self, value: Any, path: str, depth: int) -> bytes:
        if not isinstance(value, dict):
            packed: Iterable[bytes] = (self.pack(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value))
            return self._extension(_LIST if isinstance(value, list) else _TUPLE, b"".join(packed), path)
        parts = []
        for key, item in value.items():
            if type(key) not in (str, int):
                raise _unsendable(path, f"the key {key!r} is a '{type(key).__name__}'", "Use keys of str or int.")
            inner = f"{path}[{key!r}]"
            parts += [self.pack(key, inner, depth + 1), self.pack(item, inner, depth + 1)]
        return self._extension(_DICT, b"".join(parts), path)

    def _pack_bulk(self, code: int, about: list[Any], data: Any, path: str) -> bytes:
        self.buffers.append(memoryview(data))
        return self._extension(code, b"".join(self.pack(item, path, 0) for item in about), path)

    def _pack_tensor(self, value: torch.Tensor, path: str) -> bytes:
        remedy = "Send a dense tensor of plain numbers."
        if value.layout is not torch.strided or value.is_nested:
            raise _unsendable(path, "it is a sparse or nested tensor", remedy)
        if value.dtype not in _NAMES:
            raise _unsendable(path, f"tensors of dtype {value.dtype} have no representation", remedy)
        if value.device.type == "meta":
            raise _unsendable(path, "it is on the meta device and has no data", remedy)
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy()
        return self._pack_bulk(_TENSOR, [_NAMES[value.dtype], *value.shape], data, path)

    def _pack_array(self, value: Any, path: str) -> bytes:
        code, array = (_SCALAR if isinstance(value, np.generic) else _ARRAY), np.asarray(value)
        if array.dtype.str not in _NUMPY_DTYPES:
            reason = f"arrays of dtype {array.dtype} have no representation"
            raise _unsendable(path, reason, "Send numbers or bools, of at most 64 bits, or 128 where complex.")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._pack_bulk(code, [array.dtype.str, *array.shape], data, path)

    def _pack_image(self, value: Image.Image, path: str) -> bytes:
        if value.mode != "1" and value.mode not in _PIXEL_NBYTES:
            raise _unsendable(path, f"images of mode {value.mode!r} have no representation", "Convert it to 'RGB'.")
        if value.width == 0 and value.height > _TALLEST_EMPTY:
            raise _unsendable(path, "it has no pixels", "Leave it out.")
        data = value.tobytes()  # loads the file first, where there is one
        mode, colors = None, value.getpalette() if value.mode in ("P", "PA") else None
        if colors is not None:
            mode = "RGBA" if value.palette is not None and value.palette.mode == "RGBA" else "RGB"
            colors = value.getpalette(mode)
        about = [value.mode, mode, None if colors is None else bytes(colors), *value.size]
        return self._pack_bulk(_IMAGE, about, data, path)


class _Reader:
    """Unpacks one message; owns how much of the bulk data is taken."""

    def __init__(self, bulk: memoryview) -> None:
        self._bulk = bulk

    @property
    def left(self) -> int:
        """Bytes of bulk data that nothing has mentioned yet."""
        return len(self._bulk)

    def unpack(self, data: bytes | memoryview, depth: int) -> list[Any]:
        """All items of a structure. See [Note: Lying headers]."""
        limits = {"max_buffer_size": len(data) + 1, "max_array_len": 0, "max_map_len": 0}
        unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", **limits)
        unpacker.feed(data)
        items = []
        try:
            while unpacker.tell() < len(data):
                items.append(unpacker.unpack())
        except (msgpack.UnpackException, ValueError, TypeError, OverflowError) as error:
            raise _malformed(error) from error
        return [self._make(item, depth) for item in items]

    def _make(self, item: Any, depth: int) -> Any:
        if item is None or type(item) in (bool, int, float, str, bytes):
            return item
        if type(item) is msgpack.ExtType:
            containers: dict[int, Callable[..., Any]] = {_LIST: list, _TUPLE: tuple, _DICT: _make_dict}
            bulk = {_TENSOR: self._make_tensor, _ARRAY: self._make_array, _SCALAR: self._make_scalar}
            bulk[_IMAGE] = self._make_image
            if item.code in containers and depth < MAX_DEPTH:
                return containers[item.code](self.unpack(item.data, depth + 1))
            if item.code in bulk and depth <= MAX_DEPTH:
                return bulk[item.code](self.unpack(item.data, MAX_DEPTH + 1))  # plain values only
            if item.code == _INT:
                return _make_int(item.data)
        raise _malformed(f"a '{type(item).__name__}' {depth} deep, which 'encode' never writes")

    def _take(self, nbytes: int) -> memoryview:
        if nbytes > len(self._bulk):
            raise _malformed(f"{nbytes} bytes of data are named, {self.left} are there")
        taken, self._bulk = self._bulk[:nbytes], self._bulk[nbytes:]
        return taken

    def _make_tensor(self, about: list[Any]) -> torch.Tensor:
        (name,), shape = _expect(about, str)
        if name not in _TORCH_DTYPES:
            raise _malformed(f"unknown dtype {name!r}")
        dtype = _TORCH_DTYPES[name]
        taken = self._take(math.prod(shape) * dtype.itemsize)
        data = torch.empty(len(taken), dtype=torch.uint8)
        data.numpy()[:] = np.frombuffer(taken, np.uint8) if taken else 0
        return _shaped(lambda: data.view(dtype).reshape(shape))

    def _make_array(self, about: list[Any]) -> Any:
        (name,), shape = _expect(about, str)
        if name not in _NUMPY_DTYPES:
            raise _malformed(f"unknown dtype {name!r}")
        taken = self._take(math.prod(shape) * np.dtype(name).itemsize)
        data = np.empty(len(taken), np.uint8)
        data[:] = np.frombuffer(taken, np.uint8) if taken else 0
        return _shaped(lambda: data.view(name).reshape(shape))

    def _make_scalar(self, about: list[Any]) -> Any:
        array = self._make_array(about)
        if array.ndim:
            raise _malformed("a scalar with a shape")
        return array[()]

    def _make_image(self, about: list[Any]) -> Image.Image:
        (mode, palette_mode, colors), size = _expect(about, str, (str, type(None)), (bytes, type(None)))
        if len(size) != 2 or (size[0] == 0 and size[1] > _TALLEST_EMPTY):
            raise _malformed(f"an image of size {size}")
        if mode != "1" and mode not in _PIXEL_NBYTES:
            raise _malformed(f"unknown mode {mode!r}")
        if (palette_mode is None) != (colors is None) or palette_mode not in (None, "RGB", "RGBA"):
            raise _malformed(f"a palette of mode {palette_mode!r}")
        if colors is not None and (len(colors) > 256 * len(palette_mode) or len(colors) % len(palette_mode)):
            raise _malformed(f"a palette of {len(colors)} bytes")
        taken = self._take((size[0] + 7) // 8 * size[1] if mode == "1" else math.prod(size) * _PIXEL_NBYTES[mode])

        def make() -> Image.Image:
            image = Image.frombytes(mode, (size[0], size[1]), taken)
            if colors is not None:
                image.putpalette(colors, palette_mode)
            if image.mode != mode:
                raise ValueError(f"a palette for mode {mode!r}")
            return image

        return _shaped(make)


def _make_int(text: bytes) -> int:
    if re.fullmatch(rb"-?[0-9a-f]+", text) is None:
        raise _malformed("a long int that is none")
    return int(text, 16)


def _make_dict(items: list[Any]) -> dict[str | int, Any]:
    keys, values = items[0::2], items[1::2]
    if len(keys) != len(values) or any(type(key) not in (str, int) for key in keys):
        raise _malformed("a dict with a wrong key")
    made = dict(zip(keys, values))
    if len(made) != len(keys):
        raise _malformed("a dict with a key twice")
    return made


def _expect(about: list[Any], *types: type | tuple[type, ...]) -> tuple[list[Any], list[int]]:
    """The description of a tensor, array or image: values of the types, and then its shape or size."""
    values, shape = about[: len(types)], about[len(types) :]
    if len(values) != len(types) or not all(map(isinstance, values, types)):
        raise _malformed("a tensor, array or image is described wrongly")
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise _malformed("a shape that no tensor has")
    return values, shape


def _shaped(make: Callable[[], Any]) -> Any:
    """What `make` makes of data whose amount is right; shapes and palettes may still be beyond the library."""
    try:
        return make()
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError, SystemError) as error:
        raise _malformed(error) from error
