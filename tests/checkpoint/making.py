"""Checkpoints for tests, written without the writer: whatever state, cut in whatever way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from closeranks.checkpoint.format.data_file import plan_data_file
from closeranks.checkpoint.format.digests import blake3_hex, crc32c, item_bytes, layout_independent_digest
from closeranks.checkpoint.format.manifest import (
    LATEST,
    MANIFEST,
    CheckpointManifest,
    Chunk,
    ChunkLocation,
    DataFile,
    LatestPointer,
    as_reference,
    data_name,
    encode_latest,
    encode_manifest,
    folder_name,
)
from closeranks.core.pieces import Piece
from closeranks.storage.local import LocalStorage

Array = np.ndarray[Any, Any]
State = Mapping[tuple[str, str], "Whole"]
Cut = Callable[[Piece, int], Sequence[Sequence[Piece]]]
"""Of a tensor and a number of ranks: the pieces that each of them writes."""


@dataclass(frozen=True)
class Whole:
    """A tensor as opaque elements: bfloat16 and its like need no torch."""

    dtype: str
    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def filled(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Elements as so many opaque bytes; truth values are 0 or 1."""
    size = item_bytes(dtype)
    high = 2 if dtype == "bool" else 256
    octets = np.random.default_rng(seed).integers(0, high, int(np.prod(shape)) * size, dtype=np.uint8)
    return octets.view(f"V{size}").reshape(shape)


def held(whole: Array, piece: Piece) -> bytes:
    """The elements of a piece, in its own order."""
    box = whole[tuple(slice(first, first + size) for first, size in zip(piece.start, piece.size, strict=True))]
    first, last = piece.flat or (0, piece.numel)
    return np.ascontiguousarray(box).reshape(-1)[first:last].tobytes()


def by_rows(piece: Piece, num_ranks: int) -> list[list[Piece]]:
    if not piece.shape:
        return [[piece], *([] for _ in range(num_ranks - 1))]
    return [[piece.shard(0, rank, num_ranks)] for rank in range(num_ranks)]


def by_ranges(piece: Piece, num_ranks: int) -> list[list[Piece]]:
    """Flat ranges that end within rows, two to a rank."""
    marks = [piece.numel * number // (2 * num_ranks) for number in range(2 * num_ranks + 1)]
    parts = [piece.flattened(*pair) for pair in pairwise(marks)]
    return [parts[2 * rank : 2 * rank + 2] for rank in range(num_ranks)]


def a_state(seed: int = 0) -> dict[tuple[str, str], Whole]:
    """Small, of several types and shapes."""
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {
        ("model", "embed.weight"): ("float32", (7, 6)),
        ("model", "head.weight"): ("bfloat16", (5, 3, 2)),
        ("model", "mask"): ("bool", (9,)),
        ("optimizer", "embed.weight/exp_avg"): ("float64", (7, 6)),
        ("optimizer", "embed.weight/step"): ("int64", ()),
        ("other", "scale"): ("float8_e4m3fn", (3,)),
        ("other", "nothing"): ("float32", (0, 4)),
    }
    return {
        name: Whole(dtype, filled(shape, dtype, seed + number))
        for number, (name, (dtype, shape)) in enumerate(kinds.items())
    }


def write(
    root: Path,
    step: int,
    state: State,
    *,
    cut: Cut = by_rows,
    num_ranks: int = 2,
    base: CheckpointManifest | None = None,
    part: int = 1,
    tree: Mapping[str, Any] | None = None,
    metric: float | None = None,
    is_latest: bool = True,
) -> CheckpointManifest:
    """A committed checkpoint; what its ``base`` holds already is referred to."""
    storage, name = LocalStorage(root), folder_name(step, part)
    known = {} if base is None else {_identity(entry): as_reference(entry, base.name) for entry in base.entries}
    files: list[DataFile] = []
    entries: list[ChunkLocation] = []
    for rank in range(num_ranks):
        chunks = [
            (chunk, data)
            for (section, key), whole in state.items()
            for chunk, data in _chunks(section, key, whole, cut(Piece.whole(key, whole.shape), num_ranks)[rank])
        ]
        fresh = []
        for chunk, data in chunks:
            share = layout_independent_digest(data, chunk.dtype, chunk.piece)
            entry = ChunkLocation(chunk, data_name(rank, num_ranks), 0, blake3_hex(data), share)
            if chunk.num_bytes and _identity(entry) in known:
                entries.append(known[_identity(entry)])
            else:
                fresh.append((entry, data))
        if fresh:
            plan = plan_data_file([entry.chunk for entry, _ in fresh])
            sink = storage.create(f"{name}/{data_name(rank, num_ranks)}", plan.num_bytes)
            for data in (plan.header, *(data for _, data in fresh)):
                sink.write(data)
            sink.close()
            entries += [replace(entry, offset=at) for (entry, _), at in zip(fresh, plan.offsets, strict=True)]
            files.append(DataFile(data_name(rank, num_ranks), plan.num_bytes, len(plan.header), crc32c(plan.header)))
    manifest = CheckpointManifest(
        name=name,
        step=step,
        save=f"5eed-{step}",
        num_ranks=num_ranks,
        layout=f"data={num_ranks}",
        created=1_700_000_000.0 + step,
        is_full=not any("/" in entry.file for entry in entries),
        metric=metric,
        tree={"progress": {"step": step}} if tree is None else tree,
        files=tuple(files),
        entries=tuple(entries),
    )
    publish(root, manifest, is_latest=is_latest)
    return manifest


def publish(root: Path, manifest: CheckpointManifest, *, is_latest: bool = True) -> None:
    data = encode_manifest(manifest)
    storage = LocalStorage(root)
    storage.publish(f"{manifest.name}/{MANIFEST}", data, replace=True)
    if is_latest:
        storage.publish(LATEST, encode_latest(LatestPointer(manifest.name, blake3_hex(data))), replace=True)


def _chunks(section: str, key: str, whole: Whole, pieces: Sequence[Piece]) -> list[tuple[Chunk, bytes]]:
    data = [held(whole.values, piece) for piece in pieces]
    return [
        (Chunk(section, key, whole.dtype, piece, len(octets), crc32c(octets)), octets)
        for piece, octets in zip(pieces, data, strict=True)
    ]


def _identity(entry: ChunkLocation) -> tuple[Chunk, str]:
    return entry.chunk, entry.blake3
