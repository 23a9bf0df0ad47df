"""Predicts how long a checkpoint save takes when many jobs save to shared storage.

The model: a save alone takes ``transfer_s``; the storage shares its bandwidth fairly among all saves in progress
(processor sharing); every job saves once per ``period_s``. Random phases: a queue with processor sharing, in which a
save takes transfer / (1 - load of the others) on average, and never more than the worst case. Aligned: all saves begin
together and end together, after the bytes of all. Invariant: 1 job is not delayed; random phases never take longer than
aligned ones; where the saves of all do not fit into one period the storage falls behind without bound, whatever the
phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """Storage that ``num_jobs`` jobs save to."""

    transfer_s: float
    """Duration of one save, alone."""
    num_jobs: int
    period_s: float

    @property
    def utilization(self) -> float:
        """Share of the storage's bandwidth that is in use; above 1 it falls behind."""
        return self.num_jobs * self.transfer_s / self.period_s

    @property
    def aligned_s(self) -> float:
        """Duration of a save when all begin together."""
        return self.num_jobs * self.transfer_s

    @property
    def random_s(self) -> float:
        """Mean duration of a save when each job begins at a random time."""
        others = (self.num_jobs - 1) * self.transfer_s / self.period_s
        return min(self.aligned_s, self.transfer_s / (1 - others)) if others < 1 else self.aligned_s


def contended_period_s(transfer_s: float, num_jobs: int) -> float:
    """The period that loses least to a failure under contention: the loss is half a period plus the time of a save.

    Where the saves of all just fit into a period the storage is saturated, and a save takes as long as when all begin
    together. A little slack (b + sqrt(2 x b), with b the others' transfers) shortens the save more than it lengthens
    the period.
    """
    others_s = (num_jobs - 1) * transfer_s
    return max(num_jobs * transfer_s, others_s + math.sqrt(2 * transfer_s * others_s))
