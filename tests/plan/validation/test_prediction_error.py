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


def row(source: str, ratio: float, measured_s: float = 10.0, **values: object) -> RowError:
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
    same = [row("a/b", 1.0, global_batch=size, measured_s=size / 10) for size in (64, 128, 256)]
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
    rows = [row("a/b", 1 + size / 100, measured_s=float(size)) for size in (1, 2, 3, 4)]
    (found,) = sweep_ranks([*rows, row("c/d", 1.0)])
    assert (found.source, found.num_rows, found.correlation) == ("a/b", 4, pytest.approx(1))


def test_plans_are_predicted_with_the_frozen_constants() -> None:
    found, refused = row_errors([plan(), plan(global_batch=256)])
    assert not refused
    assert found[1].predicted_s > found[0].predicted_s > 0
