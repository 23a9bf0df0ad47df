"""Validates a manifest before anything acts on its contents.

A seal proves that a manifest was not damaged by accident, not that its author was correct or benign. Invariants: after
``validate_manifest`` every number in a manifest has the right type and is within bounds, no name leads out of the
checkpoints' root, no two chunks claim the same bytes of a file, and the chunks of a tensor have no more elements than
the tensor, so that the memory a reader allocates is bounded by the files that exist. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import inf, isfinite, prod
from typing import Any, NoReturn

from closeranks.checkpoint.format.digests import item_bytes
from closeranks.checkpoint.format.manifest import (
    MANIFEST,
    CheckpointManifest,
    ChunkLocation,
    DataFile,
    decode_manifest,
    parse_folder,
)
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.core.printable import is_printable, printable
from closeranks.core.reshard import plan_copies
from closeranks.storage.protocol import MissingError, Storage, StorageError

FIX = "Use an earlier checkpoint."
DOCUMENT_BYTES = 1 << 30
"""Upper bound for a manifest: it has a hundred bytes and more per chunk, and up to a million chunks and more."""
_HEADER_BYTES = 100_000_000 + 8
"""No safetensors reader accepts a longer header."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_HEX = re.compile(r"[0-9a-f]{64}")
_DIMS = 64
_LARGE = 2**63
_DEPTH = 100
_TEXT = 4096
_LATEST = 253402300799.0
"""The end of the year 9999 in Unix time, the latest date that Python can represent."""


def read_document(storage: Storage, name: str) -> bytes:
    """The bytes of a sealed document; one that is absurdly large is refused before it is read."""
    num_bytes = storage.size(name)
    if num_bytes > DOCUMENT_BYTES:
        raise CheckpointError(f"{storage.url}/{name} is damaged: a document cannot have {num_bytes} bytes", FIX)
    return storage.read(name)


def read_manifest(storage: Storage, folder: str) -> CheckpointManifest:
    """The validated manifest of one checkpoint; ``CheckpointError`` names a checkpoint whose manifest is not valid."""
    path = f"{storage.url}/{folder}"
    try:
        data = read_document(storage, f"{folder}/{MANIFEST}")
    except MissingError as error:
        raise CheckpointError(f"{path} is not a finished checkpoint: it has no {MANIFEST}", FIX) from error
    except StorageError as error:
        raise CheckpointError(f"the manifest of {path} cannot be read: {error}", FIX) from error
    return validate_manifest(data, path)


def validate_manifest(data: bytes, path: str) -> CheckpointManifest:
    """``path``: of the checkpoint's folder. If the folder is named like a checkpoint, the manifest must have the same
    name; a copy under any other folder name may be read."""
    manifest = decode_manifest(data, f"{path}/{MANIFEST}")
    with _refused(path):
        _check(manifest, path.rstrip("/").rpartition("/")[2])
    return manifest


def validate_head(manifest: CheckpointManifest, folder: str) -> None:
    """Validate everything but the chunks, of which only the file names are checked: enough to decide what retention
    removes."""
    with _refused(folder):
        _check_head(manifest, folder)
        _checked_files(manifest.files)
        for entry in manifest.entries:
            _text(entry.file, "file")


