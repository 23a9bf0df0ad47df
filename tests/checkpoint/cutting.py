"""Strategies of tests: tensors, and the ways layouts cut them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from closeranks.core.pieces import Piece


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Piece]:
    """All pieces of one layout: by a tensor dim, then by rows or by flat ranges; ranks with nothing included."""
    pieces = [Piece.whole("x", shape)]
    if shape and draw(st.booleans()):
        dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        pieces = [piece.shard(dim, index, parts) for piece in pieces for index in range(parts)]
    kind = draw(st.sampled_from(["as it is", "rows", "flat"]))
    if kind == "rows" and shape:
        parts = draw(st.integers(1, 4))
        pieces = [piece.shard(0, index, parts) for piece in pieces for index in range(parts)]
    if kind == "flat":
        pieces = [part for piece in pieces for part in _ranges(draw, piece)]
    return pieces


def _ranges(draw: st.DrawFn, piece: Piece) -> list[Piece]:
    borders = draw(st.lists(st.integers(0, piece.numel), max_size=4))
    marks = [0, *sorted(borders), piece.numel]
    return [piece.flattened(first, last) for first, last in pairwise(marks)]
