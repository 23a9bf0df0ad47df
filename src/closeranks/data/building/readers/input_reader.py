"""Reads the documents or records in a range of an input, in order.

Invariant: the ranges of an input, concatenated, are the whole input, however it was cut: a line belongs to the range in
which it begins. An unusable record is not an error here but an ``InputItem`` with a reason: the user chooses whether it
stops the build. Any other failure (a missing file, a broken archive) raises.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from closeranks.data.building.part_plan import InputRange
from closeranks.data.building.readers.bad_records import read_with_errors
from closeranks.data.building.readers.compressed_mds import open_compressed_mds
from closeranks.data.building.readers.decompress import open_stream
from closeranks.data.building.readers.input_files import IMAGES, JSONL, PACKED_MDS, TAR, TEXT, BuildInput
from closeranks.data.building.readers.tar_records import read_tar_records
from closeranks.data.dataset_protocol import Records
from closeranks.data.decode import image_error
from closeranks.data.files.protocol import Files
from closeranks.data.formats.json_error import json_error

_RECORDS_AT_ONCE = 256
_MAPPED_BYTES = 16 << 20
_TEXT_FIELDS = ("text", "content", "txt")


class InputItem(NamedTuple):
    """A document's text in UTF-8, or a record; or the reason why there is none."""

    value: Any
    file: str
    offset: int
    unit: str = "byte"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InputReadOptions:
    """What to read from the records of the inputs."""

    kind: str
    """``tokens``: texts. ``records``: all fields, as they are."""
    field: str
    """Which field holds the text; empty: the first that exists of ``text``, ``content`` and ``txt``."""
    split: str
    """For text files: a document is a ``file`` or a ``line``."""
    needs_utf8: bool


OnBytes = Callable[[int], None]
"""Called with the number of bytes of the input file consumed since the last call."""


def read_range(
    given: BuildInput,
    files: Files,
    span: InputRange,
    options: InputReadOptions,
    store: Callable[[], Records],
    on_bytes: OnBytes,
) -> Iterator[InputItem]:
    """``store`` opens the records of a format that is read in place."""
    if given.kind == TEXT:
        yield from _shaped_texts(_texts(given, files, span, options.split, on_bytes), options)
        return
    if given.kind == JSONL:
        found = _json_lines(given, files, span, on_bytes)
    elif given.kind == TAR:
        found = _archive(given, files, on_bytes)
    elif given.kind == PACKED_MDS:
        found = _packed(given, files, on_bytes)
    else:
        records = store()
        found = _stored(records, given, span, files.url, on_bytes)
        if given.kind == IMAGES and options.kind == "records":
            found = _images(found, records, span)
    yield from (found if options.kind == "records" else _shaped_records(found, options))


def _texts(given: BuildInput, files: Files, span: InputRange, split: str, on_bytes: OnBytes) -> Iterator[InputItem]:
    shown = files.full_name(given.name)
    with files.local_path(given.name) as path:
        if split == "line":
            for line, offset in _lines(path, shown, given.compression, span, on_bytes):
                if line := line.rstrip(b"\r\n"):
                    yield InputItem(line, shown, offset)
            return
        with open_stream(path, shown, given.compression) as stream:
            is_large = given.num_bytes >= _MAPPED_BYTES and not given.compression
            yield InputItem(_mapped(stream.content) if is_large else stream.content.read(), shown, 0)
        on_bytes(given.num_bytes)


def _mapped(content: BinaryIO) -> mmap.mmap:
    """A large text, memory-mapped, so that it takes no memory."""
    return mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)


def _lines(
    path: Path, shown: str, compression: str, span: InputRange, on_bytes: OnBytes
) -> Iterator[tuple[bytes, int]]:
    """The lines that begin in the span, each with its newline and its offset; for a compressed file, all lines."""
    with open_stream(path, shown, compression) as stream:
        if compression:
            last_reported = offset = 0
            for line in stream.content:
                yield line, offset
                offset += len(line)
                if (reported := stream.tell_bytes()) != last_reported:
                    on_bytes(reported - last_reported)
                    last_reported = reported
            return
        offset = _line_start(stream.content, span.first)
        while offset < span.last and (line := stream.content.readline()):
            yield line, offset
            offset += len(line)
            on_bytes(len(line))


def _line_start(content: BinaryIO, first: int) -> int:
    """The start of the first line that begins at ``first`` or after it."""
    if first == 0:
        return 0
    content.seek(first - 1)
    return first - 1 + len(content.readline())


