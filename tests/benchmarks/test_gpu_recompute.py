from __future__ import annotations

from typing import Any

import pytest
from gpu_recompute import MODES, agreement, judge

from tests.benchmarks.scripts import run_script


def found(peaks: tuple[float, ...] = (60.0, 40.0, 30.0), estimate: float = 1.0, agree: bool = True) -> dict[str, Any]:
    modes = {
        mode: {"peak_memory_gib": peak, "estimate_over_peak": estimate}
        for mode, peak in zip(MODES, peaks, strict=False)
    }
    return {"modes": modes, "losses_agree": agree}


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        (found(), True),
        (found(peaks=(60.0, 61.0, 30.0)), False),
        (found(estimate=1.2), False),
        (found(estimate=0.9), True),
        (found(agree=False), False),
        (found(peaks=(60.0, 40.0)), False),
        ({"modes": {mode: {"out_of_memory": "too much"} for mode in MODES}, "losses_agree": True}, False),
    ],
)
def test_the_goal_is_less_memory_as_foretold(figures: dict[str, Any], met: bool) -> None:
    assert judge(figures) is met


def test_a_mode_that_did_not_train_is_not_compared() -> None:
    assert agreement({"none": [], "selective": [3.0, 2.0], "full": [3.0, 2.0]})["losses_agree"]
    assert not agreement({"none": []})["losses_agree"]


@pytest.mark.slow
def test_it_runs_without_a_gpu() -> None:
    closing = run_script("gpu_recompute.py", "--device", "cpu", "--quick")
    figures = closing["figures"]["tiny"]
    assert set(figures["modes"]) == set(MODES)
    assert figures["losses_agree"]
    for mode in figures["modes"].values():
        assert mode["tokens_per_s"]["median"] > 0
        assert mode["estimate"]["total_gib"] >= mode["estimate"]["state_gib"]
    assert not closing["met"]
