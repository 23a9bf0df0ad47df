"""Measures the gradient noise scale during training, from gradient norms at two batch sizes that a step has anyway.

The big batch is the global batch, whose norm is part of the vote. The small one is the first micro-batch of each data
rank: on measured steps a hook of ours sees each gradient as autograd leaves it, before the reducer's own hook takes it
away, so nothing is computed twice. Two numbers are then summed over the data ranks.

Invariants: our hooks are registered before the reducer's, hence called first; nothing waits for the device (its sums
are read when the step is settled); all ranks hold the same averages, which are part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from closeranks.core.events import Event, NoiseSeen
from closeranks.core.protocols import ReduceGroup
from closeranks.data.sampling.batch_schedule import BatchSchedule, MicroBatch
from closeranks.elastic.vote import Verdict
from closeranks.optim.noise_scale import NoiseMeasurement, NoiseScaleAverages
from closeranks.optim.norms import norm_squared
from closeranks.run.components.component import Component
from closeranks.run.state.saved_state import SavedState

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult


@dataclass(frozen=True, slots=True)
class _Sums:
    """The sum of the small batches' squared norms and their number, being copied to the host."""

    values: Tensor
    event: torch.cuda.Event | None

    @classmethod
    def send(cls, values: Tensor) -> _Sums:
        if not values.is_cuda:
            return cls(values, None)
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def read(self) -> tuple[float, float]:
        """Sync point on CUDA, with a step that is already over."""
        if self.event is not None:
            self.event.synchronize()
        total, number = self.values.tolist()
        return total, number


class GradientNoiseScale(Component):
    """Measures the first backward of every ``every``-th step; with 0 it does nothing."""

    def __init__(
        self,
        every: int,
        parameters: Iterable[nn.Parameter],
        schedule: BatchSchedule,
        group: ReduceGroup,
        device: torch.device,
    ) -> None:
        self._every, self._schedule, self._group, self._device = every, schedule, group, device
        self._averages = NoiseScaleAverages()
        self._squares: dict[Tensor, Tensor] | None = None
        """By parameter, while the first backward of a measured step runs."""
        self._awaits_first = False
        self._own: Tensor | None = None
        self._sent: dict[int, _Sums] = {}
        for parameter in parameters if every else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self, index: int) -> None:
        self._awaits_first = self._is_due(index)

    def before_backward(self, micro_batch: MicroBatch) -> None:
        """A short or padding micro-batch is not measured: it does not have the small batch's size."""
        is_whole = not micro_batch.is_padding and micro_batch.num_samples == self._schedule.micro_batch
        if self._awaits_first and is_whole:
            self._squares = {}
        self._awaits_first = False

    def after_backward(self, weight: Tensor, scale: Tensor) -> None:
        if self._squares is None:
            return
        squares, self._squares = self._squares, None
        one = torch.ones((), dtype=torch.float64, device=self._device)
        total = torch.stack(list(squares.values())).sum() if squares else torch.zeros_like(one)
        self._own = torch.stack([total / (weight * scale.double()).square(), one])

    def after_vote(self, index: int, verdict: Verdict) -> None:
        """Collective in the steps that are measured."""
        if self._is_due(index):
            own = torch.zeros(2, dtype=torch.float64, device=self._device) if self._own is None else self._own
            self._own = None
            self._sent[index + 1] = _Sums.send(self._group.sum(own))

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        done = entry.done
        sums = self._sent.pop(done.step, None)
        if sums is None or not done.taken:
            return
        total, number = sums.read()
        small, batch = self._schedule.micro_batch, self._schedule.global_batch
        is_whole = self._schedule.position(done.step) - self._schedule.position(done.step - 1) == batch
        if not number or not is_whole:  # a short last step is no measure of the run's batch
            return
        self._averages = self._averages.add(NoiseMeasurement(small, batch, total / number, done.grad_norm**2))
        emit(NoiseSeen(done.step, self._averages.scale, batch))

    def tree(self) -> dict[str, Any]:
        """Empty if nothing is measured."""
        return {"noise": self._averages.state() if self._every else {}}

    def restore(self, saved: SavedState) -> None:
        """If the saved run did not measure, start with empty averages."""
        if self._every and (state := saved.tree.get("noise")):
            self._averages = NoiseScaleAverages.of_state(state)

    def _is_due(self, index: int) -> bool:
        return self._every > 0 and (index + 1) % self._every == 0

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._squares is not None and parameter.grad is not None:
            self._squares[parameter] = norm_squared([parameter.grad])  # a second call in one backward has all of it
