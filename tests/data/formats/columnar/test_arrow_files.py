from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from closeranks.core.errors import BadRecordError, DataError, SetupError
from closeranks.data.formats.columnar import arrow_files, arrow_records
from closeranks.data.formats.columnar.arrow_records import ArrowRecords
from closeranks.data.formats.record_index.saved_index import IndexLocation
from tests.data.formats.local_files import FolderFiles

NUM_ROWS = 60
ROOT = Path(__file__).parents[4]


def opened(root: Path) -> ArrowRecords:
    return arrow_files.open_records(FolderFiles(root), IndexLocation(str(root.parent / "index")))


def table(first: int, num_rows: int) -> Any:
    numbers = range(first, first + num_rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "text": [None if number % 7 == 3 else f"row {number} é" for number in numbers],
            "tokens": pa.array([[number] * (number % 5) for number in numbers], pa.list_(pa.uint16())),
            "point": pa.array([[number, 0.5] for number in numbers], pa.list_(pa.float32(), 2)),
        }
    )


def row(number: int) -> dict[str, Any]:
    text = None if number % 7 == 3 else f"row {number} é"
    return {"id": number, "text": text, "tokens": [number] * (number % 5), "point": [number, 0.5]}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def write(path: Path, content: Any, *, stream: bool, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    path.parent.mkdir(parents=True, exist_ok=True)
    with new(path, content.schema, options=options) as out:
        out.write_table(content, max_chunksize=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    write(root / "a.arrow", table(0, 35), stream=True)
    write(root / "b.feather", table(35, 25), stream=False)
    return root


def test_streams_and_files_in_any_order(folder: Path) -> None:
    records = opened(folder)
    assert len(records) == NUM_ROWS
    order = np.random.default_rng(3).permutation(NUM_ROWS)
    assert [plain(dict(record)) for record in records.read(order)] == [row(number) for number in order.tolist()]
    assert [record["id"] for record in records.read(np.asarray([40, 3, 40]))] == [40, 3, 40]
    assert records.read(np.asarray([1]))[0]["tokens"].dtype == np.uint16
    with pytest.raises(DataError, match="there is no"):
        records.read(np.asarray([-1]))


def test_says_where_a_row_lies(folder: Path) -> None:
    records = opened(folder)
    assert str(records.where(20)) == f"'{folder / 'a.arrow'}', row 20"
    assert str(records.where(37)) == f"'{folder / 'b.feather'}', row 2"
    assert records.files_of(np.asarray([50, 2, 40])) == ["b.feather", "a.arrow"]


def test_survives_pickling_and_closing(folder: Path) -> None:
    records = opened(folder)
    again = pickle.loads(pickle.dumps(records.select(["id"])))
    assert again.read(np.asarray([44])) == [{"id": 44}]
    assert again.identity == records.identity
    records.read(np.arange(NUM_ROWS))
    records.close()
    assert records._files.num_held == 0
    assert records.read(np.asarray([7]))[0]["id"] == 7


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_lie_together_and_are_kept_within_bounds(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "set" / "a.arrow", table(0, 40), stream=True, compression=compression)
    records = opened(tmp_path / "set")
    assert records.block == 8
    assert [plain(dict(record)) for record in records.read(np.arange(40))] == [row(number) for number in range(40)]
    assert records._kept_bytes == sum(kept.nbytes for kept in records._kept.values()) > 0
    monkeypatch.setattr(arrow_records, "KEPT_BYTES", 1)
    records.close()
    records.read(np.arange(40))
    assert len(records._kept) == 1


def test_dictionaries(tmp_path: Path) -> None:
    words = pa.array(["x", "yy", "x", None] * 10).dictionary_encode()
    for name, stream in (("a.arrow", True), ("b.arrow", False)):
        write(tmp_path / "set" / name, pa.table({"word": words}), stream=stream)
    records = opened(tmp_path / "set")
    assert [record["word"] for record in records.read(np.asarray([79, 1, 42]))] == [None, "yy", "x"]
    assert records.lengths("word").tolist() == [1, 2, 1, 0] * 20


def test_lengths_from_offsets_alone(folder: Path) -> None:
    records = opened(folder)
    assert records.lengths("tokens").tolist() == [number % 5 for number in range(NUM_ROWS)]
    assert records.lengths("point").tolist() == [2] * NUM_ROWS
    assert records.lengths("id") is None


def test_identity_names_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    before = opened(folder).identity
    folder.rename(tmp_path / "moved")
    assert opened(tmp_path / "moved").identity == before
    write(tmp_path / "moved" / "a.arrow", table(1, 35), stream=True)
    assert opened(tmp_path / "moved").identity != before


def test_files_of_other_columns_are_refused(folder: Path) -> None:
    write(folder / "c.arrow", pa.table({"id": [1]}), stream=True)
    with pytest.raises(DataError, match=r"c\.arrow' has the columns id: int64; .*a\.arrow' has id: int32, text"):
        opened(folder)


def hugging_face_set() -> datasets.Dataset:
    pixels = np.random.default_rng(4).integers(0, 255, (30, 5, 4, 3), np.uint8)
    features = datasets.Features(
        {
            "id": datasets.Value("int32"),
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "grid": datasets.Array2D((2, 3), "float32"),
            "vector": datasets.Sequence(datasets.Value("float32"), length=3),
            "meta": {"source": datasets.Value("string"), "tags": datasets.Sequence(datasets.Value("string"))},
        }
    )
    rows = [
        {
            "id": number,
            "image": Image.fromarray(pixels[number]),
            "label": number % 2,
            "input_ids": [*range(number % 6)],
            "grid": [[number, 1, 2], [3, 4, 5]],
            "vector": [number, 0.25, 1],
            "meta": {"source": f"s{number}", "tags": ["a"] * (number % 3)},
        }
        for number in range(30)
    ]
    return datasets.Dataset.from_list(rows, features=features)


def assert_equal_to_datasets(records: ArrowRecords, wanted: datasets.Dataset) -> None:
    assert len(records) == len(wanted)
    order = np.random.default_rng(5).permutation(len(wanted))
    for number, record in zip(order.tolist(), records.read(order), strict=True):
        expected = wanted[number]
        image = np.asarray(Image.open(io.BytesIO(record["image"])))
        assert (image == np.asarray(expected.pop("image"))).all()
        assert record["grid"].shape == (2, 3)
        assert plain({name: value for name, value in record.items() if name != "image"}) == expected


@pytest.mark.parametrize("how", ["plain", "shuffled", "selected", "flattened indices", "two shards"])
def test_a_saved_hugging_face_set_equals_load_from_disk(how: str, tmp_path: Path) -> None:
    whole = hugging_face_set()
    made = {
        "plain": lambda: whole,
        "shuffled": lambda: whole.shuffle(seed=1),
        "selected": lambda: whole.select([5, 5, 2, 29]),
        "flattened indices": lambda: whole.shuffle(seed=2).flatten_indices(),
        "two shards": lambda: whole,
    }[how]()
    made.save_to_disk(tmp_path / "set", num_shards=2 if how == "two shards" else 1)
    records = opened(tmp_path / "set")
    assert_equal_to_datasets(records, datasets.load_from_disk(tmp_path / "set"))
    assert records.files_of(np.asarray([0])) == [f"data-00000-of-0000{2 if how == 'two shards' else 1}.arrow"]


def test_a_saved_set_reads_the_same_where_datasets_is_not_imported(tmp_path: Path) -> None:
    hugging_face_set().save_to_disk(tmp_path / "set")
    code = (
        "import sys, pickle; records = pickle.load(sys.stdin.buffer); import numpy as np; "
        "record = records.read(np.asarray([4]))[0]; assert 'datasets' not in sys.modules; "
        "sys.stdout.buffer.write(pickle.dumps(record))"
    )
    pickled = pickle.dumps(opened(tmp_path / "set"))
    found = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True, cwd=ROOT)
    record = pickle.loads(found.stdout)
    assert record["grid"].tolist() == [[4, 1, 2], [3, 4, 5]]
    assert Image.open(io.BytesIO(record["image"])).size == (4, 5)


def test_columns_that_a_set_was_formatted_to(tmp_path: Path) -> None:
    hugging_face_set().with_format(columns=["label", "id"]).save_to_disk(tmp_path / "set")
    assert opened(tmp_path / "set").read(np.asarray([3])) == [{"label": 1, "id": 3}]


def test_the_mapping_that_old_versions_saved_is_respected(folder: Path) -> None:
    mapping = np.random.default_rng(6).permutation(NUM_ROWS)[:20].astype(np.uint64)
    write(folder / "indices.arrow", pa.table({"indices": mapping}), stream=True)
    files = {"_data_files": [{"filename": "a.arrow"}, {"filename": "b.feather"}]}
    state = {**files, "_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    records = opened(folder)
    assert [record["id"] for record in records.read(np.arange(20))] == mapping.tolist()
    assert records.lengths("tokens").tolist() == (mapping % 5).tolist()
    assert records.where(4).offset == mapping[4] - (35 if mapping[4] >= 35 else 0)
    with pytest.raises(DataError, match="there is no"):
        records.read(np.asarray([20]))
    (folder / "state.json").write_text(json.dumps(files))
    assert len(opened(folder)) == 20
    write(folder / "indices.arrow", pa.table({"indices": [NUM_ROWS]}), stream=True)
    with pytest.raises(DataError, match=f"names row {NUM_ROWS} of {NUM_ROWS}"):
        opened(folder)


def test_splits_are_named_to_choose_from(tmp_path: Path) -> None:
    root = tmp_path / "set"
    one = datasets.Dataset.from_dict({"a": [1, 2]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(root)
    assert arrow_files.is_format(FolderFiles(root).list(), FolderFiles(root))
    with pytest.raises(DataError, match=r"several datasets: test, train\. Choose one: '.*set/test'"):
        opened(root)
    (root / "dataset_dict.json").unlink()
    with pytest.raises(DataError, match="several datasets: test, train"):
        opened(root)
    datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "single")
    with pytest.raises(DataError, match=r"holds a dataset in a subfolder: train\. Choose one: '.*single/train'"):
        opened(tmp_path / "single")
    cache = tmp_path / "cache"
    for split in ("train", "test"):
        write(cache / f"imdb-{split}.arrow", table(0, 3), stream=True)
    (cache / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
    with pytest.raises(DataError, match=r"several datasets: test, train\. Save the one you want"):
        opened(cache)


def test_a_damaged_description_of_a_saved_set_is_an_error(folder: Path) -> None:
    (folder / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(DataError, match=r"gone\.arrow' is missing"):
        opened(folder)
    for text in ('{"_data_files"', "[]", '{"_data_files": [3]}', "{}"):
        (folder / "state.json").write_text(text)
        with pytest.raises(DataError, match=r"state\.json' (is damaged|does not belong)"):
            opened(folder)


@pytest.mark.parametrize("name", ["a.arrow", "b.feather"])
def test_a_file_cut_anywhere_is_an_error(folder: Path, name: str) -> None:
    path = folder / name
    sound = path.read_bytes()
    batch_ends = [len(sound) - 8, int(opened(folder)._index["offsets"][2])]
    for keep in [0, 5, 100, len(sound) - 1, *batch_ends, *range(200, len(sound), 701)]:
        path.write_bytes(sound[:keep])
        with pytest.raises(DataError, match=rf"{name}' is damaged or not Arrow") as caught:
            opened(folder)
        assert not isinstance(caught.value, BadRecordError)
    path.write_bytes(sound + b"\0" * 8)
    with pytest.raises(DataError, match="is damaged or not Arrow"):
        opened(folder)


@pytest.mark.parametrize("name", ["a.arrow", "b.feather"])
def test_a_flip_is_told_or_changes_values_and_nothing_worse(folder: Path, name: str) -> None:
    path = folder / name
    sound = path.read_bytes()
    num_told = 0
    for at in range(3, len(sound), 61):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        try:
            assert len(opened(folder).read(np.arange(NUM_ROWS))) == NUM_ROWS
        except DataError as error:
            num_told += name in str(error)
    assert num_told > 10


def test_a_damaged_batch_is_a_bad_record_that_names_it(folder: Path) -> None:
    records = opened(folder)
    batch = records._batch(1)
    offsets = batch.column(2).buffers()[1]
    at = (folder / "a.arrow").read_bytes().index(offsets.to_pybytes())
    data = bytearray((folder / "a.arrow").read_bytes())
    data[at + 7] = 0x40
    (folder / "a.arrow").write_bytes(data)
    with pytest.raises(BadRecordError, match=r"a\.arrow', batch at byte \d+: In column 2: .*Offset invariant failure"):
        opened(folder).read(np.asarray([9]))
    assert opened(folder).read(np.asarray([7, 12]))[0]["id"] == 7


def test_needs_pyarrow_and_never_datasets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from closeranks.data.formats.columnar import arrow_files, parquet_files; "
        "assert 'pyarrow' not in sys.modules; "
        "import closeranks.data.formats.columnar.arrow_records; assert not {'torch', 'datasets'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.delitem(sys.modules, "closeranks.data.formats.columnar.arrow_records")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"needs pyarrow.*pip install 'closeranks\[data\]'"):
        opened(folder)
