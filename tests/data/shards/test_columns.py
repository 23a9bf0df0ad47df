from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from closeranks.core.errors import BadRecordError
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.shard_format import DATA_OFFSET
from tests.data.shards.made import opened, write_records

NAMES = ("x", "n", "f", "b", "raw")


def rows(shape: tuple[int, ...], dtype: str, raw_bytes: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    row = st.fixed_dictionaries(
        {
            "n": st.integers(-(2**63), 2**63 - 1),
            "x": hnp.arrays(dtype, shape),
            "skipped": st.none(),
            "b": st.booleans(),
            "raw": st.binary(min_size=raw_bytes, max_size=raw_bytes),
            "f": st.floats(),
        }
    )
    in_order = row.map(lambda made: {name: made[name] for name in sorted(made)})  # another order is another form
    return st.lists(in_order, min_size=1, max_size=12)


@given(
    table=st.builds(
        rows,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4),
        st.sampled_from(["uint8", "bool", "float16", "int64", "complex64"]),
        st.integers(1, 40),
    ).flatmap(lambda made: made),
    shard_bytes=st.sampled_from([300, 1 << 20]),
    data=st.data(),
)
def test_columns_are_the_records_stacked(
    tmp_path_factory: pytest.TempPathFactory, table: list[dict[str, Any]], shard_bytes: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("alike")
    write_records(folder, table, shard_bytes=shard_bytes)
    store = ShardRecords(opened(folder))
    wanted = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, max_size=20))
    found = store.columns(np.array(wanted), NAMES)
    assert found is not None
    assert found.keys() == set(NAMES)
    for number, index in enumerate(wanted):
        row = table[index]
        np.testing.assert_array_equal(found["x"][number], row["x"])
        assert found["x"].dtype == row["x"].dtype
        assert bytes(found["raw"][number]) == row["raw"]
        assert (found["n"][number], found["b"][number]) == (row["n"], row["b"])
        np.testing.assert_equal(float(found["f"][number]), row["f"])


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.zeros((2, 3), np.uint8), "n": 1},  # another shape of the same size
        {"x": np.zeros(6, np.int8), "n": 1},
        {"x": np.zeros(7, np.uint8), "n": 1},
        {"x": np.zeros(6, np.uint8), "n": 1.0},
        {"n": 1, "x": np.zeros(6, np.uint8)},
        {"x": np.zeros(6, np.uint8), "n": None},
    ],
    ids=["shape", "dtype", "length", "kind", "order", "nothing"],
)
def test_records_that_are_not_alike_are_not_read_together(tmp_path: Path, other: dict[str, Any]) -> None:
    usual = {"x": np.arange(6, dtype=np.uint8), "n": 3}
    write_records(tmp_path, [usual, other, usual])
    store = ShardRecords(opened(tmp_path))
    assert store.columns(np.array([0, 2]), ("x", "n")) is not None
    assert store.columns(np.array([0, 1]), ("x", "n")) is None
    assert store.columns(np.array([0, 2]), ("x", "missing")) is None


def test_a_damaged_block_is_noticed_by_columns_too(tmp_path: Path) -> None:
    write_records(tmp_path, [{"x": np.arange(100, dtype=np.uint8)}] * 4)
    (shard,) = tmp_path.glob("*.crs")
    content = bytearray(shard.read_bytes())
    content[DATA_OFFSET + 60] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BadRecordError, match="does not match its checksum"):
        ShardRecords(opened(tmp_path)).columns(np.array([0, 1]), ("x",))
