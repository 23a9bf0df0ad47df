"""Builds from every kind of input, and the same bytes whoever works at them."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from closeranks.core.errors import BadRecordError, DataError
from closeranks.data.building.build import BuildReporter, BuildRequest, BuildSummary, build_shards
from closeranks.data.building.tokenizer import encoder_spec, open_encoder
from closeranks.data.files.open import open_files
from closeranks.data.shards.manifest import read_manifest
from closeranks.data.shards.records import ShardRecords
from closeranks.data.shards.tokens import ShardTokens
from tests.data.building.material import contents, json_lines, png, rows, tar_bytes, texts_folder, tiny_tokenizer

pytestmark = pytest.mark.world
MDS = Path(__file__).parents[1] / "formats" / "golden" / "mds"


def build(out: Path, *inputs: Path, **asked: Any) -> BuildSummary:
    asked = {"num_processes": 1, **asked}
    return build_shards(BuildRequest(inputs=tuple(map(str, inputs)), out=out, **asked))


def documents(out: Path) -> list[list[int]]:
    store = ShardTokens(open_files(str(out)))
    ends = np.asarray(store.ends[:]).tolist()
    stream = store.read(np.array([0]), store.num_tokens)[0]
    return [stream[first:last].tolist() for first, last in zip([0, *ends], ends, strict=False)]


def texts(out: Path) -> list[str]:
    return [bytes(document).decode() for document in documents(out)]


def records(out: Path) -> list[Any]:
    store = ShardRecords(open_files(str(out)))
    return [dict(record) for record in store.read(np.arange(len(store)))]


# What goes in comes out


def test_every_file_of_a_folder_is_a_document(tmp_path: Path) -> None:
    expected = texts_folder(tmp_path / "in")
    summary = build(tmp_path / "out", tmp_path / "in")
    in_order = sorted((path.relative_to(tmp_path / "in").as_posix(), path) for path in (tmp_path / "in").rglob("*.py"))
    assert texts(tmp_path / "out") == [path.read_text() for _, path in in_order]
    assert summary.num_documents == len(expected)
    assert summary.num_tokens == summary.text_bytes == sum(len(text.encode()) for text in expected.values())


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_every_line_is_a_document(tmp_path: Path, packed: str) -> None:
    text = "one\n\ntwo\r\nthree ü\nfour".encode()
    data = {"": text, ".gz": gzip.compress(text), ".zst": zstandard.ZstdCompressor().compress(text)}[packed]
    (tmp_path / f"a.txt{packed}").write_bytes(data)
    build(tmp_path / "out", tmp_path / f"a.txt{packed}", split="line", eos="10")
    assert texts(tmp_path / "out") == ["one\n", "two\n", "three ü\n", "four\n"]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_json_lines_give_a_field_as_text(tmp_path: Path, packed: str) -> None:
    made = rows(50)
    data = json_lines(made)
    data = {"": data, ".gz": gzip.compress(data), ".zst": zstandard.ZstdCompressor().compress(data)}[packed]
    (tmp_path / f"a.jsonl{packed}").write_bytes(data)
    build(tmp_path / "out", tmp_path / f"a.jsonl{packed}")
    assert texts(tmp_path / "out") == [row["text"] for row in made]


def test_json_lines_as_records_keep_every_field(tmp_path: Path) -> None:
    made: list[dict[str, object]] = [{"a": 1, "b": "x", "c": [1, {"d": None}], "e": 0.5, "f": True}, {"a": 2}]
    (tmp_path / "a.jsonl").write_bytes(json_lines(made))
    summary = build(tmp_path / "out", tmp_path / "a.jsonl", kind="records")
    assert records(tmp_path / "out") == made
    assert (summary.kind, summary.num_documents, summary.num_tokens) == ("records", 2, 0)


def test_parquet(tmp_path: Path) -> None:
    made = rows(40)
    (tmp_path / "in").mkdir()
    table = pa.Table.from_pylist(made)
    pq.write_table(table.slice(0, 25), tmp_path / "in" / "a.parquet", row_group_size=10)
    pq.write_table(table.slice(25), tmp_path / "in" / "b.parquet")
    (tmp_path / "in" / "README.md").write_text("about")
    build(tmp_path / "tokens", tmp_path / "in")
    assert texts(tmp_path / "tokens") == [row["text"] for row in made]
    build(tmp_path / "records", tmp_path / "in", kind="records")
    assert records(tmp_path / "records") == made
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["README.md", "a.parquet", "b.parquet"]


@pytest.mark.parametrize(
    ("mode", "name"), [("w", "a.tar"), ("w:gz", "a.tar.gz"), ("w:bz2", "a.tar.bz2"), ("w:xz", "a.txz")]
)
def test_tar(tmp_path: Path, mode: str, name: str) -> None:
    (tmp_path / name).write_bytes(tar_bytes(mode, 20))
    build(tmp_path / "records", tmp_path / name, kind="records")
    assert records(tmp_path / "records")[7] == {"__key__": "a/0007", "txt": b"text 7", "cls": b"1"}
    build(tmp_path / "tokens", tmp_path / name)
    assert texts(tmp_path / "tokens") == [f"text {number}" for number in range(20)]


def test_hugging_face_folder(tmp_path: Path) -> None:
    import datasets

    made = rows(30)
    datasets.Dataset.from_list(made).save_to_disk(str(tmp_path / "hf"))
    build(tmp_path / "out", tmp_path / "hf")
    assert texts(tmp_path / "out") == [row["text"] for row in made]


@pytest.mark.parametrize("packing", ["", "zstd"])
def test_mds(tmp_path: Path, packing: str) -> None:
    """Compressed shards cannot be read by number where they lie, and that is what a build is for."""
    folder = tmp_path / "in"
    shutil.copytree(MDS / "zstd", folder)
    if not packing:
        data = (folder / "shard.00000.mds.zstd").read_bytes()
        (folder / "shard.00000.mds").write_bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 20))
        (folder / "shard.00000.mds.zstd").unlink()
        index = json.loads((folder / "index.json").read_text())
        index["shards"][0] |= {"zip_data": None, "compression": None}
        (folder / "index.json").write_text(json.dumps(index))
    build(tmp_path / "out", folder, kind="records")
    found = records(tmp_path / "out")
    assert [record["label"] for record in found] == [0, 1, 2]
    build(tmp_path / "tokens", folder, field="caption")
    assert texts(tmp_path / "tokens") == [record["caption"] for record in found]


def test_images_stay_as_they_are(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / "in" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    build(tmp_path / "out", tmp_path / "in", kind="records")
    stored = [value for record in records(tmp_path / "out") for value in record.values()]
    assert [png(number) in stored for number in range(6)] == [True] * 6


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer.json")
    made = rows(50)
    (tmp_path / "a.jsonl").write_bytes(json_lines(made))
    summary = build(tmp_path / "out", tmp_path / "a.jsonl", tokenizer=str(tokenizer))
    encoder = open_encoder(encoder_spec(str(tokenizer), "auto"))
    expected = [encoder.encode([str(row["text"]).encode()]).tokens.tolist() for row in made]
    assert documents(tmp_path / "out") == expected
    manifest = read_manifest(open_files(str(tmp_path / "out")))
    assert (manifest.head.dtype, manifest.about.vocab_size) == ("uint16", 600)
    assert manifest.about.tokenizer_digest == encoder_spec(str(tokenizer), "auto").digest
    assert summary.text_bytes == sum(len(str(row["text"]).encode()) for row in made)


def test_several_inputs_come_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    build(tmp_path / "out", tmp_path / "b.txt", tmp_path / "a.txt", tmp_path / "c.txt")
    assert texts(tmp_path / "out") == ["b.txt", "a.txt", "c.txt"]


def test_a_large_text_is_a_document_too(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 256, 17 << 20, dtype=np.uint8).tobytes()
    (tmp_path / "large.txt").write_bytes(text)
    (tmp_path / "small.txt").write_bytes(b"small")
    build(tmp_path / "out", tmp_path / "small.txt", tmp_path / "large.txt", shard_bytes=1 << 20)
    store = ShardTokens(open_files(str(tmp_path / "out")))
    assert np.asarray(store.ends[:]).tolist() == [5, 5 + len(text)]
    assert store.read(np.array([5]), len(text))[0].tobytes() == text


# The same bytes, whoever works at it


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Inputs that are cut in every way there is: lines, whole files, records."""
    folder = tmp_path_factory.mktemp("mixed")
    texts_folder(folder / "texts", 3)
    (folder / "long.jsonl").write_bytes(json_lines(rows(1500)))
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(json_lines(rows(500))))
    pq.write_table(pa.Table.from_pylist(rows(700)), folder / "rows.parquet", row_group_size=100)
    return [folder / "texts", folder / "long.jsonl", folder / "packed.jsonl.gz", folder / "rows.parquet"]


