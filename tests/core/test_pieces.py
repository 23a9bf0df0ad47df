"""Pieces: every cut covers what it cuts, without overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.pieces import Piece


@given(rows=st.integers(1, 40), columns=st.integers(1, 9), parts=st.integers(1, 8), dim=st.integers(0, 1))
def test_shares_of_a_cut_cover_the_whole(rows: int, columns: int, parts: int, dim: int) -> None:
    whole = Piece.whole("w", (rows, columns))
    shares = [whole.shard(dim, index, parts) for index in range(parts)]
    cells = [
        (row, column)
        for share in shares
        for row in range(share.start[0], share.start[0] + share.size[0])
        for column in range(share.start[1], share.start[1] + share.size[1])
    ]
    assert sorted(cells) == [(row, column) for row in range(rows) for column in range(columns)]
    assert sum(share.numel for share in shares) == whole.numel


def test_cuts_nest() -> None:
    piece = Piece.whole("w", (8, 6)).shard(0, 1, 2).shard(1, 2, 3)
    assert (piece.start, piece.size) == ((4, 4), (4, 2))
    assert piece.shard(0, 1, 2).start == (6, 4)


def test_uneven_cuts_leave_the_last_ones_short_or_empty() -> None:
    sizes = [Piece.whole("w", (5,)).shard(0, index, 4).size for index in range(4)]
    assert sizes == [(2,), (2,), (1,), (0,)]


def test_a_flat_range_is_one_dimensional_and_cannot_be_cut_by_dim() -> None:
    piece = Piece.whole("w", (4, 3)).shard(0, 0, 2).flattened(1, 5)
    assert piece.local_shape == (4,)
    assert piece.numel == 4
    assert not piece.is_whole
    with pytest.raises(ValueError, match="no dims left"):
        piece.shard(0, 0, 2)


def test_whole_is_whole_however_it_is_said() -> None:
    whole = Piece.whole("w", (4, 3))
    assert whole.is_whole
    assert whole.flattened(0, 12).is_whole
    assert not whole.shard(0, 0, 2).is_whole
    assert Piece.whole("s", ()).numel == 1
