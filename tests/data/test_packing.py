from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.errors import BadRecordError
from closeranks.data import packing
from closeranks.data.packing import (
    Packing,
    best_fit,
    block_bounds,
    default_block_tokens,
    fill_rows,
    pack,
    pack_block,
    read_segments,
)
from tests.data.sources.memory_stores import MemoryTokens

LENGTHS = st.lists(st.integers(0, 40), max_size=60)
ROW = st.integers(2, 16)
BLOCK = st.integers(1, 200)


def ends_of(lengths: list[int]) -> Any:
    return np.cumsum(lengths, dtype=np.int64)


def table(packed: Packing) -> list[list[tuple[int, int]]]:
    """Each row's segments as (start, length)."""
    return [
        [(int(packed.starts[at]), int(packed.lengths[at])) for at in range(packed.firsts[row], packed.firsts[row + 1])]
        for row in range(packed.num_rows)
    ]


def first_fit(lengths: list[int], row_tokens: int) -> int:
    """Rows that the simplest packing takes: each document into the first row with room, as they come."""
    rooms: list[int] = []
    for length in lengths:
        for row, room in enumerate(rooms):
            if room >= length:
                rooms[row] -= length
                break
        else:
            rooms.append(row_tokens - length)
    return len(rooms)


@given(LENGTHS, ROW, BLOCK)
def test_every_token_of_a_document_with_two_stands_in_exactly_one_row(
    lengths: list[int], row_tokens: int, block_tokens: int
) -> None:
    packed = pack(ends_of(lengths), row_tokens, block_tokens)
    found = [token for row in table(packed) for start, length in row for token in range(start, start + length)]
    begins = ends_of(lengths) - np.array(lengths, dtype=np.int64)
    due = [t for begin, n in zip(begins.tolist(), lengths, strict=True) if n >= 2 for t in range(begin, begin + n)]
    assert sorted(found) == due
    assert packed.num_tokens == len(due)


@given(LENGTHS, ROW, BLOCK)
def test_rows_hold_whole_documents_in_order_and_never_too_much(
    lengths: list[int], row_tokens: int, block_tokens: int
) -> None:
    ends = ends_of(lengths)
    begins = (ends - lengths).tolist()
    whole = {(begin, n) for begin, n in zip(begins, lengths, strict=True) if 2 <= n <= row_tokens}
    rows = table(pack(ends, row_tokens, block_tokens))
    segments = {segment for row in rows for segment in row}
    assert whole <= segments, "a document that fits into a row is not cut"
    for row in rows:
        assert 0 < sum(length for _, length in row) <= row_tokens
        assert row == sorted(row)
        documents = np.searchsorted(ends, [start for start, _ in row], side="right").tolist()
        assert len(set(documents)) == len(documents), "pieces of one document never share a row"


@given(st.integers(17, 400), ROW)
def test_a_long_document_is_cut_into_whole_rows_and_a_rest(length: int, row_tokens: int) -> None:
    rows = table(pack(ends_of([3, length]), row_tokens))
    pieces = sorted(segment for row in rows for segment in row if segment[0] >= 3)
    assert [n for _, n in pieces[:-1]] == [row_tokens] * (len(pieces) - 1)
    assert [start for start, _ in pieces] == [3 + number * row_tokens for number in range(len(pieces))]


@given(LENGTHS, LENGTHS, ROW, BLOCK)
def test_appending_documents_changes_no_complete_block(
    lengths: list[int], more: list[int], row_tokens: int, block_tokens: int
) -> None:
    before = table(pack(ends_of(lengths), row_tokens, block_tokens))
    after = table(pack(ends_of(lengths + more), row_tokens, block_tokens))
    *_, last = block_bounds(ends_of(lengths), block_tokens) if lengths else ([0],)
    kept = [row for row in before if row[0][0] < last[0]]
    assert after[: len(kept)] == kept
    if last[-1] - last[0] >= block_tokens:
        assert after[: len(before)] == before, "the last block was complete too"


