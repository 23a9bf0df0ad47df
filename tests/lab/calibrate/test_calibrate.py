"""A whole calibration of a CPU in its shortest form, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.facts.calibration import Calibration, load_calibration
from closeranks.lab.calibrate import calibration_runs as calibration_runs_module
from closeranks.lab.calibrate import workers
from closeranks.lab.calibrate.calibrate import worker_counts
from closeranks.lab.calibrate.calibration_runs import calibration_runs, trained_steps
from closeranks.lab.calibrate.job_steps import StepRun, StepRunFailed, run_steps
from tests.cli.calling import call
from tests.cli.commands import ROOT

TINY = ROOT / "examples" / "tiny.toml"


@pytest.mark.slow
@pytest.mark.world
def test_everything_of_a_cpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_TURN_S", 0.01)
    path = tmp_path / "mine.json"
    found = call("plan", "calibrate", TINY, "--device", "cpu", "--seconds", 2, "--out", path, cwd=tmp_path)
    assert found.code == 0, found.err
    assert str(path) in found.out
    calibration = load_calibration(path)
    assert calibration.kind == "cpu"
    assert calibration.product_s(192, 128, 128, "fp32")
    for name in ("attention", "memory_passes", "optimizer", "slowdowns", "collectives"):
        assert getattr(calibration, name), name
    assert {one.operation for one in calibration.collectives} == set(workers.OPERATIONS)
    assert calibration.disk_bytes_per_s
    assert calibration.corrections["compute: memory-bound"] > 0
    assert calibration.step_overhead_s
    assert list(tmp_path.iterdir()) == [path], "the file that the disk was measured with is gone"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--device", "tpu"], "'tpu' is no device"),
        (["--out", "nowhere/mine.json"], "nowhere/mine.json cannot be written: No such file"),
        (["--out", "/dev/null/mine.json"], "cannot be written"),
        (["--out", "."], ". cannot be written: Is a directory"),
        (["none.toml"], "none.toml"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: list[str], what: str) -> None:
    found = call("plan", "calibrate", *arguments)
    assert found.code == 2
    assert what in found.err


def test_workers_of_a_host_up_to_two_for_each_core() -> None:
    assert worker_counts(1) == (2,)
    assert worker_counts(2) == (2, 4)
    assert worker_counts(16) == (2, 8)


def test_what_is_trained_for_a_calibration(tmp_path: Path) -> None:
    cpu = calibration_runs(TINY, "cpu", num_cores=2)
    assert [(run.num_workers, run.choice().micro_batch) for run in cpu] == [(1, 3), (2, 3), (2, 6), (2, 6)]
    assert [run.choice().layout.tensor for run in cpu] == [1, 1, 1, 2]
    assert all(run.choice().num_micro(run.workload().global_batch) == 2 for run in cpu)
    planned = tmp_path / "planned.toml"
    planned.write_text(TINY.read_text().replace("data = 0", "data = 2\nzero = 3"))
    found = calibration_runs(planned, "cpu", num_cores=2)
    assert [run.choice().layout for run in found] == [run.choice().layout for run in cpu], "whatever the job chose"
    gpu = calibration_runs(TINY, "cuda", num_cores=16)
    assert [(run.num_workers, run.choice().micro_batch) for run in gpu] == [(1, 1), (1, 3)]


def test_runs_are_trained_again_in_another_order_and_a_failing_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_runs_module, "_PASSES_S", 1e9)
    good = [StepRun(TINY, (f"layout.data={n}", "train.steps=4", "train.global_batch=4"), n, 4) for n in (1, 2)]
    told: list[str] = []
    found = trained_steps([good[0], StepRun(TINY, ("layout.tensor=3",), 3), good[1]], Calibration(), told.append)
    assert [(one.cluster.num_devices, one.choice.layout.data) for one in found] == [(1, 1), (2, 2)]
    assert all(one.measured.seconds > 0 for one in found)
    order = [line.split(", ")[1] for line in told if line.startswith("steps") and "tensor" not in line]
    assert order == ["data=1", "data=2", "data=2", "data=1", "data=2", "data=1"]
    assert sum(line.startswith("not measured") for line in told) == 1


def test_no_pass_begins_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_runs_module, "_PASSES_S", 0.0)
    told: list[str] = []
    trained_steps([StepRun(TINY, ("layout.data=1", "train.global_batch=4"), 1, 4)], Calibration(), told.append)
    assert sum(line.startswith("steps") for line in told) == 1


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(StepRunFailed, match="tensor"):
        run_steps(StepRun(TINY, ("layout.tensor=3",), 3))
