"""Plans on a CPU beside its runs: what is judged, what the calibration may train, and what disturbs a measurement."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from plan_cpu import JOB, ROWS, compare, judge
from quiet import others_running

from closeranks.lab.calibrate.calibration_runs import calibration_runs
from closeranks.plan.check.measured_step import GROUPS, StepGroups
from tests.benchmarks.scripts import run_script


def step(seconds: float) -> StepGroups:
    return StepGroups(seconds, dict.fromkeys(GROUPS, 0.0) | {GROUPS[0]: seconds})


def figures(ratios: list[float]) -> dict[str, Any]:
    """Layouts of 1.00, 1.01, ... seconds, each predicted to take so many times as long."""
    seconds = [1 + place / 100 for place in range(len(ratios))]
    predicted = {str(place): {GROUPS[0]: ratio * seconds[place]} for place, ratio in enumerate(ratios)}
    planned = {name: dict.fromkeys(GROUPS, 0.0) | groups for name, groups in predicted.items()}
    return compare(planned, {str(place): [step(one), step(one)] for place, one in enumerate(seconds)})


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ([1.0] * 10, True),
        ([1.0] * 9, False),
        ([1.14] * 10, True),
        ([1.16] * 10, False),
        ([1.1] * 19 + [0.8], False),
    ],
)
def test_the_goal_asks_for_near_predictions_of_enough_layouts_and_a_fast_pick(ratios: list[float], met: bool) -> None:
    assert judge(figures(ratios)) is met


def test_no_layout_that_is_judged_is_trained_for_the_calibration() -> None:
    runs = calibration_runs(JOB, "cpu", num_cores=2)
    trained = {(run.choice(), run.workload().global_batch) for run in runs}
    judged = {(row.run(3).choice(), row.run(3).workload().global_batch) for row in ROWS}
    assert len(judged) == len(ROWS) >= 10
    assert not trained & judged


def test_a_process_of_ones_own_disturbs_nothing() -> None:
    """Another one, which is nobody's descendant here, does."""
    script = "import os, sys; os.fork() and os._exit(0); print(os.getpid(), flush=True)\nwhile os.getppid() != 0: pass"
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as own:
        assert own.pid not in others_running()
        own.kill()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as left:
        assert left.stdout
        orphan = int(left.stdout.readline())
        try:
            left.wait()
            assert orphan in others_running()
        finally:
            subprocess.run(["kill", str(orphan)], check=True)


@pytest.mark.slow
def test_it_runs() -> None:
    found = run_script("plan_cpu.py", "--quick")
    assert found["name"] == "plan_cpu"
    assert found["figures"]["num_layouts"] == 2
    assert found["met"] is False
