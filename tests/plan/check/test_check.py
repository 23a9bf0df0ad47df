"""Errors are of the prediction, and the sentence names the part that differs most, with what would help."""

from __future__ import annotations

import pytest

from closeranks.plan.check.check import CheckedFigure, PlanCheck, check_json, check_plan, check_rows
from closeranks.plan.check.measured_step import (
    COMPUTE,
    DATA_AXIS,
    GROUPS,
    INPUT,
    PIPELINE_AXIS,
    StepGroups,
)


def checked(planned: dict[str, float], measured: dict[str, float], **known: bool) -> PlanCheck:
    whole = [dict.fromkeys(GROUPS, 0.0) | one for one in (planned, measured)]
    return check_plan(whole[0], StepGroups(sum(measured.values()), whole[1]), **known)


def test_errors_are_a_share_of_what_was_measured() -> None:
    found = checked({COMPUTE: 1.1, DATA_AXIS: 0.5}, {COMPUTE: 1.0, DATA_AXIS: 1.0})
    assert found.step.error == pytest.approx(-0.2)
    assert [part.name for part in found.parts] == [COMPUTE, DATA_AXIS], "what neither side has is left out"
    assert found.parts[0].error == pytest.approx(0.1)
    assert CheckedFigure("nothing", 1.0, 0.0).error is None


@pytest.mark.parametrize(
    ("planned", "measured", "known", "words"),
    [
        ({COMPUTE: 1.0}, {COMPUTE: 1.01}, {}, "No part differs by more than 5% of a step."),
        (
            {COMPUTE: 0.5},
            {COMPUTE: 1.0},
            {},
            "forward and backward: 50% of a step longer than predicted. The plan rests",
        ),
        ({COMPUTE: 2.0}, {COMPUTE: 1.0}, {"is_calibrated": True}, "100% of a step shorter than predicted, although"),
        ({DATA_AXIS: 0.1}, {DATA_AXIS: 1.0}, {"is_one_host": False}, "name the links between your hosts"),
        ({PIPELINE_AXIS: 0.1}, {PIPELINE_AXIS: 1.0}, {}, "closeranks doctor says which rank is slow"),
        ({}, {INPUT: 1.0}, {}, "no plan knows how fast your data loads"),
    ],
)
def test_the_sentence(
    planned: dict[str, float], measured: dict[str, float], known: dict[str, bool], words: str
) -> None:
    assert words in checked(planned, measured, **known).sentence()


def test_tables_for_people_and_programs() -> None:
    found = checked({COMPUTE: 0.5}, {COMPUTE: 1.0})
    assert check_rows(found)[-1] == ("step", "500.0 ms", "1,000.0 ms", "-50.0%")
    assert check_json(found)["step_s"] == {"name": "step", "predicted": 0.5, "measured": 1.0, "error": -0.5}
