from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from closeranks.core.errors import DataError
from closeranks.core.protocols import DataSource
from closeranks.data.config import TextConfig
from closeranks.data.sources import text
from closeranks.data.sources.open import open_source


def both(path: Path | str, **keys: Any) -> tuple[DataSource, DataSource]:
    config = TextConfig(path=str(path), **keys)
    held_out = open_source(config, "eval", 0)
    assert held_out is not None
    return open_source(config, "train", 0), held_out


def test_samples_tile_the_text_and_overlap_by_the_last_target(tmp_path: Path) -> None:
    content = bytes(range(200))
    file = tmp_path / "bytes.txt"
    file.write_bytes(content)
    train, held_out = both(file, seq_len=10, eval_fraction=0.2)
    assert (len(train), len(held_out)) == (15, 4)
    for source, offset in ((train, 0), (held_out, 15)):
        tokens = source.read(np.arange(len(source)))["tokens"]
        for row, sample in enumerate(tokens):
            begin = (offset + row) * 10
            assert bytes(sample.tolist()) == content[begin : begin + 11]


def test_reading_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(101)))
    train, _ = both(tmp_path, seq_len=4, eval_fraction=0.1)
    tokens = train.read(np.array([7, 2, 7]))["tokens"]
    assert tokens[:, 0].tolist() == [28, 8, 28]
    tokens[0, 0] = 99
    assert train.read(np.array([7]))["tokens"][0, 0] == 28, "a batch is a copy"


def test_a_folder_is_its_files_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in (("b.txt", b"BBBB"), ("a.txt", b"AAAA"), ("sub/c.txt", b"CCCC"), (".hidden", b"HHHH")):
        (tmp_path / name).write_bytes(content)
    source = open_source(TextConfig(path=str(tmp_path), seq_len=11, eval_fraction=0), "train", 0)
    assert bytes(source.read(np.array([0]))["tokens"][0].tolist()) == b"AAAABBBBCCCC"


def test_identity_is_the_content_not_the_place(tmp_path: Path) -> None:
    identities = []
    for folder, content in (("one", b"a" * 100), ("two", b"a" * 100), ("three", b"a" * 99 + b"b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "corpus.txt").write_bytes(content)
        identities.append(both(tmp_path / folder / "corpus.txt", seq_len=4)[0].identity)
    assert identities[0] == identities[1] != identities[2]
    assert both(tmp_path / "one" / "corpus.txt", seq_len=5)[0].identity != identities[0]
    train, held_out = both(tmp_path / "one" / "corpus.txt", seq_len=4)
    assert train.identity != held_out.identity


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "corpus.txt"
    file.write_bytes(b"a" * 100)
    before = both(file, seq_len=4)[0].identity
    file.write_bytes(b"b" * 101)
    assert both(file, seq_len=4)[0].identity != before


def test_max_bytes_bounds_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 30)
    (tmp_path / "b.txt").write_bytes(b"b" * 30)
    config = TextConfig(path=str(tmp_path), seq_len=1, eval_fraction=0, max_bytes=40)
    source = open_source(config, "train", 0)
    tokens = source.read(np.arange(len(source)))["tokens"][:, 0]
    assert bytes(tokens.tolist()) == b"a" * 30 + b"b" * 9


def test_without_a_fraction_there_is_no_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 30)
    assert open_source(TextConfig(path=str(tmp_path), seq_len=1, eval_fraction=0), "eval", 0) is None


@pytest.mark.parametrize(
    ("content", "keys", "said"),
    [
        (b"", {"seq_len": 4}, "has 0 bytes, too short"),
        (b"1234", {"seq_len": 4}, "has 4 bytes, too short for one sample of data.seq_len = 4"),
        (b"12345", {"seq_len": 4}, "has 1 sample, too few to keep a part for evaluation"),
    ],
)
def test_too_little_text(tmp_path: Path, content: bytes, keys: dict[str, Any], said: str) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        open_source(TextConfig(path=str(file), **keys), "train", 0)
    assert caught.value.fix


def test_missing_path_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist.*folder of them, or 'stdlib'"):
        open_source(TextConfig(path=str(tmp_path / "nowhere")), "train", 0)
    with pytest.raises(DataError, match=r"holds no files.*Put text files"):
        open_source(TextConfig(path=str(tmp_path)), "train", 0)


def test_the_standard_library_is_text_enough_and_quick() -> None:
    text._read.cache_clear()
    began = time.process_time()
    train, held_out = both("stdlib")
    assert time.process_time() - began < 0.5
    assert 7 << 20 < (len(train) + len(held_out)) * 128 <= 8 << 20
    start = bytes(train.read(np.array([0]))["tokens"][0].tolist())
    assert start.startswith(b'"""Record of phased-in incompatible language changes')


def test_the_standard_library_is_the_same_every_time() -> None:
    first = both("stdlib")[0].identity
    text._read.cache_clear()
    assert both("stdlib")[0].identity == first


def test_what_is_no_good_text_is_left_out() -> None:
    paths = [Path(file.path) for file in text._list_files("stdlib")]
    assert len(paths) > 200
    parts = {part for path in paths for part in path.parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"}
    assert not [path for path in paths if path.name.startswith("_sysconfig")]
