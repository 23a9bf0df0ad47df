"""Small scenarios whose accounts can be computed by hand: 4 hosts of 2 devices, steps of 10 s, 1,000 s in all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from closeranks.facts.failures.failure_rates import FailureKind, FailureTable
from closeranks.plan.goodput.failure_draw import US, DrawnFailure
from closeranks.plan.goodput.scenario import CLOSING_RANKS, RESTART, GoodputScenario, RecoveryStrategy
from closeranks.plan.goodput.simulation import SimulatedRun, simulate

NEVER_S = 10_000.0
NO_FAILURES = FailureTable(())
FREE_SNAPSHOTS = replace(CLOSING_RANKS, snapshot_share=0.0)
"""Closing ranks with snapshots that cost nothing, so that figures stay round."""


def scenario(**values: Any) -> GoodputScenario:
    base = GoodputScenario(
        num_devices=8, per_host=2, wall_s=1000, step_s=10, stall_s=0, durable_s=10, save_every_s=NEVER_S
    )
    return replace(base, **values)


def failure(at_s: float, *, repair_s: float = 0.0, copies: float = 1.0, **values: Any) -> DrawnFailure:
    kind = FailureKind("test", 1, 1, **values)
    return DrawnFailure(round(at_s * US), kind, round(repair_s * US), 0.0, copies)


def run(strategy: RecoveryStrategy, *failures: DrawnFailure, **values: Any) -> SimulatedRun:
    return simulate(scenario(**values), strategy, NO_FAILURES, failures)


def seconds(found: SimulatedRun) -> dict[str, float]:
    """Rows that are not zero, in worker-seconds; checks that they add up exactly."""
    assert sum(found.rows.values()) == found.num_workers * found.wall_us
    return {row: spent / US for row, spent in found.rows.items() if spent}


__all__ = ["FREE_SNAPSHOTS", "NEVER_S", "NO_FAILURES", "RESTART", "US", "failure", "run", "scenario", "seconds"]
