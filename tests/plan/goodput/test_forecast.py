"""Forecasts: the sums over seeds, what is paid for, and how many spares pay."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from closeranks.facts.failures.failure_rates import FailureKind, FailureTable, load_failures
from closeranks.plan.goodput.forecast import Spread, draws, forecast, spare_counts, spread, sweep_spares
from closeranks.plan.goodput.scenario import CLOSING_RANKS, RESTART, GoodputScenario, expected_in_repair
from closeranks.plan.goodput.simulation import simulate

CASE = GoodputScenario(num_devices=2048, wall_s=20 * 86400, replica_hosts=4)
FRAIL = FailureTable((FailureKind("gpu", 1, 20_000, hosts=1, repair_h=12), FailureKind("software", 1, 50_000)))


def test_a_spread_is_median_and_quartiles() -> None:
    assert spread([3.0, 1.0, 2.0, 5.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_same_seeds_give_the_same_forecast() -> None:
    first, again = (forecast(CASE, RESTART, FRAIL, draws(CASE, FRAIL, [1, 2, 3])) for _ in range(2))
    other = forecast(CASE, RESTART, FRAIL, draws(CASE, FRAIL, [4, 5, 6]))
    assert first == again
    assert first.goodput != other.goodput


def test_shares_add_up_and_kinds_are_counted() -> None:
    found = forecast(CASE, CLOSING_RANKS, FRAIL, draws(CASE, FRAIL, range(4)))
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert set(found.by_kind) == {"gpu", "software"}
    assert found.by_kind["gpu"] > found.by_kind["software"]


def test_what_is_paid_for() -> None:
    """The run's 256 hosts and 3 spares for 480 hours; without failures no cold spare is ever started."""
    found = forecast(replace(CASE, spares=3, cold_spares=5), RESTART, FRAIL, [()])
    assert found.device_hours == (256 + 3) * 8 * 480
    assert found.hours_per_useful == pytest.approx(259 / 256 / found.goodput.median)


def test_a_cold_spare_is_paid_for_while_it_is_used() -> None:
    case, failures = replace(CASE, cold_spares=5), draws(CASE, FRAIL, range(2))
    used_s = mean(simulate(case, RESTART, FRAIL, drawn).cold_host_s for drawn in failures)
    assert used_s > 0
    found = forecast(case, RESTART, FRAIL, failures)
    assert found.device_hours == pytest.approx(256 * 8 * 480 + 8 * used_s / 3600)


def test_numbers_of_spares_reach_beyond_what_is_under_repair() -> None:
    assert expected_in_repair(CASE, FRAIL) == pytest.approx(2048 / 20_000 * 12)
    assert spare_counts(CASE, FRAIL) == tuple(range(9))
    assert spare_counts(CASE, FailureTable(())) == (0,)
    large = replace(CASE, num_devices=65536)
    under_repair, many = expected_in_repair(large, load_failures()), spare_counts(large, load_failures())
    assert (len(many), many[0]) == (11, 0)
    assert under_repair + 6 * under_repair**0.5 <= many[-1] < 3 * under_repair


def test_spares_pay_up_to_a_number_and_a_run_that_shrinks_needs_fewer() -> None:
    """A run that waits for every missing host is lost without spares; one that shrinks is not. More spares than are
    ever needed only cost."""
    closing, restart = sweep_spares(CASE, FRAIL, range(4), (0, 1, 2, 3, 4, 6, 20))
    for sweep in (closing, restart):
        goodputs = [found.goodput.median for found in sweep.forecasts]
        assert goodputs == sorted(goodputs)
        assert sweep.best.scenario.spares < 20
        assert sweep.forecasts[-1].hours_per_useful > sweep.best.hours_per_useful
    assert restart.forecasts[0].goodput.median < 0.5 < closing.forecasts[0].goodput.median
    assert closing.best.scenario.spares < restart.best.scenario.spares
    assert closing.best.hours_per_useful < restart.best.hours_per_useful


def test_strategies_meet_the_same_failures() -> None:
    """With spares enough for all, every failure stops the run under either strategy."""
    closing, restart = sweep_spares(CASE, FRAIL, [3], (40,))
    assert closing.best.by_kind == restart.best.by_kind
