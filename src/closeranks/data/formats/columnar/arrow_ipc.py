"""Finds the record batches of an Arrow file, and reads one without the others.

A stream is a sequence of messages: the schema, then batches, then an end-of-stream marker; the file format is the same
between ``ARROW1`` and a footer. Reading a batch needs only its message and copies nothing (unless it is compressed), so
that memory does not grow with the number of batches, as it does in readers that keep them all. Invariant: a file is
scanned to its very end; one that is truncated, or continues after its end, is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

_MAGIC = b"ARROW1"
_HEAD = 8
"""The magic at the front of a file, padded."""
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SAMPLE_BYTES = 1024
_RECORD_BATCH, _DICTIONARY = "record batch", "dictionary"


class NotArrow(Exception):
    """``str`` says what is wrong, without the file's name."""


@dataclass(frozen=True, slots=True)
class ArrowBatch:
    """A record batch as its message describes it."""

    offset: int
    """The position of its message in the file."""
    num_bytes: int
    num_rows: int
    is_compressed: bool
    crc: int
    """Of its metadata and of the first and last bytes of its body: identifies the content without reading it all."""


@dataclass(frozen=True, slots=True)
class ArrowScan:
    schema: Any
    batches: list[ArrowBatch]
    has_dictionaries: bool
    """Batches that refer to dictionaries cannot be read alone."""


def scan(view: npt.NDArray[np.uint8]) -> ArrowScan:
    """Scan a file; reads the metadata and no data. Raises ``NotArrow``, or what Arrow raises for malformed bytes."""
    begin, end = _extent(view)
    source = pa.BufferReader(pa.py_buffer(view[begin:end]))
    messages = pa.ipc.MessageReader.open_stream(source)
    schema_message = _next(messages)
    if schema_message is None or schema_message.type != "schema":
        raise NotArrow("it does not begin with a schema")
    schema = pa.ipc.read_schema(schema_message)
    if len(set(schema.names)) != len(schema.names):
        raise NotArrow("it has two columns of one name")
    batches, has_dictionaries, at = [], False, source.tell()
    while (message := _next(messages)) is not None:
        if message.type == _RECORD_BATCH:
            batches.append(_batch(message, begin + at, source.tell() - at))
        elif message.type == _DICTIONARY:
            has_dictionaries = True
        else:
            raise NotArrow(f"a message of the kind '{message.type}' at byte {begin + at}")
        at = source.tell()
    _check_end(view[:end], begin + at, begin + source.tell(), has_footer=end < len(view))
    return ArrowScan(schema, batches, has_dictionaries)


def _check_end(view: npt.NDArray[np.uint8], last: int, reached: int, *, has_footer: bool) -> None:
    """After the last batch there is an end-of-stream marker and nothing else. With a footer, some writers omit it."""
    if reached != len(view):
        raise NotArrow(f"it has data after its end at byte {reached}")
    if view[last:reached].tobytes() != _END and not (has_footer and last == reached):
        raise NotArrow(f"it was cut off: no end marker at byte {last}")


def read_batch(view: npt.NDArray[np.uint8], offset: int, num_bytes: int, schema: Any) -> Any:
    message = pa.ipc.read_message(pa.py_buffer(view[offset : offset + num_bytes]))
    return pa.ipc.read_record_batch(message, schema)


def read_all(view: npt.NDArray[np.uint8]) -> Iterator[Any]:
    """Every batch, with its dictionaries."""
    begin, end = _extent(view)
    return iter(pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(view[begin:end]))))


def _extent(view: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Where the stream begins and ends."""
    head = view[: len(_MAGIC)].tobytes()
    if head[:4] == b"FEA1":
        raise NotArrow("it is Feather version 1; write it again as Arrow")
    if head != _MAGIC:
        return 0, len(view)
    if len(view) < _HEAD + 10 or view[-len(_MAGIC) :].tobytes() != _MAGIC:
        raise NotArrow("it was cut off: its footer is missing")
    num_footer = int.from_bytes(view[-10:-6].tobytes(), "little")
    end = len(view) - 10 - num_footer
    if end < _HEAD:
        raise NotArrow(f"its footer would have {num_footer} bytes")
    return _HEAD, end


def _next(messages: Any) -> Any:
    try:
        return messages.read_next_message()
    except StopIteration:
        return None


def _batch(message: Any, offset: int, num_bytes: int) -> ArrowBatch:
    description, body = message.metadata, message.body
    num_rows, is_compressed = _describe(memoryview(description))
    if num_rows < 0:
        raise NotArrow(f"the batch at byte {offset} would have {num_rows} rows")
    crc = crc32c(memoryview(description))
    if body is not None:
        crc = crc32c(memoryview(body[:_SAMPLE_BYTES]), crc)
        crc = crc32c(memoryview(body[max(len(body) - _SAMPLE_BYTES, 0) :]), crc)
    return ArrowBatch(offset, num_bytes, num_rows, is_compressed, int(crc))


def _describe(message: memoryview) -> tuple[int, bool]:
    """Number of rows, and whether the body is compressed, from the message's flatbuffer (which Arrow has verified):
    pyarrow returns neither without decoding the batch. Message: field 2 is the header; RecordBatch: 0 is the length, 3
    compression."""
    root = struct.unpack_from("<I", message, 0)[0]
    at = _field(message, root, 2)
    batch = at + struct.unpack_from("<I", message, at)[0]
    length = _field(message, batch, 0)
    num_rows = struct.unpack_from("<q", message, length)[0] if length else 0
    return num_rows, _field(message, batch, 3) != 0


def _field(data: memoryview, table: int, slot: int) -> int:
    """The position of a field in a flatbuffer's table; 0 if it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    num_bytes = struct.unpack_from("<H", data, vtable)[0]
    place = 4 + 2 * slot
    offset = struct.unpack_from("<H", data, vtable + place)[0] if place < num_bytes else 0
    return table + offset if offset else 0
