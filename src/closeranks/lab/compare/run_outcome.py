"""Computes the outcome of a run that has ended: speed, losses, time to the target, cost. Pure but for ``read_outcome``.

Invariants: times are of training alone, without evaluations and saves; figures of training and of evaluations are kept
apart; a figure that was not measured, or is not finite, is None, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from statistics import median

from closeranks.core.events import Evaluated, StepDone
from closeranks.lab.compare.comparison_plan import ComparisonRun
from closeranks.lab.compare.config import CompareConfig, ComparisonTarget
from closeranks.lab.compare.run_records import ComparisonRunFolder, RunRecord
from closeranks.lab.compare.traffic import bytes_per_step, recorded_step_times
from closeranks.telemetry.run_log.run_history import RunHistory, load_history

FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
_DIVERGED_RATIO = 1.2
"""A loss has diverged, though finite, if the mean of its last tenth exceeds this multiple of that of its first."""
_NOT_INJECTED = re.compile(r"\bnot (be )?injected: ")
"""In the last line of a run that was to be disturbed, and was not."""
_MIN_SIDE_STEPS = 2
"""Minimum steps on each side over which a figure is smoothed."""


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """A figure, and the seconds of training until then."""

    step: int
    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class ComparisonRunOutcome:
    """The outcome of one run."""

    setting: str
    seed: int
    repeat: int
    num_workers: int
    state: str
    """``finished``, ``diverged`` or ``failed``."""
    condition: str = ""
    """The name of the condition; empty if the comparison names none."""
    reason: str = ""
    """Why it did not finish, in words."""
    num_steps: int = 0
    seconds: float | None = None
    """Of training, without evaluations; with the time that faults cost."""
    steps_per_s: float | None = None
    """Without the first step."""
    items_per_s: float | None = None
    """Tokens or samples, over all workers."""
    staleness: float | None = None
    """In steps of updates, the mean over the run."""
    bytes_total: int | None = None
    bytes_per_step: float | None = None
    seconds_to_target: float | None = None
    steps_to_target: float | None = None
    final_loss: float | None = None
    """Of training, over the last tenth."""
    eval_loss: float | None = None
    """Of the last evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of training, over the last tenth."""
    eval_metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    memory_bytes: int | None = None
    cost: float | None = None
    cost_to_target: float | None = None
    wall_s: float = 0.0
    folder: str = ""
    machine: str = ""
    """Where it ran, in words."""
    losses: tuple[MetricPoint, ...] = ()
    """Smoothed, for the picture."""

    @property
    def is_sound(self) -> bool:
        return self.state == FINISHED

    def final(self, metric: str, *, is_evaluated: bool) -> float | None:
        """The final figure, of the last evaluation or of training; runs are compared by the same of the two."""
        if metric != "loss":
            return (self.eval_metrics if is_evaluated else self.metrics).get(metric)
        return self.eval_loss if is_evaluated else self.final_loss


def read_outcome(
    compare: CompareConfig, run: ComparisonRun, run_folder: ComparisonRunFolder, record: RunRecord
) -> ComparisonRunOutcome:
    return outcome_of(
        compare,
        run,
        record,
        load_history(run_folder.folder, all_steps=True),
        recorded_step_times(run_folder),
        str(run_folder.folder),
    )


def outcome_of(
    compare: CompareConfig,
    run: ComparisonRun,
    record: RunRecord,
    history: RunHistory,
    times: dict[int, float],
    folder: str = "",
) -> ComparisonRunOutcome:
    """``times``: the wall-clock time at which each step was reported."""
    state, reason = end_state(record, history)
    losses = points(history, "loss")
    reached = _reached(compare.target, history) if compare.target else None
    seconds = losses[-1].at_s if losses else None
    counted = [step for step in history.steps if step.step not in history.first_steps]
    counted_s = sum(step.seconds for step in counted)
    price_per_s = run.case.num_workers * compare.price_per_worker_hour / 3600
    return ComparisonRunOutcome(
        setting=run.case.name,
        seed=run.seed,
        repeat=run.repeat,
        num_workers=run.case.num_workers,
        state=state,
        condition=run.case.condition.name,
        reason=reason,
        num_steps=history.steps[-1].step if history.steps else 0,
        seconds=seconds,
        steps_per_s=len(counted) / counted_s if counted_s else None,
        items_per_s=history.throughput().items_per_s,
        staleness=sum(step.staleness for step in history.steps) / len(history.steps) if history.steps else None,
        bytes_total=record.traffic[-1][1] if record.traffic else None,
        bytes_per_step=bytes_per_step(record.traffic, times),
        seconds_to_target=reached.at_s if reached else None,
        steps_to_target=reached.value if reached else None,
        final_loss=_last([point.value for point in losses]),
        eval_loss=history.evals[-1].loss if history.evals else None,
        metrics=_final_metrics(history),
        eval_metrics=_finite(history.evals[-1].metrics) if history.evals else {},
        memory_bytes=max((step.memory_bytes for step in history.steps), default=0) or None,
        cost=price_per_s * seconds if price_per_s and seconds is not None else None,
        cost_to_target=price_per_s * reached.at_s if price_per_s and reached else None,
        wall_s=record.wall_s,
        folder=folder,
        machine=str(record.machine),
        losses=tuple(smooth(losses)),
    )


def end_state(record: RunRecord, history: RunHistory) -> tuple[str, str]:
    """How a run ended, and the reason in words if it did not finish."""
    steps = history.steps
    if steps and _has_nonfinite_loss(steps[-1]):
        return DIVERGED, f"its loss is not finite from step {_since(steps, _has_nonfinite_loss)}"
    has_failed = record.exit_code != 0 and not record.is_stopped
    if has_failed and steps and not steps[-1].taken:
        return DIVERGED, f"its gradients are not finite from step {_since(steps, lambda step: not step.taken)}"
    if has_failed:
        detail = history.ended.detail if history.ended is not None else ""
        return FAILED, _first_sentence(detail or record.said or f"exit status {record.exit_code}")
    if not steps:
        return FAILED, "no step was finished"
    if _NOT_INJECTED.search(record.said):
        return FAILED, _first_sentence(record.said)
    if history.evals and not math.isfinite(history.evals[-1].loss):
        return DIVERGED, f"its loss in the evaluation after step {history.evals[-1].step} is not finite"
    losses = [step.loss for step in steps]
    first, last = _first(losses), _last(losses)
    if first is not None and last is not None and last > _DIVERGED_RATIO * first > 0:
        return DIVERGED, f"its loss rose from {first:.4g} to {last:.4g}"
    return FINISHED, ""


def _has_nonfinite_loss(step: StepDone) -> bool:
    return not math.isfinite(step.loss)


def _since(steps: Sequence[StepDone], is_bad: Callable[[StepDone], bool]) -> int:
    """The first of the consecutive bad steps at the end of the run."""
    return list(takewhile(is_bad, reversed(steps)))[-1].step


def _first_sentence(text: str) -> str:
    first = text.strip().splitlines()[0]
    return first if len(first) <= 200 else first[:197] + "..."


def points(history: RunHistory, metric: str) -> list[MetricPoint]:
    """A figure of every training step, with the training time until then, recoveries included."""
    steps, lost_s = history.steps, _lost_s(history)
    elapsed = accumulate(step.seconds + lost_s.get(step.step, 0.0) for step in steps)
    values = (step.loss if metric == "loss" else step.metrics.get(metric, math.nan) for step in steps)
    return [MetricPoint(step.step, at_s, value) for step, at_s, value in zip(steps, elapsed, values, strict=True)]


def _lost_s(history: RunHistory) -> dict[int, float]:
    """What faults cost, by the first step that was finished after each."""
    step_s = median(step.seconds for step in history.steps) if history.steps else 0.0
    lost: dict[int, float] = {}
    for fault in history.fault_history.faults:
        if fault.closed is not None:
            lost[fault.closed.step] = lost.get(fault.closed.step, 0.0) + fault.lost_s(step_s)
    return lost


def eval_points(history: RunHistory, metric: str) -> list[MetricPoint]:
    at_s = {point.step: point.at_s for point in points(history, "loss")}
    return [MetricPoint(one.step, at_s.get(one.step, 0.0), _value(one, metric)) for one in history.evals]


def _value(done: Evaluated, metric: str) -> float:
    return done.loss if metric == "loss" else done.metrics.get(metric, math.nan)


def smooth(raw: Sequence[MetricPoint]) -> list[MetricPoint]:
    """Each figure as the mean of about a tenth of the run around it.

    The window is symmetric, so that a steep start does not lag, except at the end of the run, where it takes what there
    is, so that no single step decides.
    """
    is_finite = [math.isfinite(point.value) for point in raw]
    sums = [0.0, *accumulate(point.value if ok else 0.0 for point, ok in zip(raw, is_finite, strict=True))]
    counts = [0, *accumulate(map(int, is_finite))]
    widest = max(_MIN_SIDE_STEPS, len(raw) // 20)
    smoothed = []
    for index, point in enumerate(raw):
        half = min(widest, index)
        first, stop = index - half, min(len(raw), index + half + 1)
        num = counts[stop] - counts[first]
        smoothed.append(MetricPoint(point.step, point.at_s, (sums[stop] - sums[first]) / num if num else math.nan))
    return smoothed


def first_reaching(series: Sequence[MetricPoint], target: float, *, higher_is_better: bool) -> MetricPoint | None:
    """Where a series first reaches the target, interpolated between points; ``value`` is the step. None if nowhere."""
    sign = 1.0 if higher_is_better else -1.0
    before: MetricPoint | None = None
    for point in series:
        shortfall = sign * (target - point.value)
        if shortfall <= 0:
            if before is None:
                return MetricPoint(point.step, point.at_s, float(point.step))
            gap = sign * (target - before.value)
            share = gap / (gap - shortfall)
            at_s = before.at_s + share * (point.at_s - before.at_s)
            return MetricPoint(point.step, at_s, before.step + share * (point.step - before.step))
        before = point if math.isfinite(point.value) else None
    return None


def _reached(target: ComparisonTarget, history: RunHistory) -> MetricPoint | None:
    if target.of == "evaluation":
        return first_reaching(
            eval_points(history, target.metric), target.value, higher_is_better=target.higher_is_better
        )
    return first_reaching(
        smooth(points(history, target.metric)), target.value, higher_is_better=target.higher_is_better
    )


def _first(values: Sequence[float]) -> float | None:
    """The mean of the first tenth."""
    return _last(values[::-1])


def _last(values: Sequence[float]) -> float | None:
    """The mean of the finite values in the last tenth."""
    tail = [value for value in values[-max(1, len(values) // 10) :] if math.isfinite(value)]
    return sum(tail) / len(tail) if tail else None


def _final_metrics(history: RunHistory) -> dict[str, float]:
    names = history.steps[-1].metrics if history.steps else {}
    found = {name: _last([point.value for point in points(history, name)]) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
