"""The closed forms of the bubble are the idle times of the schedules that train."""

from __future__ import annotations

import pytest

from closeranks.facts.layout import SCHEDULES
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import ActionCosts, timeline
from closeranks.plan.step_time.pipeline_bubble import PipelineWork, bubble_seconds


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_the_bubble_is_that_of_the_schedule(schedule: str, pipeline: int) -> None:
    """Every stage takes one unit forward and two backward; also with fewer micro-batches than ranks."""
    per_rank = SCHEDULES[schedule]
    others = (pipeline - 1) * per_rank
    for num_micro in (*range(1, pipeline + 3), 2 * pipeline, 3 * pipeline + 1):
        idle = timeline(schedule_for(schedule, pipeline, num_micro)).makespan - 3 * per_rank * num_micro
        work = PipelineWork(others, 2 * others, pipeline, per_rank)
        assert bubble_seconds(work, schedule, num_micro) == pytest.approx(idle), num_micro


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved-zero-bubble"])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_backwards_that_are_not_split_wait_as_their_schedule_does(
    schedule: str, pipeline: int, backward: float
) -> None:
    """The first half of a backward does all of it, and the second nothing: so do recomputed and compiled blocks."""
    costs, others = ActionCosts(1.0, backward, backward, 0.0), 2 * (pipeline - 1)
    for num_micro in (*range(1, pipeline + 3), 2 * pipeline, 3 * pipeline + 1):
        made = schedule_for(schedule, pipeline, num_micro)
        idle = timeline(made, costs).makespan - 2 * (1 + backward) * num_micro
        work = PipelineWork(others, backward * others, pipeline, 2)
        assert bubble_seconds(work, schedule, num_micro, splits=False) == pytest.approx(idle), num_micro
        assert idle > bubble_seconds(work, schedule, num_micro)


def test_one_rank_waits_for_nobody() -> None:
    assert bubble_seconds(PipelineWork(0.0, 0.0, 1, 1), "1f1b", 4) == 0
