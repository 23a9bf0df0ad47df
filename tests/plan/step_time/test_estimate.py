"""Step times: the parts add up, follow the schedules, and come near to what was measured on one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import timeline
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import TransformerShape, from_llama
from closeranks.plan.step_time.estimate import StepEstimator, estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload

WORK = Workload(from_llama(PRESETS["8b"]), 4096, 512)
CLUSTER = parse_cluster("64xh100")
CHOICES = [
    PlanChoice(Layout(64, zero=3)),
    PlanChoice(Layout(8, zero=1, tensor=8), micro_batch=2, recompute="selective"),
    PlanChoice(Layout(8, tensor=2, pipeline=4), recompute="full", compiled=False),
    PlanChoice(Layout(16, zero=3, pipeline=4), precision="fp32"),
    PlanChoice(Layout(8, tensor=2, context=4), precision="fp8"),
    PlanChoice(Layout(8, tensor=8), sequence_parallel=False, fused_attention=False, software="megatron"),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: str(choice.layout))
def test_parts_add_up_and_none_is_negative(choice: PlanChoice) -> None:
    estimate = estimate_step(WORK, choice, CLUSTER)
    assert estimate.seconds == pytest.approx(sum(part.seconds for part in estimate.parts))
    assert all(part.seconds >= 0 for part in estimate.parts)
    assert 0 < estimate.mfu <= estimate.hfu < 1
    assert estimate.tokens_per_s == pytest.approx(512 * 4096 / estimate.seconds)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: str(choice.layout))
def test_a_shared_estimator_gives_what_a_fresh_one_gives(choice: PlanChoice) -> None:
    shared = StepEstimator(WORK, CLUSTER)
    for other in CHOICES:
        shared.estimate(other)
    assert shared.estimate(choice) == estimate_step(WORK, choice, CLUSTER)


def test_one_h200_step_by_its_measured_parts() -> None:
    """1.5B Llama, bf16, compiled, 4 x 4,096 tokens: 257 ms, of which products 161, attention 43.7, pointwise 19.3,
    optimizer and clip 16.3, loss 5.6."""
    work = Workload(from_llama(PRESETS["1b_untied"]), 4096, 4)
    estimate = estimate_step(work, PlanChoice(Layout(), micro_batch=4), parse_cluster("h200"))
    assert estimate.seconds == pytest.approx(0.257, rel=0.1)
    assert estimate.part("compute: products") == pytest.approx(0.161, rel=0.1)
    assert estimate.part("compute: attention") == pytest.approx(0.0437, rel=0.15)


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved-1f1b", 2),
        ("looped-bfs", 2),
        ("interleaved-zero-bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    ],
)
def test_the_bubble_is_that_of_the_schedule(schedule: str, per_rank: int) -> None:
    """Blocks alone, forward a third of the work: the closed form is the idle time of the schedule's own timeline."""
    shape = TransformerShape(32, 4096, 32, 32, 128, 16_384, 256)
    choice = PlanChoice(Layout(1, pipeline=4, schedule=schedule))
    estimate = estimate_step(Workload(shape, 2048, 16), choice, parse_cluster("4xh100"))
    compute = sum(part.seconds for part in estimate.parts if part.name.startswith("compute"))
    drawn = timeline(schedule_for(schedule, 4, 16))
    busy = 16 * 3.0 * per_rank
    assert estimate.part("pipeline bubble") / compute == pytest.approx((drawn.makespan - busy) / busy, rel=0.1)


def test_more_bandwidth_is_never_slower() -> None:
    slow = replace(CLUSTER, inter_host=parse_cluster("8xl40s").inter_host)
    for choice in CHOICES:
        assert estimate_step(WORK, choice, CLUSTER).seconds <= estimate_step(WORK, choice, slow).seconds


def test_tensor_across_hosts_is_slow() -> None:
    inside = estimate_step(WORK, PlanChoice(Layout(8, tensor=8)), CLUSTER).part("tensor communication")
    across = replace(CLUSTER, devices_per_host=2)
    assert estimate_step(WORK, PlanChoice(Layout(8, tensor=8)), across).part("tensor communication") > 2 * inside


def test_recompute_costs_what_it_repeats() -> None:
    none, selective, full = (
        estimate_step(WORK, PlanChoice(Layout(64, zero=3), recompute=kind), CLUSTER)  # type: ignore[arg-type]
        for kind in ("none", "selective", "full")
    )
    assert none.part("recompute") == 0 < selective.part("recompute") < full.part("recompute")
    assert none.hfu == none.mfu == pytest.approx(none.hfu)
    assert full.hfu / full.mfu == pytest.approx(1.32, abs=0.03)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (PlanChoice(Layout(63)), "63 ranks, and the cluster 64 devices"),
        (PlanChoice(Layout(64), micro_batch=64), "64 data ranks cannot share 512 samples"),
        (PlanChoice(Layout(1, pipeline=64)), "32 layers do not fill 64 stages"),
        (PlanChoice(Layout(64, expert=2)), "no experts"),
        (PlanChoice(Layout(64), software="megatrn"), "Did you mean 'megatron'"),
    ],
)
def test_what_cannot_run_is_refused(choice: PlanChoice, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        estimate_step(WORK, choice, CLUSTER)
