from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from closeranks.core.errors import BadRecordError, DataError, UserError
from closeranks.data.config import RecordsConfig
from closeranks.data.source import LoaderSource
from closeranks.data.sources import records, splits
from closeranks.data.sources.records import RecordSelection, RecordsSource, open_records_source
from closeranks.data.timing import measure
from tests.data.sources.memory_stores import MemoryFiles, MemoryRecords


def source_of(rows: list[Any], *, bad: tuple[int, ...] = (), first: int = 0, **wish: Any) -> RecordsSource:
    store = MemoryRecords(rows, bad)
    return RecordsSource(
        store, MemoryFiles(), RecordSelection(wish.pop("fields", {}), **wish), range(first, len(rows)), "rows"
    )


def png(width: int = 4, height: int = 3, value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (value, 0, 255)).save(file, "png")
    return file.getvalue()


def test_fields_become_tensors_and_text_is_left_out() -> None:
    rows = [{"n": i, "x": [i, 0.5], "flag": i > 1, "text": "no", "raw": bytes([i, 7])} for i in range(5)]
    batch = source_of(rows).read(np.array([3, 1]))
    assert {name: value.tolist() for name, value in batch.items()} == {
        "n": [3, 1],
        "x": [[3, 0.5], [1, 0.5]],
        "flag": [True, False],
        "raw": [[3, 7], [1, 7]],
    }
    assert [value.dtype for value in batch.values()] == [torch.int64, torch.float32, torch.bool, torch.uint8]


def test_fields_are_chosen_and_named_by_the_job() -> None:
    rows = [{"jpg": b"not decoded", "cls": b"%d" % i, "json": b'{"a": {"b": [%d, 2]}}' % i} for i in range(3)]
    batch = source_of(rows, fields={"y": "cls", "b": "json.a.b"}).read(np.array([2, 0]))
    assert {name: value.tolist() for name, value in batch.items()} == {"y": [2, 0], "b": [[2, 2], [0, 2]]}


def test_what_is_nested_has_names_with_dots() -> None:
    rows = [{"json": b'{"a": %d, "deep": {"b": 1.5}, "said": "text"}' % i, "note": "text"} for i in range(3)]
    batch = source_of(rows).read(np.array([2]))
    assert {name: value.tolist() for name, value in batch.items()} == {"json.a": [2], "json.deep.b": [1.5]}


def test_only_what_becomes_a_tensor_is_decoded() -> None:
    rows: list[Any] = [{"x": 1, "txt": b"text"}, *({"x": i, "txt": b"\xff"} for i in range(8))]
    assert source_of(rows).read(np.array([1]))["x"].tolist() == [0], "text that is no UTF-8 does no harm"


def test_images_from_0_to_1_channels_first() -> None:
    batch = source_of([{"png": png(value=51 * i), "label": i} for i in range(3)]).read(np.array([2, 0]))
    assert batch["png"].shape == (2, 3, 3, 4)
    assert batch["png"][0, :, 0, 0].tolist() == pytest.approx([0.4, 0, 1])
    assert batch["label"].tolist() == [2, 0]
    stored_as_array = source_of([{"npy": np.full((3, 4, 3), 9, np.uint8)}]).read(np.array([0]))["npy"]
    assert stored_as_array.dtype == torch.uint8
    assert stored_as_array.shape == (1, 3, 4, 3)


def test_images_of_hugging_face_are_images() -> None:
    batch = source_of([{"picture": {"bytes": png(), "path": None}}]).read(np.array([0]))
    assert batch["picture"].shape == (1, 3, 3, 4)
    assert batch["picture"].dtype == torch.float32


def test_images_of_different_sizes() -> None:
    rows = [{"x.png": png(4)}, {"x.png": png(4)}, {"x.png": png(5)}]
    said = r"sample 2 of rows \('part-1', row 0\): 'x.png' is uint8\[3,5,3\] where the others are uint8\[3,4,3\]"
    source = source_of(rows)
    for asked in ([0, 2], [2], [2, 1]):
        with pytest.raises(BadRecordError, match=said) as caught:
            source.read(np.array(asked))
        assert "data.image_size" in caught.value.fix
    assert source_of(rows, image_size=8).read(np.arange(3))["x.png"].shape == (3, 3, 8, 8)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"n": 0.5}, r"'n' is float64\[\], which does not fit into int64\[\]"),
        ({"n": "four"}, r"'n' is the text 'four', which is not a tensor"),
        ({"m": 4}, r"'n' is nothing"),
        ({"n": None}, r"'n' is nothing"),
    ],
)
def test_a_record_unlike_the_first_ones(odd: dict[str, Any], said: str) -> None:
    source = source_of([*({"n": i} for i in range(9)), odd])
    for asked in ([9], [0, 9]):
        with pytest.raises(BadRecordError, match=rf"'part-4', row 1.*{said}"):
            source.read(np.array(asked))


def test_a_field_that_is_not_there() -> None:
    source = source_of([*({"cls": b"1", "n": 2} for _ in range(9)), {"n": 2}])
    with pytest.raises(BadRecordError, match=r"'part-4', row 1: field 'cls' is missing; found n"):
        source.read(np.array([0, 9]))


def test_what_needs_no_decoding_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = source_of([{"x": np.arange(3), "n": i, "raw": b"ab", "list": [1, 2]} for i in range(3)], fields={})
    named = source_of([{"cls": b"7"}, {"cls": b"8"}])
    monkeypatch.setattr(records, "decode_batch", lambda *_, **__: pytest.fail("decoded"))
    batch = plain.read(np.array([2]))
    assert {name: value.tolist() for name, value in batch.items()} == {
        "x": [[0, 1, 2]],
        "n": [2],
        "raw": [[97, 98]],
        "list": [[1, 2]],
    }
    with pytest.raises(pytest.fail.Exception):
        named.read(np.array([0]))


