"""When has compression begun to lose more than it used to?

The first measurements tell what is usual for this model and this compressor: top-k loses most of every step and learns
all the same. What is told is a lasting rise above that. Pure: measurements in, a sentence out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

NUM_USUAL = 5
"""Measurements that say what is usual."""
NUM_LASTING = 3
"""In a row, before anything is said."""
GROWTH = 1.5
"""Of the relative error, against the usual."""
FALL = 0.5
"""Of the cosine: the share of the usual below which it must not fall."""


@dataclass
class Drift:
    """What was measured so far."""

    usual: list[tuple[float, float]] = field(default_factory=list)
    lasting: int = 0

    def note(self, relative_error: float, cosine: float) -> str:
        """What to tell; empty most of the time. It is told once, and again only after it had gone."""
        if not math.isfinite(relative_error):
            return ""
        if len(self.usual) < NUM_USUAL:
            self.usual.append((relative_error, cosine))
            return ""
        error, angle = (median(values) for values in zip(*self.usual, strict=True))
        is_odd = relative_error > GROWTH * error + 1e-12 or cosine < FALL * angle
        self.lasting = self.lasting + 1 if is_odd else 0
        if self.lasting != NUM_LASTING:
            return ""
        return (
            f"compression loses more than it did: an error of {relative_error:.2f} of the gradient where {error:.2f} "
            f"was usual, a cosine of {cosine:.2f} where {angle:.2f} was. Send more (sync.compress), or lower optim.lr"
        )


def of_sums(sums: Sequence[float]) -> tuple[float, float]:
    """Relative error and cosine from the squares of the error, of the exact and of the compressed sum, and their
    product."""
    error, exact, ours, product = sums
    if exact <= 0:
        return (0.0, 1.0) if error <= 0 else (math.inf, 0.0)
    return math.sqrt(error / exact), product / math.sqrt(exact * ours) if ours > 0 else 0.0
