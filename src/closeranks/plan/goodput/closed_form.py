"""The goodput that Daly's model predicts, beside the simulation.

Valid where hosts never run short, and without stragglers and silent errors (``facts.checkpoint_policy``, [Note: exact
share]); stops with notice are taken to be independent of failures without. There the simulation agrees with it within
its statistical error (tests/plan/goodput/test_closed_form.py).
"""

from __future__ import annotations

import math

from closeranks.facts.checkpoint_policy.save_interval import CheckpointLevel, efficiency
from closeranks.facts.failures.failure_rates import FailureTable
from closeranks.plan.goodput.scenario import GoodputScenario, RecoveryStrategy, save_period_s, stopping_kinds


def closed_form_goodput(scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable) -> float:
    """With snapshots, a period of the model is the work between two of them, and saves take a share of the rest."""
    kinds = stopping_kinds(table)
    mtbf_s = FailureTable(kinds).mtbf_s(scenario.num_devices)
    restart_s = _restart_s(scenario, strategy, table, mtbf_s)
    period_s = save_period_s(scenario, strategy, table)
    planned = _share_between_planned_stops(scenario, strategy, table)
    if not strategy.from_memory:
        saves = CheckpointLevel("checkpoint", mtbf_s, scenario.stall_s, scenario.durable_s, restart_s)
        return planned * efficiency(period_s, saves)
    every_s = strategy.snapshot_every * scenario.step_s
    snapshot_s = strategy.snapshot_share * every_s
    snapshots = CheckpointLevel("snapshot", mtbf_s, snapshot_s, snapshot_s, restart_s)
    training_s = period_s * (1 + strategy.snapshot_share)
    return planned * efficiency(every_s, snapshots) * training_s / (training_s + scenario.stall_s)


def _share_between_planned_stops(scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable) -> float:
    """A stop with notice costs a last save, without snapshots, and the recovery; the next one may come meanwhile."""
    rate = sum(kind.per_device_hour for kind in table.kinds if kind.notice_s) * scenario.num_devices / 3600
    stop_s = strategy.recover_s + (0.0 if strategy.from_memory else scenario.durable_s)
    return math.exp(-rate * stop_s)


def _restart_s(scenario: GoodputScenario, strategy: RecoveryStrategy, table: FailureTable, mtbf_s: float) -> float:
    """The fixed restart time that is as likely to be cut short by the next failure as those of the kinds are."""
    kinds = stopping_kinds(table)
    if not kinds:
        return 0.0
    rate = sum(kind.per_device_hour for kind in kinds)
    restarts_s = [strategy.detection_s(kind, scenario.step_s) + strategy.recover_s for kind in kinds]
    survive = sum(
        kind.per_device_hour / rate * math.exp(-restart_s / mtbf_s)
        for kind, restart_s in zip(kinds, restarts_s, strict=True)
    )
    return -mtbf_s * math.log(survive)
