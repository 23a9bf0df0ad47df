"""A search ranks what fits, says what does not, and prefers what is simple."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.facts.shapes.llama import PRESETS, llama_structure
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.search import changes
from closeranks.plan.search.changes import PlanChange, single_changes, smallest_fitting_change
from closeranks.plan.search.cost_curve import fewest_devices
from closeranks.plan.search.plan_text import nothing_fits_text, tensor_host_warning
from closeranks.plan.search.reasons import why_winner
from closeranks.plan.search.search import Plan, PlanEstimator, PlanQuestion, layout_key, search_plans, simplest_within
from closeranks.plan.search.space import SearchSpace, candidate_choices
from closeranks.plan.step_time.workload import PlanChoice, Workload


def question(preset: str, cluster: str, global_batch: int = 256, seq_len: int = 4096) -> PlanQuestion:
    shape = PRESETS[preset]
    needs = LayoutConstraints(
        global_batch=global_batch, micro_batch=1, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
        num_layers=shape.num_layers, vocab_size=shape.vocab_size, ffn_dim=shape.ffn_dim, seq_len=seq_len,
    )  # fmt: skip
    workload = Workload(from_llama(shape), seq_len, global_batch, llama_structure(shape, seq_len))
    return PlanQuestion(workload, needs, parse_cluster(cluster), PlanChoice(Layout()))


def test_the_best_of_each_layout_is_listed_fastest_first() -> None:
    result = search_plans(question("13b", "64xh100"))
    times = [plan.step.seconds for plan in result.plans]
    keys = [layout_key(plan.choice.layout) for plan in result.plans]
    assert len(result.plans) >= 10
    assert times == sorted(times)
    assert len(set(keys)) == len(keys)
    assert all(plan.fits for plan in result.plans)


def test_nothing_faster_that_fits_is_left_out() -> None:
    """Against every choice, estimated one by one."""
    asked = replace(question("8b", "16xa100"), margin=0.0)
    result = search_plans(asked, limit=5)
    everything = search_plans(asked, limit=0)
    assert result.num_choices == everything.num_choices
    assert [plan.choice.layout for plan in result.plans[:5]] == [plan.choice.layout for plan in everything.plans[:5]]
    assert len(everything.plans) > len(result.plans)


def test_a_plan_that_fits_is_found_however_slow() -> None:
    """Of 2,238 choices for 70B on 16 H100, the 1,592 fastest do not fit."""
    winner = search_plans(question("70b", "16xh100"), limit=1).winner
    assert winner is not None
    assert winner.fits


@pytest.mark.parametrize(("preset", "cluster"), [("8b", "16xa100"), ("70b", "64xh100"), ("1b", "4xh100")])
@pytest.mark.parametrize("limit", [1, 3])
def test_the_same_plan_wins_if_every_choice_is_estimated(preset: str, cluster: str, limit: int) -> None:
    """However few layouts are listed."""
    asked = question(preset, cluster)
    estimator, devices = PlanEstimator(asked), asked.cluster
    tried = candidate_choices(asked.space, asked.constraints, asked.template, devices.num_devices, devices.domain_size)
    every = [estimator.plan(choice) for choice in tried]
    fitting = [plan for plan in every if plan.fits]
    fastest = min(fitting, key=lambda plan: plan.step.seconds)
    best = simplest_within(fitting, fastest.step.seconds * (1 + asked.margin))
    result = search_plans(asked, limit)
    assert result.num_choices == len(every)
    assert result.winner == best
    assert result.fastest == fastest
    assert result.winner in result.plans
    assert len(result.plans) == limit
    least: dict[tuple[int, ...], float] = {}
    for plan in fitting:
        key = layout_key(plan.choice.layout)
        least[key] = min(least.get(key, math.inf), plan.step.seconds)
    slowest = sorted(least.values())[limit - 1] * (1 + asked.margin)
    assert all(plan.step.seconds <= slowest or plan is result.winner for plan in result.plans)


def test_no_bound_is_above_its_estimate() -> None:
    asked = question("8b", "32xh100")
    steps = PlanEstimator(asked).steps
    choices = list(candidate_choices(asked.space, asked.constraints, asked.template, 32, 8))
    shares = [steps.least_seconds(choice) / steps.estimate(choice).seconds for choice in choices]
    assert max(shares) <= 1.0
    assert min(shares) < 0.9
    assert sorted(shares)[len(shares) // 2] > 0.5, "a bound that is far below saves nothing"


def test_an_estimator_that_shares_estimates_the_same() -> None:
    one, other = question("8b", "64xh100"), question("8b", "16xh100", global_batch=128)
    shared = search_plans(other, 3, PlanEstimator(other, PlanEstimator(one)))
    assert [plan.step for plan in shared.plans] == [plan.step for plan in search_plans(other, 3).plans]
    small = question("8b", "4xh100")  # its tensor ranks have other links
    apart = search_plans(small, 3, PlanEstimator(small, PlanEstimator(one)))
    assert [plan.step for plan in apart.plans] == [plan.step for plan in search_plans(small, 3).plans]


def test_what_is_faster_and_too_big_is_kept() -> None:
    result = search_plans(question("70b", "64xh100"))
    assert result.misses
    assert all(plan.step.seconds <= result.plans[0].step.seconds for plan in result.misses)
    sizes = [plan.memory.total_bytes for plan in result.misses]
    assert sizes == sorted(sizes)
    assert all(not plan.fits for plan in result.misses)
    assert "Of the faster ones" in why_winner(result)


def lasting(plan: Plan, seconds: float) -> Plan:
    return replace(plan, step=replace(plan.step, seconds=seconds))


def test_a_simple_plan_wins_within_the_margin() -> None:
    asked = question("8b", "16xh100")
    estimator = PlanEstimator(asked)
    simple, middle, fast = (
        lasting(estimator.plan(PlanChoice(layout, recompute="full")), seconds)
        for layout, seconds in (
            (Layout(16, zero=3), 1.03),
            (Layout(4, zero=1, tensor=4), 1.015),
            (Layout(2, zero=3, tensor=2, pipeline=4), 1.0),
        )
    )
    assert [plan.complexity for plan in (simple, middle, fast)] == [4, 5, 9]
    for most_s, winner in ((1.0, fast), (1.02, middle), (1.05, simple)):
        assert simplest_within([middle, fast, simple], most_s) is winner
    assert simplest_within([lasting(simple, 1.01), simple], 2.0) is not simple, "of equally simple ones the fastest"
    loose = search_plans(replace(asked, margin=0.5))
    assert loose.winner is not loose.plans[0] or "fastest" in why_winner(loose)


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    asked = question("70b", "8xh100")
    result = search_plans(asked)
    assert result.winner is None
    assert result.closest is not None
    change = smallest_fitting_change(result.closest, asked, PlanEstimator(asked))
    text = nothing_fits_text(result, change)
    assert f"{result.closest.memory.missing_bytes / 2**30:,.1f} GiB too much" in text
    assert ("planned only" in text) if change else ("No single change" in text)
    more = fewest_devices(asked)
    assert more is not None
    assert more.choice.layout.num_ranks == 16
    assert "On 16 devices" in nothing_fits_text(result, change, more)


def test_the_smallest_change_that_fits_is_a_setting_before_an_axis() -> None:
    asked = question("8b", "8xa100", global_batch=512)
    estimator = PlanEstimator(asked)
    plan = estimator.plan(PlanChoice(Layout(8, zero=3), micro_batch=8, compiled=True))
    assert not plan.fits
    change = smallest_fitting_change(plan, asked, estimator)
    assert change is not None
    assert change.plan.fits
    assert change.what.startswith(("recompute", "micro_batch"))


def test_a_setting_is_smaller_than_an_axis_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question("8b", "16xh100")
    estimator = PlanEstimator(asked)
    fits, too_big = (
        estimator.plan(PlanChoice(Layout(16, zero=3), recompute="full")),
        estimator.plan(PlanChoice(Layout(16), micro_batch=16)),
    )
    assert fits.fits
    assert not too_big.fits
    tried = [
        PlanChange("tensor = 2", lasting(fits, 1.0), 5),
        PlanChange("recompute = none", lasting(too_big, 1.0), 1),
        PlanChange("micro_batch = 1", lasting(fits, 3.0), 1),
        PlanChange("recompute = full", lasting(fits, 2.0), 1),
    ]
    monkeypatch.setattr(changes, "single_changes", lambda *_: tried)
    assert smallest_fitting_change(too_big, asked, estimator) is tried[3]
    monkeypatch.setattr(changes, "single_changes", lambda *_: tried[1:2])
    assert smallest_fitting_change(too_big, asked, estimator) is None


def test_single_changes_differ_in_one_thing_and_mark_what_is_planned_only() -> None:
    asked = question("8b", "16xh100")
    estimator = PlanEstimator(asked)
    plan = estimator.plan(PlanChoice(Layout(8, zero=3, tensor=2), recompute="full"))
    found = single_changes(plan, asked, estimator)
    by_name = {change.what: change for change in found}
    assert by_name["offload"].planned_only == ("offload",)
    assert by_name["precision = fp8"].planned_only == ("fp8",)
    assert by_name["context = 2"].planned_only == ("context=2",)
    assert not by_name["recompute = none"].planned_only
    assert all(change.plan.choice.layout.num_ranks == 16 for change in found)
    assert {"tensor = 4", "tensor = 1", "pipeline = 2", "zero = 1", "micro_batch = 2"} <= set(by_name)


def test_experts_over_more_ranks_are_a_change_of_models_that_have_some() -> None:
    asked = question("8b", "16xh100")
    shape = replace(asked.workload.transformer, num_experts=8, experts_per_token=2, expert_ffn_dim=2048)
    asked = replace(asked, workload=Workload(shape, 4096, 256))
    estimator = PlanEstimator(asked)
    plan = estimator.plan(PlanChoice(Layout(16, zero=3), recompute="full"))
    by_name = {change.what: change for change in single_changes(plan, asked, estimator)}
    assert by_name["expert = 2"].planned_only == ("expert=2",)
    assert by_name["expert = 2"].plan.step.part("expert communication") > 0


def test_tensor_across_hosts_is_named() -> None:
    cluster = parse_cluster("32xh100")
    assert "Use tensor=8" in tensor_host_warning(Layout(2, tensor=16), cluster)
    assert tensor_host_warning(Layout(4, tensor=8), cluster) == ""


def test_only_the_layout_that_is_kept() -> None:
    asked = question("8b", "16xh100")
    layout = Layout(8, zero=3, tensor=2)
    result = search_plans(replace(asked, space=SearchSpace(layout=layout)))
    assert {plan.choice.layout for plan in result.plans} == {layout}
