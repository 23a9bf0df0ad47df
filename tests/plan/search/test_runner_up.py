"""What a runner-up would need is a change that a user can make, and that makes it win."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from closeranks.plan.search.runner_up import runner_up_needs
from closeranks.plan.search.search import Plan, PlanEstimator, SearchResult, search_plans, with_batch
from tests.plan.search.test_search import lasting, question

CHANGE = re.compile(
    r"it needs (train\.global_batch=\d+ or more|a link (inside a host|between hosts) that is [\d.]+ times as fast "
    r"\(int(er|ra)_host of a cluster file\)|[\d.,]+ GiB more on a device, for micro_batch=\d+ recompute=\w+|"
    r"micro_batch=\d+ recompute=\w+)|"
    r"set layout=\"[^\"]+\" and --keep layout$|with --margin [\d.e-]+ the winner no longer"
)


def said(result: SearchResult) -> list[tuple[Plan, str]]:
    assert result.winner is not None
    estimator, winner = PlanEstimator(result.question), result.winner
    others = [plan for plan in result.plans if plan is not winner]
    return [(plan, runner_up_needs(plan, winner, result.question, estimator)) for plan in others]


@pytest.mark.parametrize(
    ("preset", "cluster"), [("70b", "128xh100"), ("13b", "64xa100"), ("1b", "4xh100"), ("8b", "8xh200")]
)
def test_every_reason_names_a_change(preset: str, cluster: str) -> None:
    reasons = said(search_plans(question(preset, cluster), limit=12))
    assert len(reasons) > 3
    for _, text in reasons:
        assert CHANGE.search(text), text


def test_it_says_where_it_loses() -> None:
    result = search_plans(question("70b", "128xh100"))
    plan, text = said(result)[-1]
    assert result.winner is not None
    behind = plan.step.seconds / result.winner.step.seconds - 1
    assert text.startswith(f"{100 * behind:.1f}% slower, mostly ")


def test_the_larger_batch_that_it_names_is_enough_and_half_of_it_is_not() -> None:
    result = search_plans(question("70b", "128xh100", global_batch=128), limit=40)
    assert result.winner is not None
    named = [
        (plan, int(found[1])) for plan, text in said(result) if (found := re.search(r"global_batch=(\d+) or", text))
    ]
    assert named
    for plan, batch in named:
        for size, wins in ((batch, True), (batch // 2, False)):
            steps = PlanEstimator(with_batch(result.question, size)).steps
            mine, theirs = (steps.estimate(one.choice).seconds for one in (plan, result.winner))
            assert (mine <= theirs) is wins


def test_the_memory_that_it_names_would_make_it_win() -> None:
    result = search_plans(question("13b", "64xa100"), limit=40)
    assert result.winner is not None
    estimator = PlanEstimator(result.question)
    pattern = r"([\d.,]+) GiB more on a device, for micro_batch=(\d+) recompute=(\w+)"
    named = [(plan, found) for plan, text in said(result) if (found := re.search(pattern, text))]
    assert named
    for plan, found in named:
        tried = estimator.plan(replace(plan.choice, micro_batch=int(found[2]), recompute=found[3]))  # type: ignore[arg-type]
        assert tried.step.seconds <= result.winner.step.seconds
        roomy = tried.memory.capacity_bytes + float(found[1]) * 2**30
        assert replace(tried.memory, capacity_bytes=round(1.001 * roomy + 2**27)).verdict == "fits"
        assert replace(tried.memory, capacity_bytes=round(roomy - 2**27)).verdict != "fits"


def test_a_faster_one_says_which_margin_would_prefer_it() -> None:
    asked = question("8b", "16xh100")
    plan = search_plans(asked, limit=1).plans[0]
    estimator = PlanEstimator(asked)
    text = runner_up_needs(plan, lasting(plan, 1.01 * plan.step.seconds), asked, estimator)
    assert text.startswith("1.0% faster, and has more moving parts")
    margin = float(text.split("--margin ")[1].split()[0])
    assert 0.005 < margin < 0.01
    assert runner_up_needs(plan, plan, asked, estimator).startswith("as fast, and no simpler")
