"""The manifest of a data set, ``dataset.json``.

Written last and replaced as a whole: a folder without one is an unfinished build. Invariants: it lists the shards in
the order of their samples, with a digest of each, so that a truncated, replaced or foreign shard is noticed; it
contains no times or locations, so that the same build gives the same bytes; what is appended later comes after what was
there, and earlier samples keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import Ints
from closeranks.data.files.protocol import Files
from closeranks.data.shards.shard_format import SUFFIX, TOKEN_DTYPES, Kind, ShardFooter, ShardHeader, ShardRegions
from closeranks.storage.documents import UnsoundDocument, seal, unseal

NAME = "dataset.json"
VERSION = 1
_KIND = "dataset"
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*" + re.escape(SUFFIX))
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What a build says about the data, beyond what the shards contain."""

    vocab_size: int = 0
    """Token ids are below it; 0: unknown."""
    tokenizer: str = ""
    tokenizer_digest: str = ""
    """BLAKE3 of the tokenizer's file; empty if there is none (bytes)."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The inputs and settings of the build: plain values."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    name: str
    num_items: int
    data_bytes: int
    notes_bytes: int
    largest: int
    blake3: str
    """Digest of the shard's footer."""

    def regions(self, block_bytes: int) -> ShardRegions[int]:
        return ShardRegions(self.num_items, self.data_bytes, self.notes_bytes, block_bytes)

    @staticmethod
    def of(name: str, footer: ShardFooter, digest: str) -> ShardEntry:
        shape = footer.shape
        return ShardEntry(name, shape.num_items, shape.data_bytes, shape.notes_bytes, footer.largest, digest)


@dataclass(frozen=True, slots=True)
class DatasetManifest:
    head: ShardHeader
    about: DatasetInfo
    fields: Mapping[str, tuple[str, ...]]
    """For records: every field's name, and the kinds of its values."""
    shards: tuple[ShardEntry, ...]

    @property
    def regions(self) -> ShardRegions[Ints]:
        """The regions of all shards at once: computed one by one for thousands, they would dominate the time to open a
        data set."""
        counts = [(shard.num_items, shard.data_bytes, shard.notes_bytes) for shard in self.shards]
        columns = np.array(counts, dtype=np.int64).reshape(-1, 3).T
        return ShardRegions(columns[0], columns[1], columns[2], self.head.block_bytes)

    @property
    def num_items(self) -> int:
        return sum(shard.num_items for shard in self.shards)

    @property
    def num_units(self) -> int:
        """Tokens, or bytes of records."""
        return sum(shard.data_bytes for shard in self.shards) // self.head.unit_bytes

    @property
    def num_bytes(self) -> int:
        return int(self.regions.num_bytes.sum())

    @property
    def identity(self) -> str:
        """Identifies the samples and their order, whatever the files are called and wherever they came from."""
        head = f"{self.head.kind} {self.head.dtype} {self.about.vocab_size}\n"
        digest = blake3((head + "\n".join(shard.blake3 for shard in self.shards)).encode()).hexdigest(length=16)
        return f"shards of {self.num_items} {'documents' if self.head.kind == 'tokens' else 'records'}, blake3 {digest}"


def encode_manifest(manifest: DatasetManifest) -> bytes:
    shards = [_encode_shard(shard, manifest.head) for shard in manifest.shards]
    body = {
        "kind": manifest.head.kind,
        "dtype": manifest.head.dtype,
        "block_bytes": manifest.head.block_bytes,
        "num_items": manifest.num_items,
        "num_units": manifest.num_units,
        **asdict(manifest.about),
        "fields": {name: list(kinds) for name, kinds in sorted(manifest.fields.items())},
        "shards": shards,
    }
    return seal(_KIND, body, VERSION)


def decode_manifest(data: bytes, name: str) -> DatasetManifest:
    """``DataError`` for a manifest that is damaged, of a later version of this program, or inconsistent."""
    fix = "Build the data set again, or copy it again from an intact copy."
    try:
        body = unseal(_KIND, data, f"'{name}'", VERSION)
    except UnsoundDocument as error:
        raise DataError(str(error), "Update closeranks." if error.is_newer else fix) from error
    try:
        manifest = _decode(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"'{name}' makes no sense ({type(error).__name__}: {error})", fix) from error
    return manifest


def read_manifest(files: Files) -> DatasetManifest:
    """One read and no listing in the normal case."""
    try:
        data = files.read(NAME)
    except DataError as error:
        names = [info.name for info in files.list()]
        if NAME in names or not any(name.endswith((SUFFIX, f"{SUFFIX}.part")) for name in names):
            raise
        fix = "Run the same build again: it continues from the finished shards."
        raise DataError(f"'{files.url}' holds shards without '{NAME}': its build was not finished", fix) from error
    return decode_manifest(data, files.full_name(NAME))


def _decode(body: Any) -> DatasetManifest:
    kind: Kind = body["kind"]
    block_bytes = _count(body["block_bytes"])
    if kind not in ("tokens", "records") or (body["dtype"] in TOKEN_DTYPES) != (kind == "tokens"):
        raise ValueError(f"kind '{kind}' of dtype '{body['dtype']}'")
    if block_bytes < 4096 or block_bytes & (block_bytes - 1):
        raise ValueError(f"blocks of {block_bytes} bytes")
    head = ShardHeader(kind, body["dtype"] if kind == "tokens" else "", block_bytes)
    about = DatasetInfo(
        _count(body["vocab_size"]), str(body["tokenizer"]), str(body["tokenizer_digest"]), dict(body["provenance"])
    )
    fields = {str(name): tuple(map(str, kinds)) for name, kinds in body["fields"].items()}
    shards = tuple(_decode_shard(entry, head.unit_bytes) for entry in body["shards"])
    manifest = DatasetManifest(head, about, fields, shards)
    if (body["num_items"], body["num_units"]) != (manifest.num_items, manifest.num_units):
        raise ValueError("the counts are not the sums of the shards'")
    if manifest.regions.num_bytes.tolist() != [entry[1] for entry in body["shards"]]:
        raise ValueError("the sizes of a shard contradict each other")
    if len({shard.name for shard in shards}) != len(shards):
        raise ValueError("a shard is listed twice")
    return manifest


def _encode_shard(shard: ShardEntry, head: ShardHeader) -> list[Any]:
    num_bytes = shard.regions(head.block_bytes).num_bytes
    counts = (shard.num_items, shard.data_bytes, shard.notes_bytes, shard.largest)
    return [shard.name, num_bytes, *counts, shard.blake3]


def _decode_shard(entry: list[Any], unit_bytes: int) -> ShardEntry:
    name, _, num_items, data_bytes, notes_bytes, largest, digest = entry
    if not _SHARD_NAME.fullmatch(name) or not _HEX.fullmatch(digest):
        raise ValueError(f"a shard '{name}' with digest '{digest}'")
    if _count(data_bytes) % unit_bytes:
        raise ValueError(f"shard '{name}' has {data_bytes} bytes of data")
    return ShardEntry(name, _count(num_items), data_bytes, _count(notes_bytes), _count(largest, 1 << 63), digest)


def _count(value: Any, limit: int = 1 << 48) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"'{value}' where a count is expected")
    return value
