"""From a job's table to batches, over real files."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from closeranks.core.errors import BadRecordError, DataError
from closeranks.core.protocols import DataSource
from closeranks.data.config import MixtureConfig, RecordsConfig, TokensConfig
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter
from closeranks.data.source import LoaderSource
from closeranks.data.sources.mixture import MixtureSource
from closeranks.data.sources.open import open_source
from closeranks.data.sources.tokens import PackedDocuments

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"


def in_a_worker(source: DataSource) -> LoaderSource:
    """As a process that reads ahead sees it."""
    again = pickle.loads(pickle.dumps(source))
    assert isinstance(again, LoaderSource)
    assert again.identity == source.identity
    return again


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_tokens(folder: Path, documents: list[Any], **keys: Any) -> str:
    with TokenShardWriter(folder, "uint16", shard_bytes=8192, block_bytes=4096) as writer:
        for document in documents:
            writer.append(document)
        writer.finish_and_commit(DatasetInfo(**keys))
    return str(folder)


def test_shards_as_windows_over_the_stream(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "corpus", [np.arange(n, n + 100) for n in range(0, 10_000, 100)], vocab_size=10_000)
    assert len(list((tmp_path / "corpus").iterdir())) > 3, "several shards"
    source = open_source(TokensConfig(path=path, seq_len=64, eval_fraction=0.1), "train", 0)
    held_out = open_source(TokensConfig(path=path, seq_len=64, eval_fraction=0.1), "eval", 0)
    assert held_out is not None
    assert (len(source), len(held_out)) == (140, 16)
    assert source.vocab_size == 10_000  # type: ignore[attr-defined]
    for reader in (source, in_a_worker(source)):
        tokens = reader.read(np.array([100, 3]))["tokens"]
        assert tokens.dtype == torch.uint16
        assert tokens.tolist() == [list(range(6400, 6465)), list(range(192, 257))]
    assert held_out.read(np.array([0]))["tokens"][0, 0].item() == 140 * 64


def test_shards_as_packed_documents(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(0, 300, 200).tolist()
    documents = [np.arange(n) + 300 * (at % 100) for at, n in enumerate(sizes)]
    config = TokensConfig(path=write_tokens(tmp_path / "corpus", documents), seq_len=127, packing="documents")
    source = in_a_worker(open_source(config, "train", 0))
    batch = source.read(np.arange(len(source)))
    tokens, numbers = batch["tokens"].long(), batch["documents"]
    assert sorted(tokens[numbers >= 0].tolist()) == sorted(int(t) for d in documents if len(d) > 1 for t in d)
    is_next = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
    assert bool((tokens[:, 1:] - tokens[:, :-1])[is_next].eq(1).all()), "inside a document tokens follow each other"
    assert source.efficiency > 0.95  # type: ignore[attr-defined]


def test_a_damaged_block_is_a_bad_record_of_the_rows_in_it(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "corpus", [np.full(n, n) for n in (200, 100, 60, 300, 50, 70)] * 20)
    shard = sorted(Path(path).glob("shard-*"))[1]
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    windows = open_source(TokensConfig(path=path, seq_len=127), "train", 0)
    bad = bad_samples(windows, shard.name)
    assert 16 <= len(bad) <= 18 < len(windows), "a block holds 2048 tokens"
    rows = open_source(TokensConfig(path=path, seq_len=127, packing="documents"), "train", 0)
    assert isinstance(rows, PackedDocuments)
    first, last = bad[0] * 127, bad[-1] * 127 + 128
    bad = bad_samples(rows, shard.name)
    for row in range(len(rows)):
        starts, lengths, _ = rows._packing.segments(np.array([row]))
        assert row not in bad or bool(((starts < last) & (starts + lengths > first)).any())
    assert 0 < len(bad) < len(rows) / 2


def bad_samples(source: DataSource, file: str) -> list[int]:
    """Those that are bad, each of them in this file."""
    found = {}
    for index in range(len(source)):
        try:
            source.read(np.array([index]))
        except BadRecordError as error:
            found[index] = str(error)
    assert all(file in said for said in found.values())
    return list(found)


def test_shards_as_records(tmp_path: Path) -> None:
    with RecordShardWriter(tmp_path / "rows", shard_bytes=4096, block_bytes=4096) as writer:
        for number in range(100):
            writer.append(
                {"x": np.full((4, 3), number, np.int16), "y": number, "note": "text", "raw": bytes([number] * 9)}
            )
        writer.finish_and_commit(DatasetInfo())
    source = in_a_worker(open_source(RecordsConfig(path=str(tmp_path / "rows")), "train", 0))
    assert (len(source), source.block > 0) == (100, True)
    batch = source.read(np.array([99, 4]))
    assert sorted(batch) == ["raw", "x", "y"]
    assert batch["x"].shape == (2, 4, 3)
    assert batch["x"][:, 0, 0].tolist() == batch["y"].tolist() == batch["raw"][:, 8].tolist() == [99, 4]


def test_lines_of_json_as_tokens(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"tokens": [i] * 5} for i in range(20)])
    source = in_a_worker(open_source(TokensConfig(path=path, seq_len=9), "train", 0))
    assert len(source) == 11
    assert source.read(np.array([10, 0]))["tokens"].long().tolist() == [[18] * 5 + [19] * 5, [0] * 5 + [1] * 5]


def test_text_in_lines_of_json_as_packed_documents(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": letter * 6} for letter in "abcde"])
    config = TokensConfig(path=path, seq_len=11, packing="documents", eval_fraction=0.3)
    train, held_out = open_source(config, "train", 0), open_source(config, "eval", 0)
    assert held_out is not None
    for source in (train, in_a_worker(train)):
        batch = source.read(np.array([1, 0]))
        assert [bytes(row.tolist()) for row in batch["tokens"]] == [b"ccccccdddddd", b"aaaaaabbbbbb"]
        assert batch["documents"].tolist() == [[0] * 6 + [1] * 6] * 2
    assert bytes(held_out.read(np.array([0]))["tokens"][0].tolist()) == b"eeeeee" + bytes(6)


def test_lines_of_json_as_records(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"x": [i, 0.5], "y": i, "note": "text"} for i in range(20)])
    source = in_a_worker(open_source(RecordsConfig(path=path), "train", 0))
    batch = source.read(np.array([7, 3]))
    assert {name: value.tolist() for name, value in batch.items()} == {"x": [[7, 0.5], [3, 0.5]], "y": [7, 3]}
    assert "a.jsonl" in source.where(7)


def test_images_in_a_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(4):
            image = io.BytesIO()
            Image.new("RGB", (6, 5), (number * 51, 0, 0)).save(image, "png")
            for name, data in ((f"{number}.png", image.getvalue()), (f"{number}.cls", b"%d" % number)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    config = RecordsConfig(path=str(tmp_path), fields={"x": "png", "y": "cls"}, image_size=4)
    batch = in_a_worker(open_source(config, "train", 0)).read(np.array([3, 1]))
    assert batch["x"].shape == (2, 3, 4, 4)
    assert batch["x"][:, 0, 0, 0].tolist() == pytest.approx([0.6, 0.2])
    assert batch["y"].tolist() == [3, 1]


def test_a_column_of_images_whatever_it_is_called(tmp_path: Path) -> None:
    """As Hugging Face stores it; and of a table no other column is read."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), 255, dtype=np.uint8)).save(buffer, "JPEG")
    rows = [{"scan": {"bytes": buffer.getvalue(), "path": f"{n}.jpg"}, "grade": n, "note": "x" * 99} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = RecordsConfig(path=str(tmp_path), fields={"x": "scan", "y": "grade"})
    source = open_source(config, "train", 0)
    assert source._store.column_names == ["scan", "grade"]  # type: ignore[attr-defined]
    batch = in_a_worker(source).read(np.array([3, 0]))
    assert (batch["x"].shape, batch["x"].dtype, batch["y"].tolist()) == ((2, 3, 4, 6), torch.float32, [3, 0])
    assert batch["x"].min() > 0.9


def test_a_folder_of_images(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4), (0, 0, 255)).save(tmp_path / name / "1.png")
    batch = in_a_worker(open_source(RecordsConfig(path=str(tmp_path)), "train", 0)).read(np.array([1, 0]))
    assert batch["label"].tolist() == [1, 0]
    assert batch["image"].shape == (2, 3, 4, 4)


