"""The account while a run goes is that of its records, as rank 0 sees it, and continues that of earlier commands."""

from __future__ import annotations

import pytest

from closeranks.telemetry.goodput.live_account import LiveAccount
from closeranks.telemetry.goodput.rank_record import record_of
from closeranks.telemetry.goodput.run_account import build_account
from tests.telemetry.goodput.simulated import SimulatedRun


def heard(run: SimulatedRun, live: LiveAccount, after: float = 0.0) -> LiveAccount:
    lines = [*run.ranks[0], *((line.at, line.event) for line in run.agent)]
    for at, event in sorted(lines, key=lambda line: line[0]):
        if at > after and event is not None:
            live.add(at, event)
    return live


def test_it_is_that_of_rank_0s_records() -> None:
    run = SimulatedRun(num_ranks=4)
    run.launch()
    run.steps(10)
    run.fault(back_to=7)
    run.steps(10)
    run.end()
    assert heard(run, LiveAccount()).account() == build_account({0: record_of(run.ranks[0])}, run.agent)


def test_a_later_command_continues_the_account() -> None:
    run = SimulatedRun(num_ranks=4)
    run.launch()
    run.steps(20)
    run.end()
    first, ended_at = heard(run, LiveAccount()).account(), run.now
    run.pause(1000.0)
    run.launch(first_step=15)
    run.steps(10)
    run.end()
    both = heard(run, LiveAccount(first, 20), ended_at).account()
    whole = run.account()
    assert both.worker_s == pytest.approx(whole.worker_s)
    assert both.rows == pytest.approx(whole.rows, rel=0.01, abs=1e-6)
    assert (both.num_steps, both.num_redone, both.num_launches) == (25, 5, 2)
