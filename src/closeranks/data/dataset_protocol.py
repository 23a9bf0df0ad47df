"""The interfaces of stored data, which make any format usable in any job.

Two kinds: ``Records`` (each record is a sample: images, features, pairs) and ``Tokens`` (one long stream with the ends
of its documents). Invariants: a record or token is found by its number alone, in any order and from any process;
returned data has passed the checksums that its format has; a record that has not is a ``BadRecordError`` which names
file, offset and reason. Order, batches and ranks are handled elsewhere. Stores can be pickled (they reopen their
files), and are read from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Record: TypeAlias = Mapping[str, Any]
"""Named values: bytes, str, int, float, bool, None, lists and dicts of those (JSON), or numpy arrays."""


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where something is stored, for people: ``file`` as the user knows it (a path or URL), ``offset`` in bytes or
    rows."""

    file: str
    offset: int
    unit: str = "byte"

    def __str__(self) -> str:
        return f"'{self.file}', {self.unit} {self.offset}"


class Records(Protocol):
    """Records by number."""

    identity: str
    """Identifies the content, not only the path: a resumed run refuses other data. Cheap to compute (no full read)."""
    block: int
    """Number of records that are stored together (``typical_block``); 0 if all orders cost the same."""

    def __len__(self) -> int: ...

    def read(self, indices: Ints) -> list[Record]:
        """In the order of ``indices``. ``BadRecordError`` for the first that is damaged."""
        ...

    def where(self, index: int) -> RecordLocation: ...

    def files_of(self, indices: Ints) -> Sequence[str]:
        """Names of the files that contain these records, in the order first needed, without duplicates."""
        ...

    def close(self) -> None:
        """Release all files; ``read`` opens them again."""
        ...


class Tokens(Protocol):
    """A stream of token ids, cut into documents."""

    identity: str
    dtype: np.dtype[Any]
    vocab_size: int
    """All ids are below it; 0 if the format does not say."""
    block: int
    """Number of tokens that are stored together (``typical_block``); 0 if all orders cost the same."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def ends(self) -> npt.NDArray[Any]:
        """Where each document ends in the stream, ascending; memory-mapped or computed once. The last is
        ``num_tokens``. Empty documents are allowed."""
        ...

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from each start, one row each, also across documents and files. [n, length]"""
        ...

    def where(self, start: int) -> RecordLocation: ...

    def files_of(self, starts: Ints, length: int) -> Sequence[str]: ...

    def close(self) -> None:
        """Release all files; ``read`` opens them again."""
        ...


@runtime_checkable
class ColumnarRecords(Records, Protocol):
    """Records whose fields are stored separately, so that unused fields need not be decoded."""

    @property
    def column_names(self) -> Sequence[str]: ...

    def select(self, names: Sequence[str]) -> Records:
        """The same records with only these fields, with the same identity."""
        ...


class CheckableIndex(Protocol):
    @property
    def path(self) -> Path: ...

    def check(self) -> None:
        """Checks every byte; ``DataError`` names what is damaged."""
        ...


@runtime_checkable
class IndexedStore(Protocol):
    """A store with a saved index, of which opening checks only a part."""

    @property
    def indexes(self) -> Sequence[CheckableIndex]: ...


def select_fields(records: Records, names: Collection[str]) -> Records:
    """The records with only these fields (column projection), if the format can skip the others; ``json.label`` needs
    ``json``. Without names, or if one is not a column, the records are returned as they are: the reader then reports
    what is missing."""
    if not names or not isinstance(records, ColumnarRecords):
        return records
    found = {name: _column_of(name, records.column_names) for name in names}
    return records.select([*dict.fromkeys(found.values())]) if "" not in found.values() else records


def _column_of(name: str, columns: Sequence[str]) -> str:
    while name and name not in columns:
        name = name.rpartition(".")[0]
    return name


def typical_block(counts: Sequence[int] | Ints) -> int:
    """Number of items that are stored together, from the number in each file (or other unit that is read as a whole); 0
    for a single one. The median: with files of equal size except the last, blocks then coincide with files, and a few
    odd ones do not matter. The location of the files has no influence: data that is moved keeps its order."""
    held = np.sort(np.asarray(counts, dtype=np.int64))
    held = held[held > 0]
    return int(held[len(held) // 2]) if len(held) > 1 else 0
