"""Planned steps and peaks beside runs on one GPU: what is counted, and what meets the goal."""

from __future__ import annotations

from typing import Any

import pytest
from plan_gpu import LEAST_ROWS, QUICK, ROWS, figures_of, judge

from closeranks.facts.cluster import parse_cluster
from closeranks.plan.memory.estimate import memory_estimate
from tests.benchmarks.scripts import run_script


def row(peak_error: float = 0.01, step_error: float = -0.05, verdict: str = "fits") -> dict[str, Any]:
    return {"row": "1b", "peak_error": peak_error, "step_error": step_error, "verdict": verdict}


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([row()] * LEAST_ROWS, True),
        ([row()] * (LEAST_ROWS - 1), False),
        ([row(peak_error=-0.06)] * LEAST_ROWS, False),
        ([row(step_error=0.11)] * LEAST_ROWS, False),
        ([*[row()] * LEAST_ROWS, row(verdict="does not fit")], False),
        ([*[row()] * LEAST_ROWS, {"row": "3b", "failed": "out of memory"}], False),
    ],
)
def test_the_goal_asks_for_peaks_and_steps_of_enough_rows(rows: list[dict[str, Any]], met: bool) -> None:
    assert judge(figures_of(rows, 0)) is met


def test_every_row_is_a_job_that_is_planned_to_fit() -> None:
    assert len({one.name for one in ROWS}) == len(ROWS) >= LEAST_ROWS
    for one in ROWS:
        run = one.run("cuda", 8)
        found = memory_estimate(run.workload(), run.choice(), parse_cluster("1xh200"))
        assert found.verdict == "fits", one.name
        assert run.load().train.steps == 8
    assert {one.precision for one in ROWS} == {"bf16", "fp16", "float32"}
    assert {one.recompute for one in ROWS} == {"none", "selective", "full"}


@pytest.mark.slow
def test_it_runs_on_a_cpu() -> None:
    found = run_script("plan_gpu.py", "--device", "cpu", "--quick")
    assert found["name"] == "plan_gpu"
    assert found["figures"]["num_rows"] == len(QUICK)
    assert found["met"] is False
