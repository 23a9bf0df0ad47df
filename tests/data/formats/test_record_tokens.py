"""Any records with ids or text are a stream of tokens, each record read once per batch."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.dataset_protocol import Ints, Record, RecordLocation
from closeranks.data.formats.open import open_tokens
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.record_tokens import RecordTokens
from tests.data.formats.local_files import FolderFiles


class ListRecords:
    """Records of a list; remembers what was read."""

    identity = "list"
    block = 2

    def __init__(self, rows: Sequence[Record]) -> None:
        self.rows = rows
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Ints) -> list[Record]:
        self.asked.append(indices.tolist())
        return [self.rows[number] for number in indices.tolist()]

    def where(self, index: int) -> RecordLocation:
        return RecordLocation("list", index, "row")

    def files_of(self, indices: Ints) -> Sequence[str]:
        return [f"f{number}" for number in dict.fromkeys((indices // 2).tolist())]

    def close(self) -> None:
        return None


def opened(folder: Path, rows: Sequence[Any], field: str = "ids") -> tuple[RecordTokens, ListRecords]:
    (folder / "data").mkdir(exist_ok=True)
    if not (folder / "data" / "rows").exists():
        (folder / "data" / "rows").write_bytes(b"x")
    records = ListRecords([row if isinstance(row, dict) else {"ids": row} for row in rows])
    return RecordTokens(
        records, FolderFiles(folder / "data"), field, IndexLocation(folder=str(folder / "index"))
    ), records


@given(
    rows=st.lists(st.lists(st.integers(0, 70_000), max_size=6), min_size=1, max_size=12),
    length=st.integers(1, 10),
    as_array=st.booleans(),
    data=st.data(),
)
def test_windows_go_across_documents(
    rows: list[list[int]], length: int, as_array: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    given = [np.array(row, np.int32) for row in rows] if as_array else rows
    tokens, records = opened(tmp_path_factory.mktemp("rows"), given)
    stream = [token for row in rows for token in row]
    assert tokens.num_tokens == len(stream)
    np.testing.assert_array_equal(tokens.ends, np.cumsum([len(row) for row in rows]))
    assert tokens.dtype == (np.uint16 if max(stream, default=0) < 65536 else np.uint32)
    if len(stream) < length:
        return
    starts = np.array(data.draw(st.lists(st.integers(0, len(stream) - length), max_size=6)), np.int64)
    records.asked.clear()
    found = tokens.read(starts, length)
    assert found.tolist() == [stream[start : start + length] for start in starts.tolist()]
    read = [number for asked in records.asked for number in asked]
    assert len(read) == len(set(read)), "each record once"
    for start in starts.tolist():
        number = tokens.where(start).offset
        assert tokens.ends[number] - len(rows[number]) <= start < tokens.ends[number]
        assert f"f{number // 2}" in tokens.files_of(starts, length)


@pytest.mark.parametrize("texts", [["grün", "", "abc"], ["grün".encode(), b"", b"abc"]])
def test_text_is_its_bytes(tmp_path: Path, texts: list[Any]) -> None:
    tokens, _ = opened(tmp_path, texts)
    assert (tokens.vocab_size, tokens.dtype) == (256, np.uint8)
    assert tokens.read(np.array([0]), 8).tobytes() == "grünabc".encode()
    assert tokens.ends.tolist() == [5, 5, 8]


def test_members_of_archives_are_decoded_first(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([5, 600], np.uint16))
    rows = [{"npy": buffer.getvalue(), "json": b'{"ids": [1, 2, 3]}'}]
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    assert opened(tmp_path / "1", rows, "npy")[0].read(np.array([0]), 2).tolist() == [[5, 600]]
    assert opened(tmp_path / "2", rows, "json.ids")[0].read(np.array([1]), 2).tolist() == [[2, 3]]


def test_lengths_are_found_out_once(tmp_path: Path) -> None:
    opened(tmp_path, [[1, 2], [3]])
    _, records = opened(tmp_path, [[1, 2], [3]])
    assert records.asked == []


def test_the_field_is_found(tmp_path: Path) -> None:
    tokens, _ = opened(tmp_path, [{"input_ids": [1], "text": "a"}], "")
    assert tokens.num_tokens == 1
    assert tokens.read(np.array([0]), 1).tolist() == [[1]]
    with pytest.raises(DataError, match=r"no field tokens, input_ids or text.*data\.field\): b, x"):
        opened(tmp_path, [{"x": 1, "b": 2}], "")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"other": 1}, "field 'ids' is missing; found other"),
        (3.5, "is of type float, neither text nor a list of ids"),
        ([1.5], r"is float64\[1\] and not a flat list of ids"),
        ([[1, 2]], r"is int64\[1, 2\] and not a flat list of ids"),
        ([[1], [2, 3]], "is not a flat list of ids"),
        ([1, -2], "has the negative id -2"),
        ([2**70], "not a flat list of ids"),
        (None, "is of type NoneType"),
    ],
)
def test_a_record_without_tokens_stops_the_index(tmp_path: Path, bad: Any, reason: str) -> None:
    with pytest.raises(DataError, match=rf"'list', row 1: .*{reason}.*data build") as caught:
        opened(tmp_path, [[1], bad, [2]])
    assert type(caught.value) is DataError, "no token behind it has a number: it cannot be skipped"


def test_text_and_ids_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="text in some records and ids in others"):
        opened(tmp_path, [[1], "abc"])


def test_a_record_that_changed_is_bad(tmp_path: Path) -> None:
    tokens, records = opened(tmp_path, [[1, 2], [3, 4], [5, 6]])
    records.rows = [{"ids": [1, 2]}, {"ids": [3]}, {"ids": [5, 2**20]}]
    assert tokens.read(np.array([0]), 2).tolist() == [[1, 2]]
    with pytest.raises(BadRecordError, match=r"row 1: field 'ids' has 1 tokens, and had 2"):
        tokens.read(np.array([1]), 3)
    with pytest.raises(BadRecordError, match=r"row 2: field 'ids' has the id 1048576"):
        tokens.read(np.array([4]), 2)


def test_tokens_outside_are_refused(tmp_path: Path) -> None:
    tokens, _ = opened(tmp_path, [[1, 2], [3]])
    for start in (-1, 2):
        with pytest.raises(DataError, match="holds 3 tokens"):
            tokens.read(np.array([start]), 2)


def test_what_lies_together_is_counted_in_tokens(tmp_path: Path) -> None:
    assert opened(tmp_path, [[1, 2], [3, 4]])[0].block == 4


def test_pickled_tokens_read_on(tmp_path: Path) -> None:
    tokens, _ = opened(tmp_path, [[1, 2], [3]])
    assert pickle.loads(pickle.dumps(tokens)).read(np.array([1]), 2).tolist() == [[2, 3]]


def test_plain_bytes_are_tokens_even_if_they_are_an_image(tmp_path: Path) -> None:
    data = b"\x89PNG\r\n\x1a\n and so on"
    tokens, _ = opened(tmp_path, [{"ids": data}])
    assert tokens.read(np.array([0]), len(data))[0].tobytes() == data


def test_of_a_table_only_the_column_of_the_tokens_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    rows = {"text": ["ab", "c"], "picture": [b"x" * 100, b"y" * 100]}
    pq.write_table(pa.table(rows), folder / "a.parquet")
    files, place = FolderFiles(folder), IndexLocation(folder=str(tmp_path / "index"))
    tokens = open_tokens(files, "", place, "")
    assert isinstance(tokens, RecordTokens)
    for one in (tokens, pickle.loads(pickle.dumps(tokens))):
        assert one.read(np.array([0]), 3).tobytes() == b"abc"
        assert one._records.column_names == ["text"]
        one.close()
        assert one.read(np.array([1]), 2).tobytes() == b"bc"
