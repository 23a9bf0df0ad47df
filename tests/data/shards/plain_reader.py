"""A reader that needs no more than docs/data-format.md says: it shares no code with the package.

Slow and short, and checks everything the page says.
"""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from crc32c import crc32c

TOKEN_DTYPES = {1: "<u1", 2: "<u2", 3: "<u4", 4: "<i4", 5: "<i8"}


def read_document(folder: Path) -> dict[str, Any]:
    line, _, body = (folder / "dataset.json").read_bytes().partition(b"\n")
    assert line == b'{"closeranks":"dataset","version":1,"blake3":"%s"}' % blake3(body).hexdigest().encode()
    document: dict[str, Any] = json.loads(body)
    return document


def round_up(number: int, step: int) -> int:
    return (number + step - 1) // step * step


def read_shard(folder: Path, entry: list[Any]) -> tuple[int, list[bytes], dict[str, Any]]:
    """The code of the dtype, the bytes of each document or record, and the notes."""
    name, num_bytes, num_items, data_bytes, notes_bytes, largest, digest = entry
    data = (folder / name).read_bytes()
    assert len(data) == num_bytes
    header, footer = data[:64], data[-128:]
    assert blake3(footer).hexdigest() == digest
    assert struct.unpack("<I", footer[124:])[0] == crc32c(footer[:124])
    assert struct.unpack("<I", header[60:])[0] == crc32c(header[:60])
    magic, version, kind, dtype, block_bytes, data_offset = struct.unpack_from("<8sIIIIQ", header)
    assert (magic, version, data_offset) == (b"CRSHARD\n", 1, 4096)
    assert header[32:60] == bytes(28)
    found = struct.unpack_from("<8sIIIIQQQQQQQ32s", footer)
    assert footer[112:124] == bytes(12)
    index_offset = round_up(4096 + data_bytes, 8)
    notes_offset = index_offset + 8 * (num_items + 1)
    table_offset = round_up(notes_offset + notes_bytes, 8)
    num_blocks = round_up(table_offset, block_bytes) // block_bytes
    table = data[table_offset:-128]
    assert len(table) == round_up(4 * num_blocks, 8)
    counts = (num_items, data_bytes, notes_bytes, num_blocks, table_offset, num_bytes, largest)
    assert found == (b"CRSFOOT\n", 1, kind, dtype, block_bytes, *counts, blake3(table).digest())
    for block in range(num_blocks):
        part = data[block * block_bytes : min((block + 1) * block_bytes, table_offset)]
        assert struct.unpack_from("<I", table, 4 * block)[0] == crc32c(part)
    offsets = struct.unpack_from(f"<{num_items + 1}Q", data, index_offset)
    unit = np.dtype(TOKEN_DTYPES[dtype]).itemsize if kind == 0 else 1
    items = [data[4096 + a * unit : 4096 + b * unit] for a, b in pairwise(offsets)]
    return dtype, items, json.loads(data[notes_offset : notes_offset + notes_bytes])


def read_record(data: bytes, forms: list[Any]) -> dict[str, Any]:
    (number,) = struct.unpack_from("<Q", data)
    form = forms[number]
    width = {"none": 0, "array": None}
    fixed = sum(8 * (field[3] + 1) if field[1] == "array" else width.get(field[1], 8) or 0 for field in form)
    at, end = 8, 8 + fixed
    record: dict[str, Any] = {}
    for name, kind, *rest in form:
        if kind == "none":
            record[name] = None
        elif kind in ("bool", "int", "float"):
            (value,) = struct.unpack_from("<d" if kind == "float" else "<q", data, at)
            record[name] = bool(value) if kind == "bool" else value
            at += 8
        elif kind == "array":
            dtype, ndim = rest
            *shape, stop = struct.unpack_from(f"<{ndim + 1}Q", data, at)
            start, at = round_up(end, 8), at + 8 * (ndim + 1)
            record[name] = np.frombuffer(data[start:stop], np.dtype(dtype).newbyteorder("<")).reshape(shape)
            end = stop
        else:
            (stop,) = struct.unpack_from("<Q", data, at)
            value = data[end:stop]
            record[name] = {"bytes": lambda v: v, "str": bytes.decode, "json": json.loads}[kind](value)
            end, at = stop, at + 8
    assert round_up(end, 8) == len(data)
    return record


def read_tokens(folder: Path) -> list[list[int]]:
    documents: list[list[int]] = []
    for entry in read_document(folder)["shards"]:
        dtype, items, _ = read_shard(folder, entry)
        documents += [np.frombuffer(item, TOKEN_DTYPES[dtype]).tolist() for item in items]
    return documents


def read_records(folder: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for entry in read_document(folder)["shards"]:
        _, items, notes = read_shard(folder, entry)
        records += [read_record(item, notes["forms"]) for item in items]
    return records
