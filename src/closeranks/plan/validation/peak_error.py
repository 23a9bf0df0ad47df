"""How far are predicted peaks of memory from published ones?

Published is mostly what the allocator reserved: predictions are compared without what lies outside it. Invariant: a row
whose micro-batch is not known has no prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from closeranks.plan.memory.estimate import memory_estimate
from closeranks.plan.validation.run_plan import RunPlan, plan_of
from closeranks.plan.validation.run_table import PublishedRun

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PeakError:
    """One published peak beside its prediction."""

    plan: RunPlan
    published_gib: float
    predicted_gib: float

    @property
    def source(self) -> str:
        return self.plan.source

    @property
    def signed(self) -> float:
        return self.predicted_gib / self.published_gib - 1


@dataclass(frozen=True, slots=True)
class PeakSummary:
    num_published: int
    num_predicted: int
    mean: float
    bias: float
    within_10: float
    """Share of the predicted rows within 10%."""
    verdicts: Mapping[str, int]
    """Of all runs that state their recompute, with a published peak or without: they ran, so each of them fits."""


def peak_errors(runs: Iterable[PublishedRun]) -> tuple[list[PeakError], int]:
    """The predictions, and the number of published peaks."""
    published = [run for run in runs if run.memory_gib_per_gpu]
    found = []
    for run in published:
        samples = run.global_batch or (run.micro_batch or 0) * (run.dp or 1)
        plan = plan_of(replace(run, global_batch=samples or None), is_timed=False)
        if isinstance(plan, str):
            continue
        estimate = memory_estimate(plan.workload, plan.choice, plan.cluster)
        inside = estimate.total_bytes - estimate.part("device context and libraries")
        found.append(PeakError(plan, run.memory_gib_per_gpu or 1.0, inside / _GIB))
    return found, len(published)


def summarize_peaks(errors: Sequence[PeakError], num_published: int, plans: Iterable[RunPlan]) -> PeakSummary:
    signed = [error.signed for error in errors]
    stated = [plan for plan in plans if plan.run.recompute]
    return PeakSummary(
        num_published,
        len(errors),
        mean(map(abs, signed)) if signed else 0.0,
        mean(signed) if signed else 0.0,
        mean(abs(error) <= 0.10 for error in signed) if signed else 0.0,
        Counter(memory_estimate(plan.workload, plan.choice, plan.cluster).verdict for plan in stated),
    )
