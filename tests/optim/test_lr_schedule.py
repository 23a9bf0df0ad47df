from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.optim.config import ScheduleConfig
from closeranks.optim.lr_schedule import SHAPES, lr_factor, num_warmup_steps

schedules = st.builds(
    ScheduleConfig,
    name=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    warmup=st.integers(0, 300) | st.floats(0, 0.99),
    min_ratio=st.floats(0, 1),
    decay=st.floats(0, 1),
)


def factors(num_steps: int, **keys: Any) -> list[float]:
    config = ScheduleConfig(**keys)
    return [lr_factor(config, step, num_steps) for step in range(num_steps + 1)]


@given(schedules, st.integers(1, 200))
def test_rises_to_one_then_never_again_and_ends_at_the_minimum(config: ScheduleConfig, num_steps: int) -> None:
    course = [lr_factor(config, step, num_steps) for step in range(num_steps + 3)]
    warmup = num_warmup_steps(config, num_steps)
    assert 0 <= warmup <= num_steps
    rise, fall = course[:warmup], course[warmup:]
    assert rise == [(step + 1) / warmup for step in range(warmup)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(fall))
    assert all(config.min_ratio - 1e-12 <= factor <= 1.0 for factor in fall)
    assert all(factor > 0 for factor in course[:num_steps])
    if warmup < num_steps:
        assert fall[0] == pytest.approx(1.0)
    if config.name != "constant":
        assert fall[-1] == pytest.approx(config.min_ratio, abs=1e-12)


def test_constant() -> None:
    assert factors(4, name="constant", warmup=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear() -> None:
    assert factors(5, name="linear", warmup=1, min_ratio=0.2) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine() -> None:
    found = factors(6, name="cosine", warmup=2, min_ratio=0.5)
    falling = [0.5 + 0.5 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(5)]
    assert found == pytest.approx([0.5, 1.0, *falling])


def test_wsd() -> None:
    found = factors(10, name="wsd", warmup=2, min_ratio=0.0, decay=0.4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_the_last_step_still_learns_where_the_minimum_is_zero() -> None:
    for name in SHAPES:
        assert factors(10, name=name, warmup=0, min_ratio=0.0)[9] > 0.0


@pytest.mark.parametrize(
    ("warmup", "num_steps", "expected"), [(0, 10, 0), (0.05, 100, 5), (0.05, 8, 0), (3, 10, 3), (30, 10, 10), (1, 5, 1)]
)
def test_warmup_in_steps_or_as_a_fraction(warmup: float, num_steps: int, expected: int) -> None:
    assert num_warmup_steps(ScheduleConfig(warmup=warmup), num_steps) == expected


def test_a_decay_that_overlaps_the_warmup_waits_for_it() -> None:
    assert factors(4, name="wsd", warmup=2, min_ratio=0.0, decay=1.0) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
