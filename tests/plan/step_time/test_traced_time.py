"""A traced module is timed from what it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.core.errors import ConfigError
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.module_trace import ModuleTrace, Product, TracedUnit
from closeranks.plan.step_time.estimate import estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload

BLOCK = TracedUnit(
    "block",
    num_params=1 << 24,
    products=(Product(2048, 4096, 4096),),
    backward_products=(Product(2048, 4096, 4096), Product(4096, 4096, 2048, grows="k")),
    attention_flops=1e10,
    moved_bytes=1e8,
    backward_moved_bytes=2e8,
    output_bytes=2048 * 4096 * 2,
    is_block=True,
)
HEAD = replace(BLOCK, name="head", attention_flops=0.0, is_block=False)
TRACED = Workload(ModuleTrace((BLOCK,) * 12 + (HEAD,), precision="bf16"), 2048, 64)


def test_a_traced_module_is_timed() -> None:
    estimate = estimate_step(TRACED, PlanChoice(Layout(8, zero=3), micro_batch=4), parse_cluster("8xh100"))
    flops = 64 * TRACED.flops_per_sample
    assert estimate.mfu == pytest.approx(flops / estimate.seconds / (8 * 989.4e12))
    assert 0.2 < estimate.mfu < 0.8
    eager = estimate_step(TRACED, PlanChoice(Layout(8), micro_batch=4, compiled=False), parse_cluster("8xh100"))
    assert eager.part("compute: memory-bound") > 2 * estimate.part("compute: memory-bound")


def test_a_traced_module_can_be_cut_between_its_blocks() -> None:
    cut = estimate_step(TRACED, PlanChoice(Layout(2, pipeline=4), micro_batch=4), parse_cluster("8xh100"))
    assert cut.part("pipeline bubble") > 0 < cut.part("pipeline sends")


@pytest.mark.parametrize(("layout", "axis"), [(Layout(4, tensor=2), "tensor"), (Layout(4, context=2), "context")])
def test_how_a_traced_module_splits_is_not_guessed(layout: Layout, axis: str) -> None:
    with pytest.raises(ConfigError, match=f"layout.{axis}: how a traced module splits"):
        estimate_step(TRACED, PlanChoice(layout), parse_cluster("8xh100"))
