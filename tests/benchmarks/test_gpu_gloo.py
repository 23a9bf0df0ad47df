from __future__ import annotations

from math import nan
from pathlib import Path

import pytest
from gloo_tries import DTYPES, OPS, WORKS, told_by
from gpu_gloo import LAYOUTS, compare, judge, num_ranks, verdicts

from tests.benchmarks.scripts import run_script


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([[WORKS, WORKS], [WORKS, WORKS]], [WORKS, WORKS]),
        ([[WORKS, "refused"], [WORKS, "refused"]], [WORKS, "refused"]),
        ([[WORKS, "refused"], [WORKS]], [WORKS, "refused"]),
        ([[WORKS, WORKS], [WORKS]], [WORKS, "killed"]),
        ([["refused"], [WORKS, WORKS]], ["refused"]),
        ([[], []], ["killed"]),
    ],
)
def test_a_complaint_counts_before_how_the_world_ended(ranks: list[list[str]], expected: list[str]) -> None:
    assert verdicts(ranks, "killed") == expected


def test_a_line_that_was_cut_off_is_none(tmp_path: Path) -> None:
    (tmp_path / "tries-0").write_text('"works"\n"wor')
    assert told_by(tmp_path, 0) == [WORKS]
    assert told_by(tmp_path, 1) == []


def test_losses_are_compared_with_those_of_one_process() -> None:
    assert compare([3.0, 2.0], [3.0001, 2.0], "")["agrees"]
    assert not compare([3.0, 2.0], [3.0, 2.1], "")["agrees"]
    assert not compare([nan], [3.0], "")["agrees"]
    assert compare([], [3.0], "Gloo does not know this")["words"] == "Gloo does not know this"


def test_nothing_tried_is_nothing_shown() -> None:
    assert not judge({})
    assert judge({"data=2": {"agrees": True}})
    assert not judge({"data=2": {"agrees": True}, "tensor=2": {"agrees": False}})


@pytest.mark.world
@pytest.mark.slow
def test_it_runs_on_the_cpu() -> None:
    two = [name for name, layout in LAYOUTS.items() if num_ranks(layout) == 2]
    closing = run_script("gpu_gloo.py", "--device", "cpu", "--ranks", "2", "--timeout-s", "45", "--layouts", *two)
    figures = closing["figures"]
    assert figures["collectives"]["2"] == {f"{op} {dtype}": WORKS for op in OPS for dtype in DTYPES}
    assert {name: found["agrees"] for name, found in figures["layouts"].items()} == dict.fromkeys(two, True)
    assert closing["met"]
