"""Reads tensors, piece by piece, from one safetensors file.

    8 bytes    the header's length, little-endian
    JSON       {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    data       tensors back to back, row-major

Pieces are read with ``pread``, not mapped: truncating a mapped file kills the process, and a mapping of a slow storage
is read page by page. Invariants: a header is trusted only if it fits the file (sizes, order, no holes); a read takes
only the rows that its piece touches from the file, and holds at most one band of them besides the piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from closeranks.checkpoint.weights.hf_index import MAX_JSON_BYTES
from closeranks.checkpoint.weights.protocol import BAND_BYTES
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.reshard import TensorBox, contiguous_boxes
from closeranks.core.system.regular_file import open_binary, open_descriptor

FORMATS: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FORMAT_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in FORMATS.items()}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""


class SafetensorsFile:
    """One file; its header is read and checked on construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _read_header(path)

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        stored = self.tensors[name]
        out = torch.empty(piece.local_shape, dtype=dtype or stored.dtype)
        flat = out.view(-1)
        try:
            file = open_descriptor(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}", "Check the file.") from error
        try:
            for run in contiguous_boxes(piece):
                target = flat[run.first : run.first + run.box.numel].view(run.box.size)
                self._read_box(file, stored, run.box, target)
        finally:
            os.close(file)
        return out

    def _read_box(self, file: int, stored: SafetensorsEntry, box: TensorBox, target: Tensor) -> None:
        """``target`` has the box's size. A leading dim of size 1 is stripped, so that a part of one row reads only that
        part."""
        itemsize, shape, start, size, offset = stored.dtype.itemsize, stored.shape, box.start, box.size, stored.offset
        while size and size[0] == 1:
            offset += start[0] * prod(shape[1:]) * itemsize
            shape, start, size, target = shape[1:], start[1:], size[1:], target[0]
        if not size:
            self._read_into(file, offset, target, stored.dtype)
            return
        row = prod(shape[1:]) * itemsize
        share = max(1, BAND_BYTES // max(1, row))
        for first in range(0, size[0], share):
            length = min(share, size[0] - first)
            part = target.narrow(0, first, length)
            where = offset + (start[0] + first) * row
            if size[1:] == shape[1:]:
                self._read_into(file, where, part, stored.dtype)
                continue
            band = torch.empty((length, *shape[1:]), dtype=stored.dtype)
            self._fill(file, where, band)
            for dim in range(1, len(shape)):
                band = band.narrow(dim, start[dim], size[dim])
            part.copy_(band)
            del band  # before the next one is made

    def _read_into(self, file: int, offset: int, target: Tensor, dtype: torch.dtype) -> None:
        """``target`` is contiguous; reads through a temporary band if its dtype is not the stored one."""
        if target.dtype == dtype:
            self._fill(file, offset, target)
            return
        band = torch.empty(target.shape, dtype=dtype)
        self._fill(file, offset, band)
        target.copy_(band)

    def _fill(self, file: int, offset: int, target: Tensor) -> None:
        view: memoryview = target.reshape(-1).view(torch.uint8).numpy().data
        position = 0
        while position < len(view):
            try:
                count = os.preadv(file, [view[position:]], offset + position)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}", "Check the disk.") from error
            if not count:
                raise CheckpointError(f"{self.path} is damaged: it ends too early", "Fetch it again.")
            position += count


def _read_header(path: Path) -> dict[str, SafetensorsEntry]:
    try:
        with open_binary(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or not 2 <= length <= min(MAX_JSON_BYTES, num_bytes - 8):
                raise _damaged(path, "its header does not match the file")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "Check the file.") from error
    try:
        header = json.loads(text)
        rows = {str(name): row for name, row in header.items() if name != "__metadata__"}
        found = {name: _stored(path, name, row, 8 + length) for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, "its header is not that of a safetensors file") from error
    _check_extent(path, found, 8 + length, num_bytes)
    return found


def _stored(path: Path, name: str, row: Any, data_start: int) -> SafetensorsEntry:
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise _damaged(path, f"'{name}' has impossible offsets")
    if row["dtype"] not in FORMATS:
        what = f"'{name}' in {path} is stored as {row['dtype']!r}, a format this program does not read"
        raise CheckpointError(what, "Convert the weights to bfloat16 or float32.")
    dtype = FORMATS[row["dtype"]]
    if end - begin != prod(shape) * dtype.itemsize:
        raise _damaged(path, f"'{name}' does not have the bytes that its shape needs")
    return SafetensorsEntry(dtype, shape, data_start + begin)


def _check_extent(path: Path, found: Mapping[str, SafetensorsEntry], data_start: int, num_bytes: int) -> None:
    """Check that tensors lie back to back and fill the file: a truncated or spliced file is refused before it is
    used."""
    position = data_start
    for stored in sorted(found.values(), key=lambda stored: (stored.offset, prod(stored.shape))):
        if stored.offset != position:
            raise _damaged(path, "its tensors overlap or leave holes")
        position += prod(stored.shape) * stored.dtype.itemsize
    if position != num_bytes:
        raise _damaged(path, f"it has {num_bytes} bytes, but its header describes {position}")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}", "Fetch it again.")
