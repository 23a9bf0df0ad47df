"""A folder's format is found from its files, and what cannot be found is said in full."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from closeranks.core.errors import DataError
from closeranks.data.files.open import open_files
from closeranks.data.formats.open import FORMATS, detect, open_records, open_tokens
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.writer import RecordShardWriter, TokenShardWriter

PLACE = IndexLocation()


def line_file(root: Path) -> None:
    (root / "a.jsonl").write_text('{"text": "abc", "y": 1}\n{"text": "de", "y": 2}\n')


def tar_file(root: Path) -> None:
    with tarfile.open(root / "a.tar", "w") as archive:
        info = tarfile.TarInfo("k.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))


def array_file(root: Path) -> None:
    np.save(root / "x.npy", np.arange(6, dtype=np.uint16))


def image_file(root: Path) -> None:
    Image.new("RGB", (4, 4)).save(root / "a.png")


MAKERS = {"jsonl": line_file, "webdataset": tar_file, "numpy": array_file, "images": image_file}


@pytest.mark.parametrize("name", MAKERS)
def test_a_format_is_found_by_its_files(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path)
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "LICENSE").write_text("words")
    files = open_files(str(tmp_path))
    assert detect(files) == name
    assert len(open_records(files, "", PLACE)) > 0
    assert len(open_records(files, name, PLACE)) > 0


def test_tokens_of_every_kind(tmp_path: Path) -> None:
    for name in ("jsonl", "webdataset", "numpy"):
        root = tmp_path / name
        root.mkdir()
        MAKERS[name](root)
        tokens = open_tokens(open_files(str(root)), "", PLACE, "")
        first = tokens.read(np.array([0]), 3)
        assert first.tolist() == ([[0, 1, 2]] if name == "numpy" else [[97, 98, 99]])


def test_shards_come_first(tmp_path: Path) -> None:
    with RecordShardWriter(tmp_path / "records") as records:
        records.append({"text": "abc", "ids": np.array([1, 2])})
        records.append({"text": "de", "ids": np.array([3])})
        records.finish_and_commit(DatasetInfo())
    with TokenShardWriter(tmp_path / "tokens", "uint16") as tokens:
        tokens.append([7, 8, 9])
        tokens.finish_and_commit(DatasetInfo())
    for name in ("records", "tokens"):
        line_file(tmp_path / name)
        assert detect(open_files(str(tmp_path / name))) == "shards"
    stored = open_files(str(tmp_path / "records"))
    assert open_records(stored, "", PLACE).read(np.array([1]))[0]["text"] == "de"
    assert open_tokens(stored, "", PLACE, "ids").read(np.array([0]), 3).tolist() == [[1, 2, 3]]
    assert open_tokens(open_files(str(tmp_path / "tokens")), "", PLACE, "").read(np.array([1]), 2).tolist() == [[8, 9]]


def test_data_that_lies_far_away(tmp_path: Path) -> None:
    far = fsspec.filesystem("memory")
    for number in range(3):
        far.pipe(f"/formats/d/a-{number}.jsonl", b'{"text": "abc"}\n' * (number + 1))
    files = open_files("memory://formats/d", cache=str(tmp_path / "cache"))
    place = IndexLocation(cache=str(tmp_path / "cache"))
    records = open_records(files, "", place)
    assert records.read(np.array([5]))[0] == {"text": "abc"}
    assert records.where(5).file == "memory://formats/d/a-2.jsonl"
    tokens = open_tokens(files, "", place, "")
    assert tokens.read(np.array([2]), 4).tobytes() == b"cabc"
    assert tokens.files_of(np.array([2]), 4) == ["a-0.jsonl", "a-1.jsonl"]
    assert len([path for path in (tmp_path / "cache" / "index").iterdir() if path.suffix == ".v1"]) == 2
    files.close()


def test_nothing_known_lists_what_was_looked_for_and_found(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "c.md", "Makefile"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError) as caught:
        detect(open_files(str(tmp_path)))
    text = str(caught.value)
    assert "found 2 .csv, 1 " in text
    assert "Makefile" in text
    assert "shards (dataset.json)" in text
    assert all(f"{format.name} ({format.shown})" in text for format in FORMATS)
    assert "closeranks data build" in text


def test_a_mixture_of_formats_must_be_settled_by_hand(tmp_path: Path) -> None:
    line_file(tmp_path)
    image_file(tmp_path)
    files = open_files(str(tmp_path))
    with pytest.raises(DataError, match=r"mixes formats: jsonl \(1 files\), images \(1 files\).*data\.format"):
        open_records(files, "", PLACE)
    assert "image" in open_records(files, "images", PLACE).read(np.array([0]))[0]
    assert len(open_records(files, "jsonl", PLACE)) == 2


def test_an_unknown_format(tmp_path: Path) -> None:
    line_file(tmp_path)
    with pytest.raises(DataError, match=r"there is no format 'jsonlines'. Did you mean 'jsonl'?"):
        open_records(open_files(str(tmp_path)), "jsonlines", PLACE)


def test_compressed_data_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"12")
    with pytest.raises(DataError, match=r"compressed.*closeranks data build"):
        open_records(open_files(str(tmp_path)), "", PLACE)


def test_every_format_has_its_module() -> None:
    from importlib import import_module

    for format in FORMATS:
        module = import_module(f"closeranks.data.formats.{format.module}")
        assert format.name == module.NAME
        assert callable(module.is_format)
        assert hasattr(module, "open_records") or hasattr(module, "open_tokens")
        known = [*getattr(module, "SUFFIXES", ()), *getattr(module, "COMPRESSED", ()), *getattr(module, "PACKED", ())]
        assert set(known) <= set(format.suffixes), "files of a kind that nobody would ask for"


def test_reading_lines_needs_neither_torch_nor_arrow(tmp_path: Path) -> None:
    line_file(tmp_path)
    script = """
import json, sys
import numpy as np
from closeranks.data.files.open import open_files
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.formats.open import open_records, open_tokens
files = open_files(sys.argv[1])
assert len(open_records(files, "", IndexLocation())) == 2
assert open_tokens(files, "", IndexLocation(), "text").num_tokens == 5
print(json.dumps([name for name in ("torch", "pyarrow", "PIL", "fsspec", "pandas") if name in sys.modules]))
"""
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []
