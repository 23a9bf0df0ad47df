"""Steps that were made up from known factors give these factors back, and predict other steps."""

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
from closeranks.lab.calibrate.corrections import TrainedSteps, corrected
from closeranks.plan.check.measured_step import GROUPS, StepGroups, planned_groups
from closeranks.plan.step_time.workload import PlanChoice, Workload

SHAPE = from_llama(PRESETS["tiny"])
ALONE = Calibration(
    products=tuple(ProductTime("fp32", size, size, size, 2e-5 + 2 * size**3 / 6e10) for size in (64, 256, 1024)),
    attention=(AttentionTime("fp32", 2, 16, 64, 8, 3e-4, 7e-4),),
    memory_passes=(MemoryPassTime(1 << 14, 4e-6), MemoryPassTime(1 << 24, 4e-3)),
    optimizer=(OptimizerTime(1_000_000, 2e-3),),
    collectives=(CollectiveTime("all-reduce", 2, 1 << 10, 1e-4), CollectiveTime("all-reduce", 2, 1 << 24, 1e-2)),
    slowdowns=(WorkerSlowdown(1, 0.6, 0.6), WorkerSlowdown(2), WorkerSlowdown(4, 2.0, 2.2)),
)
TRUTH = replace(
    ALONE,
    corrections={
        "compute: products": 1.1,
        "compute: attention": 1.1,
        "compute: memory-bound": 2.5,
        "optimizer": 1.4,
    },
    slowdowns=(WorkerSlowdown(1, 0.8, 0.8), *ALONE.slowdowns[1:]),
    wait_share=0.04,
    step_overhead_s=4e-3,
    micro_batch_overhead_s=5e-3,
)


def steps(micro_batch: int, num_micro: int, data: int) -> TrainedSteps:
    """As the truth would take them."""
    work = Workload(SHAPE, 64, micro_batch * num_micro * data)
    choice = PlanChoice(Layout(data), micro_batch=micro_batch, precision="fp32", compiled=False)
    cluster = parse_cluster(f"{data}xcpu")
    nothing = TrainedSteps(work, choice, cluster, StepGroups(0.0, {}))
    groups = planned_groups({part.name: part.seconds for part in nothing.estimate(TRUTH).parts})
    assert set(groups) == set(GROUPS)
    return replace(nothing, measured=StepGroups(sum(groups.values()), groups))


def test_few_runs_predict_others() -> None:
    found = corrected(ALONE, [steps(1, 1, 1), steps(2, 2, 2), steps(4, 2, 2)])
    for other in (steps(3, 1, 1), steps(8, 1, 2), steps(1, 8, 2), steps(2, 1, 4)):
        assert other.estimate(found).seconds == pytest.approx(other.measured.seconds, rel=0.08)
        assert other.estimate(ALONE).seconds < 0.8 * other.measured.seconds, "without corrections it would be far off"
    assert found.corrections["optimizer"] == pytest.approx(1.4)
    assert found.corrections["data communication"] == pytest.approx(1.0, abs=0.2)
    assert found.wait_share == pytest.approx(0.04, abs=0.02)
    assert found.slowdown(1).products == pytest.approx(0.8, abs=0.05), (
        "one worker gains less by its threads than its operations alone"
    )
    assert found.step_overhead_s == pytest.approx(4e-3)


def test_without_runs_nothing_is_corrected() -> None:
    assert corrected(ALONE, []) == ALONE


def test_nothing_that_is_fitted_is_negative() -> None:
    fast = steps(1, 1, 1)
    groups = {name: 0.01 * seconds for name, seconds in fast.measured.groups.items()}
    found = corrected(ALONE, [replace(fast, measured=StepGroups(0.01 * fast.measured.seconds, groups))])
    assert min(found.corrections.values()) >= 0
    assert (found.micro_batch_overhead_s or 0.0) >= 0
