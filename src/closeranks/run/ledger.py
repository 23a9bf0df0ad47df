"""What did each step come to, and is the run still sane?

Verdicts are read late on an accelerator (see [Note: the vote]); the ledger keeps those not read yet, turns each into a
``StepDone`` and watches for steps that could not be taken. Invariant: verdicts are settled in order and at the same lag
on every rank, so that all ranks act on the same step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from closeranks.core.errors import DataError
from closeranks.core.events import StepDone
from closeranks.elastic.vote import Outcome, Verdict
from closeranks.run.parts import Parts
from closeranks.telemetry.device import peak_memory_bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """One step's account for people and machines, and what the ranks asked for with it."""

    done: StepDone
    drain: bool
    save: bool
    is_told: bool
    """Whether the drain was asked for from outside."""
    regroup: bool = False
    """Whether this generation ends here, for another to take over."""


class Ledger:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pending: deque[tuple[int, Verdict]] = deque()
        self._lag = 1 if parts.device.type == "cuda" else 0
        self._num_bad = 0
        self._marked_at = time.monotonic()
        self._waited_s = 0.0

    def push(self, index: int, verdict: Verdict) -> Iterator[Settled]:
        """Take a new verdict in and settle those that are due."""
        self._pending.append((index, verdict))
        yield from self._settle(self._lag)

    def flush(self) -> Iterator[Settled]:
        """Settle everything: before evaluation, saving and the end. Sync point."""
        yield from self._settle(0)

    def restart_clock(self) -> None:
        """What happened since the last step was not training."""
        self._marked_at = time.monotonic()

    def _settle(self, keep: int) -> Iterator[Settled]:
        while len(self._pending) > keep:
            index, verdict = self._pending.popleft()
            outcome = verdict.read()
            asked = (outcome.drain, outcome.save, outcome.is_told, outcome.regroup)
            yield Settled(self._account(index, outcome), *asked)
            self._watch(index, outcome)

    def _account(self, index: int, outcome: Outcome) -> StepDone:
        parts, now = self._parts, time.monotonic()
        seconds, self._marked_at = now - self._marked_at, now
        waited_s, self._waited_s = parts.supply.wait_s - self._waited_s, parts.supply.wait_s
        spent = parts.supply.pop_times()
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
            seconds=seconds,
            data_wait_s=waited_s,
            data_read_s=spent.read_s,
            data_fetch_s=spent.fetch_s,
            data_decode_s=spent.decode_s,
            data_collate_s=spent.collate_s,
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
                "Lower optim.lr, check the data for extreme values, or train in float32.",
                step=index + 1,
            )
