"""The formulas agree with published figures, with each other, and with failures that were played out one by one.

The simulations are seeded, and large enough that their own error is about a hundredth of the waste they measure.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.facts.checkpoint_policy.multilevel import best_multilevel_schedule, waste_at
from closeranks.facts.checkpoint_policy.preemption_hazard import LIFE_S, age_gain, ages_of, hazard, hazards, lost_by
from closeranks.facts.checkpoint_policy.save_interval import (
    CheckpointLevel,
    best_period_s,
    daly_period_s,
    efficiency,
    efficiency_without_saves,
    learned_mtbf_s,
    lost_s,
    prior_mtbf_s,
    storage_cost,
    waste,
    young_period_s,
)
from closeranks.facts.checkpoint_policy.storage_contention import SharedStorage, contended_period_s
from closeranks.facts.durations import duration_literal, format_duration
from tests.facts.playing import play, share_store

MINUTE, HOUR = 60.0, 3600.0


def first_order_waste(period_s: float, level: CheckpointLevel) -> float:
    """s/T + (T/2 + L + R)/mu: what the exact share comes to while periods are short beside mean lives."""
    return level.stall_s / period_s + (period_s / 2 + level.durable_s + level.restart_s) * level.rate


# --- figures


@pytest.mark.parametrize(("mtbf_min", "minutes"), [(24 * 60, 116.7), (6 * 60, 56.7), (15, 9.14)])
def test_daly_agrees_with_his_own_figures(mtbf_min: float, minutes: float) -> None:
    """Saves of 5 minutes."""
    assert daly_period_s(mtbf_min * MINUTE, 5 * MINUTE) / MINUTE == pytest.approx(minutes, rel=2e-3)


TABLE = {
    11.3 * MINUTE: (8.2, 36, 79, 183, 357),
    1 * HOUR: (19, 84, 186, 445, 942),
    3 * HOUR: (33, 146, 325, 785, 1701),
    8 * HOUR: (54, 239, 533, 1295, 2840),
    24 * HOUR: (93, 415, 926, 2257, 4992),
}


@pytest.mark.parametrize("mtbf_s", TABLE)
def test_daly_over_costs_and_lives(mtbf_s: float) -> None:
    for cost_s, expected in zip((0.05, 1, 5, 30, 150), TABLE[mtbf_s], strict=True):
        assert daly_period_s(mtbf_s, cost_s) == pytest.approx(expected, rel=8e-3)


def test_one_save_per_life_where_saving_takes_longer_than_living() -> None:
    assert daly_period_s(100.0, 200.0) == 100.0
    assert daly_period_s(100.0, 1e9) == 100.0


def test_first_order_figures_of_restarting_every_eleven_minutes() -> None:
    """Restart 65 s with saves every 15 min keeps 24 %, every minute 85 %."""
    slow = CheckpointLevel("disk", 11.3 * MINUTE, 0.0, 0.0, 65.0)
    assert 1 - first_order_waste(900.0, slow) == pytest.approx(0.24, abs=0.01)
    assert 1 - first_order_waste(60.0, slow) == pytest.approx(0.85, abs=0.015)


# --- laws

SPANS = st.floats(0.01, 1e5)
LEVELS = st.builds(CheckpointLevel, st.just("any"), st.floats(1.0, 1e7), SPANS, SPANS, SPANS)


@given(st.floats(1e-3, 1e8), LEVELS)
def test_shares_are_shares(period_s: float, level: CheckpointLevel) -> None:
    assert 0 <= efficiency(period_s, level) <= 1
    assert 0 <= lost_s(period_s, level) <= level.mtbf_s * (1 + 1e-9)


@given(st.floats(1e3, 1e7), st.floats(1e-3, 1e2), st.floats(0.5, 2.0))
def test_no_other_period_is_much_better_than_dalys(mtbf_s: float, cost_s: float, factor: float) -> None:
    level = CheckpointLevel("disk", mtbf_s, cost_s, cost_s)
    best = best_period_s(level)
    assert waste(best, level) <= waste(factor * best, level) * 1.01


@given(st.floats(1e3, 1e7), st.floats(1e-3, 10.0), st.floats(0.0, 60.0))
def test_the_time_to_be_durable_does_not_move_the_best_period(mtbf_s: float, stall_s: float, late_s: float) -> None:
    soon, late = (CheckpointLevel("disk", mtbf_s, stall_s, durable_s) for durable_s in (stall_s, stall_s + late_s))
    assert best_period_s(late) == max(best_period_s(soon), late.floor_s)


@given(st.floats(1e5, 1e8), st.floats(1e-3, 1.0), st.floats(1.0, 60.0), st.floats(0.0, 300.0))
def test_exact_and_first_order_meet_where_lives_are_long(
    mtbf_s: float, stall_s: float, late_s: float, restart_s: float
) -> None:
    level = CheckpointLevel("disk", mtbf_s, stall_s, stall_s + late_s, restart_s)
    period_s = best_period_s(level)
    assert waste(period_s, level) == pytest.approx(first_order_waste(period_s, level), rel=0.05)
    assert lost_s(period_s, level) == pytest.approx((period_s + stall_s) / 2 + late_s, rel=0.05)


def test_a_medium_that_does_not_keep_up_makes_training_wait() -> None:
    level = CheckpointLevel("disk", math.inf, 0.0, 10.0)
    assert efficiency(1.0, level) == pytest.approx(0.1)
    assert efficiency(10.0, level) == 1.0


def test_never_saving_is_hopeless_for_long_jobs_and_free_for_safe_ones() -> None:
    assert efficiency_without_saves(24 * HOUR, 3 * HOUR, 60.0) < 0.005
    assert efficiency_without_saves(24 * HOUR, 1e12, 60.0) == pytest.approx(1.0)
    assert efficiency_without_saves(24 * HOUR, 1.0, 60.0) == 0.0


def test_priors_and_learning() -> None:
    assert prior_mtbf_s(1024) == pytest.approx(7.9 * HOUR)
    assert prior_mtbf_s(4096) == pytest.approx(7.9 * HOUR / 4)
    assert (prior_mtbf_s(1), prior_mtbf_s(10**9)) == (24 * HOUR, 14 * MINUTE)
    assert learned_mtbf_s(HOUR, 0.0, 0) == HOUR
    assert learned_mtbf_s(HOUR, 1000 * HOUR, 100) == pytest.approx(10 * HOUR, rel=0.02)


def test_a_month_of_storage_costs_its_price() -> None:
    assert storage_cost(100e9, 0.023, 730 * HOUR) == pytest.approx(2.3)


@given(st.floats(0.1, 1e7))
def test_literals_say_the_span(seconds: float) -> None:
    text = duration_literal(seconds)
    unit = next(unit for unit in ("min", "h", "s") if text.endswith(unit))
    back = float(text.removesuffix(unit)) * {"s": 1, "min": 60, "h": 3600}[unit]
    assert back == pytest.approx(seconds, rel=0.01)


def test_spans_in_words() -> None:
    spans = (0.05, 9.3, 54, 60, 90, 150, 900, 28440, 28800, 3.6e6, math.inf)
    assert [*map(format_duration, spans)] == [
        "0.05 s", "9.3 s", "54 s", "1 min", "90 s", "2.5 min", "15 min", "7.9 h", "8 h", "42 days", "forever",
    ]  # fmt: skip
    assert [*map(duration_literal, (54, 90, 900, 10800, 678, 0.05))] == ["54s", "90s", "15min", "3h", "678s", "0.05s"]


# --- failures played out


CASES = [
    CheckpointLevel("blocking", 3 * HOUR, 14.0, 14.0, 65.0),
    CheckpointLevel("asynchronous", 3 * HOUR, 0.5, 20.0, 65.0),
    CheckpointLevel("slow medium", 1 * HOUR, 0.05, 120.0, 30.0),
    CheckpointLevel("dying often", 11.3 * MINUTE, 1.0, 5.0, 65.0),
]


@pytest.mark.parametrize("level", CASES, ids=lambda level: level.name)
def test_one_level_played_out(level: CheckpointLevel) -> None:
    """The waste is as the formula says, and no other period on a grid does noticeably better."""
    best = best_period_s(level)
    played = {factor: play(factor * best, [level]) for factor in (0.6, 1.0, 1.6)}
    for factor, share in played.items():
        assert share == pytest.approx(waste(factor * best, level), rel=0.03), factor
    assert played[1.0] <= 1.02 * min(played.values())


NEAR = CheckpointLevel("near", 4 * HOUR, 0.15, 9.0, 60.0)
FAR = CheckpointLevel("far", 12 * HOUR, 1.0, 40.0, 90.0)


def test_two_levels_played_out() -> None:
    found = best_multilevel_schedule([NEAR, FAR])
    assert [place.level.name for place in found.placed] == ["near", "far"]
    every, period_s = found.placed[1].every, found.period_s
    assert every >= 2
    played = play(period_s, [NEAR, FAR], every)
    assert played == pytest.approx(found.waste, rel=0.02)
    others = [(0.5 * period_s, every), (2 * period_s, every), (period_s, 4 * every), (2 * period_s, 1)]
    assert played <= 1.02 * min(play(other_s, [NEAR, FAR], count) for other_s, count in others)


def test_two_levels_beat_either_alone() -> None:
    merged = 1 / (NEAR.rate + FAR.rate)
    alone = CheckpointLevel("far", merged, 1.0, 40.0, 90.0)
    assert best_multilevel_schedule([NEAR, FAR]).waste < waste(best_period_s(alone), alone)


def test_a_level_that_does_not_pay_is_dropped() -> None:
    """Nearly all failures take the near disk with them, and the far place is as cheap."""
    found = best_multilevel_schedule(
        [CheckpointLevel("near", 1000 * HOUR, 0.15, 9.0, 60.0), CheckpointLevel("far", 3 * HOUR, 0.1, 9.0, 60.0)]
    )
    assert found.dropped == ("near",)
    assert [place.level.name for place in found.placed] == ["far"]
    assert found.placed[0].level.rate == pytest.approx(1 / (1000 * HOUR) + 1 / (3 * HOUR))


def test_what_every_save_costs_stays_when_a_level_is_dropped() -> None:
    levels = [CheckpointLevel("near", 1000 * HOUR, 0.1, 9.0), CheckpointLevel("far", 3 * HOUR, 0.1, 9.0)]
    found = best_multilevel_schedule(levels, copy_s=5.0)
    assert found.placed[0].level.stall_s == pytest.approx(5.0 + levels[len(found.dropped)].stall_s)


@given(st.floats(5.0, 2000.0))
def test_no_given_period_beats_the_nesting(period_s: float) -> None:
    assert waste_at([NEAR, FAR], period_s) >= best_multilevel_schedule([NEAR, FAR]).waste * 0.99


# --- many jobs, one store


@pytest.mark.parametrize(("num_jobs", "load"), [(1, 0.3), (2, 0.4), (4, 0.3), (4, 0.6), (16, 0.5), (32, 0.3)])
def test_random_phases_played_out(num_jobs: int, load: float) -> None:
    """The queue's formula is a little gloomy: jobs that come once a period bunch less than strangers do."""
    period_s = num_jobs * 10.0 / load
    played = share_store(10.0, num_jobs, period_s, num_rounds=1200 // num_jobs)
    said = SharedStorage(10.0, num_jobs, period_s).random_s
    assert played <= 1.05 * said
    assert played >= 0.8 * said


@given(st.floats(0.1, 100.0), st.integers(1, 500), st.floats(0.1, 1e5))
def test_sharing_keeps_its_bounds(transfer_s: float, num_jobs: int, period_s: float) -> None:
    sharing = SharedStorage(transfer_s, num_jobs, period_s)
    assert transfer_s <= sharing.random_s * (1 + 1e-12)
    assert sharing.random_s <= sharing.aligned_s == num_jobs * transfer_s
    assert SharedStorage(transfer_s, 1, period_s).random_s == transfer_s
    assert (sharing.utilization <= 1) == (period_s >= num_jobs * transfer_s) or math.isclose(sharing.utilization, 1)


@pytest.mark.parametrize("num_jobs", [1, 2, 4, 16, 64, 300])
def test_a_little_slack_is_kinder_than_a_full_store(num_jobs: int) -> None:
    def lost(period_s: float) -> float:
        return period_s / 2 + SharedStorage(10.0, num_jobs, period_s).random_s

    kind, least = contended_period_s(10.0, num_jobs), num_jobs * 10.0
    assert kind >= least
    assert lost(kind) <= min(lost(least * (1 + step / 100)) for step in range(300)) * 1.001


# --- machines that live a day


def test_machines_are_lost_in_a_bathtub() -> None:
    assert lost_by(0.0) == 0.0
    assert 0.9 < lost_by(LIFE_S) < 1.0
    early, middle, late = (hazard(first * HOUR, last * HOUR) for first, last in ((0, 1), (8, 16), (23, 24)))
    assert middle < 0.1 < 1 < early
    assert late > 1


def test_danger_has_mean_one_and_periods_follow_it() -> None:
    ages = ages_of(3 * HOUR, 0.15, floor_s=5.0)
    assert sum(age.danger * (age.last_s - age.first_s) for age in ages) / LIFE_S == pytest.approx(1.0)
    for age in ages:
        assert age.period_s == pytest.approx(max(5.0, young_period_s(3 * HOUR / age.danger, 0.15)))
    assert ages[0].period_s < ages[1].period_s < ages[2].period_s > ages[3].period_s > ages[4].period_s


def test_the_gain_is_what_following_the_danger_spares() -> None:
    """Overheads added up over a life, one period against the best of each moment."""
    mtbf_s, cost_s = 3 * HOUR, 0.2
    rates = [one / mtbf_s for one in hazards()[1]]
    assert sum(rates) / len(rates) == pytest.approx(1 / mtbf_s)
    fixed_s = young_period_s(mtbf_s, cost_s)
    fixed = sum(cost_s / fixed_s + rate * fixed_s / 2 for rate in rates)
    bent = sum(math.sqrt(2 * cost_s * rate) for rate in rates)
    assert age_gain() == pytest.approx(1 - bent / fixed, rel=1e-6)
    assert 0.2 < age_gain() < 0.7
