"""Stores that lie in memory, and a folder of files that is none: samples without any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.core.errors import BadRecordError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation
from closeranks.data.files.protocol import FileInfo


class MemoryTokens:
    """Documents in a row, in "files" of ``block`` tokens; counts its reads."""

    def __init__(self, documents: Sequence[npt.NDArray[Any]], *, vocab_size: int = 0, block: int = 0) -> None:
        self._tokens = np.concatenate(documents) if documents else np.zeros(0, dtype=np.uint16)
        self._ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        self.identity = f"memory {hash(self._tokens.tobytes()):x}"
        self.dtype: np.dtype[Any] = self._tokens.dtype
        self.vocab_size, self.block = vocab_size, block
        self.num_reads = 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def ends(self) -> npt.NDArray[Any]:
        return self._ends

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        self.num_reads += 1
        assert len(starts) == 0 or (starts.min() >= 0 and int(starts.max()) + length <= self.num_tokens)
        return np.lib.stride_tricks.sliding_window_view(self._tokens, length)[starts]

    def where(self, start: int) -> RecordLocation:
        return RecordLocation(f"part-{start // max(1, self.block)}", start % max(1, self.block), "token")

    def files_of(self, starts: Ints, length: int) -> Sequence[str]:
        block = max(1, self.block)
        touched = [f for s in starts.tolist() for f in range(s // block, (s + length - 1) // block + 1)]
        return [f"part-{number}" for number in dict.fromkeys(touched)]

    def close(self) -> None:
        return None


class MemoryRecords:
    """Records in a list, two to a "file"; those in ``bad`` are damaged."""

    block = 2

    def __init__(self, records: Sequence[Record], bad: Sequence[int] = ()) -> None:
        self._records, self._bad = list(records), set(bad)
        self.identity = f"memory of {len(records)} records"
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Ints) -> list[Record]:
        self.num_reads += 1
        for index in indices.tolist():
            if index in self._bad:
                raise BadRecordError(f"{self.where(index)}: the checksum does not match", "Copy it again.")
        return [self._records[index] for index in indices.tolist()]

    def where(self, index: int) -> RecordLocation:
        return RecordLocation(f"part-{index // 2}", index % 2, "row")

    def files_of(self, indices: Ints) -> Sequence[str]:
        return [f"part-{number}" for number in dict.fromkeys((indices // 2).tolist())]

    def close(self) -> None:
        return None


class MemoryFiles:
    """Holds nothing; remembers what was wanted."""

    is_local = True

    def __init__(self, url: str = "/data/corpus") -> None:
        self.url = url
        self.wanted: list[list[str]] = []
        self.is_closed = False

    def list(self) -> Sequence[FileInfo]:
        return ()

    @contextmanager
    def local_path(self, name: str) -> Iterator[Path]:
        yield Path(self.url, name)

    def read(self, name: str) -> bytes:
        return b""

    def prefetch(self, names: Sequence[str]) -> None:
        self.wanted.append([*names])

    def discard(self, name: str) -> None:
        return None

    def full_name(self, name: str) -> str:
        return f"{self.url}/{name}"

    def close(self) -> None:
        self.is_closed = True