def test_parquet_as_records_and_as_tokens(tmp_path: Path) -> None:
    columns = {"x": [[i, 2.5] for i in range(9)], "y": list(range(9)), "text": ["ab"] * 9}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    batch = in_a_worker(open_source(RecordsConfig(path=str(tmp_path)), "train", 0)).read(np.array([8, 0]))
    assert {name: value.tolist() for name, value in batch.items()} == {"x": [[8, 2.5], [0, 2.5]], "y": [8, 0]}
    assert batch["x"].dtype == torch.float32
    tokens = open_source(TokensConfig(path=str(tmp_path), seq_len=3), "train", 0).read(np.array([4]))["tokens"]
    assert bytes(tokens[0].tolist()) == b"abab"


def test_megatron_as_packed_documents(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "megatron" / "int32", tmp_path / "corpus")
    store = open_source(TokensConfig(path=str(tmp_path / "corpus"), seq_len=4), "train", 0)
    packed = open_source(TokensConfig(path=str(tmp_path / "corpus"), seq_len=200, packing="documents"), "train", 0)
    stream = store.read(np.arange(len(store)))["tokens"]
    assert stream.dtype == torch.int32
    rows = in_a_worker(packed).read(np.arange(len(packed)))
    used = rows["tokens"][rows["documents"] >= 0]
    assert used[:5].tolist() == stream[0].tolist()


