"""``closeranks drill``: what it refuses, how it judges and tells, and one whole drill of a small job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closeranks.core.events import Event, RankLost, RanksClosed, SaveFailed, SlowRank
from closeranks.elastic.faults.fault import InjectedFault
from closeranks.elastic.faults.inject import Injection
from closeranks.lab.drills.fault_results import DrillResult, FaultResult, fault_results, is_resized
from closeranks.lab.drills.recorded_run import (
    RecordedRun,
    read_recorded_run,
    same_losses,
    same_samples,
    state_difference,
)
from closeranks.lab.drills.report import markdown_page, print_summary, write_report
from closeranks.telemetry.run_log.fault_history import TimedEvent
from tests.cli.calling import call
from tests.cli.commands import closeranks
from tests.cli.fault_jobs import IMPORTABLE, hook, write_job
from tests.elastic.faults.worker_processes import can_mount

# --- what is refused, before anything runs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "kil"], "there is no fault `kil`. Did you mean kill?"),
        (["--faults", "kill(rank=9, step=3)"], "there is no rank 9"),
        (["--faults", "kill(rank=1, step=99)"], "the run has 12 steps only"),
        (["--faults", "kill(rank=1)"], "step is missing"),
        (["--faults", "kill", "--count", "13"], "13 faults do not fit into 12 steps"),
        (["--faults", "diskfull(step=11)"], "diskfull would still last"),
        (["--faults", "kill", "elastic.enabled=false"], "this job survives no fault"),
        (["--faults", "kill", "train.stepps=3"], "train.stepps"),
        (["--faults", "kill", "layout.data=3"], "3 workers"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path: Path, words: list[str], said: str) -> None:
    said_all = call("drill", write_job(tmp_path), "-n", 2, "--folder", tmp_path / "drill", *words)
    assert said_all.code == 2
    assert said in said_all.err
    assert not (tmp_path / "drill").exists()


def test_a_kind_without_means_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from closeranks.lab.drills import drill

    monkeypatch.setattr(drill, "unavailable_kinds", lambda kinds: {"oom": "there is no memory control"})
    said = call("drill", write_job(tmp_path), "-n", 2, "--faults", "kill,oom", "--folder", tmp_path / "drill")
    assert said.code == 2
    assert "the fault oom is not possible here: there is no memory control. Leave it out of --faults." in said.err


def test_train_wants_faults_in_full(tmp_path: Path) -> None:
    said = call("train", write_job(tmp_path), "-n", 2, "--faults", "kill")
    assert said.code == 2
    assert "`kill` does not say which rank and step. Write kill(rank=1, step=3)" in said.err
    said = call("train", write_job(tmp_path), "-n", 2, "--faults", "kill(rank=2, step=1)")
    assert said.code == 2
    assert "there is no rank 2" in said.err


def test_help_names_every_kind() -> None:
    from closeranks.elastic.faults.fault import KINDS

    said = call("drill", "--help")
    assert said.code == 0
    assert [kind for kind in KINDS if kind not in said.out] == []


# --- how it judges: from strikes and from what the agent recorded

LOSSES = {step: 1.0 / step for step in range(1, 11)}
QUIET = RecordedRun(LOSSES, last_step=10)


def told(*lines: tuple[float, Event]) -> list[TimedEvent]:
    return [TimedEvent(at, event) for at, event in lines]


def test_a_fault_is_timed_from_the_strike_over_its_notice_to_the_first_good_step() -> None:
    kill = Injection(InjectedFault("kill", 3, 1), 100.0, 0, 3, "SIGKILL")
    lines = told((100.2, RankLost(0, 1, step=3, kind="killed")), (101.0, RanksClosed(1, 3, 0.9, 1, 4)))
    (row,) = fault_results([kill], [], QUIET, RecordedRun(LOSSES, events=lines), has_finished=True)
    assert row == FaultResult(
        "kill(rank=1, step=3)", pytest.approx(0.1), 0.9, 1, survived=True, equal=True, note="SIGKILL"
    )


def test_each_fault_is_matched_with_its_own_generation() -> None:
    strikes = [Injection(InjectedFault("kill", 3), 100.0, 0, 3), Injection(InjectedFault("stop", 7, 1), 110.0, 1, 7)]
    lines = told(
        (100.1, RankLost(0)), (101.0, RanksClosed(1, 3, 0.9)), (116.0, RankLost(1)), (117.0, RanksClosed(2, 7, 1.5, 1))
    )
    rows = fault_results(strikes, [], QUIET, RecordedRun(LOSSES, events=lines), has_finished=True)
    assert [row.detected_s for row in rows] == [pytest.approx(0.1), pytest.approx(5.5)]
    assert [row.num_redone for row in rows] == [0, 1]


def test_who_never_came_back_was_not_survived() -> None:
    unseen = Injection(InjectedFault("stop", 3, 1), 100.0, 0, 3, "SIGSTOP")
    (row,) = fault_results([unseen], [], QUIET, QUIET, has_finished=True)
    assert not row.survived
    assert row.note == "SIGSTOP; it was never detected"
    lost = RecordedRun(LOSSES, events=told((105.0, RankLost(0, 1))))
    (row,) = fault_results([unseen], [], QUIET, lost, has_finished=False)
    assert (row.survived, row.detected_s, row.num_redone) == (False, 5.0, None)
    assert row.note == "SIGSTOP; no step was finished after it"
    (row,) = fault_results([unseen], [], QUIET, lost, has_finished=True)
    assert (row.survived, row.detected_s, row.num_redone) == (True, 5.0, 0)
    assert row.note == "SIGSTOP; every step was finished already"


@pytest.mark.parametrize(("ended_at", "survived"), [(100.5, True), (102.0, False)])
def test_who_is_asked_to_leave_in_the_last_second_need_not_be_seen_to(ended_at: float, survived: bool) -> None:
    losses = dict.fromkeys(range(1, 4), 1.0)
    strike = Injection(InjectedFault("term", 3, 1), 100.0, 0, 3, "SIGTERM")
    (row,) = fault_results(
        [strike], [], RecordedRun(losses, last_step=3), RecordedRun(losses, ended_at=ended_at), has_finished=True
    )
    assert row.survived == survived
    assert ("was over before" in row.note) == survived


def test_what_did_not_strike_was_not_survived() -> None:
    failed = Injection(InjectedFault("exception", 2), 100.0, 0, 2, error="rank 0 has no connection to another")
    rows = fault_results([failed], [InjectedFault("kill", 10)], QUIET, QUIET, has_finished=True)
    assert [row.survived for row in rows] == [False, False]
    assert rows[0].note == "it could not be injected: rank 0 has no connection to another"
    assert rows[1].note.startswith("it was not injected: the run was over")


def test_what_ends_nothing_is_survived_by_going_on() -> None:
    strikes = [
        Injection(InjectedFault("slow", 2, 1), 100.0, 0, 2),
        Injection(InjectedFault("diskfull", 6), 110.0, 0, 6),
    ]
    lines = told((90.0, SaveFailed(1)), (95.0, SlowRank(1)), (103.0, SlowRank(0)), (104.0, SlowRank(1)))
    rows = fault_results(
        strikes, [], QUIET, RecordedRun(LOSSES, events=[*lines, TimedEvent(112.5, SaveFailed(6))]), has_finished=True
    )
    assert [(row.detected_s, row.num_redone, row.survived) for row in rows] == [(4.0, 0, True), (2.5, 0, True)]
    rows = fault_results(strikes, [], QUIET, RecordedRun(LOSSES), has_finished=True)
    assert [(row.detected_s, row.survived) for row in rows] == [(None, True), (None, True)]
    assert [row.note for row in rows] == ["; it was not reported as slow", "; no save was affected by it"]


def test_the_fault_after_which_losses_differ_is_the_one_that_is_blamed() -> None:
    strikes = [
        Injection(InjectedFault("kill", step), 100.0 + step, number, step) for number, step in enumerate((2, 5, 8))
    ]
    lines = told(*((100.5 + step, RankLost(number)) for number, step in enumerate((2, 5, 8))))
    lines += told(*((101.0 + step, RanksClosed(number + 1)) for number, step in enumerate((2, 5, 8))))
    odd = RecordedRun({**LOSSES, 6: 1.0 / 6 + 1e-16}, events=lines)
    assert [row.equal for row in fault_results(strikes, [], QUIET, odd, has_finished=True)] == [True, False, True]
    assert [row.equal for row in fault_results(strikes, [], QUIET, odd, has_finished=True, tolerance=1e-9)] == [
        True,
        True,
        True,
    ]


def test_losses_are_compared_bit_by_bit() -> None:
    assert same_losses(QUIET, QUIET, 1, 10)
    assert not same_losses(QUIET, RecordedRun({**LOSSES, 3: 1 / 3 + 1e-16}), 1, 10)
    assert not same_losses(QUIET, RecordedRun({step: LOSSES[step] for step in range(1, 10)}), 1, 10)
    nan = RecordedRun({1: float("nan")})
    assert same_losses(nan, nan, 1, 1)
    assert not same_losses(RecordedRun({1: 0.0}), RecordedRun({1: -0.0}), 1, 1)


def test_another_size_is_noticed() -> None:
    assert not is_resized(told((1.0, RanksClosed(1, world_size=4))), 4)
    assert is_resized(told((1.0, RanksClosed(1, world_size=3)), (2.0, RanksClosed(2, world_size=4))), 4)


# --- how it tells

ROWS = (
    FaultResult("kill(rank=1, step=3)", 0.05, 0.912, 1, survived=True, equal=True, note="SIGKILL"),
    FaultResult("slow(rank=0, step=5)", None, None, 0, survived=True, equal=True, note="20% of a processor"),
)


def test_the_table_and_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    summary = DrillResult(ROWS, 10, losses=True, state="", samples=True)
    assert summary.has_passed
    print_summary(summary)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "fault"
    assert lines[1].split() == ["kill(rank=1,", "step=3)", "0.05", "s", "0.91", "s", "1", "yes", "SIGKILL"]
    assert lines[2].split()[2:6] == ["-", "-", "0", "yes"]
    said = "2 of 2 faults survived; the losses of all 10 steps and the last state are equal in every bit"
    assert summary.sentence == f"{said}, the samples are the same."


def test_a_resized_run_is_equal_up_to_a_tolerance_and_says_so() -> None:
    summary = DrillResult(ROWS, 10, losses=True, state="", samples=None, tolerance=1e-4)
    assert "equal up to 0.0001, because the run was resized" in summary.sentence
    assert "| to 0.0001 |" in markdown_page(
        summary, {"job": "job.toml", "num_workers": 4, "command": "closeranks drill job.toml"}
    )


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (DrillResult(ROWS, 10, losses=False, state="", samples=None), "but the losses are not those"),
        (DrillResult(ROWS, 10, losses=True, state="3 tensors differ", samples=None), "but 3 tensors differ."),
        (DrillResult(ROWS, 10, losses=True, state="", samples=False), "but some steps took other samples"),
        (DrillResult(ROWS, 10, losses=False, state="", samples=None, failure="rank 1 died\nlog"), "ended: rank 1 died"),
        (
            DrillResult((FaultResult("x", equal=True),), 10, losses=True, state="", samples=None),
            "0 of 1 fault survived",
        ),
        (
            DrillResult((FaultResult("x", survived=True),), 10, losses=True, state="", samples=None),
            "1 of 1 fault survived",
        ),
    ],
)
def test_whatever_is_wrong_fails_the_drill(summary: DrillResult, said: str, tmp_path: Path) -> None:
    assert not summary.has_passed
    assert said in summary.sentence
    write_report(tmp_path, summary, {"job": "job.toml", "num_workers": 4, "command": "closeranks drill job.toml"})
    kept = json.loads((tmp_path / "drill.json").read_text())
    assert kept["passed"] is False
    assert kept["sentence"] == summary.sentence
    assert summary.sentence in (tmp_path / "drill.md").read_text()


# --- the whole of it


def _drilled(
    tmp_path: Path, *words: object, timeout_s: float = 300.0, env: dict[str, str] | None = None
) -> tuple[Path, dict[str, object], str]:
    words = ("-n", 3, "--folder", tmp_path / "drill", *words, "data.log_samples=true")
    done = closeranks("drill", write_job(tmp_path), *words, cwd=tmp_path, timeout_s=timeout_s, env=env)
    folder = tmp_path / "drill"
    assert done.code == 0, done.out + done.err
    assert done.left_behind == []
    return folder, json.loads((folder / "drill.json").read_text()), done.out


@pytest.mark.world
def test_a_job_comes_out_the_same_after_a_kill_at_the_first_a_middle_and_the_last_step(tmp_path: Path) -> None:
    faults = "kill(rank=1, step=1), kill(rank=0, step=6, at=0.5), kill(rank=2, step=12)"
    folder, kept, out = _drilled(tmp_path, "--faults", faults, hook("Unhurried"), env=IMPORTABLE)
    assert kept["passed"] is True
    assert kept["samples_equal"] is True
    rows = kept["rows"]
    assert isinstance(rows, list)
    assert [row["survived"] and row["equal"] and row["num_redone"] <= 1 for row in rows] == [True] * 3
    assert "3 of 3 faults survived" in out
    assert state_difference(folder / "undisturbed", folder / "disturbed") == ""
    assert same_samples(read_recorded_run(folder / "undisturbed"), read_recorded_run(folder / "disturbed"))


@pytest.mark.slow
@pytest.mark.world
@can_mount
@pytest.mark.timeout(600)
def test_every_kind_that_is_possible_here_is_survived(tmp_path: Path) -> None:
    settings = ("train.steps=24", "elastic.hang_floor_s=2", hook("Unhurried"))
    _, kept, _ = _drilled(tmp_path, "--seed", 7, *settings, timeout_s=550.0, env=IMPORTABLE)
    rows = kept["rows"]
    assert isinstance(rows, list)
    assert len(rows) >= 9


@pytest.mark.world
def test_train_can_be_struck_too(tmp_path: Path) -> None:
    words = ("-n", 2, "--faults", "kill(rank=1, step=6)", hook("Unhurried"))
    done = closeranks("train", write_job(tmp_path), *words, cwd=tmp_path, env=IMPORTABLE)
    assert done.code == 0, done.err
    assert "rank 1 lost at step 6" in done.out
    assert done.left_behind == []
