"""The verdict about memory: how often it is borderline, and whether a rank that is run without data agrees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_fits import (
    DRAWN,
    LEAST_DRY_RUNS,
    MOST_BORDERLINE,
    Asked,
    all_choices,
    case_of,
    check_peak,
    draw_near,
    is_met,
    is_near,
    peak_figures,
    published_verdicts,
    said_of_sizes,
    verdict_figures,
)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return list(all_choices("1b", 8))


def test_few_choices_are_borderline(asked: list[Asked]) -> None:
    figures = verdict_figures(asked)
    assert figures["num"] == sum(figures["verdicts"].values()) > 1000
    assert 0 < figures["borderline"] <= MOST_BORDERLINE
    assert figures["borderline"] == figures["borderline_by_preset"]["1b"]
    assert figures["borderline_half_to_twice"] > figures["borderline"], "it is harder near the limit"


def test_no_published_run_is_said_not_to_fit() -> None:
    said = published_verdicts()
    assert said["fits"] > 200
    assert "does not fit" not in said


def test_what_is_drawn_is_near_the_limit_and_always_the_same(asked: list[Asked]) -> None:
    drawn = draw_near(asked, "1b", 8)
    assert drawn == draw_near(asked, "1b", 8)
    assert len({str(one.choice.layout) for one in drawn}) == len(drawn) == 8
    assert all(is_near(one) for one in drawn)
    few = [one for one in asked if str(one.choice.layout) == str(drawn[0].choice.layout)]
    assert len(draw_near(few, "1b", 3)) == 3, "of one layout several, if there are no others"
    assert sum(DRAWN.values()) >= LEAST_DRY_RUNS


def test_a_dry_run_near_the_limit_agrees(asked: list[Asked]) -> None:
    """The shortest one, with shorter sequences; the whole table is the benchmark's."""
    plain = [one for one in asked if str(one.choice.layout) == "data=8 zero=1" and one.choice.precision == "bf16"]
    case = case_of(draw_near(plain, "1b", 1)[0])
    row = check_peak(replace(case, micro_batch=1, num_micro=1, seq_len=1024))
    assert row["num_wrong"] == 0
    assert row["most_that_does_not"] < 1 <= row["least_that_fits"]


@pytest.mark.parametrize(("planned", "wrong"), [(100, False), (108, False), (92, False), (80, True), (125, True)])
def test_a_verdict_is_wrong_if_the_plan_is(planned: int, wrong: bool) -> None:
    """In thousandths of a peak of 100,000: a plan that is 10% off still keeps its distance, one of 20% does not."""
    assert bool(said_of_sizes(1000 * planned, 100_000)["num_wrong"]) is wrong


def test_the_goal_needs_every_part() -> None:
    rows = [{"num_wrong": 0, "least_that_fits": 1.1, "most_that_does_not": 0.9, "error": 0.0}] * LEAST_DRY_RUNS
    good = {"choices": {"borderline": 0.05}, "published": {"fits": 3}, "num_dry_runs": len(rows), **peak_figures(rows)}
    assert is_met(good)
    for worse in (
        {"choices": {"borderline": 0.2}},
        {"num_dry_runs": LEAST_DRY_RUNS - 1},
        {"num_wrong": 1},
        {"published": {"fits": 3, "does not fit": 1}},
    ):
        assert not is_met({**good, **worse})
