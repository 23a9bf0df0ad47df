"""What must a set of weights offer so that any layout can start from it?

Whoever wrote it, it is names, shapes and values that are read piece by piece. Invariants: ``read`` allocates no more
than the piece it returns, a copy of it in the format it is stored in, and ``BAND_BYTES``; what is damaged or foreign is
a ``CheckpointError`` that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from closeranks.core.pieces import Piece

BAND_BYTES = 8 << 20
"""What is read and converted at once, where it need not be more: large enough for a disk, small beside any model."""


class Weights(Protocol):
    """Tensors by name, in some file format."""

    @property
    def path(self) -> str:
        """What a person would write to name it: a path, or a URL."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about how it was read, one sentence each."""
        ...

    def names(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes by name, in the order of the files."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The format it is stored in."""
        ...

    def read(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """A piece on the CPU, of ``piece.local_shape``, in ``dtype`` or as it is stored. The piece's own name does not
        matter: models and files may call a tensor differently."""
        ...


class Band(NamedTuple):
    """A part of a piece, and where it lies in the piece's tensor along dim 0."""

    piece: Piece
    first: int
    length: int


def bands(piece: Piece, itemsize: int, max_bytes: int = BAND_BYTES) -> Iterator[Band]:
    """A piece in parts of at most ``max_bytes``, or of one row where a row is more; none of an empty piece."""
    if not piece.numel:
        return
    if not piece.local_shape:
        yield Band(piece, 0, 1)
        return
    extent = piece.local_shape[0]
    share = max(1, max_bytes // (itemsize * prod(piece.local_shape[1:])))
    for first in range(0, extent, share):
        last = min(first + share, extent)
        if piece.flat is None:
            part = piece.narrow(0, first, last)
        else:
            part = piece.flattened(piece.flat[0] + first, piece.flat[0] + last)
        yield Band(part, first, last - first)