@contextmanager
def _refused(path: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged or invalid: {error}", FIX) from error


def coverage_gap(pieces: Iterable[Piece]) -> str:
    """What is wrong with the pieces as a partition of one tensor; empty: they cover each element exactly once."""
    held = tuple(pieces)
    if len(held) == 1 and held[0].is_whole:
        return ""
    shape = held[0].shape
    missing = plan_copies(Piece.whole(held[0].name, shape), held).missing
    if missing:
        return f"elements from {missing[0].start} on are missing"
    return "" if sum(piece.numel for piece in held) == prod(shape) else "some of its chunks overlap"


def _check(manifest: CheckpointManifest, folder: str) -> None:
    _check_head(manifest, folder)
    files = _checked_files(manifest.files)
    for entry in manifest.entries:
        _check_entry(entry, manifest.name, files)
    if manifest.is_full and manifest.referenced_files():
        raise ValueError("it is marked as full but refers to other checkpoints")
    _check_tensors(manifest)
    _check_ranges(manifest.entries)


def _check_head(manifest: CheckpointManifest, folder: str) -> None:
    place = parse_folder(_text(manifest.name, "name"))
    if place is None or place[0] != _number(manifest.step, "step"):
        raise ValueError(f"'{manifest.name}' is not a checkpoint of step {manifest.step}")
    if parse_folder(folder) is not None and folder != manifest.name:
        raise ValueError(f"it was saved as {manifest.name}")
    for name in ("save", "layout"):
        _text(getattr(manifest, name), name)
    _number(manifest.num_ranks, "num_ranks", 1)
    _real(manifest.created, "created", 0.0, _LATEST)
    if manifest.metric is not None:
        _real(manifest.metric, "metric")
    if type(manifest.is_full) is not bool or type(manifest.tree) is not dict:
        raise ValueError("its parts are inconsistent")
    _check_plain(manifest.tree)


def _checked_files(files: Iterable[DataFile]) -> dict[str, DataFile]:
    found: dict[str, DataFile] = {}
    for file in files:
        if not _NAME.fullmatch(_text(file.name, "file")) or file.name in found:
            raise ValueError(f"'{file.name}' is not a valid name for a data file")
        _number(file.header_crc32c, f"the checksum of {file.name}", 0, 2**32)
        _number(file.header_bytes, f"the header of {file.name}", 8, _HEADER_BYTES + 1)
        _number(file.num_bytes, f"the size of {file.name}", file.header_bytes)
        found[file.name] = file
    return found


def _check_entry(entry: ChunkLocation, name: str, files: dict[str, DataFile]) -> None:
    chunk = entry.chunk
    what = f"{_text(chunk.section, 'section')}/{_text(chunk.key, 'key')}"
    _check_piece(chunk.piece, what)
    if _number(chunk.num_bytes, what) != chunk.piece.numel * item_bytes(_text(chunk.dtype, what)):
        raise ValueError(f"a chunk of {what} has {chunk.num_bytes} bytes for {chunk.piece.numel} elements")
    _number(chunk.crc32c, what, 0, 2**32)
    _number(entry.digest_term, what, 0, 2**64)
    if not _HEX.fullmatch(_text(entry.blake3, what)):
        raise ValueError(f"a digest of {what} is not valid")
    first = 0
    if "/" in _text(entry.file, what):
        folder, _, file = entry.file.partition("/")
        if parse_folder(folder) is None or folder == name or not _NAME.fullmatch(file):
            raise ValueError(f"{what} is listed in '{entry.file}', where no other checkpoint has files")
    elif entry.file in files:
        first = files[entry.file].header_bytes
        _number(entry.offset + chunk.num_bytes, f"the end of a chunk of {what}", 0, files[entry.file].num_bytes + 1)
    else:
        raise ValueError(f"{what} is listed in '{entry.file}', which is not one of its files")
    _number(entry.offset, f"the place of {what}", first)


def _check_piece(piece: Piece, what: str) -> None:
    dims = (piece.shape, piece.start, piece.size)
    if len({len(numbers) for numbers in dims}) != 1 or len(piece.shape) > _DIMS:
        raise ValueError(f"a chunk of {what} has a different number of dims")
    for whole, start, size in zip(*dims, strict=True):
        _number(whole, what)
        _number(size, what, 0, whole + 1)
        _number(start, what, 0, whole - size + 1)
    if piece.flat is not None:
        first, last = piece.flat
        _number(last, what, 0, prod(piece.size) + 1)
        _number(first, what, 0, last + 1)


def _check_tensors(manifest: CheckpointManifest) -> None:
    """Cheap sums; whether chunks of a tensor overlap is checked when it is read (``coverage_gap``)."""
    for (section, key), entries in manifest.tensors().items():
        first = entries[0].chunk
        if any((one.chunk.dtype, one.chunk.piece.shape) != (first.dtype, first.piece.shape) for one in entries):
            raise ValueError(f"{section}/{key} has two dtypes or shapes")
        numel = sum(entry.chunk.piece.numel for entry in entries)
        if numel != prod(first.piece.shape):
            raise ValueError(f"its chunks of {section}/{key} have {numel} of {prod(first.piece.shape)} elements")


def _check_ranges(entries: Iterable[ChunkLocation]) -> None:
    """Bytes claimed twice would let a small file describe a huge state."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for entry in entries:
        if entry.chunk.num_bytes:
            byte_range = (entry.offset, entry.offset + entry.chunk.num_bytes, entry.chunk.key)
            by_file.setdefault(entry.file, []).append(byte_range)
    for file, ranges in by_file.items():
        for one, other in pairwise(sorted(ranges)):
            if other[0] < one[1]:
                raise ValueError(f"'{one[2]}' and '{other[2]}' claim the same bytes of {file}")


def _number(value: Any, what: str, low: int = 0, high: int = _LARGE) -> int:
    if type(value) is not int or not low <= value < high:
        _refuse(value, what)
    return value


def _real(value: Any, what: str, low: float = -inf, high: float = inf) -> None:
    if type(value) not in (int, float) or not low <= value <= high or not isfinite(value):
        _refuse(value, what)


def _text(value: Any, what: str) -> str:
    """One line of printable text, since names are printed to a terminal."""
    if type(value) is not str or len(value) > _TEXT or not is_printable(value):
        _refuse(value, what)
    return value


def _check_plain(tree: dict[str, Any]) -> None:
    """Limit the depth of the state tree, so that no value breaks a recursive walk; what the values mean is checked by
    their readers."""
    left: list[tuple[Any, int]] = [(tree, 1)]
    while left:
        value, depth = left.pop()
        if isinstance(value, dict | list):
            if depth > _DEPTH:
                raise ValueError(f"its tree is more than {_DEPTH} levels deep")
            left += [(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]


def _refuse(value: Any, what: str) -> NoReturn:
    raise ValueError(f"{printable(str(value)[:80])!r} is not valid ({what})")
