"""Pieces against pieces, without a file or a process."""

from __future__ import annotations

from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.pieces import Piece
from closeranks.core.reshard import TensorBox, contiguous_boxes, plan_copies
from tests.checkpoint.cutting import cuts, shapes


def elements(box: TensorBox) -> list[tuple[int, ...]]:
    return list(product(*(range(start, start + size) for start, size in zip(box.start, box.size, strict=True))))


def in_memory(piece: Piece) -> list[tuple[int, ...]]:
    """The whole's index of each element of a piece, in the order of its memory."""
    boxed = elements(TensorBox(piece.start, piece.size))
    return boxed if piece.flat is None else boxed[slice(*piece.flat)]


@given(st.data())
def test_runs_are_the_pieces_memory_in_order(data: st.DataObject) -> None:
    for piece in data.draw(shapes().flatmap(cuts)):
        found = contiguous_boxes(piece)
        assert [index for run in found for index in elements(run.box)] == in_memory(piece)
        assert [run.first for run in found] == [sum(one.box.numel for one in found[:n]) for n in range(len(found))]
        assert len(found) <= max(1, 2 * len(piece.shape))


@given(st.data())
def test_a_plan_writes_every_wanted_element_once_from_where_it_lies(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    saved, wanted = data.draw(cuts(shape)), data.draw(cuts(shape))
    saved = data.draw(st.permutations(saved + saved[:2]))  # replicas hold the same
    for piece in wanted:
        found = plan_copies(piece, saved)
        assert not found.missing
        written = [index for overlap in found.overlaps for index in elements(overlap.box)]
        assert sorted(written) == sorted(in_memory(piece))
        for overlap in found.overlaps:
            assert set(elements(overlap.box)) <= set(elements(overlap.source.box)) & set(elements(overlap.target.box))
            assert overlap.source in contiguous_boxes(saved[overlap.saved])


@given(st.data())
def test_what_no_piece_covers_is_missing(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    saved = data.draw(cuts(shape))
    lost = data.draw(st.integers(0, len(saved) - 1))
    rest = saved[:lost] + saved[lost + 1 :]
    found = plan_copies(Piece.whole("x", shape), rest)
    assert sorted(index for box in found.missing for index in elements(box)) == sorted(in_memory(saved[lost]))
    assert sum(overlap.box.numel for overlap in found.overlaps) + saved[lost].numel == prod(shape)
