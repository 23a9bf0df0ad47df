from __future__ import annotations

import json
import pickle
import shutil
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from closeranks.core.errors import DataError
from closeranks.data.formats.arrays import megatron
from closeranks.data.formats.arrays.megatron import MegatronTokens
from closeranks.data.formats.record_index.saved_index import IndexLocation
from tests.data.formats.local_files import FolderFiles

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"
HEADER_BYTES = 34


def opened(root: Path, place: Path) -> MegatronTokens:
    return megatron.open_tokens(FolderFiles(root), IndexLocation(str(place)))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with a copy of one golden pair."""
    folder = tmp_path / "pair"
    folder.mkdir()
    for name in ("a_text_document.bin", "a_text_document.idx"):
        shutil.copy(GOLDEN / "two" / name, folder / name)
    return folder


@pytest.mark.parametrize("name", ["two", "int32"])
def test_reads_what_megatron_wrote(name: str, tmp_path: Path) -> None:
    documents = json.loads((GOLDEN / name / "expected.json").read_text())["documents"]
    tokens = opened(GOLDEN / name, tmp_path)
    stream = [*chain.from_iterable(documents)]
    assert tokens.num_tokens == len(stream)
    assert tokens.ends.tolist() == np.cumsum([len(document) for document in documents]).tolist()
    assert tokens.dtype == (np.uint16 if name == "two" else np.int32)
    assert tokens.read(np.asarray([0]), len(stream))[0].tolist() == stream
    for length in (1, 2, 13):
        starts = np.random.default_rng(length).permutation(len(stream) - length + 1)
        rows = tokens.read(starts, length)
        assert rows.dtype == tokens.dtype
        assert rows.tolist() == [stream[start : start + length] for start in starts.tolist()]


def test_says_where_a_token_lies(tmp_path: Path) -> None:
    tokens = opened(GOLDEN / "two", tmp_path)
    num_first = (GOLDEN / "two" / "a_text_document.bin").stat().st_size // 2
    assert str(tokens.where(3)) == f"'{GOLDEN / 'two' / 'a_text_document.bin'}', byte 6"
    assert str(tokens.where(num_first + 1)) == f"'{GOLDEN / 'two' / 'b_text_document.bin'}', byte 2"
    assert tokens.files_of(np.asarray([num_first, 0]), 2) == ["b_text_document.bin", "a_text_document.bin"]
    assert tokens.files_of(np.asarray([num_first - 1]), 2) == ["a_text_document.bin", "b_text_document.bin"]
    with pytest.raises(DataError, match="there is no"):
        tokens.read(np.asarray([tokens.num_tokens - 1]), 2)


def test_survives_pickling_and_closing(tmp_path: Path) -> None:
    tokens = opened(GOLDEN / "two", tmp_path)
    before = tokens.read(np.asarray([5, 60]), 9)
    again = pickle.loads(pickle.dumps(tokens))
    tokens.close()
    assert again.identity == tokens.identity
    assert (again.read(np.asarray([5, 60]), 9) == before).all()
    assert (tokens.read(np.asarray([5, 60]), 9) == before).all()


def test_identity_names_the_documents_and_not_the_place(pair: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(pair, moved)
    here, there = opened(pair, tmp_path / "i"), opened(moved, tmp_path / "j")
    assert here.identity == there.identity
    other = tmp_path / "other"
    other.mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(GOLDEN / "int32" / f"corpus.{suffix}", other / f"a_text_document.{suffix}")
    assert opened(other, tmp_path / "k").identity != here.identity


def test_is_known_by_the_pair_of_names(pair: Path) -> None:
    files = FolderFiles(pair)
    assert megatron.is_format(files.list(), files)
    (pair / "a_text_document.bin").unlink()
    assert not megatron.is_format(files.list(), files)


def test_every_flipped_bit_of_an_index_is_refused_but_for_bounds_of_documents(pair: Path, tmp_path: Path) -> None:
    path = pair / "a_text_document.idx"
    sound = path.read_bytes()
    num_sequences = int.from_bytes(sound[18:26], "little")
    bounds_at = HEADER_BYTES + 12 * num_sequences
    whole = opened(pair, tmp_path / "i").read(np.asarray([0]), 10)
    for at in range(len(sound)):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        if at < bounds_at:
            with pytest.raises(DataError, match="a_text_document"):
                opened(pair, tmp_path / f"i{at}")
            continue
        with suppress(DataError):
            assert (opened(pair, tmp_path / f"i{at}").read(np.asarray([0]), 10) == whole).all()


@pytest.mark.parametrize("keep", [0, 9, 33, 60, 141])
def test_a_cut_index_is_refused(pair: Path, tmp_path: Path, keep: int) -> None:
    path = pair / "a_text_document.idx"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match="is damaged: it has"):
        opened(pair, tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 128, 132])
def test_data_of_another_size_than_its_index_says_is_refused(pair: Path, tmp_path: Path, num_bytes: int) -> None:
    path = pair / "a_text_document.bin"
    path.write_bytes(path.read_bytes()[:num_bytes].ljust(num_bytes, b"x"))
    with pytest.raises(DataError, match=f"has {num_bytes} bytes, and 130 according to"):
        opened(pair, tmp_path)


def test_data_cut_after_it_was_indexed_is_refused(pair: Path, tmp_path: Path) -> None:
    tokens = opened(pair, tmp_path)
    (pair / "a_text_document.bin").write_bytes(b"x" * 128)
    with pytest.raises(DataError, match="128 bytes, and had 130"):
        tokens.read(np.asarray([0]), 4)


def test_a_multimodal_set_is_refused_and_one_of_text_alone_is_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multimodal"):
        opened(GOLDEN / "multimodal", tmp_path / "i")
    folder = tmp_path / "text"
    shutil.copytree(GOLDEN / "multimodal", folder)
    index = (folder / "corpus.idx").read_bytes()
    num_sequences = int.from_bytes(index[18:26], "little")
    (folder / "corpus.idx").write_bytes(index[:-num_sequences] + bytes(num_sequences))
    expected = json.loads((GOLDEN / "int32" / "expected.json").read_text())["documents"]
    assert opened(folder, tmp_path / "j").num_tokens == sum(map(len, expected))


def test_foreign_files_and_lone_halves_are_named(pair: Path, tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "int32" / "corpus.idx", pair / "b.idx")
    with pytest.raises(DataError, match=r"b\.idx' is incomplete: there is no 'b\.bin'"):
        opened(pair, tmp_path)
    shutil.copy(GOLDEN / "int32" / "corpus.bin", pair / "b.bin")
    with pytest.raises(DataError, match=r"holds int32, .* uint16"):
        opened(pair, tmp_path)
    (pair / "b.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(60))
    with pytest.raises(DataError, match="not a Megatron index"):
        opened(pair, tmp_path)
    with pytest.raises(DataError, match=r"no pair of \.bin and \.idx"):
        opened(tmp_path / "empty", tmp_path)


def test_sequences_nobody_closed_are_a_document(pair: Path, tmp_path: Path) -> None:
    path = pair / "a_text_document.idx"
    index = bytearray(path.read_bytes())
    num_bounds = int.from_bytes(index[26:34], "little")
    index[26:34] = (num_bounds - 1).to_bytes(8, "little")
    path.write_bytes(index[:-8])
    before = opened(GOLDEN / "two", tmp_path / "i")
    after = opened(pair, tmp_path / "j")
    assert after.ends.tolist() == before.ends[: num_bounds - 1].tolist()
