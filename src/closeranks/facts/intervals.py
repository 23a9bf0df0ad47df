"""How often should a job save, and what share of its time is lost at best?

Failures come at random, ``mtbf_s`` apart on average and without memory. A save lets training stand for ``stall_s`` and
counts ``durable_s`` after it began; training goes on meanwhile. A failure throws the job back to the newest save that
counts, and costs ``restart_s`` until it trains again (a failure may strike in that time too).

[Note: exact share] A save that begins ``k`` periods after a start counts with probability exp(-(kP + L - s)/mu), where
P is work and stall together. So a life of mean ``mu`` keeps T e^(-(L-s)/mu) / (e^(P/mu) - 1) seconds of work, and
``efficiency`` is that over the mean life with its restart, mu e^(R/mu). With L = s this is Daly's exact model. L is
only a factor: it costs time but does not move the best period, which is why a save that drains in the background is as
dear as its stall alone.

Invariant: all of this is arithmetic on values; shares lie in 0..1 whatever the arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLEET_MTBF_S = 7.9 * 3600
"""Mean time to failure of jobs on ``FLEET_RANKS`` accelerators in a large fleet (arXiv 2410.21680)."""
FLEET_RANKS = 1024
LEAST_PRIOR_S = 14 * 60.0
"""The same fleet's forecast for 131,072 accelerators: no prior is gloomier."""
MOST_PRIOR_S = 24 * 3600.0
"""However small the job, it must live a day to earn the belief that it lives longer: a month's prior would take a month
of failures to unlearn."""
_TOO_LONG = 500.0
"""Periods of so many mean lives are never survived; beyond, exp would overflow."""


@dataclass(frozen=True, slots=True)
class Level:
    """One place to save to, and the failures after which nothing nearer is left."""

    name: str
    mtbf_s: float
    """Between failures that need this level; infinite where there are none."""
    stall_s: float
    """What one save costs training."""
    durable_s: float
    """From the beginning of a save until it counts."""
    restart_s: float = 0.0
    """Noticing the failure, starting again, loading from here."""
    least_s: float = 0.0
    """A shorter period the medium cannot carry for other reasons, such as other jobs."""

    @property
    def rate(self) -> float:
        return 1 / self.mtbf_s

    @property
    def floor_s(self) -> float:
        """No save should begin sooner after another: the medium would not keep up."""
        return max(self.least_s, self.durable_s)


def young(mtbf_s: float, cost_s: float) -> float:
    """Work between saves, first order: sqrt(2 mu C)."""
    return math.sqrt(2 * mtbf_s * cost_s)


def daly(mtbf_s: float, cost_s: float) -> float:
    """Work between saves, higher order; a save dearer than two lives is tried once per life."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return young(mtbf_s, cost_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def best_period_s(level: Level) -> float:
    """Work between saves that loses least: what the stall asks for, or what the medium can carry if that is more."""
    wanted = math.inf if math.isinf(level.mtbf_s) else daly(level.mtbf_s, level.stall_s)
    return max(wanted, level.floor_s)


def efficiency(period_s: float, level: Level) -> float:
    """Share of the time that ends up as kept work, with saves after every ``period_s`` of work ([Note: exact share]).

    Saves that come faster than the medium carries them wait for it, and training waits with them.
    """
    between_s = _between_s(period_s, level)
    kept = _kept(between_s * level.rate)
    late_s = max(0.0, level.durable_s - level.stall_s)
    return period_s / between_s * kept * math.exp(-min(_TOO_LONG, (late_s + level.restart_s) * level.rate))


def waste(period_s: float, level: Level) -> float:
    """Share of the time that is lost: to saving, to work done twice, to starting again."""
    return 1 - efficiency(period_s, level)


def lost_s(period_s: float, level: Level) -> float:
    """Expected time per failure that must be worked again; the restart is not in it."""
    between_s = _between_s(period_s, level)
    late_s = max(0.0, level.durable_s - level.stall_s)
    if math.isinf(level.mtbf_s):
        return between_s / 2 + late_s
    return level.mtbf_s * (1 - _kept(between_s * level.rate) * math.exp(-late_s * level.rate))


def efficiency_without_saves(work_s: float, mtbf_s: float, restart_s: float) -> float:
    """Share of the time that is work when each failure starts the whole job again."""
    return _kept(work_s / mtbf_s) * math.exp(-min(_TOO_LONG, restart_s / mtbf_s))


def _between_s(period_s: float, level: Level) -> float:
    """From save to save on the clock."""
    return max(period_s + level.stall_s, level.floor_s)


def _kept(lives: float) -> float:
    """x / (e^x - 1): the share of work that survives when every piece of it takes x mean lives."""
    if lives <= 0:
        return 1.0
    return lives / math.expm1(lives) if lives < _TOO_LONG else 0.0


def prior_mtbf_s(num_ranks: int) -> float:
    """What to expect of a job nothing is known of: the fleet's failures per accelerator, within bounds."""
    return min(MOST_PRIOR_S, max(LEAST_PRIOR_S, FLEET_MTBF_S * FLEET_RANKS / max(1, num_ranks)))


def learned_mtbf_s(prior_s: float, uptime_s: float, num_faults: int) -> float:
    """The prior, weighed as one failure, and what the job has lived through (a Gamma prior with a = 1, b = prior)."""
    return (prior_s + uptime_s) / (1 + num_faults)


def storage_cost(kept_bytes: float, price: float, length_s: float) -> float:
    """What keeping so much for so long costs at a price per GB and month (of 730 hours)."""
    return kept_bytes / 1e9 * price * length_s / (730 * 3600)
