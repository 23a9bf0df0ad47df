"""How far are predicted step times from published ones? Errors of rows, of sources, and weighed by source.

A source with a hundred rows counts as much as one with ten: otherwise the largest table would decide. Invariant: an
error is relative to the measurement, and positive where the prediction is too slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import TypeVar

from closeranks.core.errors import UserError
from closeranks.plan.step_time.constants import Constants
from closeranks.plan.step_time.estimate import StepEstimator
from closeranks.plan.validation.run_plan import RunPlan
from closeranks.plan.validation.run_table import UnusableRun

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RowError:
    plan: RunPlan
    predicted_s: float

    @property
    def source(self) -> str:
        return self.plan.source

    @property
    def signed(self) -> float:
        return self.predicted_s / self.plan.measured_s - 1

    @property
    def log_ratio(self) -> float:
        return log(self.predicted_s / self.plan.measured_s)


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    num_rows: int
    num_sources: int
    mean: float
    """Of absolute errors, weighed by source."""
    p90: float
    bias: float
    """Mean signed error."""


def row_errors(
    plans: Iterable[RunPlan], constants: Constants | None = None
) -> tuple[list[RowError], list[UnusableRun]]:
    """Predicts every plan; ``constants`` other than the frozen ones are for fitting."""
    found: list[RowError] = []
    refused: list[UnusableRun] = []
    for plan in plans:
        try:
            estimator = StepEstimator(plan.workload, plan.cluster, None, constants)
            found.append(RowError(plan, estimator.estimate(plan.choice).seconds))
        except (UserError, ArithmeticError) as error:
            what = error.what if isinstance(error, UserError) else "its step time has no value"
            refused.append(UnusableRun(plan.run.number, plan.run.source, what))
    return found, refused


def summarize(rows: Sequence[RowError]) -> ErrorSummary:
    """Of no rows: zeros."""
    weights = _weights(rows)
    total = sum(weights) or 1.0
    absolute = [abs(row.signed) for row in rows]
    return ErrorSummary(
        len(rows),
        len({row.source for row in rows}),
        sum(weight * error for weight, error in zip(weights, absolute, strict=True)) / total,
        weighted_quantile(absolute, weights, 0.9),
        sum(weight * row.signed for weight, row in zip(weights, rows, strict=True)) / total,
    )


def _weights(rows: Sequence[RowError]) -> list[float]:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.source] += 1
    return [1 / counts[row.source] for row in rows]


def weighted_quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The smallest value that this share of the weight does not exceed."""
    reached, wanted = 0.0, share * sum(weights) * (1 - 1e-12)
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= wanted:
            return value
    return 0.0


def by_source(rows: Iterable[RowError]) -> dict[str, list[RowError]]:
    return group_rows(rows, lambda row: row.source)


def group_rows(rows: Iterable[RowError], key: Callable[[RowError], Key]) -> dict[Key, list[RowError]]:
    found: dict[Key, list[RowError]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return dict(found)


def constant_efficiency(rows: Sequence[RowError]) -> list[RowError]:
    """The same rows, predicted by one number of model FLOP/s per GPU for each kind of GPU and precision.

    The number is the median of the very rows that it then predicts: no constant could be chosen better.
    """
    found: list[RowError] = []
    for group in group_rows(rows, _gpu).values():
        rates = sorted(_model_flops(row) / row.plan.measured_s for row in group)
        rate = rates[len(rates) // 2]
        found += [replace(row, predicted_s=_model_flops(row) / rate) for row in group]
    return found


def _gpu(row: RowError) -> tuple[str, str]:
    return row.plan.cluster.device.name, row.plan.kind


def _model_flops(row: RowError) -> float:
    workload = row.plan.workload
    flops = workload.flops_per_sample * workload.global_batch
    again = 4 / 3 if row.plan.choice.recompute == "full" else 1.0
    return flops * again / row.plan.cluster.num_devices


def leave_one_source_out(rows: Sequence[RowError]) -> Mapping[str, ErrorSummary]:
    """Each source after all predictions were scaled by what the other sources say, the median of their ratios.

    How far this differs from the plain errors is how much one common factor could still explain.
    """
    sources = by_source(rows)
    found = {}
    for name, own in sources.items():
        others = [row for row in rows if row.source != name]
        scale = weighted_quantile([row.log_ratio for row in others], _weights(others), 0.5) if others else 0.0
        found[name] = summarize([replace(row, predicted_s=row.predicted_s / exp(scale)) for row in own])
    return found
