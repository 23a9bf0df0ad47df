"""Estimates the gradient noise scale: the batch size beyond which more samples per step stop paying off.

A gradient over B samples has the expected squared norm |G|^2 + S/B, with the true gradient G and the trace S of one
sample's covariance. Two batch sizes give two such equations, solved for both; their ratio S / |G|^2 is the noise scale
(McCandlish, Kaplan, Amodei 2018, appendix A.1). Invariant: both are averaged before they are divided, since a ratio of
single estimates is biased and may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from closeranks.core.errors import CheckpointError

DECAY = 0.95
"""Of the averages, at each measurement: about the last twenty count."""


@dataclass(frozen=True, slots=True)
class NoiseMeasurement:
    """Squared gradient norms of two batch sizes at the same weights; the smaller one may be a mean over several."""

    small_batch: int
    big_batch: int
    small: float
    big: float

    @property
    def signal(self) -> float:
        """The true gradient's squared norm; an unbiased estimate, so that it may come out negative."""
        return (self.big_batch * self.big - self.small_batch * self.small) / (self.big_batch - self.small_batch)

    @property
    def spread(self) -> float:
        """The trace of one sample's covariance, likewise."""
        return (self.small - self.big) / (1 / self.small_batch - 1 / self.big_batch)


@dataclass(frozen=True, slots=True)
class NoiseScaleAverages:
    """Both estimates, averaged over measurements; both start at zero, a bias that cancels in their ratio."""

    signal: float = 0.0
    spread: float = 0.0

    def add(self, measured: NoiseMeasurement) -> NoiseScaleAverages:
        """A measurement that is not finite is ignored."""
        if not math.isfinite(measured.small) or not math.isfinite(measured.big):
            return self
        return NoiseScaleAverages(
            DECAY * self.signal + (1 - DECAY) * measured.signal,
            DECAY * self.spread + (1 - DECAY) * measured.spread,
        )

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None where there are too few measurements or they are too noisy."""
        return self.spread / self.signal if self.signal > 0 and self.spread > 0 else None

    def state(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> NoiseScaleAverages:
        if set(state) != {"signal", "spread"}:
            raise CheckpointError(f"the noise scale's state has the keys {sorted(state)}", "Save it with this version.")
        return cls(float(state["signal"]), float(state["spread"]))