def test_a_damaged_record_names_its_place() -> None:
    source = source_of([*({"cls": b"1"} for _ in range(9)), {"cls": b"one"}], bad=(0, 3))
    with pytest.raises(BadRecordError, match=r"'part-1', row 1: the checksum does not match"):
        source.read(np.array([2, 3]))
    with pytest.raises(BadRecordError, match=r"'part-4', row 1: field 'cls' is not a number"):
        source.read(np.array([8, 9]))
    assert source.read(np.array([1, 2]))["cls"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        ([{"a": "x", "b": None}], {}, r"no field of rows can be a tensor: a, b.*data.transform"),
        ([{"a": "x", "b": 1}], {"y": "a"}, r"'y' of rows is the text 'x', which is not a tensor.*data.fields"),
        ([{"a": "x", "b": 1}], {"y": "label"}, r"can be used.*field 'label' is missing; found a, b.*data.fields"),
        ([{"a": 1, "model.pkl": b"x"}], {}, r"would have to be unpickled"),
    ],
)
def test_fields_that_do_not_serve(rows: list[Any], fields: dict[str, str], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        source_of(rows, fields=fields)
    assert not isinstance(caught.value, BadRecordError)
    assert caught.value.fix


def test_a_batch_is_one_read_and_its_stages_have_names() -> None:
    store = MemoryRecords([{"png": png(64, 64), "x": np.zeros(50_000)} for _ in range(40)])
    source = RecordsSource(store, MemoryFiles(), RecordSelection({}), range(40), "rows")
    tries = []
    for _ in range(5):
        store.num_reads = 0
        with measure() as times:
            source.read(np.arange(32))
        assert store.num_reads == 1
        assert times.decode_s > 0
        tries.append(times.collate_s > times.read_s)
    assert any(tries), "putting together takes longer than handing out what lies in memory"
    assert not source._inferred.is_plain


def test_where_samples_lie_and_what_is_fetched() -> None:
    files = MemoryFiles()
    files.is_local = False
    source = RecordsSource(MemoryRecords([{"n": i} for i in range(9)]), files, RecordSelection({}), range(4, 9), "rows")
    assert isinstance(source, LoaderSource)
    assert (len(source), source.block) == (5, 2)
    assert source.where(1) == "'part-2', row 1"
    source.prefetch(np.array([4, 0, 1]))
    assert files.wanted == [["part-4", "part-2"]]
    assert source.read(np.array([1]))["n"].tolist() == [5]
    source.close()
    assert files.is_closed


TRANSFORM = """
import torch

def widths(records):
    return {"n": torch.tensor([len(record["text"]) for record in records])}

def fails(records):
    return {"n": torch.tensor([1 // record["n"] for record in records])}

def lost(records):
    open("/nowhere/at/all")

NUMBER = 3
"""


@pytest.fixture
def _transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_batches.py").write_text(TRANSFORM)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_transforms")
def test_a_function_of_the_users_own_makes_the_batch() -> None:
    rows = [{"text": "a" * i} for i in range(5)]
    source = pickle.loads(pickle.dumps(source_of(rows, transform="their_batches:widths")))
    assert source.read(np.array([4, 2]))["n"].tolist() == [4, 2]
    renamed = source_of([{"said": "abc"}], fields={"text": "said"}, transform="their_batches:widths")
    assert renamed.read(np.array([0]))["n"].tolist() == [3]


@pytest.mark.usefixtures("_transforms")
def test_an_error_of_the_users_function_names_its_line() -> None:
    source = source_of([{"n": 1}, {"n": 0}], transform="their_batches:fails")
    with pytest.raises(BadRecordError, match=r"for one of samples 0, 1 raised ZeroDivisionError.*their_batches.py:8"):
        source.read(np.array([0, 1]))
    with pytest.raises(BadRecordError, match=r"for sample 1 \('part-0', row 1\) raised ZeroDivisionError"):
        source.read(np.array([1]))
    with pytest.raises(DataError, match="raised FileNotFoundError") as caught:
        source_of([{"n": 1}], transform="their_batches:lost").read(np.array([0]))
    assert not isinstance(caught.value, BadRecordError)


@pytest.mark.usefixtures("_transforms")
@pytest.mark.parametrize("name", ["their_batches:NUMBER", "their_batches:nothing", "nowhere_at_all:make"])
def test_a_function_that_is_none_is_found_when_opening(name: str) -> None:
    with pytest.raises(UserError, match=f"data.transform = '{name}'"):
        source_of([{"n": 1}], transform=name)


def test_it_opens_from_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"/a": MemoryRecords([{"n": i} for i in range(10)]), "/none": MemoryRecords([])}
    monkeypatch.setattr(splits, "open_files", lambda path, **_: MemoryFiles(path))
    monkeypatch.setattr(records, "open_records", lambda files, *_: stores[files.url])
    config = RecordsConfig(path="/a", eval_fraction=0.2)
    train, held_out = open_records_source(config, "train", 0), open_records_source(config, "eval", 0)
    assert train is not None
    assert held_out is not None
    assert (len(train), len(held_out)) == (8, 2)
    assert held_out.read(np.array([0, 1]))["n"].tolist() == [8, 9]
    assert train.identity == "records 'a' (train, samples 0:8, memory of 10 records)"
    assert open_records_source(RecordsConfig(path="/a"), "eval", 0) is None
    with pytest.raises(DataError, match="records 'none' holds no records"):
        open_records_source(RecordsConfig(path="/none"), "train", 0)
