"""How a job scales: every point is its own search, efficiency is per device, and levers say what they gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.core.errors import UserError
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout, LayoutConstraints
from closeranks.facts.shapes.llama import PRESETS, llama_structure
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.scaling.levers import Lever, levers
from closeranks.plan.scaling.scaling import (
    BUBBLE,
    COMMUNICATION,
    ScaleCurve,
    ScalePoint,
    device_counts,
    own_plan,
    scale_curves,
    share_of,
)
from closeranks.plan.search.search import PlanEstimator, PlanQuestion, search_plans
from closeranks.plan.search.space import SearchSpace
from closeranks.plan.step_time.workload import PlanChoice, Precision, Workload

SHAPE = PRESETS["8b"]


def question(cluster: str, layout: Layout | None = None, global_batch: int = 256) -> PlanQuestion:
    needs = LayoutConstraints(
        global_batch=global_batch, micro_batch=1, num_heads=SHAPE.num_heads, num_kv_heads=SHAPE.num_kv_heads,
        num_layers=SHAPE.num_layers, vocab_size=SHAPE.vocab_size, ffn_dim=SHAPE.ffn_dim, seq_len=4096,
    )  # fmt: skip
    work = Workload(from_llama(SHAPE), 4096, global_batch, llama_structure(SHAPE, 4096))
    space = SearchSpace(micro_batches=(1,), recompute=("full",), layout=layout)
    return PlanQuestion(work, needs, parse_cluster(cluster), PlanChoice(Layout()), space)


def point(asked: PlanQuestion) -> ScalePoint:
    return ScalePoint(asked.cluster.num_devices, asked.workload.global_batch, asked, search_plans(asked, limit=1))


def lever(found: list[Lever], name: str) -> Lever:
    (one,) = [one for one in found if one.name == name]
    return one


def test_numbers_of_devices_are_doublings_and_the_last() -> None:
    assert device_counts(8, 64) == (8, 16, 32, 64)
    assert device_counts(8, 48) == (8, 16, 32, 48)
    assert device_counts(8, 8) == (8,)
    with pytest.raises(UserError, match="nothing from 8 to 4"):
        device_counts(8, 4)


def test_efficiency_is_throughput_per_device_relative_to_the_first_that_fits() -> None:
    strong, weak = scale_curves(question("8xh100"), (1, 8, 16, 64), batch_at=8)
    assert strong.points[0].plan is None, "8B and its state do not fit on one device"
    assert strong.first is strong.points[1]
    assert [one.global_batch for one in strong.points] == [256] * 4
    assert [one.global_batch for one in weak.points] == [32, 256, 512, 2048]
    assert strong.efficiency(strong.points[0]) is None
    first, last = strong.points[1].plan, strong.points[3].plan
    assert first is not None
    assert last is not None
    assert strong.efficiency(strong.points[1]) == 1.0
    assert strong.efficiency(strong.points[3]) == pytest.approx(first.step.seconds / last.step.seconds / 8)
    kept = weak.efficiency(weak.points[3])
    assert kept is not None
    assert kept > (strong.efficiency(strong.points[3]) or 0.0), "a batch that grows hides more"


def test_where_communication_takes_over() -> None:
    """From the first number of devices on from which every point is above the share."""
    layouts = {8: Layout(8, zero=3), 16: Layout(16, zero=3), 64: Layout(64, zero=3)}
    curve = ScaleCurve("strong", tuple(point(question(f"{count}xh100", layouts[count])) for count in layouts))
    shares = [one.communication + one.bubble for one in curve.points]
    plan = curve.points[0].plan
    assert plan is not None
    assert shares[0] == pytest.approx(share_of(plan, (*COMMUNICATION, BUBBLE)))
    assert shares == sorted(shares)
    assert shares[1] < shares[2]
    assert curve.takes_over(shares[2]) is None
    assert curve.takes_over(shares[1]) is curve.points[2]
    assert curve.takes_over(0.0) is curve.points[0]


def test_levers_gain_what_the_estimate_loses() -> None:
    asked = question("64xh100", Layout(64, zero=3))
    here = point(asked)
    plan = here.plan
    assert plan is not None
    found = levers(here)
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True)
    shown = plan.step.part("data communication")
    assert shown > 0
    assert lever(found, "overlap").gain == pytest.approx(shown / (plan.step.seconds - shown))
    inside = PlanEstimator(asked).plan(replace(plan.choice, layout=Layout(64, zero=3, shard=8)))
    hierarchical = lever(found, "hierarchical")
    assert hierarchical.gain == pytest.approx(plan.step.seconds / inside.step.seconds - 1)
    assert "shard=8" in hierarchical.what
    batch = lever(found, "larger batch")
    twice = point(question("64xh100", Layout(64, zero=3), 512)).plan
    assert twice is not None
    assert batch.gain == pytest.approx(2 * plan.step.seconds / twice.step.seconds - 1)
    assert 'twice the global batch, 512, with optim.scaling = "sqrt", optim.base_batch = 256' in batch.what


def compressed(layout: Layout, precision: Precision = "bf16") -> float:
    """What compression gains relative to hiding the whole data axis; 0 where it is no lever."""
    asked = question("64xh100")
    plan = PlanEstimator(asked).plan(PlanChoice(layout, recompute="full", precision=precision))
    result = replace(search_plans(asked, limit=1), plans=(plan,), winner=plan)
    found = {one.name: one.gain for one in levers(ScalePoint(64, 256, asked, result))}
    return found.get("compression", 0.0) / found["overlap"]


def test_compression_shrinks_what_this_version_compresses() -> None:
    assert 0.6 < compressed(Layout(64)) < 1.0, "all of the traffic is gradients, three quarters of which go"
    assert 0.0 < compressed(Layout(64, zero=2)) < 0.5, "weights are gathered whole"
    scattered = compressed(Layout(64, zero=3))
    assert 0.0 < compressed(Layout(64, zero=3, shard=8)) < scattered < 0.5, "sums inside a shard stay whole"
    assert compressed(Layout(8, zero=3, tensor=8)) == 0.0
    assert compressed(Layout(64), "fp16") == 0.0


def test_the_rule_for_the_learning_rate_is_that_of_the_optimizer() -> None:
    asked = question("64xh100", Layout(64, zero=3))
    plain = replace(asked, template=PlanChoice(Layout(), optimizer="sgd"))
    assert 'optim.scaling = "linear"' in lever(levers(point(plain)), "larger batch").what


def test_another_layout_is_a_lever_where_the_jobs_own_runs() -> None:
    here = point(question("64xh100"))
    mine = PlanChoice(Layout(8, zero=3, tensor=8), recompute="full")
    own = own_plan(here, mine)
    assert own is not None
    assert here.plan is not None
    assert lever(levers(here, own), "other layout").gain == pytest.approx(own.step.seconds / here.plan.step.seconds - 1)
    assert own_plan(here, PlanChoice(Layout(32))) is None, "it has other devices"
    assert all(one.name != "other layout" for one in levers(here, here.plan))
