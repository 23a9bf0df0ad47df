from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from closeranks.core.errors import BadRecordError, DataError, SetupError
from closeranks.data.formats.columnar import parquet_files, parquet_records
from closeranks.data.formats.columnar.parquet_records import ParquetRecords
from closeranks.data.formats.record_index.saved_index import IndexLocation
from tests.data.formats.local_files import FolderFiles

NUM_ROWS = 50
"""Of ``a.parquet`` 30, in row groups of 12; of ``b.parquet`` 20, in one."""


def table(first: int, num_rows: int) -> Any:
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "text": [None if number % 7 == 3 else f"row {number}" for number in numbers],
            "tokens": pa.array([[number] * (number % 5) for number in numbers], pa.list_(pa.int64())),
            "image": [{"bytes": bytes([number]) * 3, "path": None} for number in numbers],
        }
    )


def row(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "text": None if number % 7 == 3 else f"row {number}",
        "tokens": [number] * (number % 5),
        "image": bytes([number]) * 3,
    }


def plain(record: Any) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in record.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    (root / "sub").mkdir(parents=True)
    pq.write_table(table(0, 30), root / "a.parquet", row_group_size=12, write_page_checksum=True)
    pq.write_table(table(30, 20), root / "sub" / "b.parquet", write_page_checksum=True)
    (root / "_SUCCESS").touch()
    return root


def opened(root: Path, **settings: Any) -> ParquetRecords:
    return parquet_files.open_records(FolderFiles(root, **settings), IndexLocation(str(root.parent / "index")))


def test_rows_of_all_files_in_any_order(folder: Path) -> None:
    records = opened(folder)
    assert len(records) == NUM_ROWS
    assert records.block == NUM_ROWS // 4
    order = np.random.default_rng(2).permutation(NUM_ROWS)
    assert [plain(record) for record in records.read(order)] == [row(number) for number in order.tolist()]
    assert [record["id"] for record in records.read(np.asarray([40, 3, 40]))] == [40, 3, 40]
    assert records.read(np.asarray([], np.int64)) == []
    with pytest.raises(DataError, match="there is no"):
        records.read(np.asarray([NUM_ROWS]))


def test_says_where_a_row_lies(folder: Path) -> None:
    records = opened(folder)
    assert str(records.where(26)) == f"'{folder / 'a.parquet'}', row group 2, row 2"
    assert str(records.where(31)) == f"'{folder / 'sub' / 'b.parquet'}', row group 0, row 1"
    assert records.files_of(np.asarray([31, 2, 29])) == ["sub/b.parquet", "a.parquet"]


def test_survives_pickling_and_closing(folder: Path) -> None:
    records = opened(folder)
    again = pickle.loads(pickle.dumps(records.select(["id"])))
    assert again.read(np.asarray([44])) == [{"id": 44}]
    assert again.identity == records.identity
    records.close()
    assert records._files.num_held == 0
    assert records.read(np.asarray([7]))[0]["id"] == 7


def test_chosen_columns_alone_are_decoded(folder: Path) -> None:
    chosen = opened(folder).select(["text", "id"])
    assert chosen.read(np.asarray([13])) == [{"text": "row 13", "id": 13}]
    assert chosen._kept[1].column_names == ["text", "id"]
    with pytest.raises(DataError, match=r"no column 'txt'. It has id, text, tokens, image"):
        opened(folder).select(["txt"])


def test_lengths_without_decoding_values(folder: Path) -> None:
    records = opened(folder)
    assert records.lengths("tokens").tolist() == [number % 5 for number in range(NUM_ROWS)]
    assert records.lengths("text").tolist() == [len(row(number)["text"] or "") for number in range(NUM_ROWS)]
    assert records.lengths("id") is None


