"""How much later does a save count when many jobs save to one store?

The model: the store carries ``transfer_s`` worth of one job's save when it is alone and shares its bandwidth fairly
among all saves under way (processor sharing); every job saves once per ``period_s``. Random phases: a queue with
processor sharing, whose mean stay is transfer / (1 - load of the others), and which never exceeds the worst case.
Aligned: all begin at once and all end at once, after everybody's bytes. Invariant: 1 job waits for nobody; random
phases never take longer than aligned ones; where the saves of all do not fit into one period the store falls behind
without end, whatever the phases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharing:
    """A store that so many jobs save to."""

    transfer_s: float
    """One save, alone."""
    num_jobs: int
    period_s: float

    @property
    def load(self) -> float:
        """Share of the store's bandwidth that is in use; over 1 it falls behind."""
        return self.num_jobs * self.transfer_s / self.period_s

    @property
    def aligned_s(self) -> float:
        """Until a save is through when all begin together."""
        return self.num_jobs * self.transfer_s

    @property
    def random_s(self) -> float:
        """Until a save is through on average when each begins at its own time."""
        others = (self.num_jobs - 1) * self.transfer_s / self.period_s
        return min(self.aligned_s, self.transfer_s / (1 - others)) if others < 1 else self.aligned_s


def kind_period_s(transfer_s: float, num_jobs: int) -> float:
    """The period that loses least to a failure in a crowd: half of it, and the time a save is under way.

    Where the saves of all just fit into a period the store is full, and a save takes as long as in step with all. A
    little slack (b + sqrt(2 x b), with b the others' transfers) shortens the stay more than it lengthens the period.
    """
    others_s = (num_jobs - 1) * transfer_s
    return max(num_jobs * transfer_s, others_s + math.sqrt(2 * transfer_s * others_s))
