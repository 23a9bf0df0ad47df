"""Tensors and pieces for the tests of weights."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from closeranks.core.pieces import Piece


def some_tensors() -> dict[str, Tensor]:
    """All kinds that files hold, none of them trivial."""
    draw = torch.Generator().manual_seed(5)
    return {
        "a.weight": torch.randn(7, 5, generator=draw),
        "a.bias": torch.randn(5, generator=draw),
        "b.weight": torch.randn(4, 3, 2, generator=draw).to(torch.bfloat16),
        "b.half": torch.randn(6, 2, generator=draw).half(),
        "b.double": torch.randn(3, 3, generator=draw).double(),
        "count": torch.tensor(12),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
    }


@st.composite
def pieces(draw: st.DrawFn, name: str, shape: tuple[int, ...]) -> Piece:
    """A box of a tensor, or a flat range of one."""
    piece = Piece.whole(name, shape)
    for dim, extent in enumerate(shape):
        first = draw(st.integers(0, extent))
        piece = piece.narrow(dim, first, draw(st.integers(first, extent)))
    if draw(st.booleans()):
        first = draw(st.integers(0, piece.numel))
        piece = piece.flattened(first, draw(st.integers(first, piece.numel)))
    return piece


def expected(whole: Tensor, piece: Piece) -> Tensor:
    """Independent of the code under test: index, then flatten."""
    box = whole[tuple(slice(first, first + size) for first, size in zip(piece.start, piece.size, strict=True))]
    return box if piece.flat is None else box.flatten()[piece.flat[0] : piece.flat[1]]
