"""A histogram of the lengths of documents or records.

Lengths are counted, not stored: exactly up to 65,535, and in steps of about one percent beyond. Invariant: memory does
not grow with the number of lengths, so that a histogram of billions costs as much as one of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from closeranks.data.dataset_protocol import Ints

_EXACT = 1 << 16
_PER_OCTAVE = 64
_OCTAVES = 47


def _bins(lengths: npt.NDArray[Any]) -> Ints:
    """The bin of each length: one bin per length while lengths are small, then a fixed number of bins per doubling."""
    lengths = np.asarray(lengths, dtype=np.int64)
    with np.errstate(divide="ignore"):
        octaves = np.floor(np.log2(np.maximum(lengths, _EXACT) / _EXACT) * _PER_OCTAVE).astype(np.int64)
    return np.where(lengths < _EXACT, lengths, np.minimum(_EXACT + octaves, _EXACT + _OCTAVES * _PER_OCTAVE - 1))


def _middle(number: int) -> float:
    """A length that represents a bin."""
    return float(number) if number < _EXACT else _EXACT * 2 ** ((number - _EXACT + 0.5) / _PER_OCTAVE)


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Lengths ``[first, last)``, and how many items have one."""

    first: int
    last: int
    count: int


@dataclass(slots=True)
class LengthHistogram:
    count: int = 0
    total: int = 0
    shortest: int = 0
    longest: int = 0
    _counts: Ints = field(default_factory=lambda: np.zeros(_EXACT + _OCTAVES * _PER_OCTAVE, dtype=np.int64), repr=False)

    def add(self, lengths: npt.NDArray[Any]) -> None:
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self.shortest = min(self.shortest, low) if self.count else low
        self.longest = max(self.longest, high)
        self.count += len(lengths)
        self.total += int(lengths.sum(dtype=np.int64))
        bins = _bins(lengths)
        self._counts[: int(bins.max()) + 1] += np.bincount(bins)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)

    def quantile(self, share: float) -> float:
        """The shortest length that at least this share of all do not exceed; exact up to 65,535."""
        if not self.count:
            return 0.0
        number = int(np.searchsorted(np.cumsum(self._counts), max(1, int(np.ceil(share * self.count)))))
        return min(max(_middle(number), self.shortest), self.longest)

    def bars(self) -> list[LengthBin]:
        """One bar per doubling, from the shortest to the longest."""
        bars, first = [], 0
        while first <= self.longest and self.count:
            last = max(1, first * 2)
            bars.append(LengthBin(first, last, self._between(first, last)))
            first = last
        while bars and bars[0].count == 0:
            del bars[0]
        return bars

    def _between(self, first: int, last: int) -> int:
        start, stop = _bins(np.array([first, last]))
        return int(self._counts[start:stop].sum())
