"""What a run had cost at each moment: the line ends with the sums of the account, and faults stand where they were."""

from __future__ import annotations

from itertools import pairwise

import pytest

from closeranks.telemetry.goodput.rank_record import record_of
from closeranks.telemetry.goodput.run_account import session_accounts
from closeranks.telemetry.goodput.spending import SpendingPoint, spending
from tests.telemetry.goodput.simulated import SimulatedRun


def line_of(run: SimulatedRun) -> list[SpendingPoint]:
    return spending(session_accounts({rank: record_of(events) for rank, events in run.ranks.items()}, run.agent))


def test_the_line_ends_with_the_sums_of_the_account() -> None:
    run = SimulatedRun(num_ranks=3)
    run.launch()
    run.steps(10)
    run.fault(back_to=6)
    run.steps(20)
    run.fault(detected_s=2.0)
    run.steps(5)
    run.end()
    run.pause(3600.0)
    run.launch(first_step=20)
    run.steps(10)
    run.end()
    points, account, truth = line_of(run), run.account(), run.truth()
    assert points[-1].wall_s == pytest.approx(account.wall_s)
    assert points[-1].wall_s < 60, "the pause is cut out"
    assert points[-1].worker_s == pytest.approx(account.worker_s)
    lost_s = sum(truth[row] for row in ("redone", "detection", "recovery"))
    assert points[-1].lost_s == pytest.approx(lost_s, rel=1e-6)
    assert sum(point.is_fault for point in points) == 2
    for before, after in pairwise(points):
        assert all(later >= earlier - 1e-9 for earlier, later in zip(before[:3], after[:3], strict=True))


def test_a_calm_run_loses_nothing() -> None:
    run = SimulatedRun()
    run.launch()
    run.steps(10)
    run.end()
    points = line_of(run)
    assert {point.lost_s for point in points} == {0.0}
    assert points[-1].worker_s == pytest.approx(2 * points[-1].wall_s)


def test_nothing_recorded_is_a_point() -> None:
    assert spending(()) == [SpendingPoint(0.0, 0.0, 0.0)]
