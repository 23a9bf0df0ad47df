from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import DataError
from closeranks.data.config import TokensConfig
from closeranks.data.formats.record_index.saved_index import IndexLocation
from closeranks.data.packing import pack
from closeranks.data.source import LoaderSource
from closeranks.data.sources import splits, tokens
from closeranks.data.sources.tokens import PackedDocuments, TokenWindows, open_tokens_source, saved_packing
from tests.data.sources.memory_stores import MemoryFiles, MemoryTokens


def counting(num_tokens: int, dtype: str = "uint16", **keys: Any) -> MemoryTokens:
    return MemoryTokens([np.arange(num_tokens).astype(dtype)], **keys)


def windows(store: MemoryTokens, seq_len: int, samples: range, files: Any = None) -> TokenWindows:
    return TokenWindows(store, files or MemoryFiles(), seq_len, samples, "windows")


class OpenPacking:
    """Packs what a store holds; counts how often that was asked for."""

    num_opened = 0

    def __init__(self, store: MemoryTokens, row_tokens: int) -> None:
        self._ends, self._row_tokens = store.ends, row_tokens

    def __call__(self) -> Any:
        OpenPacking.num_opened += 1
        return pack(self._ends, self._row_tokens)


def packed(documents: list[int], seq_len: int, files: Any = None, **keys: Any) -> PackedDocuments:
    """Token n of document d is ``100 * d + n``."""
    store = MemoryTokens([np.arange(n, dtype=np.uint16) + 100 * d for d, n in enumerate(documents)], **keys)
    opening = OpenPacking(store, seq_len + 1)
    return PackedDocuments(store, files or MemoryFiles(), opening, range(opening().num_rows), "packed")


# Windows over the stream


@given(st.integers(1, 9), st.integers(2, 80), st.data())
def test_a_sample_is_seq_len_tokens_and_the_one_that_follows(seq_len: int, num_tokens: int, data: Any) -> None:
    num_samples = (num_tokens - 1) // seq_len
    if num_samples == 0:
        return
    first = data.draw(st.integers(0, num_samples - 1))
    source = windows(counting(num_tokens), seq_len, range(first, num_samples))
    asked = data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=9))
    rows = source.read(np.array(asked))["tokens"]
    for row, index in zip(rows, asked, strict=True):
        begin = (first + index) * seq_len
        assert row.tolist() == list(range(begin, begin + seq_len + 1))


def test_a_batch_is_one_read_of_any_size() -> None:
    store = counting(1000)
    windows(store, 4, range(100)).read(np.arange(64))
    assert store.num_reads == 1


@pytest.mark.parametrize(
    ("stored_as", "read_as"),
    [("uint8", "uint8"), ("uint16", "uint16"), ("int32", "int32"), ("uint32", "int64"), ("int64", "int64")],
)
def test_small_types_stay_small(stored_as: str, read_as: str) -> None:
    batch = windows(counting(30, stored_as), 4, range(7)).read(np.array([1, 0]))["tokens"]
    assert batch.dtype == getattr(torch, read_as)
    assert batch.long().tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]


def test_where_samples_lie_and_what_is_fetched() -> None:
    files = MemoryFiles()
    files.is_local = False
    source = windows(counting(100, block=20, vocab_size=256), 8, range(2, 12), files)
    assert isinstance(source, LoaderSource)
    assert source.block == 2
    assert source.vocab_size == 256
    assert source.where(0) == "'part-0', token 16"
    source.prefetch(np.array([9, 0]))
    assert files.wanted == [["part-4", "part-0", "part-1"]]
    source.close()
    assert files.is_closed


def test_what_lies_here_is_not_fetched() -> None:
    files = MemoryFiles()
    windows(counting(100), 8, range(12), files).prefetch(np.array([1]))
    assert files.wanted == []


# Packed documents


def test_documents_are_kept_apart_in_their_row() -> None:
    source = packed([5, 3, 2], 8)
    batch = source.read(np.arange(len(source)))
    assert [batch["tokens"].shape, batch["documents"].shape] == [(2, 9), (2, 9)]
    assert batch["tokens"].tolist() == [[0, 1, 2, 3, 4, 100, 101, 102, 0], [200, 201, *[0] * 7]]
    assert batch["documents"].tolist() == [[0] * 5 + [1] * 3 + [-1], [0, 0, *[-1] * 7]]
    assert batch["documents"].dtype == torch.int32
    assert batch["tokens"].dtype == torch.uint16
    assert source.efficiency == 10 / 18


