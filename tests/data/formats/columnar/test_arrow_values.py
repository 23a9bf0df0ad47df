from __future__ import annotations

import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.formats.columnar.arrow_values import (
    contiguous_runs,
    is_compatible_type,
    lengths_of,
    validate_rows,
    values_of,
)

SMALL = pa.int16()
HOUR = datetime.timedelta(hours=1)


def same(found: Any, wanted: Any) -> bool:
    """Equal in type, dtype and content."""
    if isinstance(wanted, np.ndarray):
        return isinstance(found, np.ndarray) and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(same, found, wanted))
    return type(found) is type(wanted) and found == wanted


def shorts(*values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.int16)


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (pa.array([1, None, 3]), [1, None, 3]),
        (pa.array([1.5, 2.5], pa.float16()), [1.5, 2.5]),
        (pa.array([True, None]), [True, None]),
        (pa.array(["é", None], pa.large_string()), ["é", None]),
        (pa.array([b"x", None], pa.binary(1)), [b"x", None]),
        (pa.array([None, None]), [None, None]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pc.run_end_encode(pa.array([4, 4, 5])), [4, 4, 5]),
        (pa.array([Decimal("1.25")]), [1.25]),
        (pa.array([datetime.datetime(1970, 1, 2)], pa.timestamp("s")), [86400]),
        (pa.array([datetime.date(1970, 1, 3)]), [2]),
        (pa.array([datetime.time(1)], pa.time32("s")), [3600]),
        (pa.array([HOUR], pa.duration("ms")), [3_600_000]),
        (pa.array([[1, 2], None, []], pa.list_(SMALL)), [shorts(1, 2), None, shorts()]),
        (pa.array([[1, 2], None], pa.list_(SMALL, 2)), [shorts(1, 2), None]),
        (pa.array([[1, None], [3]], pa.list_(SMALL)), [[1, None], shorts(3)]),
        (pa.array([[1, None], [3, 4]], pa.list_(SMALL, 2)), [[1, None], shorts(3, 4)]),
        (pa.array([[True]]), [np.asarray([True])]),
        (pa.array([[[1, 2]], []], pa.list_(pa.list_(SMALL, 2))), [shorts([1, 2]), np.empty((0, 2), np.int16)]),
        (pa.array([[[1], [2, 3]]], pa.list_(pa.list_(SMALL))), [[shorts(1), shorts(2, 3)]]),
        (pa.array([["a", None], []]), [["a", None], []]),
        (pa.array([{"a": 1, "b": ["x"]}, None]), [{"a": 1, "b": ["x"]}, None]),
        (pa.array([{"bytes": b"jpg", "path": None}, None]), [b"jpg", None]),
        (pa.array([[{"bytes": b"a", "path": "p"}]]), [[b"a"]]),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), SMALL)), [[{"key": "k", "value": 1}]]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_types_become_values_wherever_a_slice_begins(array: Any, wanted: list[Any]) -> None:
    for shift in range(3):
        shifted = pa.concat_arrays([array.slice(0, 1)] * shift + [array])
        rows = np.arange(shift, len(shifted))
        assert same(values_of(validate_rows(shifted, contiguous_runs(rows))), wanted)
    backwards = [
        values_of(validate_rows(array, contiguous_runs(np.asarray([row]))))[0] for row in reversed(range(len(array)))
    ]
    assert same(backwards, wanted[::-1])


def test_one_size_lists_are_not_copied() -> None:
    array = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 3)
    row = values_of(validate_rows(array, [slice(2, 3)]))[0]
    assert row.tolist() == [6, 7, 8]
    assert row.__array_interface__["data"][0] == array.values.buffers()[1].address + 6 * 4


def test_an_image_that_is_only_named_is_a_bad_record() -> None:
    with pytest.raises(BadRecordError, match=r"'cat\.jpg' is referenced but not stored"):
        values_of(pa.array([{"bytes": b"x", "path": None}, {"bytes": None, "path": "cat.jpg"}]))


def test_a_type_of_no_use_is_named() -> None:
    with pytest.raises(DataError, match="month_day_nano_interval"):
        values_of(pa.array([], pa.month_day_nano_interval()))


@given(st.sets(st.integers(0, 30), min_size=1))
def test_runs_are_the_rows(rows: set[int]) -> None:
    runs = contiguous_runs(np.asarray(sorted(rows)))
    assert [row for run in runs for row in range(run.start, run.stop)] == sorted(rows)
    assert all(one.stop < other.start for one, other in pairwise(runs))


def test_a_wild_offset_is_found_before_it_is_followed() -> None:
    offsets = pa.py_buffer(np.asarray([0, 2, 1 << 30, 4], np.int32))
    lists = pa.Array.from_buffers(pa.list_(pa.int8()), 3, [None, offsets], children=[pa.array([1, 2, 3, 4], pa.int8())])
    assert values_of(validate_rows(lists, [slice(0, 1)]))[0].tolist() == [1, 2]
    for row in (1, 2):
        with pytest.raises(pa.ArrowInvalid):
            validate_rows(lists, [slice(row, row + 1)])


def test_lengths_come_from_offsets() -> None:
    assert lengths_of(pa.array([[1], None, [1, 2]])).tolist() == [1, 0, 2]
    assert lengths_of(pa.array(["é", "", None], pa.large_string())).tolist() == [2, 0, 0]
    assert lengths_of(pa.array([[1, 2]], pa.list_(SMALL, 2))).tolist() == [2]
    assert lengths_of(pa.array([1])) is None


def test_what_becomes_the_same_value_is_the_same_type() -> None:
    assert is_compatible_type(pa.string(), pa.large_string())
    assert is_compatible_type(pa.dictionary(pa.int8(), pa.string()), pa.string())
    assert is_compatible_type(pa.null(), pa.list_(pa.int8()))
    assert is_compatible_type(pa.struct({"a": pa.string()}), pa.struct({"a": pa.large_string()}))
    assert not is_compatible_type(pa.struct({"a": pa.int8()}), pa.struct({"b": pa.int8()}))
    assert not is_compatible_type(pa.list_(pa.int32()), pa.list_(pa.int64()))
    assert not is_compatible_type(pa.int32(), pa.int64())
