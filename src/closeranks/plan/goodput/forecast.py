"""What goodput to expect, what it costs, and how many spares pay: many simulated runs, summed up.

Invariant: all strategies and all numbers of spares are simulated under the same failures, one draw per seed, so that
they differ by what they do and not by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, quantiles

from closeranks.facts.failures.failure_rates import FailureTable
from closeranks.plan.goodput.closed_form import closed_form_goodput
from closeranks.plan.goodput.failure_draw import DrawnFailure, draw_failures
from closeranks.plan.goodput.scenario import (
    STRATEGIES,
    GoodputScenario,
    RecoveryStrategy,
    expected_in_repair,
    save_period_s,
)
from closeranks.plan.goodput.simulation import SimulatedRun, simulate
from closeranks.plan.goodput.time_rows import ROW_WORDS

_SWEPT = 11
"""Numbers of spares in a sweep, at most."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Over seeds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GoodputForecast:
    """One strategy with one number of spares."""

    scenario: GoodputScenario
    strategy: RecoveryStrategy
    save_every_s: float
    goodput: Spread
    interruptions: Spread
    shares: dict[str, float]
    """Mean share of workers times wall time by row (``time_rows.ROW_WORDS``); they add up to 1."""
    by_kind: dict[str, float]
    """Mean number of interruptions by kind of failure."""
    num_planned: float
    num_evicted: float
    num_rollbacks: float
    """Means over seeds."""
    device_hours: float
    """Mean of what is paid for: the run's hosts and the spares that stand by all the time, even when under repair, and
    cold spares while they are in use."""
    closed_form: float
    """``closed_form_goodput``"""

    @property
    def useful_hours(self) -> float:
        return self.shares["useful"] * self.scenario.num_devices * self.scenario.wall_s / 3600

    @property
    def hours_per_useful(self) -> float:
        """Device-hours that are paid for per device-hour that trained the model."""
        return self.device_hours / self.useful_hours if self.useful_hours else math.inf


@dataclass(frozen=True, slots=True)
class SpareSweep:
    """One strategy with several numbers of spares that stand by."""

    strategy: RecoveryStrategy
    forecasts: tuple[GoodputForecast, ...]
    wanted: int | None = None
    """The number that the user asked for."""

    @property
    def best(self) -> GoodputForecast:
        """The one that pays least per useful device-hour."""
        return min(self.forecasts, key=lambda forecast: forecast.hours_per_useful)

    @property
    def chosen(self) -> GoodputForecast:
        """That of the number of spares that was asked for, or the best."""
        return next((found for found in self.forecasts if found.scenario.spares == self.wanted), self.best)


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def draws(scenario: GoodputScenario, table: FailureTable, seeds: Sequence[int]) -> list[tuple[DrawnFailure, ...]]:
    return [draw_failures(scenario, table, seed) for seed in seeds]


def forecast(
    scenario: GoodputScenario,
    strategy: RecoveryStrategy,
    table: FailureTable,
    failures: Sequence[Sequence[DrawnFailure]],
) -> GoodputForecast:
    """``failures``: those of each run (``draws``)."""
    runs = [simulate(scenario, strategy, table, drawn) for drawn in failures]
    worker_us = runs[0].num_workers * runs[0].wall_us

    def average(count: Callable[[SimulatedRun], float]) -> float:
        return mean(count(run) for run in runs)

    kinds = {kind for run in runs for kind in run.interruptions}
    counts = {kind: average(lambda run, kind=kind: run.interruptions.get(kind, 0)) for kind in kinds}  # type: ignore[misc]
    kept_hosts = scenario.num_hosts + scenario.spares
    return GoodputForecast(
        scenario=scenario,
        strategy=strategy,
        save_every_s=save_period_s(scenario, strategy, table),
        goodput=spread([run.goodput for run in runs]),
        interruptions=spread([run.num_interruptions for run in runs]),
        shares={row: sum(run.rows.get(row, 0) for run in runs) / (len(runs) * worker_us) for row in ROW_WORDS},
        by_kind=dict(sorted(counts.items(), key=lambda pair: -pair[1])),
        num_planned=average(lambda run: run.num_planned),
        num_evicted=average(lambda run: run.num_evicted),
        num_rollbacks=average(lambda run: run.num_rollbacks),
        device_hours=scenario.per_host * (kept_hosts * scenario.wall_s + average(lambda run: run.cold_host_s)) / 3600,
        closed_form=closed_form_goodput(scenario, strategy, table),
    )


def spare_counts(scenario: GoodputScenario, table: FailureTable) -> tuple[int, ...]:
    """Numbers of spares worth trying: none, up to more than are ever under repair at once."""
    under_repair = expected_in_repair(scenario, table)
    most = math.ceil(under_repair + 6 * math.sqrt(under_repair)) if under_repair else 0
    if most < _SWEPT:
        return tuple(range(most + 1))
    return tuple(sorted({round(most * place / (_SWEPT - 1)) for place in range(_SWEPT)}))


def sweep_spares(
    scenario: GoodputScenario,
    table: FailureTable,
    seeds: Sequence[int],
    counts: Sequence[int] = (),
    strategies: Sequence[RecoveryStrategy] = STRATEGIES,
    wanted: int | None = None,
) -> tuple[SpareSweep, ...]:
    """``counts``: numbers of spares; by default ``spare_counts``. ``wanted`` is tried in any case."""
    failures = draws(scenario, table, seeds)
    numbers = sorted({*(counts or spare_counts(scenario, table)), *(() if wanted is None else (wanted,))})
    return tuple(
        SpareSweep(
            strategy,
            tuple(forecast(replace(scenario, spares=number), strategy, table, failures) for number in numbers),
            wanted,
        )
        for strategy in strategies
    )