def test_what_a_row_says_of_itself() -> None:
    files = MemoryFiles()
    files.is_local = False
    source = packed([5, 3, 30, 4], 9, files, block=8)
    rows = source.read(np.arange(len(source)))["documents"].tolist()
    mixed = next(number for number, row in enumerate(rows) if max(row) > 0)
    assert source.where(mixed) == "'part-0', token 0 and 1 more document"
    source.prefetch(np.array([mixed]))
    assert files.wanted == [["part-0", "part-4", "part-5"]], "the last document ends in another file"


def test_the_packing_is_opened_again_and_never_sent() -> None:
    source = packed([7] * 600, 20)
    sent = pickle.dumps(source)
    before = OpenPacking.num_opened
    again = pickle.loads(sent)
    assert OpenPacking.num_opened == before + 1
    assert again.read(np.array([3]))["tokens"].tolist() == source.read(np.array([3]))["tokens"].tolist()
    store_bytes = len(pickle.dumps(source._store))
    assert len(sent) < 2 * store_bytes


# Opening


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, MemoryTokens]:
    """Stores by path, in place of files."""
    stores: dict[str, MemoryTokens] = {}
    monkeypatch.setattr(splits, "open_files", lambda path, **_: MemoryFiles(path))
    monkeypatch.setattr(tokens, "open_tokens", lambda files, *_: stores[files.url])
    return stores


def opened(split: str = "train", **keys: Any) -> Any:
    return open_tokens_source(TokensConfig(**{"path": "/a", "seq_len": 4, **keys}), split, 0)  # type: ignore[arg-type]


def test_the_tail_is_kept_for_evaluation(corpus: dict[str, MemoryTokens]) -> None:
    corpus["/a"] = counting(41)
    train, held_out = opened(eval_fraction=0.2), opened("eval", eval_fraction=0.2)
    assert (len(train), len(held_out)) == (8, 2)
    assert held_out.read(np.array([0]))["tokens"][0, 0].item() == 32
    assert train.identity != held_out.identity
    assert train.identity == f"tokens 'a' (train, seq_len 4, samples 0:8, {corpus['/a'].identity})"
    assert opened("eval") is None


def test_evaluation_from_elsewhere_leaves_training_whole(corpus: dict[str, MemoryTokens]) -> None:
    corpus["/a"], corpus["/b"] = counting(41), counting(9)
    keys = {"eval_path": "/b", "eval_fraction": 0.2}
    assert len(opened(**keys)) == 10
    assert len(opened("eval", **keys)) == 2


@pytest.mark.parametrize(
    ("num_tokens", "keys", "said"),
    [
        (4, {}, "tokens 'a' has 4 tokens, too few for one sample of data.seq_len = 4"),
        (0, {}, "tokens 'a' has 0 tokens"),
        (5, {"eval_fraction": 0.1}, "too few to keep a part for evaluation"),
    ],
)
def test_too_few_tokens(corpus: dict[str, MemoryTokens], num_tokens: int, keys: dict[str, Any], said: str) -> None:
    corpus["/a"] = counting(num_tokens)
    with pytest.raises(DataError, match=said) as caught:
        opened(**keys)
    assert caught.value.fix


def test_a_packing_is_built_once_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, files, place = (
        MemoryTokens([np.arange(9, dtype=np.uint16)] * 40),
        MemoryFiles(),
        IndexLocation(str(tmp_path)),
    )
    built = saved_packing(store, files, place, 20, "", "")
    store._ends = store._ends[:1]
    again = saved_packing(store, files, place, 20, "", "")
    assert (again.num_rows, again.efficiency) == (built.num_rows, built.efficiency) == (20, 0.9)
    assert saved_packing(store, files, place, 21, "", "").num_rows == 1, "another row length is another packing"
    assert not again.starts.flags.writeable


def test_packed_documents_open_and_say_how_full_they_are(
    corpus: dict[str, MemoryTokens], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus["/a"] = MemoryTokens([np.arange(9, dtype=np.uint16)] * 40)
    keys = {"packing": "documents", "seq_len": 19, "index": str(tmp_path), "eval_fraction": 0.1}
    with caplog.at_level(logging.INFO):
        train, held_out = opened(**keys), opened("eval", **keys)
    assert (len(train), len(held_out)) == (18, 2)
    assert "40 documents in 20 rows of 20 tokens, 10.00% of them padding" in caplog.text
    assert train.efficiency == 0.9
    assert "packing 1" in train.identity
    assert pickle.loads(pickle.dumps(train)).read(np.array([0]))["documents"].max() == 1


def test_documents_too_short_to_pack(corpus: dict[str, MemoryTokens], tmp_path: Path) -> None:
    corpus["/a"] = MemoryTokens([np.zeros(1, dtype=np.uint16)] * 40)
    with pytest.raises(DataError, match="no document of two tokens or more"):
        opened(packing="documents", index=str(tmp_path))
