"""Computes by how much the values of two saved tensors differ.

Reads both in equal ranges of a few million elements, so that neither is ever held in memory as a whole. Invariant:
elements with the same bits count as equal, NaN included; a NaN on one side only is an infinite difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.core.pieces import Piece

_RANGE = 4 << 20


@dataclass(frozen=True, slots=True)
class LargestDifference:
    num_different: int
    absolute: float
    relative: float
    """Relative to the larger of the two magnitudes."""


def largest_difference(a: CheckpointReader, b: CheckpointReader, section: str, key: str) -> LargestDifference:
    """For two tensors of the same shape; dtypes may differ."""
    whole = Piece.whole(key, a.shapes(section)[key])
    found = LargestDifference(0, 0.0, 0.0)
    for first in range(0, whole.numel, _RANGE):
        piece = whole.flattened(first, min(first + _RANGE, whole.numel))
        here = _compare(a.read(section, key, piece), b.read(section, key, piece))
        found = LargestDifference(
            found.num_different + here.num_different,
            max(found.absolute, here.absolute),
            max(found.relative, here.relative),
        )
    return found


def _compare(a: torch.Tensor, b: torch.Tensor) -> LargestDifference:
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    one, other = a.to(kind), b.to(kind)
    is_same = one == other
    if a.dtype == b.dtype:
        is_same = (a.view(torch.uint8) == b.view(torch.uint8)).view(a.numel(), -1).all(1)
    if bool(is_same.all()):
        return LargestDifference(0, 0.0, 0.0)
    one, other = one[~is_same], other[~is_same]
    difference = (one - other).abs().nan_to_num(nan=torch.inf)
    ratio = (difference / torch.maximum(one.abs(), other.abs())).nan_to_num(nan=torch.inf)
    ratio[difference == 0] = 0.0  # zero and minus zero
    return LargestDifference(one.numel(), float(difference.max()), float(ratio.max()))
