from __future__ import annotations

import gc
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.shards.encoding import ARRAY_DTYPES, PREFIX, RecordDecoder, decode_schemas, encode, encode_schemas
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.verify import verify
from closeranks.data.shards.writer import RecordShardWriter
from tests.data.shards.made import content, opened, records, same, write_records

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | texts
jsons = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
arrays = hnp.arrays(
    st.sampled_from(sorted(ARRAY_DTYPES)), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
)
values = jsons | st.binary(max_size=30) | arrays
rows = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), values, max_size=5)


@given(record=rows)
def test_decoding_is_the_inverse_of_encoding(record: dict[str, Any]) -> None:
    form, body = encode(record)
    data = memoryview(bytes(16) + PREFIX.pack(3) + body + bytes(8))
    assert len(body) % 8 == 0
    found = RecordDecoder(decode_schemas(encode_schemas([form]))[0])(data, 16, 16 + PREFIX.size + len(body))
    assert same(record, found)


@given(record=rows, cut=st.integers(1, 6))
def test_a_record_cut_short_or_too_long_does_not_decode(record: dict[str, Any], cut: int) -> None:
    form, body = encode(record)
    data = memoryview(PREFIX.pack(0) + body + bytes(64))
    for stop in (PREFIX.size + len(body) - 8 * cut, PREFIX.size + len(body) + 8 * cut):
        with pytest.raises(ValueError, match=r"short|overlap|beyond|fill"):
            RecordDecoder(form)(data, 0, stop)


@given(
    table=st.lists(rows, max_size=12), shard_bytes=st.sampled_from([100, 700, 1 << 20]), most=st.sampled_from([0, 1])
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, table: list[dict[str, Any]], shard_bytes: int, most: int
) -> None:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, table, shard_bytes=shard_bytes)
    store = ShardRecords(opened(folder), most)
    assert len(store) == len(table)
    order = np.random.default_rng(0).permutation(len(table))
    assert all(same(table[i], record) for i, record in zip(order, store.read(order), strict=True))
    assert set(store.fields) == {name for record in table for name in record}
    assert verify(opened(folder)) == []
    shutil.rmtree(folder)


def test_numpy_scalars_and_tuples_come_back_as_plain_values(tmp_path: Path) -> None:
    big_endian = np.arange(5, dtype=">i4")
    write_records(
        tmp_path, [{"i": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "t": (1, 2), "e": big_endian}]
    )
    (record,) = ShardRecords(opened(tmp_path)).read(np.array([0]))
    assert same({"i": 3, "f": 0.5, "b": True, "t": [1, 2]}, {key: record[key] for key in "ifbt"})
    assert record["e"].tolist() == [0, 1, 2, 3, 4]
    assert record["e"].dtype == np.dtype("<i4")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"x": object()}, "it holds a value of type object"),
        ({"x": {1: 2}}, "keys must be text"),
        ({"x": [b"raw"]}, "it holds a value of type bytes"),
        ({"x": "\ud800"}, "surrogates not allowed"),
        ({"x": np.array([object()])}, "of object"),
        ({"x": np.array(["a"])}, "of <U1"),
        ({"x": np.zeros(2, "M8[s]")}, "datetime64"),
        ({"x": 1j}, "it holds a value of type complex"),
        ({"": 1}, "not text"),
        ({3: 1}, "not text"),
    ],
)
def test_a_record_that_cannot_be_stored_is_refused_and_the_writer_goes_on(
    tmp_path: Path, record: Any, reason: str
) -> None:
    with RecordShardWriter(tmp_path) as writer:
        writer.append({"a": 1})
        with pytest.raises(BadRecordError, match=reason):
            writer.append(record)
        writer.append({"a": 2})
        from closeranks.data.shards.manifest import DatasetInfo

        writer.finish_and_commit(DatasetInfo())
    assert ShardRecords(opened(tmp_path)).read(np.arange(2)) == [{"a": 1}, {"a": 2}]


