"""What compression loses in this run, and whether it is more than it was.

In sampled steps the ranks add up what each measured (``sync.compress.compressed``), and rank 0 tells it once the step's
account is read: an event for machines, a warning for people when it drifts. Costs one small all-reduce in such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.core.events import Compressed, Event, StepDone, Warned
from closeranks.core.protocols import Group, Reducer
from closeranks.elastic.vote import Verdict
from closeranks.run.component import Component
from closeranks.sync.compress.compressed import Plan
from closeranks.sync.drift import Drift, of_sums

if TYPE_CHECKING:
    from closeranks.run.ledger import Settled


class Accuracy:
    """Call sequence: ``measure`` in every step or synchronisation, ``settle`` when the step's account is read.

    With ``plan`` None nothing is compressed; one rank ``tells``.
    """

    def __init__(self, plan: Plan | None, group: Group, device: torch.device, *, tells: bool) -> None:
        self.plan, self._group, self._device, self._tells = plan, group, device, tells
        self._measured: dict[int, Tensor] = {}
        self._drift = Drift()

    def measure(self, number: int, step: int, losses: Callable[[], Sequence[Tensor]]) -> None:
        """``number``: what sampling counts by; ``step``: under which step it is told."""
        if self.plan is None or not self.plan.is_sampled(number):
            return
        found = torch.zeros(4, dtype=torch.float64, device=self._device)
        for sums in losses():
            found += sums
        self._measured[step] = self._group.sum(found)

    def settle(self, done: StepDone, emit: Callable[[Event], None]) -> None:
        """All ranks; where the step was not taken, what was measured of it means nothing."""
        found = self._measured.pop(done.step, None)
        if found is None or not self._tells or not done.taken:
            return
        error, cosine = of_sums(found.tolist())
        emit(Compressed(done.step, error, cosine))
        if told := self._drift.note(error, cosine):
            emit(Warned(told, done.step))


class GradientAccuracy(Component):
    """Of gradients, in every step."""

    def __init__(self, accuracy: Accuracy, reducer: Reducer) -> None:
        self._accuracy, self._reducer = accuracy, reducer

    def after_vote(self, index: int, verdict: Verdict) -> None:
        self._accuracy.measure(index, index + 1, self._reducer.losses)

    def settled(self, entry: Settled, emit: Callable[[Event], None]) -> None:
        self._accuracy.settle(entry.done, emit)
