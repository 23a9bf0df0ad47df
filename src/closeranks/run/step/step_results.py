"""Turns the verdict of each step into a ``StepDone``, and stops a run whose loss or gradients stay non-finite.

On an accelerator verdicts are read late (see [Note: the vote]); those not read yet are queued here. With Local SGD
verdicts can be read only at boundaries; all of them are read there, so that whatever follows happens at a boundary.
Invariants: verdicts are settled in order and with the same lag on every rank, so that all ranks act on the same step;
the times of the steps add up to the elapsed time, however late they are reported.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from closeranks.core.errors import DataError
from closeranks.core.events import StepDone
from closeranks.core.requests import RunRequest
from closeranks.elastic.vote import StepOutcome, Verdict
from closeranks.run.step.engine import Engine
from closeranks.telemetry.device import peak_memory_bytes


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step, and the requests that the ranks made with its vote."""

    done: StepDone
    requests: frozenset[RunRequest]
    extra: Mapping[str, Sequence[float]]
    """What components added to the ballot, summed over the ranks."""


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The time of a step and what components measured in it."""

    seconds: float
    figures: Mapping[str, Any]
    """Measured by the components, as fields of ``StepDone``."""


@dataclass(slots=True)
class _Entry:
    index: int
    verdict: Verdict
    measured: _Measurement | None = None
    """Measured when the verdict was pushed, if it is settled much later; None: measured when it is settled."""


class StepResults:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[_Entry] = deque()
        self._lag = 1 if engine.context.device.type == "cuda" else 0
        self._num_non_finite = 0
        self._marked_at = time.monotonic()

    def push(self, index: int, verdict: Verdict) -> Iterator[StepResult]:
        """Queue a new verdict and settle those that are due."""
        is_late = self._engine.context.sync_schedule.sync_interval > 1
        self._pending.append(_Entry(index, verdict, self._measure(index) if is_late else None))
        if is_late and verdict.is_closed and self._lag:
            verdict.read()  # sync point, once per synchronisation interval
            self._even_out()
        yield from self._settle(0 if is_late else self._lag)

    def flush(self) -> Iterator[StepResult]:
        """Settle everything that can be: before evaluation, saving and the end. Sync point."""
        yield from self._settle(0)

    def restart_clock(self) -> None:
        """Exclude the time since the last step, which was not training."""
        self._marked_at = time.monotonic()

    def _settle(self, keep: int) -> Iterator[StepResult]:
        while len(self._pending) > keep and self._pending[0].verdict.is_closed:
            entry = self._pending.popleft()
            outcome = entry.verdict.read()
            done = self._step_done(entry.index, outcome, entry.measured or self._measure(entry.index))
            yield StepResult(done, outcome.requests, outcome.extra)
            self._check_finite(entry.index, outcome)

    def _measure(self, index: int) -> _Measurement:
        """Time and figures since the last call."""
        now = time.monotonic()
        seconds, self._marked_at = now - self._marked_at, now
        figures: dict[str, Any] = {}
        for own in self._engine.components.phases["figures"]:
            figures |= own(index)
        return _Measurement(seconds, figures)

    def _even_out(self) -> None:
        """Give all steps of an interval the same time: the host enqueues them ahead of the accelerator and waits only
        at the end of the interval."""
        rest, self._marked_at = time.monotonic() - self._marked_at, time.monotonic()
        measured = [entry.measured for entry in self._pending if entry.measured is not None]
        mean_s = (sum(one.seconds for one in measured) + rest) / max(1, len(measured))
        for entry in self._pending:
            entry.measured = entry.measured and replace(entry.measured, seconds=mean_s)

    def _step_done(self, index: int, outcome: StepOutcome, measured: _Measurement) -> StepDone:
        schedule, model = self._engine.context.schedule, self._engine.model
        position = schedule.position(index + 1)
        figures = dict(measured.figures)
        for voted in self._engine.components.phases["voted_figures"]:
            figures |= voted(outcome.extra)
        return StepDone(
            step=index + 1,
            loss=outcome.loss,
            weight=outcome.weight,
            grad_norm=outcome.grad_norm,
            taken=outcome.taken,
            loss_scale=outcome.loss_scale * model.loss_divisor,
            items=(position - schedule.position(index)) * model.spec.items_per_sample,
            position=position,
            metrics=outcome.metrics,
            seconds=measured.seconds,
            num_bad=outcome.num_bad,
            memory_bytes=peak_memory_bytes(self._engine.context.device),
            **figures,
        )

    def _check_finite(self, index: int, outcome: StepOutcome) -> None:
        """Raise after too many non-finite steps. An fp16 overflow is no such step: a smaller loss scale resolves it."""
        job, model = self._engine.context.job, self._engine.model
        loss_scale = outcome.loss_scale * model.loss_divisor
        is_recoverable = model.precision.scales_loss and loss_scale > job.optim.loss_scale.minimum
        is_recoverable = is_recoverable or (outcome.is_empty and outcome.num_bad > 0)  # data.max_bad is their limit
        self._num_non_finite = 0 if outcome.taken or is_recoverable else self._num_non_finite + 1
        if self._num_non_finite >= job.train.patience:
            first = index + 2 - self._num_non_finite
            raise DataError(
                f"loss or gradients have not been finite for {self._num_non_finite} steps in a row, since step {first}",
                non_finite_advice(model.precision.name, job.optim.clip),
                step=index + 1,
            )


def non_finite_advice(precision: str, clip: float) -> str:
    """What to change if loss or gradients stay non-finite."""
    fixes = ["lower optim.lr", "check the loss and the data for extreme values and for divisions by zero"]
    if clip == 0:
        fixes.insert(1, "set optim.clip = 1.0")
    if precision in ("bf16", "fp16"):
        fixes.append(f"train in float32 to see whether {precision} is the cause")
    text = ", ".join(fixes[:-1]) + f", or {fixes[-1]}"
    return f"{text[0].upper()}{text[1:]}."
