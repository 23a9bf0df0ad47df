"""What the files of a place are, by their names."""

from __future__ import annotations

import pytest

from closeranks.data.building.readers.input_files import BuildInput, classify_inputs, kind_of
from closeranks.data.files.protocol import FileInfo


def infos(**sizes: int) -> list[FileInfo]:
    return [FileInfo(name.replace("__", ".").replace("_I_", "/"), size, "1") for name, size in sorted(sizes.items())]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", "text"),
        ("README", "text"),
        ("a.py", "text"),
        ("a.txt.gz", "text"),
        ("a.jsonl", "jsonl"),
        ("a.JSONL.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.pq", "parquet"),
        ("a.feather", "arrow"),
        ("a.tiff", "images"),
        ("a.tar", "webdataset"),
        ("a.tar.gz", "tar"),
        ("a.tgz", "tar"),
        ("a.mds.zstd", "mds, compressed"),
        ("a.mds.br", ""),
        ("a.tar.bz2", "tar"),
        ("a.tar.lz4", ""),
        ("a.txt.xz", "text"),
        ("a.parquet.gz", ""),
        ("a.JPG", "images"),
        ("a.pyc", ""),
        ("a.bin", ""),
    ],
)
def test_a_name_says_what_a_file_is(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_bin_beside_its_idx_is_megatrons() -> None:
    assert kind_of("d/x.bin", frozenset({"d/x.bin", "d/x.idx"})) == "megatron"


def test_a_folder_is_what_most_of_its_bytes_are_and_tells_what_it_leaves_out() -> None:
    found = classify_inputs(infos(a__jsonl=100, b__jsonl__gz=100, README__md=50, x__pyc=900), 3, is_folder=True)
    assert found.inputs == (BuildInput(3, "a.jsonl", "jsonl", 100), BuildInput(3, "b.jsonl.gz", "jsonl", 100))
    assert found.left_out == ("README.md", "x.pyc")


def test_a_format_takes_its_folder_as_one() -> None:
    found = classify_inputs(infos(a__parquet=100, b__parquet=100, README__md=50), 0, is_folder=True)
    assert found.inputs == (BuildInput(0, "", "parquet", 200),)


def test_a_file_that_is_named_is_taken_whatever_it_is() -> None:
    assert classify_inputs(infos(x__bin=10), 0, is_folder=False).inputs == (BuildInput(0, "x.bin", "text", 10),)


def test_a_kind_that_was_asked_for_wins() -> None:
    found = classify_inputs(infos(a__json=100, b__json=100), 0, is_folder=True, wanted="text")
    assert [one.kind for one in found.inputs] == ["text", "text"]


def test_compressed_inputs_count_for_more() -> None:
    assert BuildInput(0, "a.jsonl.gz", "jsonl", 100).content_bytes == 400
    assert BuildInput(0, "a.tar.gz", "tar", 100).compression == "gz"
    assert BuildInput(0, "a.tar.zst", "tar", 100).compression == "zst"
    assert BuildInput(0, "a.tgz", "tar", 100).compression == "gz"
