"""What did each step come to, and is the run still sane?

Verdicts are read late on an accelerator (see [Note: the vote]); the ledger keeps those not read yet, turns each into a
``StepDone`` and watches for steps that could not be taken. Where verdicts can be read at boundaries only, all of them
are read there, so that whatever follows happens at a boundary. Invariants: verdicts are
settled in order and at the same lag on every rank, so that all ranks act on the same step; the times of steps add up to
the time that went by, however late they are told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from closeranks.core.errors import DataError
from closeranks.core.events import StepDone
from closeranks.core.requests import Request
from closeranks.elastic.vote import Outcome, Verdict
from closeranks.run.engine import Engine
from closeranks.telemetry.device import peak_memory_bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """One step's account for people and machines, and what the ranks asked for with it."""

    done: StepDone
    requests: frozenset[Request]
    extra: Mapping[str, Sequence[float]]
    """What components added to the ballot, summed over the ranks."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """What a step took."""

    seconds: float
    figures: Mapping[str, Any]
    """Of the components, as fields of ``StepDone``."""


@dataclass(slots=True)
class _Entry:
    index: int
    verdict: Verdict
    spent: _Spent | None = None
    """Measured when it was pushed, where it is settled much later; None: measured when it is settled."""


class Ledger:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[_Entry] = deque()
        self._lag = 1 if engine.context.device.type == "cuda" else 0
        self._num_bad = 0
        self._marked_at = time.monotonic()

    def push(self, index: int, verdict: Verdict) -> Iterator[Settled]:
        """Take a new verdict in and settle those that are due."""
        is_late = self._engine.context.boundaries.gap > 1
        self._pending.append(_Entry(index, verdict, self._measure(index) if is_late else None))
        if is_late and verdict.is_closed and self._lag:
            verdict.read()  # sync point, once in a round
            self._even_out()
        yield from self._settle(0 if is_late else self._lag)

    def flush(self) -> Iterator[Settled]:
        """Settle everything that can be: before evaluation, saving and the end. Sync point."""
        yield from self._settle(0)

    def restart_clock(self) -> None:
        """What happened since the last step was not training."""
        self._marked_at = time.monotonic()

    def _settle(self, keep: int) -> Iterator[Settled]:
        while len(self._pending) > keep and self._pending[0].verdict.is_closed:
            entry = self._pending.popleft()
            outcome = entry.verdict.read()
            account = self._account(entry.index, outcome, entry.spent or self._measure(entry.index))
            yield Settled(account, outcome.requests, outcome.extra)
            self._watch(entry.index, outcome)

    def _measure(self, index: int) -> _Spent:
        """Since it was asked last."""
        now = time.monotonic()
        seconds, self._marked_at = now - self._marked_at, now
        figures: dict[str, Any] = {}
        for own in self._engine.components.phases["figures"]:
            figures |= own(index)
        return _Spent(seconds, figures)

    def _even_out(self) -> None:
        """An accelerator's host pushes steps ahead of it and waits at the end of a round: its steps took alike."""
        rest, self._marked_at = time.monotonic() - self._marked_at, time.monotonic()
        spent = [entry.spent for entry in self._pending if entry.spent is not None]
        mean_s = (sum(one.seconds for one in spent) + rest) / max(1, len(spent))
        for entry in self._pending:
            entry.spent = entry.spent and replace(entry.spent, seconds=mean_s)

    def _account(self, index: int, outcome: Outcome, spent: _Spent) -> StepDone:
        schedule, model = self._engine.context.schedule, self._engine.model
        position = schedule.position(index + 1)
        figures = dict(spent.figures)
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
            seconds=spent.seconds,
            num_bad=outcome.num_bad,
            memory_bytes=peak_memory_bytes(self._engine.context.device),
            **figures,
        )

    def _watch(self, index: int, outcome: Outcome) -> None:
        """An overflow of fp16 mends itself by a smaller loss scale; anything else that lasts is a mistake."""
        job, model = self._engine.context.job, self._engine.model
        loss_scale = outcome.loss_scale * model.loss_divisor
        mends_itself = model.precision.scales_loss and loss_scale > job.optim.loss_scale.minimum
        mends_itself = mends_itself or (outcome.is_empty and outcome.num_bad > 0)  # data.max_bad is their limit
        self._num_bad = 0 if outcome.taken or mends_itself else self._num_bad + 1
        if self._num_bad >= job.train.patience:
            first = index + 2 - self._num_bad
            raise DataError(
                f"loss or gradients have not been finite for {self._num_bad} steps in a row, since step {first}",
                advice(model.precision.name, job.optim.clip),
                step=index + 1,
            )


def advice(precision: str, clip: float) -> str:
    """What to change where loss or gradients stay not finite."""
    ways = ["lower optim.lr", "check the loss and the data for extreme values and for divisions by zero"]
    if clip == 0:
        ways.insert(1, "set optim.clip = 1.0")
    if precision in ("bf16", "fp16"):
        ways.append(f"train in float32 to see whether {precision} is the cause")
    text = ", ".join(ways[:-1]) + f", or {ways[-1]}"
    return f"{text[0].upper()}{text[1:]}."
