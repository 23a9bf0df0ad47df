"""Detects when compression begins to lose more than it used to.

The first measurements are the baseline for this model and this compressor: top-k loses most of every step and trains
all the same. A lasting rise above the baseline is reported. Pure: measurements in, a sentence out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

NUM_USUAL = 5
"""Measurements that form the baseline."""
NUM_LASTING = 3
"""Measurements above the limits in a row before anything is reported."""
GROWTH = 1.5
"""Limit of the relative error, as a multiple of the baseline."""
FALL = 0.5
"""Limit of the cosine, as a share of the baseline."""


@dataclass
class CompressionDrift:
    """The measurements so far."""

    usual: list[tuple[float, float]] = field(default_factory=list)
    lasting: int = 0

    def observe(self, relative_error: float, cosine: float) -> str:
        """The warning, empty most of the time. It is given once, and again only after the rise had gone."""
        if not math.isfinite(relative_error):
            return ""
        if len(self.usual) < NUM_USUAL:
            self.usual.append((relative_error, cosine))
            return ""
        usual_error, usual_cosine = (median(values) for values in zip(*self.usual, strict=True))
        is_odd = relative_error > GROWTH * usual_error + 1e-12 or cosine < FALL * usual_cosine
        self.lasting = self.lasting + 1 if is_odd else 0
        if self.lasting != NUM_LASTING:
            return ""
        return (
            f"compression loses more than before: an error of {relative_error:.2f} of the gradient where "
            f"{usual_error:.2f} was usual, a cosine of {cosine:.2f} where {usual_cosine:.2f} was. Send more "
            "(sync.compress), or lower optim.lr"
        )


def error_and_cosine(sums: Sequence[float]) -> tuple[float, float]:
    """Relative error and cosine, from the squared norms of the error, of the exact and of the compressed sum, and the
    dot product of the two sums."""
    error, exact, ours, product = sums
    if exact <= 0:
        return (0.0, 1.0) if error <= 0 else (math.inf, 0.0)
    return math.sqrt(error / exact), product / math.sqrt(exact * ours) if ours > 0 else 0.0
