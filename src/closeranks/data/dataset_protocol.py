"""What must stored data offer, so that any format serves any job?

Two kinds: ``Records`` (each record is a sample: images, features, pairs) and ``Tokens`` (one long stream with the ends
of its documents). Invariants: a record or token is found by its number alone, in any order and from any process; what a
store returns has passed the checksums that its format carries; a record that has not is a ``BadRecordError`` which
names file, offset and reason. Order, batches and ranks are not a store's business. Stores can be pickled (they open
their files again), and are read from one thread at a time.
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
    """Where something lies, for people: ``file`` as they know it (a path or URL), ``offset`` in bytes or rows."""

    file: str
    offset: int
    unit: str = "byte"

    def __str__(self) -> str:
        return f"'{self.file}', {self.unit} {self.offset}"


class Records(Protocol):
    """Records by number."""

    identity: str
    """Names the content, not the path alone: a resumed run refuses other data. Cheap to make (no full read)."""
    block: int
    """Records that lie together (``typical_block``); 0 where any order costs the same."""

    def __len__(self) -> int: ...

    def read(self, indices: Ints) -> list[Record]:
        """In the order asked for. ``BadRecordError`` for the first that is damaged."""
        ...

    def where(self, index: int) -> RecordLocation: ...

    def files_of(self, indices: Ints) -> Sequence[str]:
        """Names of the files these records lie in, in the order first needed, without repeats."""
        ...

    def close(self) -> None:
        """Let go of all files; ``read`` opens them again."""
        ...


class Tokens(Protocol):
    """A stream of token ids, cut into documents."""

    identity: str
    dtype: np.dtype[Any]
    vocab_size: int
    """Ids are below it; 0 where the format does not say."""
    block: int
    """Tokens that lie together (``typical_block``); 0 where any order costs the same."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def ends(self) -> npt.NDArray[Any]:
        """Where each document ends in the stream, ascending; memory-mapped or computed once. The last is
        ``num_tokens``. Empty documents are allowed."""
        ...

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """``length`` tokens from each start, one row each, across documents and files alike. [n, length]"""
        ...

    def where(self, start: int) -> RecordLocation: ...

    def files_of(self, starts: Ints, length: int) -> Sequence[str]: ...

    def close(self) -> None:
        """Let go of all files; ``read`` opens them again."""
        ...


@runtime_checkable
class ColumnarRecords(Records, Protocol):
    """Records whose fields lie apart, so that those nobody asks for need not be decoded."""

    @property
    def column_names(self) -> Sequence[str]: ...

    def select(self, names: Sequence[str]) -> Records:
        """The same records with these fields alone, of the same identity."""
        ...


class CheckableIndex(Protocol):
    @property
    def path(self) -> Path: ...

    def check(self) -> None:
        """Every byte; ``DataError`` names what is damaged."""
        ...


@runtime_checkable
class IndexedStore(Protocol):
    """A store that reads by a saved index, of which opening checks a part."""

    @property
    def indexes(self) -> Sequence[CheckableIndex]: ...


def select_fields(records: Records, names: Collection[str]) -> Records:
    """Only what these fields need, where a format can leave the others out; ``json.label`` needs ``json``. No names, or
    one that is no column: as they are, for whoever reads to say what is missing."""
    if not names or not isinstance(records, ColumnarRecords):
        return records
    found = {name: _column_of(name, records.column_names) for name in names}
    return records.select([*dict.fromkeys(found.values())]) if "" not in found.values() else records


def _column_of(name: str, columns: Sequence[str]) -> str:
    while name and name not in columns:
        name = name.rpartition(".")[0]
    return name


def typical_block(counts: Sequence[int] | Ints) -> int:
    """Items that lie together, from how many each file (or what else is read as a whole) holds; 0 for a single one. The
    median: blocks then fall on files that are equal but for the last one, and a few odd ones do not matter. Where the
    files lie does not count: data that moves keeps its order."""
    held = np.sort(np.asarray(counts, dtype=np.int64))
    held = held[held > 0]
    return int(held[len(held) // 2]) if len(held) > 1 else 0