def _json_lines(given: BuildInput, files: Files, span: InputRange, on_bytes: OnBytes) -> Iterator[InputItem]:
    shown = files.full_name(given.name)
    with files.local_path(given.name) as path:
        for line, offset in _lines(path, shown, given.compression, span, on_bytes):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if line.strip():
                    yield InputItem(None, shown, offset, reason=f"not JSON: {json_error(error)}")
                continue
            is_record = type(value) is dict
            reason = "" if is_record else f"a line must be a JSON object with named fields; this one is {_kind(value)}"
            yield InputItem(value, shown, offset, reason=reason)


def _archive(given: BuildInput, files: Files, on_bytes: OnBytes) -> Iterator[InputItem]:
    shown = files.full_name(given.name)
    with files.local_path(given.name) as path, open_stream(path, shown, given.compression) as stream:
        last_reported = 0
        for member in read_tar_records(stream.content, shown):
            yield InputItem(member.record, shown, member.offset, reason=member.reason)
            reported = stream.tell_bytes()
            on_bytes(reported - last_reported)
            last_reported = reported


def _packed(given: BuildInput, files: Files, on_bytes: OnBytes) -> Iterator[InputItem]:
    shown = files.full_name(given.name)
    with open_compressed_mds(files, given.name) as records:
        span = InputRange(0, 0, len(records))
        for index, item in enumerate(_stored(records, given, span, shown, on_bytes)):
            yield item._replace(file=shown, offset=index, unit="record")


def _stored(
    records: Records, given: BuildInput, span: InputRange, shown: str, on_bytes: OnBytes
) -> Iterator[InputItem]:
    for first in range(span.first, span.last, _RECORDS_AT_ONCE):
        last = min(first + _RECORDS_AT_ONCE, span.last)
        for index, (record, reason) in enumerate(read_with_errors(records, first, last), first):
            location = records.where(index) if reason else None
            if location is None:
                yield InputItem(record, shown, index, "record")
            else:
                yield InputItem(None, location.file, location.offset, location.unit, reason)
        on_bytes(given.num_bytes * last // len(records) - given.num_bytes * first // len(records))


def _images(items: Iterator[InputItem], records: Records, span: InputRange) -> Iterator[InputItem]:
    """Checks the header of each image: a file that is not an image is better reported now than in every run."""
    for index, item in enumerate(items, span.first):
        reason = "" if item.reason else image_error(item.value["image"], in_full=False)
        if reason:
            location = records.where(index)
            item = InputItem(None, location.file, location.offset, location.unit, f"the image {reason}")
        yield item


def _shaped_texts(items: Iterator[InputItem], options: InputReadOptions) -> Iterator[InputItem]:
    if options.kind == "tokens" and not options.needs_utf8:
        yield from items
        return
    for item in items:
        reason, text = _utf8(item.value[:])
        if reason:
            yield item._replace(value=None, reason=reason)
        else:
            yield item._replace(value=item.value[:] if options.kind == "tokens" else {"text": text})


def _utf8(data: bytes) -> tuple[str, str]:
    try:
        return "", data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text, at its byte {error.start}: {error.reason}", ""


def _shaped_records(items: Iterator[InputItem], options: InputReadOptions) -> Iterator[InputItem]:
    for item in items:
        if item.reason:
            yield item
            continue
        field = options.field or text_field(item.value)
        value = item.value.get(field)
        reason = ""
        if type(value) is str:
            try:
                value = value.encode()
            except UnicodeEncodeError as error:
                reason = f"its field '{field}' is not text: {error.reason}"
        elif isinstance(value, bytes):
            reason = _utf8(value)[0] if options.needs_utf8 else ""
        else:
            reason = _no_text(item.value, field)
        yield item._replace(value=None if reason else value, reason=reason)


def text_field(record: Mapping[str, Any]) -> str:
    return next((name for name in _TEXT_FIELDS if name in record), _TEXT_FIELDS[0])


def _no_text(record: Mapping[str, Any], field: str) -> str:
    if field in record:
        return f"its field '{field}' holds {_kind(record[field])}, not text"
    return f"it has no field '{field}', but {', '.join(sorted(map(repr, record))) or 'none at all'}"


def _kind(value: Any) -> str:
    number = "a number"
    names = {"NoneType": "null", "dict": "an object", "int": number, "float": number, "str": "text", "list": "a list"}
    return names.get(type(value).__name__, f"a value of type {type(value).__name__}")