def test_mds_as_records(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "mds" / "all", tmp_path / "mds")
    config = RecordsConfig(path=str(tmp_path / "mds"), fields={"x": "array_fixed", "y": "label", "b": "f64"})
    batch = in_a_worker(open_source(config, "train", 0)).read(np.array([1, 0]))
    expected = json.loads((tmp_path / "mds" / "expected.json").read_text())
    assert batch["x"].tolist() == [expected[n]["array_fixed"]["values"] for n in (1, 0)]
    assert batch["x"].dtype == torch.int16
    assert batch["b"].dtype == torch.float32


def test_numpy_as_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(101, dtype=np.uint16))
    source = in_a_worker(open_source(TokensConfig(path=str(tmp_path / "tokens.npy"), seq_len=10), "train", 0))
    assert source.read(np.array([9]))["tokens"].tolist() == [list(range(90, 101))]
    assert source.read(np.array([9]))["tokens"].dtype == torch.uint16


def test_a_mixture_of_formats(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(1000, 1101, dtype=np.uint16))
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "abcde"}] * 5)
    parts = {
        "web": {"weight": 3, "data": {"name": "tokens", "path": str(tmp_path / "tokens.npy"), "seq_len": 8}},
        "chat": {"weight": 1, "data": {"name": "tokens", "path": lines, "seq_len": 8, "eval_fraction": 0.4}},
    }
    train = open_source(MixtureConfig(parts=parts), "train", 0)
    assert isinstance(train, MixtureSource)
    assert [len(part) for part in train.parts] == [12, 2]
    batch = in_a_worker(train).read(np.array([13, 0]))["tokens"]
    assert batch.dtype == torch.uint16
    assert batch[0].tolist() == list(b"deabcdeab")
    assert batch[1].tolist() == list(range(1000, 1009))
    held_out = open_source(MixtureConfig(parts=parts), "eval", 0)
    assert held_out is not None
    assert len(held_out) == 1
    parts["chat"]["data"]["packing"] = "documents"
    with pytest.raises(DataError, match=r"parts 'web' and 'chat'.*tokens and documents, tokens.*data.packing"):
        open_source(MixtureConfig(parts=parts), "train", 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "there is no file or folder .*nowhere"),
        ("empty", "there are no files in .*empty"),
        ("notes.md", "holds no data of a known format: found 1 .md; looked for"),
        ("empty.jsonl", "holds no records"),
    ],
)
@pytest.mark.parametrize("config", [TokensConfig, RecordsConfig])
def test_data_that_is_not_there(tmp_path: Path, config: Any, name: str, said: str) -> None:
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=said) as caught:
        open_source(config(path=str(tmp_path / name)), "train", 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [TokensConfig, RecordsConfig])
def test_a_path_must_be_given(config: Any) -> None:
    with pytest.raises(DataError, match=r"data\.path is empty. Name a file or folder"):
        open_source(config(path=""), "train", 0)


def test_a_format_that_is_named_but_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no format 'jason'. Did you mean"):
        open_source(RecordsConfig(path=write_lines(tmp_path / "a.jsonl", [{"x": 1}]), format="jason"), "train", 0)
