"""Rank order under drawn errors: their size is the one asked for, and smaller errors rank better."""

from __future__ import annotations

from statistics import mean

import plan_rank_order
import pytest

from closeranks.plan.validation.rank_order import SweepRank
from tests.plan.validation.test_prediction_error import sweep

ROWS = sweep((1.0, 1.0), (1.1, 1.0), (1.2, 1.0), (1.3, 1.0), (1.4, 1.0))


def test_smaller_errors_rank_better() -> None:
    def correlation(size: float) -> float:
        return mean(one.correlation for seed in range(200) for one in plan_rank_order.drawn(ROWS, size, seed))

    assert 1 >= correlation(0.01) > correlation(0.05) > correlation(0.3) > 0
    assert correlation(0.01) > 0.95


def test_errors_have_the_size_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[float] = []

    def note(rows: list[object]) -> list[SweepRank]:
        errors.extend(abs(row.log_ratio) for row in rows)  # type: ignore[attr-defined]
        return []

    monkeypatch.setattr(plan_rank_order, "sweep_ranks", note)
    for seed in range(400):
        plan_rank_order.drawn(ROWS, 0.05, seed)
    assert mean(errors) == pytest.approx(0.05, rel=0.05)
