"""What a run tells, from its events: times, crossings, bytes, and how it ended."""

from __future__ import annotations

import math

import pytest

from closeranks.core.events import Evaluated, RankLost, RanksClosed, RunEnded, StepDone
from closeranks.elastic.faults.grammar import ParsedFaults
from closeranks.lab.compare.comparison_plan import ComparisonCase, ComparisonRun
from closeranks.lab.compare.config import CompareConfig, ComparisonCondition
from closeranks.lab.compare.namespaces import sent_bytes
from closeranks.lab.compare.run_outcome import (
    DIVERGED,
    FAILED,
    FINISHED,
    MetricPoint,
    end_state,
    first_reaching,
    outcome_of,
    points,
    smooth,
)
from closeranks.lab.compare.run_records import RunRecord, last_output
from closeranks.lab.compare.traffic import bytes_per_step, sent_until, step_times
from closeranks.run.job.job import Job
from closeranks.telemetry.run_log.fault_history import TimedEvent, fault_history
from closeranks.telemetry.run_log.run_history import RunHistory

WELL = RunRecord(0, 1.0)


def steps(*losses: float, taken: bool = True) -> tuple[StepDone, ...]:
    return tuple(StepDone(n, loss, taken=taken, seconds=0.5) for n, loss in enumerate(losses, 1))


def row(*values: float) -> list[MetricPoint]:
    return [MetricPoint(n, 10.0 * n, value) for n, value in enumerate(values, 1)]


def test_time_is_what_the_steps_took() -> None:
    assert [point.at_s for point in points(RunHistory(steps=steps(3.0, 2.0, 1.0)), "loss")] == [0.5, 1.0, 1.5]


def test_time_includes_what_faults_cost() -> None:
    lost, closed = RankLost(rank=1, step=2, detected_s=0.25), RanksClosed(step=2, seconds=2.0, num_redone=1)
    faults = fault_history([TimedEvent(1.0, lost), TimedEvent(3.0, closed)])
    history = RunHistory(steps=steps(3.0, 2.0, 1.0), fault_history=faults)
    assert [point.at_s for point in points(history, "loss")] == [0.5, 0.5 + 0.5 + 2.25, 3.75]


def test_a_fault_that_was_not_injected_is_a_failure() -> None:
    said = "kill(rank=3, step=2) was not injected: the run was over"
    history = RunHistory(steps=steps(3.0, 2.0))
    assert end_state(RunRecord(0, 1.0, said=said), history) == (FAILED, said)
    assert end_state(RunRecord(0, 1.0, said="kill(rank=3, step=2)"), history) == (FINISHED, "")


def test_a_target_is_crossed_between_two_points() -> None:
    found = first_reaching(row(4.0, 3.0, 1.0), 2.0, higher_is_better=False)
    assert found is not None
    assert (found.at_s, found.value) == (25.0, 2.5)
    assert first_reaching(row(4.0, 3.0), 2.0, higher_is_better=False) is None
    risen = first_reaching(row(0.2, 0.6), 0.5, higher_is_better=True)
    assert risen is not None
    assert risen.at_s == pytest.approx(17.5)


def test_a_target_that_is_met_at_once_takes_the_first_point() -> None:
    found = first_reaching(row(1.0, 0.5), 2.0, higher_is_better=False)
    assert found is not None
    assert found.at_s == 10.0


def test_what_is_not_a_number_reaches_nothing() -> None:
    assert first_reaching(row(4.0, math.nan, math.nan), 2.0, higher_is_better=False) is None
    found = first_reaching(row(4.0, math.nan, 1.0), 2.0, higher_is_better=False)
    assert found is not None
    assert found.at_s == 30.0, "nothing is known of the way there"


def test_a_single_low_step_reaches_no_target() -> None:
    noisy = row(4.0, 4.0, 4.0, 4.0, 1.0, 4.0, 4.0, 4.0, 4.0, 1.0)
    assert first_reaching(smooth(noisy), 2.0, higher_is_better=False) is None
    assert first_reaching(noisy, 2.0, higher_is_better=False) is not None


def test_smoothing_keeps_a_steep_start_and_skips_what_is_not_a_number() -> None:
    smoothed = smooth(row(9.0, 5.0, 4.0, math.nan, 2.0))
    assert smoothed[0].value == 9.0
    assert smoothed[1].value == 6.0
    assert smoothed[3].value == pytest.approx((5.0 + 4.0 + 2.0) / 3)


def test_bytes_are_counted_between_the_first_step_and_the_last() -> None:
    traffic = [(0.0, 0), (1.0, 5000), (2.0, 6000), (3.0, 7000), (4.0, 9999)]
    assert bytes_per_step(traffic, {1: 1.0, 2: 2.0, 3: 3.0}) == 1000
    assert sent_until(traffic, 1.5) == 5500
    assert sent_until(traffic, 99.0) == 9999
    assert bytes_per_step([], {1: 1.0, 2: 2.0}) is None
    assert bytes_per_step(traffic, {1: 1.0}) is None
    assert bytes_per_step(traffic, {}) is None


def told(*rounds: tuple[float, int], seconds: float) -> list[tuple[float, StepDone]]:
    """Rounds of so many steps, each told line after line when it is over."""
    found: list[tuple[float, StepDone]] = []
    for at, num in rounds:
        found += [(at + 5e-5 * n, StepDone(len(found) + n + 1, seconds=seconds)) for n in range(num)]
    return found


