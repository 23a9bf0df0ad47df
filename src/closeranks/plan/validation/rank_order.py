"""Are layouts of one job ranked as their measurements rank them? Spearman's correlation inside sweeps.

A sweep is what one source measured of one model on the same GPUs: only layout, batch and recompute differ. Invariant:
equal values share their mean rank, so that a prediction that cannot tell rows apart gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from closeranks.plan.validation.prediction_error import RowError, group_rows

FEWEST_ROWS = 4


@dataclass(frozen=True, slots=True)
class SweepRank:
    source: str
    model: str
    num_rows: int
    correlation: float


def sweep_ranks(rows: Sequence[RowError]) -> list[SweepRank]:
    found = []
    for group in group_rows(rows, _sweep).values():
        measured = [row.plan.measured_s / row.plan.workload.tokens_per_step for row in group]
        predicted = [row.predicted_s / row.plan.workload.tokens_per_step for row in group]
        if len(set(measured)) >= FEWEST_ROWS:
            run = group[0].plan.run
            found.append(SweepRank(group[0].source, run.model, len(group), spearman(measured, predicted)))
    return found


def _sweep(row: RowError) -> tuple[object, ...]:
    run = row.plan.run
    return row.source, run.model, run.gpu, run.gpu_count, run.seq_len, row.plan.choice.precision


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """0 where one of them is constant."""
    first, second = _ranks(one), _ranks(other)
    middle = mean(first)
    covariance = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second)
    return float(covariance / spread**0.5) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(value) + len(order) - order[::-1].index(value) - 1) / 2 for value in values]
