"""A typical step is not that of the slowest moment, and its groups add up to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.core.events import RunStarted, StepPhases
from closeranks.plan.check.measured_step import (
    COMPUTE,
    DATA_AXIS,
    OVERHEAD,
    comparable_steps,
    measured_step,
    planned_groups,
    typical_step,
)


def step(number: int, **phases: float) -> StepPhases:
    named = {name.replace("__", "."): seconds for name, seconds in phases.items()}
    return StepPhases(number, sum(named.values()), named)


def test_a_disturbed_step_does_not_count() -> None:
    calm = [step(number, forward=1.0, backward=2.0, vote=0.25) for number in range(4)]
    found = typical_step({0: [*calm, step(9, forward=100.0, backward=2.0)]})
    assert found.seconds == pytest.approx(3.25)
    assert found.groups[COMPUTE] == pytest.approx(3.0)
    assert found.groups[OVERHEAD] == pytest.approx(0.25)


def test_the_mean_of_the_ranks_in_each_step() -> None:
    waiting = {0: [step(1, forward=1.0, data__all_reduce=1.0)], 1: [step(1, forward=2.0)]}
    found = typical_step(waiting)
    assert found.groups[COMPUTE] == pytest.approx(1.5)
    assert found.groups[DATA_AXIS] == pytest.approx(0.5)
    assert found.seconds == pytest.approx(sum(found.groups.values()))


def test_what_no_plan_contains_is_kept_apart() -> None:
    found = measured_step({"forward": 1.0, "save": 9.0, "something_new": 0.5})
    assert found.seconds == pytest.approx(1.5)
    assert found.unplanned == {"save": 9.0}
    assert found.groups[OVERHEAD] == 0.5


def test_every_part_falls_into_a_group() -> None:
    planned = planned_groups({"compute: products": 2.0, "recompute": 1.0, "overhead": 0.2, "something new": 0.3})
    assert planned[COMPUTE] == 3.0
    assert planned[OVERHEAD] == 0.5


def test_steps_of_the_layout_that_a_run_had_last() -> None:
    two, one = (RunStarted(world_size=size, layout=f"data={size}", last_step=20) for size in (2, 1))
    both = {number: step(number, forward=1.0) for number in range(1, 9)}
    alone = {number: step(number, forward=2.0) for number in range(6, 21)}
    times = {0: both | alone, 1: both}
    again = replace(two, first_step=4)
    assert [len(own) for own in comparable_steps([two, again], times, {1, 4}).values()] == [6, 6]
    found = comparable_steps([two, again, replace(one, first_step=6)], times, {6})
    assert {rank: [one.step for one in own] for rank, own in found.items()} == {0: list(range(7, 20))}
    assert comparable_steps([two], {0: both, 1: {}}) == {}
