"""Finds the file of a row, when rows are numbered across several files.

Invariant: rows are numbered in the order of the files, and within a file in stored order; files may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from closeranks.core.errors import DataError
from closeranks.data.dataset_protocol import Ints, typical_block


@dataclass(frozen=True, slots=True)
class FileRows:
    names: Sequence[str]
    firsts: Ints
    """The first row of each file, followed by the total number of rows."""

    @staticmethod
    def of(names: Sequence[str], counts: Sequence[int]) -> FileRows:
        return FileRows(names, np.cumsum([0, *counts], dtype=np.int64))

    @property
    def num_rows(self) -> int:
        return int(self.firsts[-1])

    @property
    def block(self) -> int:
        """Number of rows that are stored together: as many as a file holds, if there are several."""
        return typical_block(np.diff(self.firsts))

    def files_at(self, rows: Ints) -> Ints:
        """The number of each row's file."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    def names_of(self, rows: Ints) -> list[str]:
        """In the order first needed, without duplicates."""
        numbers = self.files_at(self.check_bounds(rows))
        _, at = np.unique(numbers, return_index=True)
        return [self.names[number] for number in numbers[np.sort(at)].tolist()]

    def check_bounds(self, rows: Ints) -> Ints:
        """Numpy counts negative numbers from the end; a store must not."""
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= self.num_rows):
            wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise DataError(f"there is no number {wrong} in this data; its indices run from 0 to {self.num_rows - 1}")
        return rows
