"""Are layouts of one job ranked as their measurements rank them? Spearman's correlation inside sweeps.

A sweep is what one source measured of one model on the same GPUs at one sequence length: only layout, batch and
recompute differ, and rows are compared by seconds per token. Invariant: a choice that was measured several times is one
entry, with its mean; equal values share their mean rank, so that a prediction that cannot tell choices apart gains
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from closeranks.plan.validation.prediction_error import RowError, group_rows

FEWEST_CHOICES = 4


@dataclass(frozen=True, slots=True)
class SweepRank:
    source: str
    model: str
    num_devices: int
    num_choices: int
    correlation: float
    spread: float
    """The slowest choice relative to the fastest, as measured."""
    pick: float
    """By how much the choice that is predicted to be fastest is slower than the fastest, as measured."""


def sweep_ranks(rows: Sequence[RowError]) -> list[SweepRank]:
    found = []
    for group in group_rows(rows, _sweep).values():
        repeats = list(group_rows(group, lambda row: (row.plan.choice, row.plan.workload.global_batch)).values())
        measured = [mean(row.plan.measured_s / row.plan.workload.tokens_per_step for row in same) for same in repeats]
        predicted = [mean(row.predicted_s / row.plan.workload.tokens_per_step for row in same) for same in repeats]
        if len(set(measured)) < FEWEST_CHOICES:
            continue
        run, fastest = group[0].plan.run, min(measured)
        found.append(
            SweepRank(
                group[0].source,
                run.model,
                run.gpu_count,
                len(repeats),
                spearman(measured, predicted),
                max(measured) / fastest,
                measured[predicted.index(min(predicted))] / fastest - 1,
            )
        )
    return found


def _sweep(row: RowError) -> tuple[object, ...]:
    run, cluster = row.plan.run, row.plan.cluster
    return row.source, row.plan.workload.shape, cluster.device.name, run.gpu_count, run.seq_len, row.plan.kind


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; 0 where one of them is constant."""
    first, second = _ranks(one), _ranks(other)
    middle = mean(first)
    covariance = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = sum((a - middle) ** 2 for a in first) * sum((b - middle) ** 2 for b in second)
    return float(covariance / spread**0.5) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [(order.index(value) + len(order) - order[::-1].index(value) - 1) / 2 for value in values]