@given(LENGTHS, BLOCK, st.integers(1, 70))
def test_a_block_ends_with_the_document_that_fills_it(lengths: list[int], block_tokens: int, at_a_time: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SLICE", at_a_time)
        blocks = [bounds.tolist() for bounds in block_bounds(ends_of(lengths), block_tokens)]
    assert [end for block in blocks for end in block[1:]] == ends_of(lengths).tolist()
    assert [block[0] for block in blocks] == [0, *(block[-1] for block in blocks)][: len(blocks)]
    for block in blocks[:-1]:
        assert block[-1] - block[0] >= block_tokens > block[-2] - block[0]


@pytest.mark.parametrize("dtype", ["uint64", "uint32", "int32"])
def test_ends_of_any_type(dtype: str) -> None:
    lengths = [30, 0, 5, 80, 2, 0]
    assert table(pack(ends_of(lengths).astype(dtype), 16, 40)) == table(pack(ends_of(lengths), 16, 40))


@given(LENGTHS, ROW, st.randoms())
def test_blocks_do_not_know_of_each_other(lengths: list[int], row_tokens: int, random: Any) -> None:
    """The rows of a block follow from its own lengths, wherever it begins."""
    sizes = np.array(lengths, dtype=np.int64)
    starts = ends_of(lengths) - sizes
    offset = random.randrange(10**12)
    here, there = pack_block(starts, sizes, row_tokens), pack_block(starts + offset, sizes, row_tokens)
    assert (there.starts - offset).tolist() == here.starts.tolist()
    assert there.counts.tolist() == here.counts.tolist()


@pytest.mark.parametrize("lengths", [[], [0], [1, 0, 1], [0, 0, 0]])
def test_documents_that_predict_nothing_give_no_row(lengths: list[int]) -> None:
    packed = pack(ends_of(lengths), 8)
    assert packed.num_rows == 0
    assert packed.efficiency == 0.0


def test_a_row_takes_at_least_one_target() -> None:
    with pytest.raises(ValueError, match="predicts nothing"):
        pack(ends_of([5]), 1)


def test_best_fit_fills_the_fullest_row_that_has_room() -> None:
    assert best_fit(np.array([2, 6, 5, 4]), 10).tolist() == [1, 0, 1, 0], "6 + 4 and 5 + 2, not 6 + 2"


@pytest.mark.parametrize("mean", [30, 200, 900])
def test_few_rows_against_the_bound_and_against_first_fit(mean: int) -> None:
    draw = np.random.default_rng(mean)
    lengths = np.clip(draw.lognormal(np.log(mean), 0.8, 3000), 2, 1025).astype(np.int64)
    num_rows = pack(np.cumsum(lengths), 1025, int(lengths.sum())).num_rows
    bound = -(-int(lengths.sum()) // 1025)
    # Where documents are near a row in length no packing comes close to the bound.
    assert bound <= num_rows <= first_fit(lengths.tolist(), 1025)
    assert num_rows <= bound * (1.01 if mean < 900 else 1.25)


def test_blocks_cost_little() -> None:
    """Packing inside blocks takes hardly more rows than packing everything together."""
    draw = np.random.default_rng(0)
    ends = np.cumsum(np.clip(draw.lognormal(5.5, 1.0, 20_000), 2, 50_000).astype(np.int64))
    packed = pack(ends, 1025)
    assert len(list(block_bounds(ends, default_block_tokens(1025)))) > 3
    assert packed.efficiency > 0.995


def test_a_hundred_thousand_documents_are_quick() -> None:
    ends = np.cumsum(np.random.default_rng(0).integers(2, 2000, 100_000))
    calls: list[tuple[int, int]] = []
    began = time.process_time()
    packed = pack(ends, 1025, on_progress=lambda done, total: calls.append((done, total)))
    assert time.process_time() - began < 2.0
    assert packed.num_tokens == int(ends[-1])
    assert calls[-1] == (int(ends[-1]), int(ends[-1]))
    assert calls == sorted(calls)


@given(LENGTHS.filter(lambda lengths: max(lengths, default=0) >= 2), ROW, st.integers(1, 9), st.data())
def test_rows_are_the_same_in_any_batch(lengths: list[int], row_tokens: int, run: int, data: Any) -> None:
    documents = [np.arange(n, dtype=np.uint16) + 100 * at for at, n in enumerate(lengths)]
    store = MemoryTokens(documents)
    packed = pack(store.ends, row_tokens, 50)
    rows = np.array(data.draw(st.lists(st.integers(0, packed.num_rows - 1), min_size=1, max_size=8)))

    def read(which: Any) -> Any:
        starts, sizes, counts = packed.segments(which)
        return fill_rows(read_segments(store, starts, sizes), sizes, counts, row_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_RUN", run)
        together = read(rows)
    expected = table(packed)
    stream = np.concatenate(documents)
    for place, row in enumerate(rows.tolist()):
        flat = [int(t) for start, n in expected[row] for t in stream[start : start + n]]
        numbers = [number for number, (_, n) in enumerate(expected[row]) for _ in range(n)]
        padding = row_tokens - len(flat)
        assert together.tokens[place].tolist() == flat + [0] * padding
        assert together.documents[place].tolist() == numbers + [-1] * padding
        assert read(np.array([row])).tokens.tolist() == [together.tokens[place].tolist()]
    assert together.tokens.dtype == np.uint16
    assert together.documents.dtype == np.int32


class Torn(MemoryTokens):
    """Reading one token is a ``BadRecordError``."""

    torn = -1

    def read(self, starts: Any, length: int) -> Any:
        if any(start <= self.torn < start + length for start in starts.tolist()):
            raise BadRecordError("torn")
        return super().read(starts, length)


@given(LENGTHS.filter(lambda lengths: max(lengths, default=0) >= 2), ROW, st.data())
def test_a_row_is_bad_only_where_its_own_tokens_are(lengths: list[int], row_tokens: int, data: Any) -> None:
    store = Torn([np.arange(n, dtype=np.uint16) for n in lengths])
    packed = pack(store.ends, row_tokens)
    store.torn = data.draw(st.integers(0, sum(lengths) - 1))
    for row, segments in enumerate(table(packed)):
        starts, sizes, _ = packed.segments(np.array([row]))
        is_bad = any(start <= store.torn < start + n for start, n in segments)
        if is_bad:
            with pytest.raises(BadRecordError):
                read_segments(store, starts, sizes)
        else:
            assert read_segments(store, starts, sizes).tolist() == [
                i for s, n in segments for i in store._tokens[s : s + n]
            ]


def test_a_batch_is_one_read() -> None:
    store = MemoryTokens([np.arange(n, dtype=np.uint16) for n in (300, 5, 700, 3)])
    packed = pack(store.ends, 1009)
    starts, lengths, _ = packed.segments(np.arange(packed.num_rows))
    read_segments(store, starts, lengths)
    assert store.num_reads == 1


def test_it_is_saved_as_arrays() -> None:
    packed = pack(ends_of([3, 50, 7, 2]), 16)
    again = Packing.from_arrays(packed.arrays())
    assert table(again) == table(packed)
    assert (again.num_tokens, again.row_tokens) == (packed.num_tokens, 16)
