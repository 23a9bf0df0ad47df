"""States, orders and saves for tests of the writing side; and the plainest way to load a checkpoint again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from closeranks.checkpoint.format.digests import crc32c
from closeranks.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointManifest,
    Chunk,
    decode_latest,
    decode_manifest,
    folder_name,
)
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings, SaveTask
from closeranks.core.pieces import Piece
from closeranks.storage.open import open_storage
from closeranks.storage.protocol import Storage

State = Mapping[str, np.ndarray]
"""Tensors of section ``model``, one-dimensional float32; a name that begins with ``frozen`` never changes."""


def settings(place: object, **changes: object) -> SaveSettings:
    fixed: dict[str, object] = {"remote": "", "keep_last": 3, "keep_every": 0, "keep_best": 0, "read_back": True}
    return SaveSettings(**{"place": str(place), **fixed, "timeout_s": 20.0, "nice": 0, **changes})  # type: ignore[arg-type]


def state(step: int, num_elements: int = 5000) -> dict[str, np.ndarray]:
    frozen = np.random.default_rng(0).standard_normal(num_elements, dtype=np.float32)
    moving = np.random.default_rng(step).standard_normal(num_elements + 1, dtype=np.float32)
    return {"frozen.weight": frozen, "weight": moving, "bias": moving[:7] * 2, "none": moving[:0]}


def share(values: State, rank: int, num_ranks: int) -> list[tuple[Chunk, bytes]]:
    """What a rank writes of it: of each tensor a flat range, in two chunks."""
    found = []
    for key, whole in values.items():
        cuts = [whole.size * place // (2 * num_ranks) for place in range(2 * num_ranks + 1)]
        for first, last in [(cuts[place], cuts[place + 1]) for place in (2 * rank, 2 * rank + 1)]:
            data = whole[first:last].tobytes()
            if data or not whole.size:
                piece = Piece.whole(key, whole.shape).flattened(first, last)
                found.append((Chunk("model", key, "float32", piece, len(data), crc32c(data)), data))
    return found


def order(step: int, rank: int = 0, num_ranks: int = 1, **changes: object) -> tuple[SaveTask, bytes]:
    """And the buffer it is about."""
    values = changes.pop("values", None) or state(step)
    parts = share(values, rank, num_ranks)  # type: ignore[arg-type]
    fixed: dict[str, object] = {"save": f"token-{step}", "folder": folder_name(step), "is_full": False}
    fixed |= {"to_remote": True, "metric": None, "tree": {"progress": {"step": step}} if rank == 0 else None}
    fixed |= {"chunks": tuple(chunk for chunk, _ in parts), "layout": f"data={num_ranks}"}
    made = SaveTask(**{**fixed, "step": step, "rank": rank, "num_ranks": num_ranks, **changes})  # type: ignore[arg-type]
    return made, b"".join(data for _, data in parts)


def source(made: SaveTask, buffer: bytes | bytearray) -> Callable[[int], memoryview]:
    view = memoryview(buffer).toreadonly()
    return lambda number: view[made.offsets[number] :][: made.chunks[number].num_bytes]


def save(made: tuple[SaveTask, bytes], where: SaveSettings) -> list[SaveReport]:
    from closeranks.checkpoint.save import save_tiers

    reports: list[SaveReport] = []
    save_tiers.save_to_all_tiers(made[0], source(*made), where, reports.append, lambda: False)
    return reports


def kinds(reports: list[SaveReport], tier: str = "primary") -> list[str]:
    return [report.kind for report in reports if report.tier == tier]


@contextmanager
def memfd(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("test")
    try:
        os.write(fd, data or b"\0")
        yield fd
    finally:
        os.close(fd)


def load(storage: Storage, name: str) -> dict[str, np.ndarray]:
    """Every chunk checked by its checksum; raises for anything that is not there or not as it should be."""
    manifest = decode_manifest(storage.read(f"{name}/{MANIFEST}"), name)
    found: dict[str, np.ndarray] = {}
    for entry in manifest.entries:
        path = entry.file if "/" in entry.file else f"{name}/{entry.file}"
        data = storage.read(path, entry.offset, entry.chunk.num_bytes)
        assert crc32c(data) == entry.chunk.crc32c, entry
        piece = entry.chunk.piece
        whole = found.setdefault(entry.chunk.key, np.full(piece.shape, np.nan, np.float32))
        assert piece.flat is not None
        whole[slice(*piece.flat)] = np.frombuffer(data, np.float32)
    return found


def committed_names(storage: Storage) -> list[str]:
    return [name[:-1] for name in storage.names() if name.endswith("/") and MANIFEST in storage.names(name[:-1])]


def latest_manifest(storage: Storage) -> CheckpointManifest:
    name = decode_latest(storage.read("latest"), "latest").name
    return decode_manifest(storage.read(f"{name}/{MANIFEST}"), name)


def assert_loads(place: object, step: int) -> None:
    """The checkpoint of a step holds exactly the state of that step."""
    loaded = load(open_storage(str(place)), folder_name(step))
    for key, whole in state(step).items():
        np.testing.assert_array_equal(loaded[key], whole)
    assert loaded.keys() == state(step).keys()


def files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    )