@pytest.mark.parametrize("with_file", [False, True], ids=["bytes", "tokenizer"])
def test_any_number_of_processes_writes_the_same_bytes(mixed: list[Path], tmp_path: Path, with_file: bool) -> None:
    asked: dict[str, Any] = {"shard_bytes": 30_000}
    if with_file:
        asked["tokenizer"] = str(tiny_tokenizer(tmp_path / "tokenizer.json"))
    for count in (1, 2, 3):
        summary = build(tmp_path / str(count), *mixed, num_processes=count, **asked)
        assert summary.num_shards >= 5
    one, two, three = (contents(tmp_path / str(count)) for count in (1, 2, 3))
    assert one == two == three
    made = [row["text"] for count in (1500, 500, 700) for row in rows(count)]
    if not with_file:
        assert texts(tmp_path / "1")[3:] == made


def test_the_same_inputs_elsewhere_and_later_write_the_same_bytes(tmp_path: Path) -> None:
    for place in ("here", "there"):
        texts_folder(tmp_path / place / "in", 4)
        build(tmp_path / place / "out", tmp_path / place / "in")
    assert contents(tmp_path / "here" / "out") == contents(tmp_path / "there" / "out")


def test_progress_counts_every_byte_of_the_inputs(mixed: list[Path], tmp_path: Path) -> None:
    totals: list[tuple[int, int]] = []
    told: list[int] = []
    reporter = BuildReporter(on_total=lambda total, done: totals.append((total, done)), on_bytes=told.append)
    request = BuildRequest(tuple(map(str, mixed)), tmp_path / "out", shard_bytes=30_000, num_processes=2)
    summary = build_shards(request, reporter)
    total = sum(
        path.stat().st_size for place in mixed for path in ([place] if place.is_file() else place.rglob("*.py"))
    )
    assert totals == [(total, 0)]
    assert summary.read_bytes == total
    assert sum(told) <= total


