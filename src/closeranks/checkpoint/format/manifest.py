"""The manifest of a checkpoint, its file layout, and the data types that the whole package shares.

    checkpoints/                              the root: a storage (a folder, or a prefix in an object store)
      step-00000040/                          one checkpoint; ``step-00000040-2`` if saved by the run's second attempt
        data-00000-of-00002.safetensors       data written by rank 0 of 2
        part-00000-of-00002.json              lists what rank 0 wrote; removed once the manifest is published
        manifest.json                         written last: its presence commits the checkpoint
      latest                                  names the newest certified checkpoint and its manifest's digest

A tensor of the state is identified by section and key (``model``, ``layers.0.weight``) and saved in chunks: flat or box
pieces of it of at most ``CHUNK_BYTES``, each with its digests. Invariants: a manifest lists every chunk of every
tensor, and each chunk lies in this checkpoint's own files or in an earlier one's, never behind a second reference; all
of it was read back from the medium before the manifest was written, unless ``checkpoint.read_back`` is off. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from closeranks.checkpoint.format.documents import seal, unseal
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece

MANIFEST, LATEST = "manifest.json", "latest"
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a tensor to be saved; ``crc32c`` was computed from the training process's own memory."""

    section: str
    key: str
    dtype: str
    """The name in torch and numpy: ``float32``, ``bfloat16``, ``int64``, ``bool``, ``float8_e4m3fn``."""
    piece: Piece
    """Its name is the key."""
    num_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """A chunk, where it lies, and its digests."""

    chunk: Chunk
    file: str
    """A file of the same checkpoint, or ``step-00000020/data-...`` in an earlier one."""
    offset: int
    """Offset of its first byte in the file."""
    blake3: str
    """BLAKE3 of its bytes: 64 hex digits."""
    digest_term: int
    """Its term of the tensor's layout-independent digest (see ``digests.layout_independent_digest``)."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A safetensors file of this checkpoint, with the digest of its header; the rest is checked chunk by chunk."""

    name: str
    num_bytes: int
    header_bytes: int
    """Size of the header up to the first tensor: the eight bytes of length and the JSON."""
    header_crc32c: int


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank wrote."""

    rank: int
    num_ranks: int
    save: str
    """Identifies the attempt: parts of different attempts never make one checkpoint."""
    files: tuple[DataFile, ...]
    """At most one today; none if nothing that this rank writes has changed."""
    entries: tuple[ChunkLocation, ...]


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    name: str
    """Name of its folder."""
    step: int
    save: str
    num_ranks: int
    layout: str
    created: float
    """Unix time."""
    is_full: bool
    """Whether nothing in it refers to an earlier checkpoint."""
    metric: float | None
    """What ``keep_best`` ranks by, smaller is better; None if nothing was evaluated."""
    tree: Mapping[str, Any]
    """The non-tensor part of the state, as plain JSON values."""
    files: tuple[DataFile, ...]
    entries: tuple[ChunkLocation, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the state it holds, including references."""
        return sum(entry.chunk.num_bytes for entry in self.entries)

    @property
    def own_bytes(self) -> int:
        """Size of its own files."""
        return sum(file.num_bytes for file in self.files)

    def tensors(self) -> dict[tuple[str, str], tuple[ChunkLocation, ...]]:
        """The chunks of each tensor, by section and key."""
        found: dict[tuple[str, str], list[ChunkLocation]] = {}
        for entry in self.entries:
            found.setdefault((entry.chunk.section, entry.chunk.key), []).append(entry)
        return {name: tuple(entries) for name, entries in found.items()}

    def digests(self) -> dict[tuple[str, str], int]:
        """The layout-independent digest of each tensor: equal whatever layout saved it."""
        return {name: sum(entry.digest_term for entry in entries) % 2**64 for name, entries in self.tensors().items()}

    def referenced_files(self) -> frozenset[str]:
        """Files of other checkpoints that this one needs, as ``folder/file``."""
        return frozenset(entry.file for entry in self.entries if "/" in entry.file)


@dataclass(frozen=True, slots=True)
class LatestPointer:
    name: str
    blake3: str
    """BLAKE3 of all bytes of the manifest."""


def folder_name(step: int, part: int = 1) -> str:
    """``part``: the attempt number; the first attempt of a run saves under plain names, the second under ``...-2``."""
    return f"step-{step:08d}" if part == 1 else f"step-{step:08d}-{part}"


def parse_folder(name: str) -> tuple[int, int] | None:
    """Step and attempt number of a checkpoint's folder name; None for anything else."""
    match = _FOLDER.fullmatch(name.rstrip("/"))
    return (int(match[1]), int(match[2] or 1)) if match else None


