from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import DataError
from closeranks.data.files.open import open_files
from closeranks.data.shards import tokens as tokens_module
from closeranks.data.shards.commit import commit
from closeranks.data.shards.detect import is_shards
from closeranks.data.shards.manifest import DatasetInfo
from closeranks.data.shards.tokens import ShardTokens
from closeranks.data.shards.verify import verify
from closeranks.data.shards.writer import TokenShardWriter
from tests.data.shards.made import VOCAB_SIZE, content, documents, opened, write_tokens


def stream_of(docs: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(docs) if docs else np.empty(0, np.uint16)


@given(
    lengths=st.lists(st.integers(0, 400), max_size=40),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"]),
    shard_bytes=st.sampled_from([64, 900, 5000, 1 << 20]),
    most_mapped=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 99),
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dtype: str,
    shard_bytes: int,
    most_mapped: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    rng = np.random.default_rng(seed)
    docs = [rng.integers(0, 250, length).astype(dtype) for length in lengths]
    manifest = write_tokens(folder, docs, dtype=dtype, shard_bytes=shard_bytes, vocab_size=250)
    store = ShardTokens(opened(folder), most_mapped)
    stream = np.concatenate([np.empty(0, dtype), *docs])
    assert (store.num_tokens, store.dtype, store.vocab_size) == (len(stream), np.dtype(dtype), 250)
    assert np.asarray(store.ends).tolist() == np.cumsum(lengths, dtype=np.int64).tolist()
    assert manifest.num_items == len(docs)
    for length in {1, 7, 129, len(stream)}:
        if 0 < length <= len(stream):
            starts = rng.integers(0, len(stream) - length + 1, 20)
            found = store.read(starts, length)
            assert found.dtype == np.dtype(dtype)
            assert found.tolist() == [stream[s : s + length].tolist() for s in starts]
    assert verify(opened(folder)) == []
    shutil.rmtree(folder)


def test_windows_longer_than_a_block_and_than_one_gather(tmp_path: Path) -> None:
    docs = [np.random.default_rng(1).integers(0, VOCAB_SIZE, 60_000).astype(np.uint16) for _ in range(3)]
    write_tokens(tmp_path, docs, shard_bytes=1 << 20)
    store, stream = ShardTokens(opened(tmp_path)), stream_of(docs)
    for length in (2048, 2049, 16_384, 16_385, 100_000):
        starts = np.array([0, 17, len(stream) - length, 5])
        assert np.array_equal(store.read(starts, length), np.stack([stream[s : s + length] for s in starts]))


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, 10**6), (10**6, 1), (-5, 10)])
def test_tokens_that_are_not_there_are_refused(tmp_path: Path, start: int, length: int) -> None:
    write_tokens(tmp_path, documents())
    with pytest.raises(IndexError, match="tokens"):
        ShardTokens(opened(tmp_path)).read(np.array([start]), length)