# Bad records


def bad_lines(path: Path) -> list[str]:
    made = rows(30)
    lines = json_lines(made).splitlines(keepends=True)
    lines[7] = b"{not json}\n"
    lines[20] = b'{"body": "other"}\n'
    lines[25] = b'{"text": "\\ud800"}\n'
    path.write_bytes(b"".join(lines))
    return [str(row["text"]) for number, row in enumerate(made) if number not in (7, 20, 25)]


def test_a_bad_record_stops_the_build_and_is_named(tmp_path: Path) -> None:
    bad_lines(tmp_path / "a.jsonl")
    offset = len(b"".join((tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)[:7]))
    with pytest.raises(BadRecordError, match=rf"a\.jsonl', byte {offset}: not JSON"):
        build(tmp_path / "out", tmp_path / "a.jsonl")
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_bad_records_can_be_skipped_and_are_written_down(tmp_path: Path) -> None:
    good = bad_lines(tmp_path / "a.jsonl")
    summary = build(tmp_path / "out", tmp_path / "a.jsonl", on_bad="skip")
    assert texts(tmp_path / "out") == good
    assert summary.num_skipped == 3
    told = read_manifest(open_files(str(tmp_path / "out"))).about.provenance
    assert told["num_skipped"] == 3
    assert [words in one for words, one in zip(("not JSON", "'body'", "surrogates"), told["skipped"], strict=True)] == [
        True
    ] * 3


def test_text_that_is_not_utf8_is_bad_for_a_tokenizer_and_fine_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\xfe")
    build(tmp_path / "bytes", tmp_path / "a.txt")
    assert documents(tmp_path / "bytes") == [list(b"fine\n\xff\xfe")]
    tokenizer = str(tiny_tokenizer(tmp_path / "t.json"))
    with pytest.raises(DataError, match="not UTF-8 text, at its byte 5"):
        build(tmp_path / "tokens", tmp_path / "a.txt", tokenizer=tokenizer)
    assert not (tmp_path / "tokens").exists()


def test_files_that_are_no_images_stop_the_build_or_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    given = {"a": png(1), "b": b"", "c": png(2)[:-9], "d": b"text", "e": png(3)}
    for name, content in given.items():
        (folder / f"{name}.png").write_bytes(content)
    request = BuildRequest((str(folder),), tmp_path / "out", kind="records", num_processes=1)
    with pytest.raises(BadRecordError, match=r"photos/b\.png', byte 0: the image is empty"):
        build_shards(request)
    summary = build_shards(replace(request, on_bad="skip", is_overwriting=True))
    assert (summary.num_documents, summary.num_skipped) == (2, 3)
    assert [Path(one.partition("'")[2].partition("'")[0]).name for one in summary.skipped] == [
        "b.png",
        "c.png",
        "d.png",
    ]
