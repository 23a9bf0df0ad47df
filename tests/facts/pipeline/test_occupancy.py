"""How many micro-batches wait, and how long ranks do: closed forms against schedules that were laid out."""

from __future__ import annotations

import pytest

from closeranks.facts.layout import SCHEDULES, Layout
from closeranks.facts.pipeline.occupancy import fullest_moment, layout_occupancy, pipeline_occupancy
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
    assert fullest_moment(made.ranks[0], "split", deferred_share=0.5).held == {0: 3, 2: 3}


def test_deferred_weight_gradients_count_where_memory_is_fullest() -> None:
    """The last rank of a V puts off every weight gradient of its first micro-batches, the first rank hardly any."""
    found = pipeline_occupancy(4, "zbv", 8).fullest
    assert (found[0].held, found[3].held) == ({0: 7, 7: 1}, {3: 4, 4: 4})
    assert [sum(one.deferred.values()) for one in found] == [1, 1, 6, 8]
    assert [sum(one.held.values()) for one in found] == [8, 8, 7, 8]


@pytest.mark.parametrize("schedule", ["zbv", "interleaved-zero-bubble", "dualpipev"])
def test_a_backward_that_is_not_split_waits_longer_and_frees_earlier(schedule: str) -> None:
    split, whole = (pipeline_occupancy(4, schedule, 4, found) for found in ("split", "whole"))
    assert whole.bubble > 1.5 * split.bubble
    assert sum(sum(one.held.values()) for one in whole.fullest) < sum(sum(one.held.values()) for one in split.fullest)
    assert not any(sum(one.deferred.values()) for one in whole.fullest)
