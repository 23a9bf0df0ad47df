"""Measures the error that gradient compression adds in this run, and warns when it grows.

In sampled steps the ranks sum what each measured (``sync.compress.compressed_reduction``). Rank 0 reports it once the
host has read the step's result: as an event, and as a warning when it drifts. Cost: one small all-reduce in each
sampled step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from closeranks.core.events import Compressed, Event, StepDone, Warned
from closeranks.core.protocols import ReduceGroup, Reducer
from closeranks.elastic.vote import Verdict
from closeranks.run.components.component import Component
from closeranks.sync.compress.compressed_reduction import CompressionSchedule
from closeranks.sync.compress.drift import CompressionDrift, error_and_cosine

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult


class CompressionQuality:
    """Call sequence: ``measure`` in every step or synchronisation, ``report`` when the host has read the step's result.

    ``plan`` None: nothing is compressed. ``emits``: True on the one rank that emits the events.
    """

    def __init__(
        self, plan: CompressionSchedule | None, group: ReduceGroup, device: torch.device, *, emits: bool
    ) -> None:
        self.plan, self._group, self._device, self._emits = plan, group, device, emits
        self._measured: dict[int, Tensor] = {}
        self._drift = CompressionDrift()

    def measure(self, number: int, step: int, read_errors: Callable[[], Sequence[Tensor]]) -> None:
        """``number``: the count that decides whether this one is sampled; ``step``: the step it is reported for."""
        if self.plan is None or not self.plan.is_sampled(number):
            return
        found = torch.zeros(4, dtype=torch.float64, device=self._device)
        for sums in read_errors():
            found += sums
        self._measured[step] = self._group.sum(found)

    def report(self, done: StepDone, emit: Callable[[Event], None]) -> None:
        """Called on all ranks. If the step was not taken, its measurement is discarded."""
        found = self._measured.pop(done.step, None)
        if found is None or not self._emits or not done.taken:
            return
        error, cosine = error_and_cosine(found.tolist())
        emit(Compressed(done.step, error, cosine))
        if warning := self._drift.observe(error, cosine):
            emit(Warned(warning, done.step))


class GradientCompressionQuality(Component):
    """Measures the compression of gradients, which happens in every step."""

    def __init__(self, quality: CompressionQuality, reducer: Reducer) -> None:
        self._quality, self._reducer = quality, reducer

    def after_vote(self, index: int, verdict: Verdict) -> None:
        self._quality.measure(index, index + 1, self._reducer.compression_errors)

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        self._quality.report(entry.done, emit)