def test_arrays_are_views_that_outlive_the_store(tmp_path: Path) -> None:
    table = records(200)
    write_records(tmp_path, table)
    store = ShardRecords(opened(tmp_path), 1)
    found = [record["x"] for i in range(200) for record in store.read(np.array([i]))]
    assert not any(array.flags.writeable or array.flags.owndata for array in found if array.size)
    assert all(array.flags.aligned for array in found)
    store.close()
    del store
    gc.collect()
    shutil.rmtree(tmp_path)
    assert all(same(table[i]["x"], array) for i, array in enumerate(found))


def test_records_larger_than_blocks_and_than_shards(tmp_path: Path) -> None:
    table = [{"x": np.random.default_rng(i).integers(0, 255, 50_000, dtype=np.uint8), "i": i} for i in range(7)]
    manifest = write_records(tmp_path, table)
    assert [shard.num_items for shard in manifest.shards] == [1] * 7
    for most in (0, 2):
        store = ShardRecords(opened(tmp_path), most)
        for indices in ([3], [6, 0, 3, 3], list(range(7))):
            found = store.read(np.array(indices))
            assert all(same(table[i], record) for i, record in zip(indices, found, strict=True))


def test_a_batch_over_more_shards_than_are_held(tmp_path: Path) -> None:
    table = records(300)
    write_records(tmp_path, table, shard_bytes=4000)
    store = ShardRecords(opened(tmp_path), 3)
    indices = np.random.default_rng(0).integers(0, 300, 100)
    assert all(same(table[i], record) for i, record in zip(indices, store.read(indices), strict=True))


@pytest.mark.parametrize("index", [-1, 40, 10**12])
def test_records_that_are_not_there_are_refused(tmp_path: Path, index: int) -> None:
    write_records(tmp_path, records())
    with pytest.raises(IndexError, match="40 items"):
        ShardRecords(opened(tmp_path)).read(np.array([0, index]))


def test_places_files_pickling_and_identity(tmp_path: Path) -> None:
    table = records()
    manifest = write_records(tmp_path / "a", table)
    write_records(tmp_path / "b", table)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    store = ShardRecords(opened(tmp_path / "a"))
    place = store.where(7)
    jpg = table[7]["jpg"]
    assert jpg in Path(place.file).read_bytes()[place.offset :][: len(jpg) + 200]
    names = [shard.name for shard in manifest.shards]
    assert store.files_of(np.array([39, 0, 39])) == [names[-1], names[0]]
    again = pickle.loads(pickle.dumps(store))
    assert all(same(a, b) for a, b in zip(again.read(np.arange(40)), table, strict=True))
    assert store.identity == again.identity == ShardRecords(opened(tmp_path / "b")).identity
    assert store.fields["x"] == ("float32[2]",)


def test_an_empty_data_set_and_an_empty_batch(tmp_path: Path) -> None:
    write_records(tmp_path, [])
    store = ShardRecords(opened(tmp_path))
    assert (len(store), store.read(np.empty(0, np.int64)), store.block) == (0, [], 0)
    with pytest.raises(IndexError):
        store.read(np.array([0]))


def test_floats_of_every_kind(tmp_path: Path) -> None:
    write_records(tmp_path, [{"x": math.nan, "y": [math.inf, -math.inf, math.nan], "z": -0.0}])
    (record,) = ShardRecords(opened(tmp_path)).read(np.array([0]))
    assert math.isnan(record["x"])
    assert record["y"][:2] == [math.inf, -math.inf]
    assert math.isnan(record["y"][2])
    assert math.copysign(1, record["z"]) == -1


def test_notes_that_make_no_sense_are_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.data.shards.writer.encode_schemas", lambda forms: [[["x", "pickle"]]])
    monkeypatch.setattr("closeranks.data.shards.commit.decode_schemas", lambda found: [])
    write_records(tmp_path, [{"x": 1}])
    with pytest.raises(DataError, match="a field 'x' of kind 'pickle'"):
        ShardRecords(opened(tmp_path)).read(np.array([0]))
    assert "schema is invalid" in str(verify(opened(tmp_path))[0])
