"""What was measured replaces the datasheet, part by part; what was not measured leaves it as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.facts.calibration import (
    AttentionTime,
    Calibration,
    CollectiveTime,
    MemoryPassTime,
    OptimizerTime,
    ProductTime,
    WorkerSlowdown,
)
from closeranks.facts.cluster import parse_cluster
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import from_llama
from closeranks.plan.step_time.estimate import StepEstimate, estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload

SHAPE = from_llama(PRESETS["tiny"])
WORK = Workload(SHAPE, seq_len=64, global_batch=8)
CHOICE = PlanChoice(Layout(2), micro_batch=2, precision="fp32", compiled=False)
EVEN = (WorkerSlowdown(1), WorkerSlowdown(2))
PRODUCT_S = 1e-3


def estimated(calibration: Calibration | None, choice: PlanChoice = CHOICE) -> StepEstimate:
    return estimate_step(WORK, choice, parse_cluster(f"{choice.layout.num_ranks}xcpu"), calibration)


def changed(calibration: Calibration) -> set[str]:
    """The parts that a calibration changes."""
    before, after = estimated(None), estimated(calibration)
    return {one.name for one, two in zip(before.parts, after.parts, strict=True) if one.seconds != two.seconds}


def test_a_measured_product_counts_as_measured() -> None:
    """One shape was measured, at one rate: every product takes its FLOPs at that rate."""
    rate = 2.0 * 128**3 / PRODUCT_S
    calibration = Calibration(products=(ProductTime("fp32", 128, 128, 128, PRODUCT_S),), slowdowns=EVEN)
    found = estimated(calibration).part("compute: products")
    matrices = SHAPE.num_layers * (SHAPE.attention_params + SHAPE.dense_ffn_params) + SHAPE.vocab_size * SHAPE.dim
    assert found == pytest.approx(6 * matrices * 64 * 4 / rate, rel=0.01)
    assert changed(calibration) <= {"compute: products", "data communication", "launches"}
    assert changed(replace(calibration, products=(ProductTime("bf16", 128, 128, 128, 1.0),))) == {"data communication"}


def test_each_measurement_reaches_its_part() -> None:
    assert "compute: attention" in changed(Calibration(attention=(AttentionTime("fp32", 2, 16, 64, 8, 1.0, 2.0),)))
    assert "compute: memory-bound" in changed(Calibration(memory_passes=(MemoryPassTime(1 << 20, 1.0),)))
    assert "optimizer" in changed(Calibration(optimizer=(OptimizerTime(1000, 1.0),)))
    overheads = Calibration(step_overhead_s=1.0, micro_batch_overhead_s=0.1)
    assert estimated(overheads).part("overhead") == pytest.approx(1.0)
    assert estimated(overheads).part("launches") == pytest.approx(2 * 0.1)
    again = estimated(overheads, replace(CHOICE, recompute="full"))
    assert again.part("launches") == pytest.approx(2 * 0.1 * 4 / 3), "a second forward is started, too"
    selective = estimated(replace(overheads, selective_op_s=1e-3), replace(CHOICE, recompute="selective"))
    assert selective.part("launches") > again.part("launches"), "it passes every operation through Python"
    assert "waiting for ranks" in changed(Calibration(wait_share=0.1))


def test_gradients_take_as_long_as_the_measured_collective() -> None:
    """A CPU reduces with the cores that it computes with, so nothing hides it."""
    seconds = 0.125
    calibration = Calibration(collectives=(CollectiveTime("all-reduce", 2, 1, seconds),))
    large = Calibration(collectives=(*calibration.collectives, CollectiveTime("all-reduce", 2, 1 << 30, seconds)))
    assert estimated(large).part("data communication") == pytest.approx(seconds)


def test_gloo_sends_more_in_a_reduce_scatter_than_in_a_gather() -> None:
    gather, scatter = (
        tuple(CollectiveTime(name, 2, size, seconds) for size in (1, 1 << 30))
        for name, seconds in (("all-gather", 0.25), ("reduce-scatter", 0.5))
    )
    measured = Calibration(collectives=(*gather, *scatter))
    part = "data communication"
    assert estimated(measured, replace(CHOICE, layout=Layout(2, zero=1))).part(part) == pytest.approx(0.25 + 0.5)
    each = replace(CHOICE, layout=Layout(2, zero=2))
    assert estimated(measured, each).part(part) == pytest.approx(0.25 + 2 * 0.5), "in each micro-batch"


def test_groups_beside_each_other_compete() -> None:
    collectives = tuple(CollectiveTime("all-reduce", 2, size, 0.125) for size in (1, 1 << 30))
    four = replace(CHOICE, layout=Layout(2, tensor=2))
    crowded = Calibration(collectives=collectives, slowdowns=(*EVEN, WorkerSlowdown(4, 2.0, 2.0)))
    assert estimated(crowded, four).part("data communication") == pytest.approx(0.25)
    roomy = replace(crowded, slowdowns=(*EVEN, WorkerSlowdown(4)))
    assert estimated(roomy, four).part("data communication") == pytest.approx(0.125)


def test_workers_that_share_cores_are_slower() -> None:
    calibration = Calibration(
        products=(ProductTime("fp32", 128, 128, 128, PRODUCT_S),),
        slowdowns=(WorkerSlowdown(1, 0.5), WorkerSlowdown(2), WorkerSlowdown(4, 2.0)),
    )
    one, two, four = (
        estimated(calibration, replace(CHOICE, layout=Layout(count))).part("compute: products") for count in (1, 2, 4)
    )
    assert one == pytest.approx(0.5 * 2 * two), "twice the micro-batches at half the time each"
    assert four == pytest.approx(two), "half the micro-batches at twice the time each"


def test_corrections_multiply_their_part() -> None:
    calibration = Calibration(memory_passes=(MemoryPassTime(1 << 10, 1e-4), MemoryPassTime(1 << 20, 1e-3)))
    corrected = replace(calibration, corrections={"compute: memory-bound": 3.0})
    name = "compute: memory-bound"
    moved = estimated(corrected).part(name) - estimated(calibration).part(name)
    assert moved > 0
    compiled = replace(CHOICE, compiled=True)
    assert estimated(corrected, compiled) == estimated(calibration, compiled), "fused operations have their own"
