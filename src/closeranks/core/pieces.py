"""Describes which part of a tensor a rank holds.

A piece is a box of a named tensor, or a range of that box in row-major order. Sharding is arithmetic on shapes and
needs no tensor, so that weights, gradients and optimizer state can be located again in any other layout. Invariant: the
pieces that a split gives to all its ranks cover the piece that was split, without overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: ``size`` elements from the corner ``start`` in each dim of the whole's ``shape``."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: tuple[int, int] | None = None
    """A range of the box's elements in row-major order, which makes the piece one-dimensional. None: the whole box."""

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Piece:
        return cls(name, tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape and self.flat in (None, (0, prod(self.size)))

    @property
    def numel(self) -> int:
        return prod(self.size) if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.size if self.flat is None else (self.numel,)

    def shard(self, dim: int, index: int, parts: int) -> Piece:
        """Shard ``index`` of ``parts`` along a dim. Shards are equal; if the dim does not divide evenly, the last ones
        are shorter or empty, as with ``torch.chunk`` and FSDP."""
        share = -(-self.size[dim] // parts)
        first, last = (min(share * number, self.size[dim]) for number in (index, index + 1))
        return self.narrow(dim, first, last)

    def narrow(self, dim: int, first: int, last: int) -> Piece:
        """Elements ``first`` to ``last`` of this box along a dim."""
        if self.flat is not None:
            raise ValueError(f"{self.name}: a flat piece has no dims left to cut")
        start, size = list(self.start), list(self.size)
        start[dim], size[dim] = start[dim] + first, last - first
        return replace(self, start=tuple(start), size=tuple(size))

    def flattened(self, first: int, last: int) -> Piece:
        """Elements ``first`` to ``last`` of this box, in row-major order."""
        return replace(self, flat=(first, last))


def narrow_to_piece(whole: Tensor, piece: Piece) -> Tensor:
    """A piece of a tensor: a view, except for a flat range of a box that is not contiguous."""
    box = whole
    for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
        box = box.narrow(dim, start, size)
    if piece.flat is None:
        return box
    first, last = piece.flat
    if box.ndim < 2 or first == last:
        return box.reshape(-1)[first:last]
    row = prod(piece.size[1:])
    begin, end = first // row, -(-last // row)  # copy only the rows that the range touches
    return box[begin:end].reshape(-1)[first - begin * row : last - begin * row]
