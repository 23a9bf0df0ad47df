"""The best checkpoint interval, and the share of time that is lost with it.

Failures are random and memoryless, ``mtbf_s`` apart on average. A save stalls training for ``stall_s`` and is durable
``durable_s`` after it began; training continues meanwhile. A failure sets the job back to the newest durable save, and
it takes ``restart_s`` until training continues (another failure may occur in that time).

[Note: exact share] A save that begins ``k`` periods after a start becomes durable with probability
exp(-(kP + L - s)/mu), where P is work and stall together. So a life of mean ``mu`` keeps
T e^(-(L-s)/mu) / (e^(P/mu) - 1) seconds of work, and ``efficiency`` is that over the mean life with its restart,
mu e^(R/mu). With L = s this is Daly's exact model. L is only a factor: it costs time but does not change the best
period, which is why a save that drains in the background counts with its stall alone.

Invariant: all of this is arithmetic on values; shares lie in 0..1 whatever the arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLEET_MTBF_S = 7.9 * 3600
"""Mean time to failure of jobs on ``FLEET_RANKS`` accelerators in a large fleet (arXiv 2410.21680)."""
FLEET_RANKS = 1024
LEAST_PRIOR_S = 14 * 60.0
"""The same fleet's forecast for 131,072 accelerators: the lower bound of the prior."""
MOST_PRIOR_S = 24 * 3600.0
"""The upper bound of the prior, however small the job: with a prior of a month, correcting it would take a month of
failures."""
_TOO_LONG = 500.0
"""No job survives a period of this many mean lives; beyond it exp would overflow."""


@dataclass(frozen=True, slots=True)
class CheckpointLevel:
    """One storage level, and the failures that only this level survives (or a further one)."""

    name: str
    mtbf_s: float
    """Mean time between failures that need this level; infinite where there are none."""
    stall_s: float
    """How long one save stalls training."""
    durable_s: float
    """From the start of a save until it is durable."""
    restart_s: float = 0.0
    """Detecting the failure, restarting, and loading from this level."""
    least_s: float = 0.0
    """The shortest period that the storage allows for other reasons, such as other jobs."""

    @property
    def rate(self) -> float:
        return 1 / self.mtbf_s

    @property
    def floor_s(self) -> float:
        """The shortest time between two saves: with less the storage would not keep up."""
        return max(self.least_s, self.durable_s)


def young_period_s(mtbf_s: float, cost_s: float) -> float:
    """Young's formula for the work between saves, first order: sqrt(2 mu C)."""
    return math.sqrt(2 * mtbf_s * cost_s)


def daly_period_s(mtbf_s: float, cost_s: float) -> float:
    """Daly's formula for the work between saves, higher order; a save longer than two lives is tried once per life."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return young_period_s(mtbf_s, cost_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def best_period_s(level: CheckpointLevel) -> float:
    """The work between saves that loses least: the optimum for the stall, or the storage's floor if that is longer."""
    wanted = math.inf if math.isinf(level.mtbf_s) else daly_period_s(level.mtbf_s, level.stall_s)
    return max(wanted, level.floor_s)


def efficiency(period_s: float, level: CheckpointLevel) -> float:
    """Share of the time that ends up as kept work, with saves after every ``period_s`` of work ([Note: exact share]).

    Saves that are more frequent than the storage can take wait for it, and training waits with them.
    """
    between_s = _between_s(period_s, level)
    kept = _kept(between_s * level.rate)
    late_s = max(0.0, level.durable_s - level.stall_s)
    return period_s / between_s * kept * math.exp(-min(_TOO_LONG, (late_s + level.restart_s) * level.rate))


def waste(period_s: float, level: CheckpointLevel) -> float:
    """Share of the time that is lost to saving, to repeated work and to restarts."""
    return 1 - efficiency(period_s, level)


def lost_s(period_s: float, level: CheckpointLevel) -> float:
    """Expected work per failure that must be repeated, without the restart."""
    between_s = _between_s(period_s, level)
    late_s = max(0.0, level.durable_s - level.stall_s)
    if math.isinf(level.mtbf_s):
        return between_s / 2 + late_s
    return level.mtbf_s * (1 - _kept(between_s * level.rate) * math.exp(-late_s * level.rate))


def efficiency_without_saves(work_s: float, mtbf_s: float, restart_s: float) -> float:
    """Share of the time that is work when each failure restarts the whole job from the beginning."""
    return _kept(work_s / mtbf_s) * math.exp(-min(_TOO_LONG, restart_s / mtbf_s))


def _between_s(period_s: float, level: CheckpointLevel) -> float:
    """Wall-clock time from save to save."""
    return max(period_s + level.stall_s, level.floor_s)


def _kept(lives: float) -> float:
    """x / (e^x - 1): the share of work that survives when every period takes x mean lives."""
    if lives <= 0:
        return 1.0
    return lives / math.expm1(lives) if lives < _TOO_LONG else 0.0


def prior_mtbf_s(num_ranks: int) -> float:
    """The prior for a job without history: the fleet's failure rate per accelerator, within bounds."""
    return min(MOST_PRIOR_S, max(LEAST_PRIOR_S, FLEET_MTBF_S * FLEET_RANKS / max(1, num_ranks)))


def learned_mtbf_s(prior_s: float, uptime_s: float, num_faults: int) -> float:
    """The prior, weighted as one failure, combined with the job's own history (a Gamma prior with a = 1, b = prior)."""
    return (prior_s + uptime_s) / (1 + num_faults)


def storage_cost(kept_bytes: float, price: float, length_s: float) -> float:
    """The cost of keeping ``kept_bytes`` for ``length_s`` at a price per GB and month (of 730 hours)."""
    return kept_bytes / 1e9 * price * length_s / (730 * 3600)
