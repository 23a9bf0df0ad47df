"""Lines are found by number, whatever separates them, and bad ones are named."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.files.open import open_files
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.records import jsonl
from closeranks.data.formats.records.jsonl import JsonlRecords

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def place(tmp_path: Path) -> IndexLocation:
    return IndexLocation(folder=str(tmp_path / "index"))


def write(folder: Path, **contents: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    return folder


def opened(path: Path, place: IndexLocation) -> JsonlRecords:
    return JsonlRecords(open_files(str(path)), place)


def everything(records: JsonlRecords) -> list[Any]:
    return [*records.read(np.arange(len(records)))]


@given(
    files=st.lists(st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=6), min_size=1, max_size=3),
    newline=st.sampled_from(["\n", "\r\n", "\n\n", "\n  \t\n"]),
    ends=st.booleans(),
    escaped=st.booleans(),
    chunk=st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_what_is_written_is_read(
    files: list[list[dict[str, Any]]],
    newline: str,
    ends: bool,
    escaped: bool,
    chunk: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    for number, rows in enumerate(files):
        text = newline.join(json.dumps(row, ensure_ascii=escaped) for row in rows)
        (folder / f"{number}.ndjson").write_bytes((text + newline * ends).encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK_BYTES", chunk)
        records = opened(folder, IndexLocation(folder=str(folder / ".index")))
    rows = [row for rows in files for row in rows]
    assert everything(records) == rows
    order = np.random.default_rng(0).permutation(len(rows))
    assert records.read(order) == [rows[number] for number in order]


def test_a_mark_of_byte_order_is_no_content(tmp_path: Path, place: IndexLocation) -> None:
    folder = write(tmp_path / "d", a=b'\xef\xbb\xbf{"x": 1}\n{"x": 2}')
    assert everything(opened(folder, place)) == [{"x": 1}, {"x": 2}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"x": 1', "not JSON"),
        (b"[1, 2]", "a JSON list where an object is needed"),
        (b"7", "a JSON int where an object is needed"),
        (b'{"x": "\xff"}', "byte 7 of the line is not UTF-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(
    tmp_path: Path, place: IndexLocation, line: bytes, reason: str
) -> None:
    folder = write(tmp_path / "d", a=b'{"x": 0}\n' + line + b'\n{"x": 2}\n')
    records = opened(folder, place)
    assert records.read(np.array([2, 0])) == [{"x": 2}, {"x": 0}]
    with pytest.raises(BadRecordError, match=rf"a\.jsonl', byte 9: {reason}"):
        records.read(np.array([0, 1]))
    assert str(records.where(1)).endswith("a.jsonl', byte 9")


def test_several_files_are_one_row_of_records(tmp_path: Path, place: IndexLocation) -> None:
    folder = write(tmp_path / "d", b=b'{"x": 2}\n', a=b'{"x": 0}\n{"x": 1}\n', empty=b"", z=b'{"x": 3}')
    records = opened(folder, place)
    assert [row["x"] for row in everything(records)] == [0, 1, 2, 3]
    assert records.files_of(np.array([3, 0, 1, 3])) == ["z.jsonl", "a.jsonl"]
    assert (records.where(2).file, records.where(2).offset) == (str(folder / "b.jsonl"), 0)
    assert records.block == 1
    with pytest.raises(DataError, match="no number 4 in this data; its indices run from 0 to 3"):
        records.read(np.array([4]))
    with pytest.raises(DataError, match="no number -1"):
        records.read(np.array([-1]))


def test_one_file_by_its_path(tmp_path: Path, place: IndexLocation) -> None:
    folder = write(tmp_path / "d", a=b'{"x": 0}\n', b=b'{"x": 1}\n')
    assert everything(opened(folder / "b.jsonl", place)) == [{"x": 1}]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_compressed_files_are_to_be_converted(tmp_path: Path, place: IndexLocation, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_bytes(b"1234")
    with pytest.raises(DataError, match=rf"a{suffix}' is compressed.*closeranks data build"):
        opened(tmp_path, place)


def test_the_identity_follows_the_content_and_not_the_place(tmp_path: Path, place: IndexLocation) -> None:
    one = write(tmp_path / "one", a=b'{"x": 0}\n{"x": 10}\n')
    same = write(tmp_path / "same", a=b'{"x": 0}\n{"x": 10}\n')
    moved = write(tmp_path / "moved", a=b'{"x": 00}\n{"x":10}\n')
    first, second, third = (opened(folder, place).identity for folder in (one, same, moved))
    assert first == second
    assert first != third, "lines of other lengths in a file of the same size"


def test_a_changed_file_is_indexed_again(tmp_path: Path, place: IndexLocation) -> None:
    folder = write(tmp_path / "d", a=b'{"x": 0}\n')
    opened(folder, place)
    write(folder, a=b'{"x": 5}\n{"x": 6}\n')
    assert everything(opened(folder, place)) == [{"x": 5}, {"x": 6}]


def test_an_index_that_points_into_a_line_is_called_wrong(tmp_path: Path, place: IndexLocation) -> None:
    records = opened(write(tmp_path / "d", a=b'{"x": {}}\n{"x": 6}\n'), place)
    records._starts, records._sizes = records._starts + np.int64(6), records._sizes * 0 + np.uint32(2)
    with pytest.raises(DataError, match=r"byte 6: the index is damaged.*Remove"):
        records.read(np.array([0]))


def test_pickled_records_open_their_files_again(tmp_path: Path, place: IndexLocation) -> None:
    records = opened(write(tmp_path / "d", a=b'{"x": 0}\n'), place)
    data = pickle.dumps(records)
    assert len(data) < 2000
    assert everything(pickle.loads(data)) == [{"x": 0}]


def test_indexing_keeps_no_list_of_lines(tmp_path: Path, place: IndexLocation) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    with (folder / "a.jsonl").open("wb") as file:
        for first in range(0, 500_000, 1000):
            file.write(
                b"".join(b'{"id": %d, "text": "some words to fill a line"}\n' % n for n in range(first, first + 1000))
            )
    started = time.process_time()
    records = opened(folder, place)
    assert time.process_time() - started < 3.0, "a scan line by line takes several times as long"
    assert len(records) == 500_000
    assert records.read(np.array([499_999, 123_456]))[1]["id"] == 123_456
