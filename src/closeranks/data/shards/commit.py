"""Commits finished shards as a data set, by writing ``dataset.json``.

It lists the shards, and is written last and atomically, replacing an older one. Invariants: every shard it lists is
complete and durable before; with ``extend`` the shards that were listed keep their positions, so that earlier samples
keep their numbers; committing the same shards twice changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crc32c import crc32c

from closeranks.core.errors import DataError
from closeranks.core.system.failpoints import declare_failpoint, failpoint
from closeranks.core.system.regular_file import open_descriptor, read_bytes
from closeranks.data.shards.encoding import RecordSchema, decode_schemas
from closeranks.data.shards.manifest import (
    NAME,
    DatasetInfo,
    DatasetManifest,
    ShardEntry,
    decode_manifest,
    encode_manifest,
)
from closeranks.data.shards.shard_footer import read_footer
from closeranks.data.shards.shard_format import ShardFooter, ShardHeader, UnsoundShard, encode_footer, footer_digest
from closeranks.storage.disk import read_range
from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import StorageError

SHARDS_READ = declare_failpoint("shards read back", "all shards are whole; dataset.json is not written")


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """A finished shard, as described by its own file."""

    entry: ShardEntry
    head: ShardHeader
    notes: Mapping[str, Any]

    @property
    def schemas(self) -> list[RecordSchema]:
        return decode_schemas(self.notes.get("forms", []))


def commit(
    folder: str | Path,
    names: Sequence[str],
    about: DatasetInfo,
    *,
    head: ShardHeader | None = None,
    extend: bool = False,
) -> DatasetManifest:
    """Make these shards, in this order, the data set of ``folder``. ``head`` describes a data set without any shards.
    ``extend``: append them to those that its ``dataset.json`` lists already."""
    folder = Path(folder)
    before = _standing(folder) if extend else None
    finished = [open_shard(folder / name) for name in names]
    heads = {*([before.head] if before else []), *(shard.head for shard in finished), *([head] if head else [])}
    if len(heads) != 1:
        words = "; ".join(sorted(f"{h.kind} {h.dtype} in blocks of {h.block_bytes}" for h in heads)) or "nothing"
        raise DataError(
            f"the shards of '{folder}' do not form one data set: {words}", "Build each into a folder of its own."
        )
    manifest = append_shards(
        before, DatasetManifest(heads.pop(), about, _fields(finished), tuple(s.entry for s in finished)), folder
    )
    failpoint(SHARDS_READ)
    try:
        LocalStorage(folder).publish(NAME, encode_manifest(manifest), replace=True)
    except StorageError as error:
        raise DataError(f"'{folder / NAME}' cannot be written: {error}", "Run the same build again.") from error
    return manifest


def append_shards(before: DatasetManifest | None, new: DatasetManifest, folder: Path) -> DatasetManifest:
    """The data set with the new shards after the old ones. Pure."""
    for shard in new.shards:
        if new.about.vocab_size and shard.data_bytes and shard.largest >= new.about.vocab_size:
            what = f"'{folder / shard.name}' holds the token {shard.largest}, and the vocabulary has"
            raise DataError(f"{what} {new.about.vocab_size}", "Name the tokenizer that the shards were made with.")
    if before is None:
        return new
    for key in ("vocab_size", "tokenizer", "tokenizer_digest"):
        old, now = getattr(before.about, key), getattr(new.about, key)
        if old != now:
            what = f"{key} is {now!r}, and the data set in '{folder}' has {old!r}"
            raise DataError(what, "Append with the same tokenizer, or build into a new folder.")
    known = {shard.name: shard for shard in before.shards}
    if any(known.get(shard.name, shard) != shard for shard in new.shards):
        raise DataError(f"a shard of '{folder}' is to be listed twice with different content", "Give it a new number.")
    added = tuple(shard for shard in new.shards if shard.name not in known)
    if not added:
        return before
    fields = {
        name: tuple(sorted({*before.fields.get(name, ()), *new.fields.get(name, ())}))
        for name in {*before.fields, *new.fields}
    }
    about = replace(new.about, provenance={**new.about.provenance, "before": dict(before.about.provenance)})
    return DatasetManifest(before.head, about, fields, before.shards + added)


def open_shard(path: Path) -> FinishedShard:
    """``DataError`` if the shard is incomplete."""
    try:
        fd = open_descriptor(path)
        try:
            footer, checksums = read_footer(fd)
            notes = json.loads(_notes(fd, footer, checksums.tolist()))
        finally:
            os.close(fd)
    except UnsoundShard as error:
        raise DataError(f"'{path}' cannot be used: {error}", "Remove it and run the same build again.") from error
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from error
    return FinishedShard(ShardEntry.of(path.name, footer, footer_digest(encode_footer(footer))), footer.head, notes)


def _notes(fd: int, footer: ShardFooter, checksums: Sequence[int]) -> bytes:
    """Read in whole blocks, each of which is checked."""
    shape, size = footer.shape, footer.head.block_bytes
    first = shape.notes_offset // size * size
    data = read_range(fd, first, shape.table_offset - first)
    for start in range(0, len(data), size):
        if crc32c(data[start : start + size]) != checksums[(first + start) // size]:
            raise UnsoundShard(f"the block at byte {first + start} does not match its checksum")
    return data[shape.notes_offset - first :][: shape.notes_bytes]


def _standing(folder: Path) -> DatasetManifest | None:
    try:
        return decode_manifest(read_bytes(folder / NAME), str(folder / NAME))
    except FileNotFoundError:
        return None


def _fields(finished: Iterable[FinishedShard]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for shard in finished:
        for schema in shard.schemas:
            for field in schema:
                found.setdefault(field.name, set()).add(field.type_name)
    return {name: tuple(sorted(kinds)) for name, kinds in found.items()}
