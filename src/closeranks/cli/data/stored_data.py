"""Opens the stored data of a path, or of a job's data table.

Imports no torch. Invariant: what is opened is what training would read, by the same detection of formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from closeranks.core.errors import DataError
from closeranks.data.config import DataConfig, RecordsConfig, SingleData, TokensConfig
from closeranks.data.dataset_protocol import RecordLocation, Records, Tokens
from closeranks.data.files.open import open_files
from closeranks.data.files.protocol import Files
from closeranks.data.formats.open import SHARDS, detect, open_records, open_tokens
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.shards.manifest import read_manifest


@dataclass(frozen=True, slots=True)
class StoredData:
    """Stored data: ``tokens`` or ``records``."""

    name: str
    format: str
    files: Files
    tokens: Tokens | None = None
    records: Records | None = None
    text_bytes: int = 0
    """Size of its text before tokenization; 0 if it was not recorded."""
    seq_len: int = 0
    """The sequence length of the job; 0 if there is none."""

    @property
    def noun(self) -> str:
        return "documents" if self.tokens is not None else "records"

    @property
    def num_samples(self) -> int:
        return len(self.tokens.ends) if self.tokens is not None else len(self._records)

    @property
    def identity(self) -> str:
        return self.tokens.identity if self.tokens is not None else self._records.identity

    @property
    def vocab_size(self) -> int:
        return self.tokens.vocab_size if self.tokens is not None else 0

    @property
    def _records(self) -> Records:
        assert self.records is not None
        return self.records

    def where(self, number: int) -> RecordLocation:
        if self.tokens is None:
            return self._records.where(number)
        return self.tokens.where(_start(self.tokens, number))

    def read(self, number: int) -> dict[str, Any]:
        if self.tokens is None:
            return dict(self._records.read(np.array([number], dtype=np.int64))[0])
        start, end = _start(self.tokens, number), int(self.tokens.ends[number])
        if start == end:
            return {"tokens": np.zeros(0, dtype=self.tokens.dtype)}
        return {"tokens": self.tokens.read(np.array([start], dtype=np.int64), end - start)[0]}


def _start(tokens: Tokens, number: int) -> int:
    return int(tokens.ends[number - 1]) if number else 0


def open_path(path: str, format: str = "") -> StoredData:
    """Token shards and Megatron files are opened as tokens, everything else as records."""
    if "://" not in path and not Path(path).expanduser().exists():
        raise DataError(f"there is no file or folder '{path}'", "Check the name.")
    return _open(path, open_files(path), format, IndexLocation())


def _open(name: str, files: Files, format: str, location: IndexLocation) -> StoredData:
    format = format or detect(files)
    if format == SHARDS:
        manifest = read_manifest(files)
        if manifest.head.kind == "tokens":
            text_bytes = int(manifest.about.provenance.get("text_bytes", 0))
            return StoredData(
                name, format, files, tokens=open_tokens(files, format, location, ""), text_bytes=text_bytes
            )
    if format == "megatron":
        return StoredData(name, format, files, tokens=open_tokens(files, format, location, ""))
    return StoredData(name, format, files, records=open_records(files, format, location))


def open_config(config: DataConfig) -> Iterator[StoredData]:
    """The stored data of a job's table; for a mixture, that of each part."""
    for part, table in _tables(config, config.name):
        files = open_files(table.path, cache=table.cache, cache_bytes=table.cache_bytes)
        location = IndexLocation(table.index, table.cache)
        name = f"{part} ({table.path})"
        if isinstance(table, RecordsConfig):
            yield StoredData(name, table.format, files, records=open_records(files, table.format, location))
            continue
        tokens = open_tokens(files, table.format, location, table.field)
        is_ours = (table.format or detect(files)) == SHARDS
        text_bytes = int(read_manifest(files).about.provenance.get("text_bytes", 0)) if is_ours else 0
        yield StoredData(name, table.format, files, tokens=tokens, text_bytes=text_bytes, seq_len=table.seq_len)


def _tables(config: DataConfig, name: str) -> Iterator[tuple[str, TokensConfig | RecordsConfig]]:
    parts: dict[str, SingleData] = {key: part.data for key, part in getattr(config, "parts", {}).items()} or {
        name: config  # type: ignore[dict-item]
    }
    for key, table in parts.items():
        if not isinstance(table, TokensConfig | RecordsConfig):
            what = f"data '{table.name}' of the job is not stored as tokens or records"
            raise DataError(what, "Use data with name = 'tokens' or 'records', or give a path.")
        yield key, table
