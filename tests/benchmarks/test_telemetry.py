from __future__ import annotations

import shutil
from typing import Any

import pytest
from telemetry_instructions import in_step as instructions_in_step
from telemetry_instructions import parse_total

from telemetry import ROWS, compare, in_step, is_met
from tests.benchmarks.scripts import run_script


def turn(*seconds: float, cpu: float = 1.0) -> list[dict[str, Any]]:
    return [{"seconds": one, "cpu_seconds": cpu} for one in seconds]


def test_the_slower_rank_of_a_turn_counts_and_ratios_are_taken_within_a_round() -> None:
    rounds = {
        "on": [turn(1.0, 1.25), turn(2.5, 10.0)],
        "off": [turn(1.0, 0.5, cpu=0.5), turn(8.0, 8.0, cpu=0.5)],
    }
    figures = compare(rounds, num_steps=10)
    assert (figures["ratio"]["low"], figures["ratio"]["high"]) == (0.8, 0.8)
    assert figures["step_ms"]["median"] == 450.0
    assert figures["cpu_ratio"]["median"] == 0.5


def test_spans_are_calls_times_their_cost_and_the_record() -> None:
    slow = {
        "num_switches": 30.0,
        "switch_us": 0.5,
        "num_counts": 10.0,
        "count_us": 1.0,
        "record_us": 25.0,
        "look_ms": 1.0,
    }
    figures = in_step([slow, {**slow, "num_switches": 2.0}])
    assert figures["telemetry_us"] == 50.0
    assert figures["look_share"] == 0.0002


@pytest.mark.parametrize(("share", "high", "met"), [(0.005, 1.0, True), (0.02, 1.0, False), (0.005, 0.98, False)])
def test_spans_must_meet_the_goal_and_the_spread_must_allow_it(share: float, high: float, met: bool) -> None:
    assert is_met({"share_of_step": share, "ratio": {"high": high}}) is met


def test_instructions_of_a_step_are_those_of_its_calls_and_the_record() -> None:
    assert parse_total("==7== \n==7== I   refs:      1,234,567\n") == 1_234_567
    with pytest.raises(RuntimeError, match="counted nothing"):
        parse_total("valgrind: no such tool")
    assert instructions_in_step({"switch": 100, "count": 50, "record": 7}, num_switches=3, num_counts=2) == 407


@pytest.mark.world
@pytest.mark.slow
def test_it_measures_and_concludes() -> None:
    found = run_script("telemetry.py", "--row", "short", "--rounds", "3", "--block", "5", "--batch", "2")
    row = found["figures"]["short"]
    assert set(found["figures"]) == {"short"} < set(ROWS)
    assert row["num_switches"] > 10
    assert row["num_counts"] >= 1, "gradients are summed"
    assert 0 < row["share_of_step"] < 0.5
    assert row["ratio"]["num"] == 3
    if shutil.which("valgrind") is None:
        assert row["instructions"] is None
    else:
        assert 10_000 < row["instructions"]["record"] < row["instructions"]["in_step"] < 10_000_000
