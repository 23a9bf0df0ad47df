"""Errors of predictions: weighed by source, against a constant, without one source, and in rank order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.plan.validation.prediction_error import (
    RowError,
    constant_efficiency,
    leave_one_source_out,
    row_errors,
    summarize,
    weighted_quantile,
)
from closeranks.plan.validation.rank_order import spearman, sweep_ranks
from tests.plan.validation.test_run_plan import plan


def row(source: str, ratio: float, measured_s: float = 40.0, **values: object) -> RowError:
    one = plan(source=source, step_time_s=measured_s, **values)
    return RowError(one, measured_s * ratio)


def test_a_large_source_counts_as_much_as_a_small_one() -> None:
    rows = [*(row("large/one", 1.1) for _ in range(9)), row("small/one", 0.7)]
    found = summarize(rows)
    assert (found.num_rows, found.num_sources) == (10, 2)
    assert found.mean == pytest.approx((0.1 + 0.3) / 2)
    assert found.bias == pytest.approx((0.1 - 0.3) / 2)
    assert found.p90 == pytest.approx(0.3)
    assert summarize([]).num_rows == 0


def test_quantiles_follow_the_weights() -> None:
    assert weighted_quantile([1.0, 2.0, 3.0], [1, 1, 1], 0.5) == 2.0
    assert weighted_quantile([1.0, 2.0, 3.0], [1, 1, 8], 0.5) == 3.0
    assert weighted_quantile([], [], 0.9) == 0.0


def test_one_constant_explains_rows_of_one_efficiency_and_no_others() -> None:
    same = [row("a/b", 1.0, global_batch=size, measured_s=size / 3) for size in (64, 128, 256)]
    assert summarize(constant_efficiency(same)).mean == pytest.approx(0)
    slow = replace(same[0], plan=replace(same[0].plan, measured_s=same[0].plan.measured_s * 2))
    assert summarize(constant_efficiency([slow, *same[1:]])).mean == pytest.approx(0.5 / 3)


def test_a_common_factor_is_taken_from_the_other_sources() -> None:
    rows = [row("a/a", 1.2), row("b/b", 1.2), row("c/c", 1.0)]
    found = leave_one_source_out(rows)
    assert found["a/a"].mean == pytest.approx(0.2)  # the median of 1.2 and 1.0 is the smaller
    assert found["c/c"].mean == pytest.approx(1 - 1 / 1.2)


def test_rank_order_inside_a_sweep() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4], [5, 5, 5, 5]) == 0
    assert spearman([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(0.894, abs=1e-3)


def sweep(*measured_and_ratios: tuple[float, float]) -> list[RowError]:
    """One choice after the other: data and pipeline ranks, and the micro-batch, differ."""
    places = [(2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 4, 2), (4, 2, 2)]
    return [
        row("a/b", ratio, 20 * measured_s, dp=data, pp=pipeline, micro_batch=micro)
        for (measured_s, ratio), (data, pipeline, micro) in zip(measured_and_ratios, places, strict=False)
    ]


def test_choices_are_ranked_inside_their_sweep() -> None:
    (found,) = sweep_ranks([*sweep((1.0, 1.0), (2.0, 1.1), (3.0, 0.9), (4.0, 1.0)), row("c/d", 1.0)])
    assert (found.source, found.num_choices, found.correlation) == ("a/b", 4, pytest.approx(1))
    assert (found.spread, found.pick) == (pytest.approx(4), 0)
    (found,) = sweep_ranks(sweep((1.0, 5.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0)))
    assert found.pick == pytest.approx(1)
    assert found.correlation == pytest.approx(-0.2)
    assert not sweep_ranks(sweep((1.0, 1.0), (2.0, 1.0), (3.0, 1.0)))


def test_a_choice_that_was_measured_twice_is_one_of_its_sweep() -> None:
    rows = sweep((1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0))
    again = replace(rows[0], plan=replace(rows[0].plan, measured_s=24.0))
    (found,) = sweep_ranks([*rows, again])
    assert (found.num_choices, found.correlation) == (4, pytest.approx(1))
    assert found.spread == pytest.approx(4 / 1.1)


def test_plans_are_predicted_with_the_frozen_constants() -> None:
    found, refused = row_errors([plan(), plan(global_batch=256)])
    assert not refused
    assert found[1].predicted_s > found[0].predicted_s > 0