def test_places_and_files_of_samples(tmp_path: Path) -> None:
    docs = documents()
    manifest = write_tokens(tmp_path, docs)
    store, stream = ShardTokens(opened(tmp_path)), stream_of(docs)
    for start in (0, 5, len(stream) - 1):
        place = store.where(start)
        data = Path(place.file).read_bytes()[place.offset :][:2]
        assert int.from_bytes(data, "little") == stream[start]
    names = [shard.name for shard in manifest.shards]
    last = len(stream) - 1
    assert store.files_of(np.array([last, 0, last]), 1) == [names[-1], names[0]]
    assert store.files_of(np.array([0]), len(stream)) == names
    sizes = sorted(shard.data_bytes // 2 for shard in manifest.shards)
    assert store.block == sizes[len(sizes) // 2]


def test_no_start_leads_out_of_the_maps(tmp_path: Path) -> None:
    """Reading gathers by address: a start that is in no shard must never become one, however far it lies away, also
    where numpy would count it from the end, or its place in bytes wraps around."""
    write_tokens(tmp_path, documents())
    store = ShardTokens(opened(tmp_path))
    store.read(np.arange(0, store.num_tokens - 8, 4), 8)  # all blocks are marked as checked
    far = [-1, -9, -5000, -40_000, -store.num_tokens - 1, -(1 << 40), -(1 << 62), store.num_tokens, 1 << 40, 1 << 62]
    for start in (*far, (1 << 62) - 8, -(1 << 63), (1 << 63) - 1):
        with pytest.raises(IndexError):
            store.read(np.array([0, start]), 8)


def test_a_pickled_store_opens_its_files_again(tmp_path: Path) -> None:
    write_tokens(tmp_path, documents())
    store = ShardTokens(opened(tmp_path))
    expected = store.read(np.arange(0, 4000, 100), 50)
    again = pickle.loads(pickle.dumps(store))
    assert again.identity == store.identity
    assert np.array_equal(again.read(np.arange(0, 4000, 100), 50), expected)


def test_a_data_set_that_changed_is_not_opened_as_the_same(tmp_path: Path) -> None:
    write_tokens(tmp_path, documents())
    data = pickle.dumps(ShardTokens(opened(tmp_path)))
    shutil.rmtree(tmp_path)
    write_tokens(tmp_path, documents(seed=1))
    with pytest.raises(DataError, match="changed while it was in use"):
        pickle.loads(data)


def test_identity_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", documents())
    write_tokens(tmp_path / "b", documents())
    write_tokens(tmp_path / "c", documents(seed=1))
    a, b, c = (ShardTokens(opened(tmp_path / name)).identity for name in "abc")
    assert a == b != c
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_an_empty_data_set(tmp_path: Path) -> None:
    write_tokens(tmp_path, [])
    store = ShardTokens(opened(tmp_path))
    assert (store.num_tokens, len(store.ends), store.block) == (0, 0, 0)
    assert store.read(np.empty(0, np.int64), 129).shape == (0, 129)
    with pytest.raises(IndexError):
        store.read(np.array([0]), 1)
    assert is_shards(opened(tmp_path))
    assert verify(opened(tmp_path)) == []


def test_data_appended_later_comes_after(tmp_path: Path) -> None:
    first, second = documents(), documents(seed=1)
    before = write_tokens(tmp_path, first)
    kept = content(tmp_path)
    with TokenShardWriter(
        tmp_path, "uint16", first=len(before.shards), vocab_size=VOCAB_SIZE, shard_bytes=12_000, block_bytes=4096
    ) as writer:
        for tokens in second:
            writer.append(tokens)
        about = DatasetInfo(VOCAB_SIZE, "words", "ab" * 32, {"from": "later"})
        after = writer.finish_and_commit(about, extend=True)
    assert after.shards[: len(before.shards)] == before.shards
    assert after.about.provenance == {"from": "later", "before": {"from": "made up"}}
    store, stream = ShardTokens(opened(tmp_path)), stream_of(first + second)
    assert np.array_equal(store.read(np.array([0]), len(stream))[0], stream)
    assert all(content(tmp_path)[name] == data for name, data in kept.items() if name != "dataset.json")
    assert commit(tmp_path, [s.name for s in after.shards], about, extend=True) == after, "a second commit adds nothing"
    with pytest.raises(DataError, match="tokenizer is 'other'"):
        commit(tmp_path, [], DatasetInfo(VOCAB_SIZE, "other"), extend=True)


def test_parts_written_apart_make_one_data_set(tmp_path: Path) -> None:
    docs = documents()
    names: list[str] = []
    for part, chunk in ((1, docs[20:]), (0, docs[:20])):
        with TokenShardWriter(tmp_path, "uint16", part=part, shard_bytes=9000) as writer:
            for tokens in chunk:
                writer.append(tokens)
            names = [*writer.finish(), *names]
    assert names == sorted(names)
    assert names[0] == "shard-00000-00000.crs"
    commit(tmp_path, names, DatasetInfo(VOCAB_SIZE))
    stream = stream_of(docs)
    assert np.array_equal(ShardTokens(opened(tmp_path)).read(np.array([0]), len(stream))[0], stream)


def test_the_ends_of_many_documents_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_FEW_DOCUMENTS", 10)
    lengths = np.random.default_rng(2).integers(0, 30, 3000)
    write_tokens(tmp_path, [np.zeros(length, np.uint16) for length in lengths], shard_bytes=9000)
    expected = np.cumsum(lengths)
    for most_mapped in (0, 2):
        ends: Any = ShardTokens(opened(tmp_path), most_mapped).ends
        assert not isinstance(ends, np.ndarray)
        assert (len(ends), ends.shape, ends.dtype, ends.size) == (3000, (3000,), np.dtype(np.int64), 3000)
        assert np.array_equal(np.asarray(ends), expected)
        assert np.array_equal(ends[10:2500], expected[10:2500])
        assert np.array_equal(ends[::-7], expected[::-7])
        assert (ends[0], ends[-1], ends[1234]) == (expected[0], expected[-1], expected[1234])
        picks = np.random.default_rng(3).integers(-3000, 3000, (40, 5))
        assert np.array_equal(ends[picks], expected[picks])
        assert np.array_equal(ends[expected % 2 == 0], expected[expected % 2 == 0])
        values = np.arange(-5, int(expected[-1]) + 5)
        for side in ("left", "right"):
            assert np.array_equal(np.searchsorted(ends, values, side=side), expected.searchsorted(values, side=side))
            assert ends.searchsorted(77, side=side) == expected.searchsorted(77, side=side)
        with pytest.raises(IndexError):
            ends[3000]


def test_tokens_are_not_records_nor_an_unfinished_build(tmp_path: Path) -> None:
    from closeranks.data.shards.records import ShardRecords

    write_tokens(tmp_path, documents())
    with pytest.raises(DataError, match="holds tokens, not records"):
        ShardRecords(opened(tmp_path))
    (tmp_path / "dataset.json").unlink()
    assert is_shards(opened(tmp_path))
    with pytest.raises(DataError, match="its build was not finished"):
        ShardTokens(opened(tmp_path))
    assert "was not finished" in str(verify(opened(tmp_path))[0])


def test_a_folder_of_other_things_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text('{"rows": 3}')
    assert not is_shards(opened(tmp_path))
    with pytest.raises(DataError, match="damaged, or not written by closeranks"):
        ShardTokens(open_files(str(tmp_path)))
