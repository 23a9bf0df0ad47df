"""Saves fall due when they should: by steps, by time, by what they cost, and again after they failed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.checkpoint.save.save_schedule import (
    FIRST_SAVE_S,
    GIVEN_UP_S,
    MOST_RETRY_S,
    MOST_S,
    SaveHistory,
    SaveSchedule,
)
from closeranks.core.errors import CloseranksError

HOUR = 3600.0


def train(
    rhythm: SaveSchedule,
    num_steps: int,
    step_s: float,
    *,
    stall_s: float = 0.05,
    durable_s: float = 2.0,
    from_s: float = 0.0,
) -> list[float]:
    """When saves were asked for, in a run on a clock of its own; every save succeeds."""
    now_s, asked, under_way = from_s, [], None
    for step in range(1, num_steps + 1):
        now_s += step_s
        rhythm.record_step(step_s)
        if under_way is not None and now_s >= under_way + durable_s:
            rhythm.record_save(stall_s, durable_s, now_s)
            under_way = None
        if rhythm.is_due(step, now_s):
            asked.append(now_s)
            under_way = now_s
    return asked


def test_steps_are_exact_even_while_a_save_is_under_way() -> None:
    rhythm = SaveSchedule(7, None, 1)
    assert [step for step in range(1, 50) if rhythm.is_due(step, 0.1 * step)] == [7, 14, 21, 28, 35, 42, 49]


def test_zero_is_never_due_not_even_after_a_failure() -> None:
    rhythm = SaveSchedule(0, None, 1)
    rhythm.record_failure(1.0)
    assert not any(rhythm.is_due(step, 100.0 * step) for step in range(1, 100))
    assert math.isinf(rhythm.interval_s)


def test_minutes_do_not_drift() -> None:
    """Steps of 7 s: each save is late by up to a step, and the thousandth is no later than the first."""
    asked = train(SaveSchedule("1min", None, 1), 3000, 7.0, from_s=1e6)
    opened = 1e6 + 7.0
    assert len(asked) == 349
    for number, at in enumerate(asked, 1):
        assert 0 <= at - opened - 60 * number < 7.0


def test_a_span_shorter_than_a_step_saves_every_step() -> None:
    asked = train(SaveSchedule("5s", None, 1), 100, 7.0, durable_s=1.0)
    assert len(asked) == 99


@given(step_s=st.floats(0.01, 100.0), durable_s=st.floats(0.01, 5000.0), stall_s=st.floats(0.0, 20.0))
def test_auto_keeps_its_bounds(step_s: float, durable_s: float, stall_s: float) -> None:
    rhythm = SaveSchedule("auto", 3 * HOUR, 8)
    asked = train(rhythm, 400, step_s, stall_s=stall_s, durable_s=durable_s)
    if not asked:
        assert 399 * step_s < FIRST_SAVE_S + step_s
        return
    assert asked[0] - step_s >= FIRST_SAVE_S - 1e-6
    for before, after in pairwise(asked):
        assert after - before >= max(step_s, durable_s) - 1e-6
    assert max(durable_s, step_s) - 1e-6 <= rhythm.interval_s or not rhythm.history.num_saves
    assert rhythm.interval_s <= max(MOST_S, durable_s, step_s) + 1e-6


def test_a_short_run_pays_nothing() -> None:
    assert train(SaveSchedule("auto", None, 2), 100, 0.19) == []


def test_auto_settles_on_the_best_interval() -> None:
    """0.05 s every 8 h: 54 s, as docs and theory say."""
    rhythm = SaveSchedule("auto", 8 * HOUR, 8)
    asked = train(rhythm, 4000, 0.5)
    assert asked[0] == pytest.approx(0.5 + FIRST_SAVE_S, abs=0.5)
    assert [after - before for before, after in pairwise(asked[2:])] == [54.0] * (len(asked) - 3)


def test_the_medium_sets_the_pace_where_it_is_slow() -> None:
    rhythm = SaveSchedule("auto", 8 * HOUR, 8)
    asked = train(rhythm, 4000, 0.5, durable_s=200.0)
    assert rhythm.interval_s == pytest.approx(200.0)
    assert min(after - before for before, after in pairwise(asked)) >= 200.0


def test_slower_steps_during_a_save_are_a_cost() -> None:
    """Saves that stall for nothing but make 10 steps 0.1 s slower cost 1 s."""
    rhythm, now_s = SaveSchedule("auto", 8 * HOUR, 8), 0.0
    since = None
    for step in range(1, 5000):
        slow = since is not None
        now_s += 0.6 if slow else 0.5
        rhythm.record_step(0.6 if slow else 0.5)
        if since is not None and step == since + 10:
            rhythm.record_save(0.0, 6.0, now_s)
            since = None
        if rhythm.is_due(step, now_s):
            since = step
    assert rhythm.history.cost_s == pytest.approx(1.0, rel=0.1)
    assert rhythm.interval_s == pytest.approx(239.3, rel=0.06)


def test_the_first_save_is_forgotten_by_the_second() -> None:
    history = SaveHistory().with_save(9.0, 90.0, 0.0).with_save(1.0, 10.0, 0.0)
    assert (history.stall_s, history.durable_s) == (1.0, 10.0)
    for _ in range(30):
        history = history.with_save(2.0, 20.0, 0.0)
    assert history.stall_s == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("every", ["auto", "10min"])
def test_failures_are_retried_ever_later_within_bounds(every: str) -> None:
    rhythm, now_s, asked = SaveSchedule(every, 8 * HOUR, 8), 0.0, []
    for step in range(20_000):
        now_s += 0.5
        if rhythm.is_due(step, now_s):
            asked.append(now_s)
            rhythm.record_failure(now_s)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps[:5] == [15.0, 30.0, 60.0, 120.0, 240.0]
    assert all(15 <= gap <= MOST_RETRY_S for gap in gaps)
    assert len(asked) < 30
    rhythm.is_due(1, now_s + 5100)
    rhythm.record_save(0.05, 2.0, now_s + 5102)
    assert not rhythm.is_due(2, now_s + 5110)
    assert rhythm.is_due(3, now_s + 5710)


def test_a_failed_save_by_steps_is_tried_again_between_the_multiples() -> None:
    rhythm = SaveSchedule(1000, None, 1)
    asked = []
    for step in range(990, 2001):
        if rhythm.is_due(step, float(step)):
            asked.append(step)
            if step == 1000:
                rhythm.record_failure(float(step))
            else:
                rhythm.record_save(0.1, 1.0, float(step))
    assert asked == [1000, 1015, 2000]


def test_a_rank_whose_part_failed_asks_for_another_save() -> None:
    rhythm = SaveSchedule(1000, None, 4)
    assert not rhythm.is_retry_due(0.0)
    rhythm.record_failure(10.0)
    assert not rhythm.is_retry_due(24.9)
    assert rhythm.is_retry_due(25.0)
    rhythm.record_save(0.1, 1.0, 30.0)
    assert not rhythm.is_retry_due(1e6)


def test_a_save_that_is_never_heard_of_does_not_end_all_saving() -> None:
    rhythm = SaveSchedule("1min", None, 1)
    assert not rhythm.is_due(1, 0.0)
    assert rhythm.is_due(2, 60.0)
    assert not rhythm.is_due(3, 600.0)
    assert rhythm.is_due(4, 60.0 + GIVEN_UP_S)


def test_a_save_somebody_else_asked_for_counts() -> None:
    rhythm = SaveSchedule("10min", None, 1)
    rhythm.is_due(1, 0.0)
    rhythm.record_save(0.1, 1.0, 601.0)
    assert not rhythm.is_due(3, 700.0)
    assert rhythm.is_due(4, 1200.0)


def test_the_estimate_goes_on_over_restarts() -> None:
    first = SaveSchedule("auto", None, 64)
    assert first.mtbf_s == 24 * HOUR  # the fleet would say 126 h; nobody is believed for more than a day
    for hour in range(7):
        first.is_due(hour, hour * HOUR)
    assert first.mtbf_s == pytest.approx(30 * HOUR)
    carried = json.loads(json.dumps(first.state()))
    second = SaveSchedule.from_state("auto", None, 64, carried)
    assert second.mtbf_s == pytest.approx(15 * HOUR)
    second.is_due(1, 9e6)
    second.is_due(2, 9e6 + 3 * HOUR)
    assert second.mtbf_s == pytest.approx(33 * HOUR / 2)
    third = SaveSchedule.from_state("auto", None, 64, second.state(is_ending=True))
    assert third.history.num_faults == 1
    assert SaveSchedule.from_state("auto", None, 64, second.state(), num_new_faults=4).history.num_faults == 5
    assert SaveSchedule.from_state("auto", None, 64, {}).history.num_faults == 1


def test_a_job_that_fails_often_learns_it() -> None:
    """Twelve faults in an hour: saving becomes five times as frequent."""
    calm = SaveSchedule("auto", None, 8, SaveHistory(stall_s=0.5, durable_s=1.0, num_saves=9, uptime_s=HOUR))
    hit = SaveSchedule(
        "auto", None, 8, SaveHistory(stall_s=0.5, durable_s=1.0, num_saves=9, uptime_s=HOUR, num_faults=12)
    )
    assert calm.interval_s / hit.interval_s == pytest.approx(math.sqrt(13), rel=0.01)


def test_the_prior_is_that_of_the_fleet_within_bounds() -> None:
    assert SaveSchedule("auto", None, 1024).mtbf_s == pytest.approx(7.9 * HOUR)
    assert SaveSchedule("auto", None, 16_384).mtbf_s == pytest.approx(7.9 * HOUR / 16)
    assert SaveSchedule("auto", None, 10**7).mtbf_s == 14 * 60
    assert SaveSchedule("auto", None, 1).mtbf_s == 24 * HOUR


def test_state_holds_no_instant() -> None:
    one, other = SaveSchedule("auto", None, 2), SaveSchedule("auto", None, 2)
    train(one, 300, 0.5, from_s=0.0)
    train(other, 300, 0.5, from_s=262144.0)
    assert one.state() == other.state()


def test_a_span_that_is_none_is_refused() -> None:
    with pytest.raises((ValueError, CloseranksError), match="not a duration"):
        SaveSchedule("often", None, 1)


def test_it_starts_without_torch() -> None:
    code = "import sys, closeranks.checkpoint.save.save_schedule; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
