"""How many micro-batches wait, and how long ranks do: closed forms against schedules that were laid out."""

from __future__ import annotations

import pytest

from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.pipeline.occupancy import layout_occupancy, peak_by_stage, pipeline_occupancy
from closeranks.facts.pipeline.schedules import schedule_for
from closeranks.facts.pipeline.timeline import peak_in_flight, timeline


@pytest.mark.parametrize("num_micro", [1, 2, 3, 7, 8, 20, 33])
@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_are_those_of_the_schedule_that_runs(schedule: str, pipeline: int, num_micro: int) -> None:
    made = schedule_for(schedule, pipeline, num_micro)
    found = pipeline_occupancy(pipeline, schedule, num_micro)
    assert tuple(sum(stages.values()) for stages in found.in_flight) == peak_in_flight(made)
    assert [set(stages) for stages in found.in_flight] == [set(own) for own in made.placement]
    assert found.bubble == pytest.approx(timeline(made).bubble, rel=0.02)


def test_without_a_pipeline_nothing_waits() -> None:
    alone = layout_occupancy(Layout(data=4), 6)
    assert (alone.in_flight, alone.bubble) == (({0: 1},), 0.0)


def test_the_fullest_moment_counts_each_stage() -> None:
    made = schedule_for("looped-bfs", 2, 3)
    assert peak_by_stage(made.ranks[0]) == {0: 3, 2: 3}
