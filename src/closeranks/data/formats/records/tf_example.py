"""Parses a serialized ``tf.train.Example`` into named values, without TensorFlow or protobuf.

    Example  { Features features = 1 }                  Feature   { BytesList = 1 | FloatList = 2 | Int64List = 3 }
    Features { map<string, Feature> feature = 1 }       each list { repeated value = 1 }, numbers packed or not

Invariant: bytes that are not such a message raise ``InvalidExample`` with the reason; nothing outside of them is read.
As in protobuf, unknown fields are skipped, and if a key occurs twice the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


class InvalidExample(Exception):
    """Why bytes are not a ``tf.train.Example``."""


def parse_example(data: bytes) -> dict[str, Any]:
    """A list of one value is that value: bytes, a float or an integer. Several numbers are an array (int64 or float32),
    several byte strings a list; a feature without a list is None."""
    found: dict[str, Any] = {}
    for number, kind, features in _fields(data):
        if number == 2 and kind == _BYTES:
            raise InvalidExample("it is a SequenceExample, and only tf.train.Example is read")
        if number == 1:
            for inner, inner_kind, entry in _fields(_message(features, kind)):
                if inner == 1:
                    name, value = _entry(_message(entry, inner_kind))
                    found[name] = value
    return found


def _entry(data: bytes) -> tuple[str, Any]:
    key, feature = b"", b""
    for number, kind, value in _fields(data):
        if number == 1:
            key = _message(value, kind)
        elif number == 2:
            feature += _message(value, kind)  # repeated messages are merged, which is to concatenate their bytes
    try:
        return key.decode(), _feature(feature)
    except UnicodeDecodeError:
        raise InvalidExample("a feature's name is not UTF-8") from None


def _feature(data: bytes) -> Any:
    which, lists = 0, b""
    for number, kind, value in _fields(data):
        if number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            lists = (lists if number == which else b"") + _message(value, kind)
            which = number
    if not which:
        return None
    values = [(kind, value) for number, kind, value in _fields(lists) if number == 1]
    if which == _BYTES_LIST:
        texts = [_message(value, kind) for kind, value in values]
        return texts[0] if len(texts) == 1 else texts
    take = _floats if which == _FLOAT_LIST else _integers
    numbers = [take(kind, value) for kind, value in values]
    joined = np.concatenate(numbers) if numbers else np.empty(0, np.float32 if which == _FLOAT_LIST else np.int64)
    return joined.item() if joined.size == 1 else joined


def _floats(kind: int, value: bytes) -> npt.NDArray[Any]:
    if kind not in (_BYTES, _FIXED32) or len(value) % 4:
        raise InvalidExample("the size of a list of floats is not a multiple of 4 bytes")
    return np.frombuffer(value, "<f4").astype(np.float32)


def _integers(kind: int, value: bytes) -> npt.NDArray[Any]:
    """Varints: seven bits per byte, the lowest first; the last byte of a number has its highest bit clear."""
    if kind not in (_BYTES, _VARINT):
        raise InvalidExample("a list of integers holds something else")
    octets = np.frombuffer(value, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if not len(octets):
        return np.empty(0, np.int64)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise InvalidExample("a list of integers ends in the middle of one")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if int(lengths.max()) > 10:
        raise InvalidExample("an integer has more than 64 bits")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(lengths.max())):
        longer = lengths > place
        bits = (octets[starts[longer] + place] & 0x7F).astype(np.uint64)
        found[longer] |= bits << np.uint64(7 * place)
    return found.view(np.int64)


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and content of each field; of a varint, its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise InvalidExample("a field has the number 0")
        if kind == _VARINT:
            _, end = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            end = at + size
        elif kind in (_FIXED64, _FIXED32):
            end = at + (8 if kind == _FIXED64 else 4)
        else:
            raise InvalidExample(f"a field has the wire type {kind}")
        if end > len(data):
            raise InvalidExample("it ends within a field")
        yield number, kind, data[at:end]
        at = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    found = 0
    for place in range(10):
        if at + place >= len(data):
            raise InvalidExample("it ends within a number")
        octet = data[at + place]
        found |= (octet & 0x7F) << (7 * place)
        if octet < 0x80:
            return found, at + place + 1
    raise InvalidExample("a number has more than 64 bits")


def _message(value: bytes, kind: int) -> bytes:
    if kind != _BYTES:
        raise InvalidExample("a message was expected where there is a number")
    return value