def test_steps_that_are_told_together_share_a_moment() -> None:
    assert step_times(told((10.0, 3), (20.0, 2), seconds=3.0)) == {1: 10.0, 2: 10.0, 3: 10.0, 4: 20.0, 5: 20.0}
    quick = [(1.0 + 1e-4 * n, StepDone(n, seconds=1e-4)) for n in range(1, 4)]
    assert len(set(step_times(quick).values())) == 3, "steps may be as quick as lines are written"


def test_bytes_of_replicas_apart_are_divided_by_the_steps_in_which_they_were_sent() -> None:
    """Three rounds of four steps, 8000 bytes at the end of each."""
    traffic = [(0.0, 0), (9.0, 0), (10.0, 8000), (19.0, 8000), (20.0, 16000), (29.0, 16000), (30.0, 24000)]
    times = step_times(told((10.0, 4), (20.0, 4), (30.0, 4), seconds=2.5))
    assert bytes_per_step(traffic, times) == 2000
    assert bytes_per_step(traffic, step_times(told((10.0, 4), seconds=2.5))) is None, "nothing is known, it is not 0"


def test_sent_bytes_are_the_ninth_figure_of_the_kernels_table() -> None:
    table = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier\n"
        "    lo:  11 1 0 0 0 0 0 0  22 1 0 0 0 0 0 0\n"
        "  eth0:1234 5 0 0 0 0 0 0 5678 9 0 0 0 0 0 0\n"
    )
    assert (sent_bytes(table, "eth0"), sent_bytes(table, "lo"), sent_bytes(table, "eth1")) == (5678, 22, 0)


@pytest.mark.parametrize(
    ("record", "history", "state", "reason"),
    [
        (WELL, RunHistory(steps=steps(3.0, 2.0)), FINISHED, ""),
        (WELL, RunHistory(steps=steps(3.0, math.nan, math.nan)), DIVERGED, "its loss is not finite from step 2"),
        (WELL, RunHistory(steps=steps(2.0, 9.0)), DIVERGED, "its loss rose from 2 to 9"),
        (WELL, RunHistory(steps=steps(1.0, *[2.0] * 39)), FINISHED, ""),
        (
            WELL,
            RunHistory(steps=steps(3.0, 2.0), evals=(Evaluated(2, math.nan),)),
            DIVERGED,
            "its loss in the evaluation after step 2 is not finite",
        ),
        (WELL, RunHistory(), FAILED, "no step was finished"),
        (
            RunRecord(2, 1.0),
            RunHistory(steps=steps(2.0, taken=False)),
            DIVERGED,
            "its gradients are not finite from step 1",
        ),
        (RunRecord(2, 1.0, said="there is no file"), RunHistory(), FAILED, "there is no file"),
        (RunRecord(1, 1.0), RunHistory(steps=steps(2.0), ended=RunEnded(1, "failed", 1, "oh\nno")), FAILED, "oh"),
        (RunRecord(137, 1.0), RunHistory(), FAILED, "exit status 137"),
        (RunRecord(130, 1.0, is_stopped=True), RunHistory(steps=steps(3.0, 2.0)), FINISHED, ""),
    ],
)
def test_how_a_run_ended(record: RunRecord, history: RunHistory, state: str, reason: str) -> None:
    assert end_state(record, history) == (state, reason)


def test_what_is_not_a_number_is_no_final_figure() -> None:
    case = ComparisonCase("plain", (), 2, Job.model_construct(), ComparisonCondition(), ParsedFaults())
    seen = steps(*[3.0] * 28, 2.0, math.inf, 1.0)
    outcome = outcome_of(CompareConfig(job="job.toml"), ComparisonRun(case, 0, 0, ""), WELL, RunHistory(steps=seen), {})
    assert outcome.final_loss == 1.5
    assert outcome.state == FINISHED
    lost = outcome_of(
        CompareConfig(job="job.toml"), ComparisonRun(case, 0, 0, ""), WELL, RunHistory(steps=steps(math.nan)), {}
    )
    assert lost.final_loss is None


def test_figures_of_training_and_of_evaluations_stay_apart() -> None:
    case = ComparisonCase("plain", (), 2, Job.model_construct(), ComparisonCondition(), ParsedFaults())
    trained = tuple(StepDone(n, 2.0, seconds=1.0, metrics={"accuracy": 0.8}) for n in (1, 2))
    held_out = Evaluated(2, 2.5, metrics={"accuracy": 0.7, "odd": math.nan})
    told = RunHistory(steps=trained, evals=(held_out,))
    outcome = outcome_of(CompareConfig(job="job.toml"), ComparisonRun(case, 0, 0, ""), WELL, told, {})
    assert (outcome.final("loss", is_evaluated=False), outcome.final("loss", is_evaluated=True)) == (2.0, 2.5)
    assert (outcome.metrics, outcome.eval_metrics) == ({"accuracy": 0.8}, {"accuracy": 0.7})
    assert outcome.final("accuracy", is_evaluated=True) == 0.7


def test_the_last_words_are_what_closeranks_said() -> None:
    said = "step 1\ncloseranks: 1 problem in the job:\n  data.path: it is not there.\n"
    assert last_output(said) == "1 problem in the job: data.path: it is not there."
    assert last_output("some line\nKilled\n") == "Killed"
    assert last_output("") == ""
