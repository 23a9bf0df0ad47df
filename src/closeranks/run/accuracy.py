"""What does compression lose in this run, and is it more than it was?

In sampled steps the ranks add up what each measured (``sync.compress.compressed``), and rank 0 tells it once the step's
account is read: an event for machines, a warning for people when it drifts. Costs one small all-reduce in such a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from closeranks.core.events import Compressed, Event, StepDone, Warned
from closeranks.core.protocols import Group, Reducer
from closeranks.elastic.vote import Verdict
from closeranks.sync.compress.compressed import Plan
from closeranks.sync.drift import Drift, of_sums


class Accuracy:
    """Call sequence: ``watch`` after the vote of every step, ``measure`` after every meeting of replicas that train
    apart, ``settle`` when the step's account is read. With ``plan`` None gradients are not compressed, with ``outer``
    None what replicas tell each other is not; one rank ``tells``."""

    def __init__(
        self,
        plan: Plan | None,
        outer: Plan | None,
        reducer: Reducer,
        group: Group,
        device: torch.device,
        *,
        tells: bool,
    ) -> None:
        self._outer, self._tells = outer, tells
        self.plan, self._reducer, self._group, self._device = plan, reducer, group, device
        self._measured: dict[int, Tensor] = {}
        self._drift = Drift()

    def watch(self, step: int, verdict: Verdict) -> None:
        if self.plan is not None and self.plan.is_sampled(step):
            self._add_up(step + 1, self._reducer.losses())

    def measure(self, step: int, losses: Sequence[Tensor]) -> None:
        if self._outer is not None and self._outer.is_sampled(step):
            self._add_up(step, losses)

    def _add_up(self, step: int, losses: Sequence[Tensor]) -> None:
        found = torch.zeros(4, dtype=torch.float64, device=self._device)
        for sums in losses:
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