def test_row_groups_decoded_last_are_kept_within_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = opened(folder)
    num_read = 0
    table_of = records._table

    def counted(*args: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return table_of(*args)

    monkeypatch.setattr(records, "_table", counted)
    for _ in range(3):
        records.read(np.arange(NUM_ROWS))
    assert num_read == 4
    monkeypatch.setattr(parquet_records, "KEPT_BYTES", 1)
    records.close()
    for number in (0, 13, 0, 1):
        records.read(np.asarray([number]))
        assert len(records._kept) == 1
    assert num_read == 4 + 3
    assert records._kept_bytes == sum(kept.nbytes for kept in records._kept.values())


def test_identity_names_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    before = opened(folder).identity
    folder.rename(tmp_path / "moved")
    assert opened(tmp_path / "moved").identity == before
    pq.write_table(table(31, 20), tmp_path / "moved" / "sub" / "b.parquet", write_page_checksum=True)
    assert opened(tmp_path / "moved").identity != before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pa.table({"id": [1]}), "has a column 'image', .* has not"),
        (table(0, 3).set_column(0, "id", pa.array([1, 2, 3])), "column 'id' is int64 in .* and int32 in"),
    ],
)
def test_files_of_other_columns_are_refused(folder: Path, other: Any, message: str) -> None:
    pq.write_table(other, folder / "c.parquet")
    with pytest.raises(DataError, match=message):
        opened(folder)


def test_columns_that_become_the_same_values_may_differ(folder: Path) -> None:
    same = table(60, 3).set_column(1, "text", pa.array(["x", "y", "x"]).dictionary_encode())
    pq.write_table(same.select(["image", "text", "id", "tokens"]), folder / "c.parquet")
    assert opened(folder).read(np.asarray([30, 31, 32]))[2]["text"] == "x"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def test_every_flip_in_the_pages_is_a_bad_record_that_names_its_row_group(folder: Path) -> None:
    path = folder / "a.parquet"
    sound = path.read_bytes()
    wanted = [row(number) for number in range(30)]
    footer_at = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    num_found = 0
    for at in range(4, footer_at, 29):
        flip(path, at)
        records = opened(folder)
        try:
            found = [plain(record) for record in records.read(np.arange(30))]
        except BadRecordError as error:
            num_found += "a.parquet', row group " in str(error)
        else:
            assert found == wanted, f"byte {at} was changed, and nobody saw it"
        assert records.read(np.asarray([35]))[0]["id"] == 35
        path.write_bytes(sound)
    assert num_found > 20


def test_flips_in_the_footer_are_told_or_leave_the_rows_alone(folder: Path) -> None:
    path = folder / "a.parquet"
    sound = path.read_bytes()
    footer_at = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    num_told = 0
    for at in range(footer_at, len(sound), 37):
        flip(path, at)
        try:
            assert len(opened(folder).read(np.asarray([0, 29, 49]))) == 3
        except DataError as error:
            num_told += ".parquet" in str(error)
        path.write_bytes(sound)
    assert num_told > 5


@pytest.mark.parametrize("keep", [0, 3, 500, -1])
def test_a_cut_file_is_an_error(folder: Path, keep: int) -> None:
    path = folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.parquet' is damaged or not Parquet") as caught:
        opened(folder)
    assert not isinstance(caught.value, BadRecordError)


def test_a_folder_without_rows_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    with pytest.raises(DataError, match=r"holds no \.parquet"):
        opened(root)
    pq.write_table(table(0, 0), root / "a.parquet")
    with pytest.raises(DataError, match="holds no rows"):
        opened(root)


def test_is_known_by_its_names_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FolderFiles(folder)
    assert parquet_files.is_format(files.list(), files)
    (folder / "_tmp").mkdir()
    (folder / "_tmp" / "x.parquet").write_bytes(b"half")
    assert len(opened(folder)) == NUM_ROWS
    monkeypatch.delitem(sys.modules, "closeranks.data.formats.columnar.parquet_records")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"needs pyarrow.*pip install 'closeranks\[data\]'"):
        parquet_files.open_records(files, IndexLocation(str(folder.parent / "index")))
