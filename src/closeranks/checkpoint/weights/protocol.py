"""The protocol of a set of weights that any layout can start from.

In whatever format, weights are names, shapes and values that are read piece by piece. Invariants: ``read`` allocates no
more than the piece it returns, a copy of it in its stored dtype, and ``BAND_BYTES``; a damaged or foreign file is a
``CheckpointError`` that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from closeranks.core.pieces import Piece

BAND_BYTES = 8 << 20
"""Read and converted at a time, unless a single row is larger: large enough for a disk, small beside any model."""


class Weights(Protocol):
    """Tensors by name, in some file format."""

    @property
    def path(self) -> str:
        """The path or URL, as a user would write it."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about how the weights were read, one sentence each."""
        ...

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes by name, in file order."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype it is stored in."""
        ...

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """A piece on the CPU, of shape ``piece.local_shape``, in ``dtype`` or as it is stored. The piece's own name is
        ignored: models and files may have different names for a tensor."""
        ...


class RowBand(NamedTuple):
    """A band of rows of a piece, and its position along dim 0 of the piece's tensor."""

    piece: Piece
    first: int
    length: int


def row_bands(piece: Piece, itemsize: int, max_bytes: int = BAND_BYTES) -> Iterator[RowBand]:
    """Split a piece into parts of at most ``max_bytes``, or of one row if a row is larger; an empty piece has none."""
    if not piece.numel:
        return
    if not piece.local_shape:
        yield RowBand(piece, 0, 1)
        return
    extent = piece.local_shape[0]
    share = max(1, max_bytes // (itemsize * prod(piece.local_shape[1:])))
    for first in range(0, extent, share):
        last = min(first + share, extent)
        if piece.flat is None:
            part = piece.narrow(0, first, last)
        else:
            part = piece.flattened(piece.flat[0] + first, piece.flat[0] + last)
        yield RowBand(part, first, last - first)
