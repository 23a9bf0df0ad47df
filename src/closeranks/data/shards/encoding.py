"""Encodes records as bytes from which fields can be read without parsing.

A record is eight bytes (the number of its schema), its fixed part (eight bytes for each number, size and end), and the
bytes of its variable values. Its schema (names, kinds, dtypes and ranks, ``RecordSchema``) is stored once per shard in
the notes, and all records of one schema are read with one ``struct``. Invariants: everything is little-endian and
aligned to eight bytes; decoding is the inverse of encoding up to what ``Value`` says; nothing is ever unpickled. Pure:
values in, bytes out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError

Value: TypeAlias = Any
"""None, bool, int, float, str, bytes, a numpy array (or scalar, which is read back as a Python number), or JSON values
of those (lists and dicts with text keys; tuples are read back as lists)."""

ARRAY_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
_FIXED = {"none": "", "bool": "q", "int": "q", "float": "d", "str": "Q", "bytes": "Q", "json": "Q"}
_MAX_NDIM = 32
PREFIX = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RecordField:
    name: str
    kind: str
    """A key of ``_FIXED``, or ``array``."""
    dtype: str = ""
    ndim: int = 0

    @property
    def struct_codes(self) -> str:
        return "Q" * (self.ndim + 1) if self.kind == "array" else _FIXED[self.kind]

    @property
    def type_name(self) -> str:
        """The kind, for people: ``float32[2]`` for a two-dimensional array."""
        return f"{self.dtype}[{self.ndim}]" if self.kind == "array" else self.kind


RecordSchema: TypeAlias = tuple[RecordField, ...]


def encode(record: Mapping[str, Value]) -> tuple[RecordSchema, bytes]:
    """A record's schema, and its bytes after the first eight, which hold the number of the schema in its shard."""
    schema, fixed, variable = _taken_apart(record)
    head = struct.Struct("<" + "".join(field.struct_codes for field in schema))
    end = PREFIX.size + head.size
    chunks = [b""]
    for field, data in variable:
        start = _aligned(end) if field.kind == "array" else end
        chunks += [bytes(start - end), data]
        end = start + len(data)
        fixed[fixed.index(None)] = end
    chunks[0] = head.pack(*fixed)
    return schema, b"".join([*chunks, bytes(_aligned(end) - end)])


def _aligned(number: int) -> int:
    return (number + 7) & ~7


def _taken_apart(record: Mapping[str, Value]) -> tuple[RecordSchema, list[Any], list[tuple[RecordField, bytes]]]:
    """The schema, the fixed part (None where an end will be filled in), and the variable values."""
    schema: list[RecordField] = []
    fixed: list[Any] = []
    variable: list[tuple[RecordField, bytes]] = []
    for name, value in record.items():
        if type(name) is not str or not name:
            raise BadRecordError(f"a field's name is {name!r}, not text")
        field, numbers, data = _encoded(name, value)
        schema.append(field)
        fixed += numbers
        if data is not None:
            fixed.append(None)
            variable.append((field, data))
    return tuple(schema), fixed, variable


def _encoded(name: str, value: Value) -> tuple[RecordField, Sequence[Any], bytes | None]:
    """A value as its field, its numbers and its bytes (None if the numbers are all of it)."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        return _encoded_array(name, value)
    if value is None:
        return RecordField(name, "none"), (), None
    if isinstance(value, bool):
        return RecordField(name, "bool"), (int(value),), None
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return RecordField(name, "int"), (int(value),), None
    if isinstance(value, float):
        return RecordField(name, "float"), (float(value),), None
    if isinstance(value, bytes | bytearray | memoryview):
        return RecordField(name, "bytes"), (), bytes(value)
    try:
        if isinstance(value, str):
            return RecordField(name, "str"), (), value.encode()
        _check_json(value)
        return RecordField(name, "json"), (), json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError
        raise BadRecordError(f"field '{name}' cannot be stored: {error}") from error


def _encoded_array(name: str, value: npt.NDArray[Any]) -> tuple[RecordField, Sequence[int], bytes]:
    if value.dtype.name not in ARRAY_DTYPES or value.ndim > _MAX_NDIM:
        raise BadRecordError(f"field '{name}' cannot be stored: it is an array of {value.ndim} dims of {value.dtype}")
    data = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return RecordField(name, "array", value.dtype.name, value.ndim), value.shape, data


def _check_json(value: Any) -> None:
    """JSON would silently convert keys to text; integers and floats of any size are allowed."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if type(key) is not str:
                raise TypeError(f"{key!r} is a key in it, and keys must be text")
            _check_json(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_json(inner)
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"it holds a value of type {type(value).__name__}")


class RecordDecoder:
    """Decodes records of one schema. Arrays are read-only views; costs about 1 µs for two fields."""

    __slots__ = ("_fields", "_size", "_unpack")

    def __init__(self, schema: RecordSchema) -> None:
        head = struct.Struct("<Q" + "".join(field.struct_codes for field in schema))
        self._unpack, self._size = head.unpack_from, head.size
        self._fields = tuple(
            (field.name, field.kind, np.dtype(field.dtype).newbyteorder("<") if field.dtype else None, field.ndim)
            for field in schema
        )

    def __call__(self, data: memoryview, start: int, stop: int) -> dict[str, Value]:
        """From the bytes ``start`` up to ``stop`` of a shard; ``ValueError`` if they are not a record of this
        schema."""
        if stop - start < self._size:
            raise ValueError("it is shorter than its fields need")
        values = self._unpack(data, start)
        at, end = 1, start + self._size
        record: dict[str, Value] = {}
        for name, kind, dtype, ndim in self._fields:
            if kind == "int" or kind == "float":
                record[name] = values[at]
            elif kind == "none":
                record[name] = None
                continue
            elif kind == "bool":
                record[name] = values[at] != 0
            else:
                begin = (end + 7) & ~7 if kind == "array" else end
                end = start + values[at + ndim]
                if not begin <= end <= stop:
                    raise ValueError("its values overlap, or reach beyond its end")
                if dtype is not None:
                    record[name] = _array(data, begin, end, dtype, values[at : at + ndim])
                    at += ndim
                else:
                    record[name] = _plain(kind, data[begin:end])
            at += 1
        if (end + 7) & ~7 != stop:
            raise ValueError("its values do not fill it")
        return record


def _array(data: memoryview, begin: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, begin)
    if array.nbytes != end - begin:
        raise ValueError("the size of an array does not match its shape")
    return array


def _plain(kind: str, data: memoryview) -> Value:
    if kind == "bytes":
        return bytes(data)
    text = str(data, "utf-8")
    return text if kind == "str" else json.loads(text)


def encode_schemas(schemas: Sequence[RecordSchema]) -> list[Any]:
    return [[[f.name, f.kind, f.dtype, f.ndim][: 4 if f.kind == "array" else 2] for f in schema] for schema in schemas]


def decode_schemas(found: Any) -> list[RecordSchema]:
    """``ValueError``, ``TypeError`` or ``KeyError`` for values that are not schemas."""
    schemas = [tuple(RecordField(*field) for field in schema) for schema in found]
    for schema in schemas:
        for field in schema:
            is_array = field.kind == "array" and field.dtype in ARRAY_DTYPES and 0 <= field.ndim <= _MAX_NDIM
            if type(field.name) is not str or not (is_array or field.kind in _FIXED):
                raise ValueError(f"a field '{field.name}' of kind '{field.kind}'")
    return schemas