def data_name(rank: int, num_ranks: int) -> str:
    return f"data-{rank:05d}-of-{num_ranks:05d}.safetensors"


def part_name(rank: int, num_ranks: int) -> str:
    return f"part-{rank:05d}-of-{num_ranks:05d}.json"


# Encoding and decoding of documents. A damaged or foreign one is refused with an error that names it.


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    body = {
        "name": manifest.name,
        "step": manifest.step,
        "save": manifest.save,
        "num_ranks": manifest.num_ranks,
        "layout": manifest.layout,
        "created": manifest.created,
        "is_full": manifest.is_full,
        "metric": manifest.metric,
        "tree": manifest.tree,
        "files": [_file_row(file) for file in manifest.files],
        "tensors": _tensor_rows(manifest.entries),
    }
    return seal("manifest", body)


def decode_manifest(data: bytes, name: str) -> CheckpointManifest:
    body = unseal("manifest", data, name)
    with _refused(name):
        return CheckpointManifest(
            **{key: body[key] for key in ("name", "step", "save", "num_ranks", "layout", "created", "is_full")},
            metric=body["metric"],
            tree=body["tree"],
            files=tuple(DataFile(*row) for row in body["files"]),
            entries=tuple(_entries(body["tensors"])),
        )


def encode_part(part: RankPart) -> bytes:
    body = {
        "rank": part.rank,
        "num_ranks": part.num_ranks,
        "save": part.save,
        "files": [_file_row(file) for file in part.files],
        "tensors": _tensor_rows(part.entries),
    }
    return seal("part", body)


def decode_part(data: bytes, name: str) -> RankPart:
    body = unseal("part", data, name)
    with _refused(name):
        return RankPart(
            body["rank"],
            body["num_ranks"],
            body["save"],
            tuple(DataFile(*row) for row in body["files"]),
            tuple(_entries(body["tensors"])),
        )


def encode_latest(latest: LatestPointer) -> bytes:
    return seal("latest", {"name": latest.name, "blake3": latest.blake3})


def decode_latest(data: bytes, name: str) -> LatestPointer:
    body = unseal("latest", data, name)
    with _refused(name):
        return LatestPointer(str(body["name"]), str(body["blake3"]))


def _file_row(file: DataFile) -> list[Any]:
    return [file.name, file.num_bytes, file.header_bytes, file.header_crc32c]


def _tensor_rows(entries: Iterable[ChunkLocation]) -> list[Any]:
    """One object for each tensor, with its chunks as rows: the manifest of a large run has a million of them."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in entries:
        chunk, piece = entry.chunk, entry.chunk.piece
        row = rows.setdefault(
            (chunk.section, chunk.key),
            {
                "section": chunk.section,
                "key": chunk.key,
                "dtype": chunk.dtype,
                "shape": list(piece.shape),
                "chunks": [],
            },
        )
        if (row["dtype"], row["shape"]) != (chunk.dtype, list(piece.shape)):
            raise ValueError(f"{chunk.section}/{chunk.key} is saved with two dtypes or shapes")
        flat = None if piece.flat is None else list(piece.flat)
        where = [list(piece.start), list(piece.size), flat]
        row["chunks"].append(
            [*where, entry.file, entry.offset, chunk.num_bytes, chunk.crc32c, entry.blake3, f"{entry.digest_term:016x}"]
        )
    return list(rows.values())


def _entries(rows: Iterable[Mapping[str, Any]]) -> Iterable[ChunkLocation]:
    for row in rows:
        section, key, dtype, shape = row["section"], row["key"], row["dtype"], tuple(row["shape"])
        for start, size, flat, file, offset, num_bytes, crc, blake, digest_term in row["chunks"]:
            piece = Piece(key, shape, tuple(start), tuple(size), None if flat is None else (flat[0], flat[1]))
            chunk = Chunk(section, key, dtype, piece, num_bytes, crc)
            yield ChunkLocation(chunk, file, offset, blake, int(digest_term, 16))


class _refused:
    """Turns decoding errors into a ``CheckpointError`` that names the document: a sealed document whose parts do not
    fit together is foreign or from a broken writer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError)):
            what = f"{self._name} is damaged: its parts are inconsistent"
            raise CheckpointError(what, "Use an earlier checkpoint.") from error


def as_reference(entry: ChunkLocation, folder: str) -> ChunkLocation:
    """The same entry, as another checkpoint refers to it."""
    return entry if "/" in entry.file else replace(entry, file=f"{folder}/{entry.file}")
