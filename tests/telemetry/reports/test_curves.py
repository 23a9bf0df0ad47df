import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.telemetry.reports.curves import StepCurve, axis_limits, downsample, rates, smooth_curve, wants_log_scale
from tests.telemetry.conftest import step

FINITE = st.floats(-1e6, 1e6)


def curve(values: list[float]) -> StepCurve:
    return StepCurve(tuple(range(1, len(values) + 1)), tuple(values))


def test_a_straight_line_is_not_bent_by_smoothing() -> None:
    straight = curve([3.0 - 0.01 * place for place in range(200)])
    assert smooth_curve(straight).values == pytest.approx(straight.values)


def test_noise_is_smoothed_away() -> None:
    noisy = smooth_curve(curve([2.0 + (-1) ** place for place in range(400)]))
    assert max(abs(value - 2.0) for value in noisy.values[10:-10]) < 0.2


@given(st.lists(FINITE, min_size=1, max_size=300))
def test_a_smooth_line_stays_within_its_values(values: list[float]) -> None:
    smooth = smooth_curve(curve(values))
    assert smooth.steps == curve(values).steps
    assert all(min(values) <= value <= max(values) for value in smooth.values)


def test_values_that_are_not_finite_weigh_nothing() -> None:
    values = [1.0] * 100
    values[50] = math.nan
    values[70] = math.inf
    assert smooth_curve(curve(values)).values == pytest.approx([1.0] * 100)
    assert math.isnan(smooth_curve(curve([math.nan])).values[0])


@given(st.lists(FINITE, min_size=60, max_size=500))
def test_thinning_keeps_the_extremes_and_the_order(values: list[float]) -> None:
    thin = downsample(curve(values), most=50)
    assert len(thin.steps) <= 52
    assert list(thin.steps) == sorted(set(thin.steps))
    assert min(thin.values) == min(values)
    assert max(thin.values) == max(values)


def test_a_log_scale_is_for_what_spans_much() -> None:
    assert not wants_log_scale([11.0, 5.0, 2.5])
    assert wants_log_scale([1.0, 0.1, 0.001])
    assert not wants_log_scale([1.0, 0.0, 0.001])
    assert not wants_log_scale([math.nan])


def test_one_spike_does_not_set_the_axis() -> None:
    values = [2.0 + 0.001 * (place % 7) for place in range(1000)]
    values[500] = 1e6
    spiky = curve(values)
    calm = curve([2.0] * 1000)
    bounds = axis_limits(spiky, calm, is_log=False)
    assert bounds is not None
    assert bounds.high < 3
    assert axis_limits(curve([math.nan]), curve([math.nan]), is_log=False) is None
    below = axis_limits(curve([*[1.0] * 20, -3.0, 0.0]), curve([1.0]), is_log=True)
    assert below is not None
    assert below.low > 0, "a damaged value is no place on a log axis"


def test_rates_are_over_a_window() -> None:
    both = rates([step(2, seconds=0.1), step(3, seconds=0.3)], window=2)
    assert both.values == pytest.approx((10_000, 5_000))


def test_a_long_run_is_smoothed_in_few_places_to_its_very_end() -> None:
    smooth = smooth_curve(curve([1.0] * 100_001))
    assert len(smooth.steps) <= 2002
    assert (smooth.steps[0], smooth.steps[-1]) == (1, 100_001)
    assert smooth_curve(curve([])) == curve([])
