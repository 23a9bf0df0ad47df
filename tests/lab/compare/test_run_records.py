"""What stays of runs: what is reused and what is run again, on which machine it ran, and a disk that refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.errors import SetupError
from closeranks.lab.compare import runner
from closeranks.lab.compare.advice import advise
from closeranks.lab.compare.comparison_plan import ComparisonPlan, ComparisonRun, make_plan
from closeranks.lab.compare.config import load_compare
from closeranks.lab.compare.report import ComparisonResult, conditions, write_report
from closeranks.lab.compare.result_table import make_table
from closeranks.lab.compare.run_environment import RunEnvironment
from closeranks.lab.compare.run_outcome import ComparisonRunOutcome
from closeranks.lab.compare.run_records import ComparisonRunFolder, MachineInfo, RunRecord, mixed_machines
from closeranks.lab.compare.runner import run_all
from tests.cli.compare.jobs import write
from tests.cli.compare.outcomes import runs

HERE, THERE = MachineInfo("here", 2, "2.11.0"), MachineInfo("there", 8, "2.12.0")
COUNTED, UNCOUNTED = (
    RunEnvironment(None, is_counted=True),
    RunEnvironment(None, is_counted=False, not_counted_reason="isolate = false"),
)


@pytest.fixture
def plan(tmp_path: Path) -> ComparisonPlan:
    """Two settings, one seed."""
    folder = f"folder={tmp_path / 'out'}"
    return make_plan(load_compare(write(tmp_path), ["seeds=[0]", folder]), tmp_path / "compare.toml")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that were really run; each run is over at once."""
    names: list[str] = []

    def at_once(
        plan: ComparisonPlan, place: RunEnvironment, run: ComparisonRun, slot: ComparisonRunFolder
    ) -> RunRecord:
        names.append(run.case.name)
        return RunRecord(0, 1.0, traffic=((1.0, 5),) if place.is_counted else ())

    monkeypatch.setattr(runner, "_run_one", at_once)
    monkeypatch.setattr(MachineInfo, "here", lambda: HERE)
    return names


def run(plan: ComparisonPlan, place: RunEnvironment) -> None:
    run_all(plan, {"": place}, lambda run, slot, record: "over")


def told(plan: ComparisonPlan, outcomes: list[ComparisonRunOutcome], uncounted: str = "") -> ComparisonResult:
    table = make_table(plan.compare, outcomes)
    return ComparisonResult(plan, tuple(outcomes), (table,), advise(table), uncounted)


def test_runs_without_bytes_are_run_again_where_bytes_are_counted(plan: ComparisonPlan, ran: list[str]) -> None:
    run(plan, UNCOUNTED)
    run(plan, UNCOUNTED)
    assert ran == ["replicas", "zero 1"], "nothing runs twice"
    run(plan, COUNTED)
    assert ran == ["replicas", "zero 1"] * 2
    run(plan, COUNTED)
    run(plan, UNCOUNTED)
    assert ran == ["replicas", "zero 1"] * 2, "what was counted stays"


def test_a_record_comes_back_with_its_machine(plan: ComparisonPlan, ran: list[str]) -> None:
    run(plan, COUNTED)
    assert ComparisonRunFolder(plan, plan.runs[0]).read() == RunRecord(0, 1.0, traffic=((1.0, 5),), machine=HERE)


def test_a_machine_is_known_without_torch() -> None:
    here = MachineInfo.here()
    assert here.host == os.uname().nodename
    assert here.num_cores == len(os.sched_getaffinity(0))
    assert here.torch.startswith("2.")


def test_what_is_no_whole_record_counts_for_nothing(plan: ComparisonPlan, ran: list[str]) -> None:
    run(plan, COUNTED)
    slot = ComparisonRunFolder(plan, plan.runs[0])
    for text in ("", "{}", '{"exit_code": 0, "wall_s": 1.0, "traffic": [], "machine": {}, "later": 1}'):
        (slot.path / "done.json").write_text(text)
        assert slot.read() is None


def test_runs_of_another_machine_are_told_of(
    plan: ComparisonPlan, ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(plan, COUNTED)
    ComparisonRunFolder(plan, plan.runs[1]).clear()
    assert "machine" not in capsys.readouterr().out
    monkeypatch.setattr(MachineInfo, "here", lambda: THERE)
    run(plan, COUNTED)
    assert capsys.readouterr().out.startswith(
        "1 finished run is of here with 2 cores and torch 2.11.0, not of there with 8 cores and torch 2.12.0: "
        "times of different machines are mixed.\n[1/2] "
    )


def test_times_of_one_machine_are_not_mixed_wherever_they_are_looked_at() -> None:
    mine, theirs = RunRecord(0, 1.0, machine=HERE), RunRecord(0, 1.0, machine=THERE)
    assert (
        mixed_machines([mine, None], HERE) == mixed_machines([theirs, theirs], HERE) == mixed_machines([], HERE) == ""
    )
    assert mixed_machines([theirs, None], HERE) != ""
    assert mixed_machines([theirs, mine], HERE) != ""
    assert mixed_machines([theirs, theirs], replace(THERE, num_cores=4)) == "", "nothing is run on this one"


def test_the_page_tells_of_machines_and_of_bytes(plan: ComparisonPlan) -> None:
    first, second = runs("replicas", None, machine="here"), runs("zero 1", None, machine="here")
    assert "machines" not in conditions(told(plan, first + second))
    mixed = conditions(told(plan, first + [replace(one, machine="there") for one in second]))
    assert "Times of different machines are mixed: here; there." in mixed
    assert "Bytes were not measured: no root." in conditions(told(plan, first + second, "no root"))
    before = [replace(one, bytes_total=5) for one in second]
    assert "Bytes were not measured, except in earlier runs: no root." in conditions(
        told(plan, first + before, "no root")
    )


def test_a_slot_that_cannot_be_written(plan: ComparisonPlan) -> None:
    slot = ComparisonRunFolder(plan, plan.runs[0])
    with pytest.raises(SetupError, match=r"cannot be written: No such file .* Set folder to a writable one"):
        slot.write(RunRecord(0, 1.0))
    with pytest.raises(SetupError, match=r"output.txt cannot be written: No such file"):
        slot.open("output.txt")
    plan.folder.mkdir()
    (plan.folder / "runs").touch()
    with pytest.raises(SetupError, match="cannot be written: Not a directory"):
        slot.clear()


def test_what_a_comparison_came_to_cannot_be_written(plan: ComparisonPlan) -> None:
    story = told(plan, runs("replicas", None) + runs("zero 1", None))
    (plan.folder / "runs.csv").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"runs.csv cannot be written: Is a directory\. Set folder"):
        write_report(story)


def test_a_run_that_cannot_be_started(plan: ComparisonPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(runner, "_start_here", refuse)
    plan.folder.mkdir()
    with pytest.raises(SetupError, match=r"a run cannot be carried out: .*Resource temporarily unavailable"):
        run(plan, UNCOUNTED)
    assert ComparisonRunFolder(plan, plan.runs[0]).read() is None
