"""What did each step come to, and is the run still sane?

Verdicts are read late on an accelerator (see [Note: the vote]); the ledger keeps those not read yet, turns each into a
``StepDone`` and watches for steps that could not be taken. Where replicas train apart, the verdicts of a round can be
read when they meet, and all of them are read there: whatever follows happens at a meeting. Invariants: verdicts are
settled in order and at the same lag on every rank, so that all ranks act on the same step; the times of steps add up to
the time that went by, however late they are told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from closeranks.core.errors import DataError
from closeranks.core.events import StepDone
from closeranks.core.requests import Request
from closeranks.data.timing import StageTimes
from closeranks.elastic.vote import Outcome, Verdict
from closeranks.run.parts import Parts
from closeranks.telemetry.device import peak_memory_bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """One step's account for people and machines, and what the ranks asked for with it."""

    done: StepDone
    requests: frozenset[Request]
    used: tuple[float, ...] = ()
    """Which parameters had a gradient, as ``run.usage`` reads it."""


@dataclass(frozen=True, slots=True)
class _Spent:
    """What a step took."""

    seconds: float
    waited_s: float
    reading: StageTimes


@dataclass(slots=True)
class _Entry:
    index: int
    verdict: Verdict
    spent: _Spent | None = None
    """Measured when it was pushed, where it is settled much later; None: measured when it is settled."""


class Ledger:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pending: deque[_Entry] = deque()
        self._lag = 1 if parts.device.type == "cuda" else 0
        self._num_bad = 0
        self._marked_at = time.monotonic()
        self._waited_s = 0.0

    def push(self, index: int, verdict: Verdict) -> Iterator[Settled]:
        """Take a new verdict in and settle those that are due."""
        is_apart = self._parts.outer is not None
        self._pending.append(_Entry(index, verdict, self._measure() if is_apart else None))
        if is_apart and verdict.is_closed and self._lag:
            verdict.read()  # sync point, once in a round
            self._even_out()
        yield from self._settle(0 if is_apart else self._lag)

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
            account = self._account(entry.index, outcome, entry.spent or self._measure())
            yield Settled(account, outcome.requests, outcome.extra)
            self._watch(entry.index, outcome)

    def _measure(self) -> _Spent:
        """Since it was asked last."""
        supply, now = self._parts.supply, time.monotonic()
        seconds, self._marked_at = now - self._marked_at, now
        waited_s, self._waited_s = supply.wait_s - self._waited_s, supply.wait_s
        return _Spent(seconds, waited_s, supply.pop_times())

    def _even_out(self) -> None:
        """An accelerator's host pushes steps ahead of it and waits at the end of a round: its steps took alike."""
        rest, self._marked_at = time.monotonic() - self._marked_at, time.monotonic()
        spent = [entry.spent for entry in self._pending if entry.spent is not None]
        mean_s = (sum(one.seconds for one in spent) + rest) / max(1, len(spent))
        for entry in self._pending:
            entry.spent = entry.spent and replace(entry.spent, seconds=mean_s)

    def _account(self, index: int, outcome: Outcome, spent: _Spent) -> StepDone:
        parts = self._parts
        position = parts.schedule.position(index + 1)
        return StepDone(
            step=index + 1,
            loss=outcome.loss,
            weight=outcome.weight,
            grad_norm=outcome.grad_norm,
            lr=parts.optimizer.lr(index),
            taken=outcome.taken,
            loss_scale=outcome.loss_scale * parts.loss_divisor,
            items=(position - parts.schedule.position(index)) * parts.spec.items_per_sample,
            position=position,
            metrics=outcome.metrics,
            seconds=spent.seconds,
            data_wait_s=spent.waited_s,
            data_read_s=spent.reading.read_s,
            data_fetch_s=spent.reading.fetch_s,
            data_decode_s=spent.reading.decode_s,
            data_collate_s=spent.reading.collate_s,
            num_bad=outcome.num_bad,
            memory_bytes=peak_memory_bytes(parts.device),
        )

    def _watch(self, index: int, outcome: Outcome) -> None:
        """An overflow of fp16 mends itself by a smaller loss scale; anything else that lasts is a mistake."""
        scaling = self._parts.precision.scales_loss
        loss_scale = outcome.loss_scale * self._parts.loss_divisor
        mends_itself = scaling and loss_scale > self._parts.job.optim.loss_scale.minimum
        mends_itself = mends_itself or (outcome.is_empty and outcome.num_bad > 0)  # data.max_bad is their limit
        self._num_bad = 0 if outcome.taken or mends_itself else self._num_bad + 1
        if self._num_bad >= self._parts.job.train.patience:
            first = index + 2 - self._num_bad
            raise DataError(
                f"loss or gradients have not been finite for {self._num_bad} steps in a row, since step {first}",
                advice(self._parts.precision.name, self._parts.job.optim.clip),
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
