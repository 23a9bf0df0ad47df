"""Step times: the parts add up, follow the schedules, and come near to what was measured on one GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.step_time.constants import frozen_constants
from closeranks.plan.step_time.estimate import StepEstimator, estimate_step
from closeranks.plan.step_time.operation_times import OperationTimes
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


def test_products_slow_down_in_a_run_by_what_is_known_of_the_device() -> None:
    choice = PlanChoice(Layout(1), micro_batch=4)
    constants = frozen_constants()

    def product_s(sustained: float) -> float:
        device = replace(CLUSTER.device, sustained=sustained)
        return OperationTimes(replace(CLUSTER, device=device), constants).product(8192, 8192, 8192, choice)

    assert product_s(0.5) == pytest.approx(2 * product_s(1.0))
    assert product_s(0.0) == pytest.approx(product_s(constants.products.sustained))


def test_stages_work_one_after_another_on_one_micro_batch() -> None:
    """A pipeline does not make one micro-batch faster, launches included; gradients of weights that are computed apart
    are computed by all ranks at the same time."""
    for name in ("tiny", "8b"):
        work = Workload(from_llama(PRESETS[name]), 256, 1)
        whole = _without_optimizer(work, PlanChoice(Layout()))
        for schedule in SCHEDULES:
            for pipeline in (2, 4):
                choice = PlanChoice(Layout(1, pipeline=pipeline, schedule=schedule))
                least = 0.65 if schedule in ("zbv", "dualpipev", "interleaved-zero-bubble") else 0.99
                assert _without_optimizer(work, choice) >= least * whole


def _without_optimizer(work: Workload, choice: PlanChoice) -> float:
    estimate = estimate_step(work, choice, parse_cluster(f"{choice.layout.num_ranks}xh100"))
    return estimate.seconds - estimate.part("optimizer")


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
