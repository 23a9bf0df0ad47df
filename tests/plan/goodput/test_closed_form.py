"""The simulation agrees with Daly's model where that is valid, within its own statistical error."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import mean, stdev

import pytest

from closeranks.facts.checkpoint_policy.save_interval import daly_period_s
from closeranks.facts.failures.failure_rates import HANG, FailureKind, FailureTable, load_failures
from closeranks.plan.goodput.closed_form import closed_form_goodput
from closeranks.plan.goodput.failure_draw import draw_failures
from closeranks.plan.goodput.scenario import (
    CLOSING_RANKS,
    RESTART,
    GoodputScenario,
    RecoveryStrategy,
    expected_in_repair,
    save_period_s,
)
from closeranks.plan.goodput.simulation import simulate

SEEDS = range(24)
OFTEN = FailureTable((FailureKind("crash", 3, 5000), FailureKind("hang", 1, 5000, shows=HANG)))
"""At 1,000 devices a failure every 75 minutes."""


def simulated(case: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable) -> tuple[float, float]:
    """Mean goodput, and its standard error."""
    found = [simulate(case, strategy, table, draw_failures(case, table, seed)).goodput for seed in SEEDS]
    return mean(found), stdev(found) / sqrt(len(found))


@pytest.mark.parametrize("strategy", [RESTART, CLOSING_RANKS], ids=lambda strategy: strategy.name)
@pytest.mark.parametrize(
    "case",
    [
        GoodputScenario(num_devices=1000, wall_s=20 * 86400),
        GoodputScenario(num_devices=1000, wall_s=20 * 86400, save_every_s=1500, stall_s=60, durable_s=300),
        GoodputScenario(num_devices=4000, wall_s=8 * 86400, step_s=20, stall_s=20, durable_s=60),
        GoodputScenario(num_devices=8000, wall_s=4 * 86400, step_s=2, save_every_s=200),
    ],
    ids=["rare", "slow saves", "often", "very often"],
)
def test_it_agrees_with_the_closed_form(case: GoodputScenario, strategy: RecoveryStrategy) -> None:
    """Four standard errors, and one period of work at the end of the run, which counts without having been saved. With
    a recovery that takes twice as long the two would not agree."""
    predicted = closed_form_goodput(case, strategy, OFTEN)
    found, error = simulated(case, strategy, OFTEN)
    end = save_period_s(case, strategy, OFTEN) / case.wall_s if not strategy.from_memory else 0.0
    assert error < 0.006
    assert predicted - 4 * error <= found <= predicted + 4 * error + end
    slower = replace(strategy, recover_s=2 * strategy.recover_s + 60)
    assert closed_form_goodput(case, slower, OFTEN) < found - 4 * error - end


@pytest.mark.parametrize("strategy", [RESTART, CLOSING_RANKS], ids=lambda strategy: strategy.name)
def test_it_agrees_on_planned_stops(strategy: RecoveryStrategy) -> None:
    """A stop in 5,000 device-hours: with 4,000 devices, restarts of 300 s and saves of 10 s take 6.7%."""
    table = FailureTable((FailureKind("maintenance", 1, 5000, notice_s=600),))
    case = GoodputScenario(num_devices=4000, wall_s=10 * 86400)
    found, error = simulated(case, strategy, table)
    assert abs(found - closed_form_goodput(case, strategy, table)) < 4 * error + 1e-4
    assert found == pytest.approx((0.93 if strategy is RESTART else 0.985), abs=0.006)


def test_without_failures_it_is_what_saves_leave() -> None:
    case = GoodputScenario(save_every_s=600, stall_s=6)
    assert closed_form_goodput(case, RESTART, FailureTable(())) == pytest.approx(600 / 606)
    shares = replace(CLOSING_RANKS, snapshot_share=0.25)
    every_s = save_period_s(case, shares, FailureTable(()))
    assert closed_form_goodput(case, shares, FailureTable(())) == pytest.approx(every_s / (1.25 * every_s + 6))


def test_the_interval_is_that_of_daly_in_whole_steps() -> None:
    case = GoodputScenario(num_devices=16384, step_s=7)
    table = load_failures("research")
    best_s = daly_period_s(table.mtbf_s(16384), case.stall_s)
    assert best_s <= save_period_s(case, RESTART, table) < best_s + 7
    assert save_period_s(GoodputScenario(num_devices=8), RESTART, table) == 1800, (
        "as every = auto, at most half an hour"
    )
    assert save_period_s(replace(case, durable_s=500, save_every_s=10), RESTART, table) == 72 * 7, "499 s in steps"


def test_hosts_under_repair_follow_littles_law() -> None:
    """On average the rate of losses times the mean repair are away, whatever the distribution of repairs."""
    table = FailureTable((FailureKind("gpu", 1, 1000, hosts=1, repair_h=2),))
    case = GoodputScenario(num_devices=1000, wall_s=60 * 86400, spares=50)
    found = [
        simulate(case, CLOSING_RANKS, table, draw_failures(case, table, seed)).repair_host_s / case.wall_s
        for seed in range(8)
    ]
    assert expected_in_repair(case, table) == 2.0
    assert mean(found) == pytest.approx(2.0, abs=4 * stdev(found) / sqrt(len(found)) + 2.0 * 2 / (60 * 24))
