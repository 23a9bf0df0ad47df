"""What lies together, and which fields are read at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from closeranks.data.dataset_protocol import ColumnarRecords, Records, select_fields, typical_block
from tests.data.sources.memory_stores import MemoryRecords


@pytest.mark.parametrize(
    ("counts", "block"),
    [([], 0), ([7], 0), ([0, 7, 0], 0), ([100, 100, 100, 3], 100), ([1_000_000, *[10] * 50], 10), ([4, 4], 4)],
)
def test_what_lies_together_is_what_most_files_hold(counts: list[int], block: int) -> None:
    assert typical_block(counts) == typical_block(np.array(counts, dtype=np.int64)) == block


class Table(MemoryRecords):
    """Records that remember which columns were asked for."""

    def __init__(self, column_names: Sequence[str]) -> None:
        super().__init__([])
        self.column_names = column_names

    def select(self, names: Sequence[str]) -> Records:
        return Table(names)


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["b"], ["b"]),
        (["json.label", "json.box.x"], ["json"]),
        (["a.b", "b"], ["a.b", "b"]),
        ([], ["a.b", "b", "json"]),
        (["b", "absent"], ["a.b", "b", "json"]),
    ],
)
def test_only_columns_that_are_needed_are_read(names: list[str], columns: list[str]) -> None:
    found = select_fields(Table(["a.b", "b", "json"]), names)
    assert isinstance(found, ColumnarRecords)
    assert [*found.column_names] == columns


def test_records_without_columns_stay_what_they_are() -> None:
    records = MemoryRecords([{"a": 1}])
    assert select_fields(records, ["a"]) is records
