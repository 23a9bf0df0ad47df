"""Decodes the columns of an MDS sample.

Supports the encodings of MosaicML's ``MDSWriter``. Invariants: nothing is unpickled; a value is decoded from exactly
its own bytes, and ``ValueError`` or ``IndexError`` says what is wrong with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import DataError

Decoder: TypeAlias = Callable[[bytes], Any]

_ARRAY_TYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_TYPES = {np.dtype(code).name: code for code in _ARRAY_TYPES.values()}
_PIXELS = {
    "L": ("u1", 1),
    "P": ("u1", 1),
    "LA": ("u1", 2),
    "RGB": ("u1", 3),
    "YCbCr": ("u1", 3),
    "LAB": ("u1", 3),
    "HSV": ("u1", 3),
    "RGBA": ("u1", 4),
    "RGBX": ("u1", 4),
    "CMYK": ("u1", 4),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
    "I;16": ("<u2", 1),
}
"""Modes of raw images: the dtype, and the number of values per pixel."""


def decoder_of(encoding: str, column: str) -> Decoder:
    """``DataError`` for encodings that are unknown or would have to be unpickled."""
    name, _, rest = encoding.partition(":")
    if name == "pkl":
        raise DataError(
            f"the column '{column}' is pickled, and unpickling can run arbitrary code",
            "Write the dataset again with another encoding (json, ndarray, bytes).",
        )
    if name == "ndarray":
        return _array_decoder(rest)
    if name in _TYPES:
        return partial(_scalar, _TYPES[name])
    found = _DECODERS.get(encoding)
    if found is None:
        raise DataError(f"the column '{column}' has the encoding '{encoding}', which is not known")
    return found


def _scalar(code: str, data: bytes) -> int | float:
    value: int | float = np.frombuffer(data, code)[0].item()
    return value


def _array_decoder(settings: str) -> Decoder:
    """``dtype:shape``; either may be missing, and is then part of the sample."""
    dtype, _, shape = settings.partition(":")
    fixed = tuple(int(size) for size in shape.split(",")) if shape else None
    return partial(_array, _TYPES[dtype] if dtype else "", fixed)


def _array(code: str, shape: tuple[int, ...] | None, data: bytes) -> npt.NDArray[Any]:
    at = 0
    if not code:
        if data[0] not in _ARRAY_TYPES:
            raise ValueError(f"an array's type has the unknown code {data[0]}")
        code, at = _ARRAY_TYPES[data[0]], 1
    if shape is None:
        num_dims, size_log = data[at] >> 2, data[at] & 3
        sizes = np.frombuffer(data, f"<u{1 << size_log}", num_dims, at + 1)
        shape, at = tuple(sizes.tolist()), at + 1 + num_dims * (1 << size_log)
    values = np.frombuffer(data, code, offset=at)
    if len(values) != prod(shape):
        raise ValueError(f"an array of shape {shape} has {len(values)} values")
    return values.reshape(shape)


def _raw_image(data: bytes) -> npt.NDArray[Any]:
    """Width, height, length of the mode's name, the mode, rows of pixels."""
    width, height, num_mode = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + num_mode].decode("utf-8")
    pixels = data[12 + num_mode :]
    if mode == "1":
        rows = np.frombuffer(pixels, np.uint8).reshape(height, -(-width // 8))
        return np.unpackbits(rows, axis=1)[:, :width].astype(np.bool_)
    if mode not in _PIXELS:
        raise ValueError(f"an image has the mode '{mode}', which is not known")
    code, num_channels = _PIXELS[mode]
    values = np.frombuffer(pixels, code)
    return values.reshape((height, width, num_channels) if num_channels > 1 else (height, width))


def _list(decode: Decoder, start: int, data: bytes) -> list[Any]:
    """From ``start``: the number of elements, the size of each, then the elements."""
    num_values = int.from_bytes(data[start : start + 4], "little")
    first = start + 4 + 4 * num_values
    if first > len(data):
        raise ValueError(f"a list of {num_values} values has only {len(data)} bytes")
    ends = first + np.cumsum(np.frombuffer(data, "<u4", num_values, start + 4), dtype=np.int64)
    if len(data) != (ends[-1] if num_values else first):
        raise ValueError("the sizes of a list's values do not add up")
    begins = [first, *ends[:-1].tolist()]
    return [decode(data[begin:end]) for begin, end in zip(begins, ends.tolist(), strict=False)]


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _same(data: bytes) -> bytes:
    return data


_DECODERS: dict[str, Decoder] = {
    "bytes": _same,
    "jpeg": _same,
    "png": _same,
    "str": _text,
    "int": partial(_scalar, "<i8"),
    "json": lambda data: json.loads(data.decode("utf-8")),
    "str_int": lambda data: int(data.decode("utf-8")),
    "str_float": lambda data: float(data.decode("utf-8")),
    "str_decimal": lambda data: float(data.decode("utf-8")),
    "pil": _raw_image,
    "list[pil]": partial(_list, _raw_image, 4),
    "list[jpeg]": partial(_list, _same, 4),
    "list[png]": partial(_list, _same, 4),
    "jpeg_array": partial(_list, _same, 0),
    "jpegarray": partial(_list, _same, 0),
}
"""Images stay encoded, for ``decode``; raw ones become arrays."""
