"""Writes weights as the files of a Hugging Face folder.

Files are planned first; since all sizes are known, each is written front to back, band by band. Invariants: no file is
larger than requested, unless a single tensor is; neither the whole model nor a whole large tensor is ever in memory;
names and index are those that transformers expects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from closeranks.capture.chunk_ranges import CHUNK_BYTES
from closeranks.checkpoint.weights.protocol import Weights, row_bands
from closeranks.checkpoint.weights.safetensors_file import FORMAT_NAMES
from closeranks.checkpoint.weights.safetensors_folder import INDEX, SINGLE
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

OnProgress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


class ProgressListener(Protocol):
    """Receives progress. Call sequence: ``begin`` for each pass with its total bytes, ``advance`` during it."""

    def begin(self, stage: str, num_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


class NoProgress:
    """Ignores progress."""

    def begin(self, stage: str, num_bytes: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor to be exported."""

    name: str
    """Its name in the file."""
    source: str
    """Its name in the weights."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def plan_export(weights: Weights, names: Mapping[str, str], dtype: torch.dtype | None = None) -> list[ExportTensor]:
    """``names``: maps names in the files to names in the weights. ``dtype`` applies to floating-point tensors; others
    keep theirs."""
    found = []
    for name, source in names.items():
        stored = weights.dtype(source)
        kept = dtype if dtype is not None and stored.is_floating_point else stored
        if kept not in FORMAT_NAMES:
            what = f"'{source}' is stored as {str(kept).removeprefix('torch.')}, which safetensors does not support"
            raise CheckpointError(what, "Export it in another format.")
        found.append(ExportTensor(name, source, tuple(weights.names()[source]), kept))
    return found


def plan_shards(tensors: Sequence[ExportTensor], shard_bytes: int) -> list[list[ExportTensor]]:
    """Tensors in order, as many to a file as fit."""
    shards: list[list[ExportTensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def write_shards(
    folder: Path, weights: Weights, tensors: Sequence[ExportTensor], shard_bytes: int, on_progress: OnProgress
) -> list[str]:
    """Write all files of the weights durably, and their index if there are several; returns the files' names."""
    shards = plan_shards(tensors, shard_bytes)
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_file(folder / file, weights, shard, on_progress)
    if count > 1:
        where = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        total = sum(tensor.num_bytes for tensor in tensors)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return files


def write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def encode_header(tensors: Sequence[ExportTensor]) -> bytes:
    """The header of a safetensors file. Readers in other programs require the data to begin at a multiple of 8."""
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        rows[tensor.name] = {
            "dtype": FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.num_bytes],
        }
        position += tensor.num_bytes
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, weights: Weights, tensors: Sequence[ExportTensor], on_progress: OnProgress) -> None:
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(encode_header(tensors)))
        for tensor in tensors:
            for band in row_bands(Piece.whole(tensor.source, tensor.shape), tensor.dtype.itemsize, CHUNK_BYTES):
                data = tensor_memoryview(weights.read(tensor.source, band.piece, tensor.dtype))
                _write_all(file.fileno(), data)
                on_progress(len(data))
        os.fsync(file.fileno())


def tensor_memoryview(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row-major."""
    view: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _write_all(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]
