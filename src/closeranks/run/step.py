"""What is one optimizer step? Visitors start here; docs/tour.md walks through it.

A step is open while its micro-batches run, in our loop or in the user's own, and is then committed. Invariants: all
ranks take the step or none does; gradients are sums, scaled once by the weight of all ranks, so uneven batches and
accumulation are exact; randomness is keyed by (seed, step, micro-batch), never by what a process drew before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from closeranks.core.errors import UserError
from closeranks.core.keys import derive_seed
from closeranks.core.protocols import Batch, Loss
from closeranks.elastic.vote import Ballot, Verdict
from closeranks.models.losses import as_loss
from closeranks.optim.norms import norm_squared
from closeranks.run.parts import Parts


class Step:
    """One optimizer step in progress: iterate its batches, call ``backward`` on each loss."""

    def __init__(self, parts: Parts, index: int) -> None:
        self._parts = parts
        self.index = index
        """Number of steps finished before this one."""
        self._num_due = len(parts.schedule.assigned(index, parts.group.rank, parts.group.size))
        self._num_taken = self._num_done = 0
        self._is_committed = False
        self._num_samples = 0
        self._scale = parts.loss_scale.scale / parts.loss_divisor
        zero = torch.zeros((), dtype=torch.float64, device=parts.device)
        self._loss, self._weight = zero.clone(), zero.clone()
        self._metrics = {name: zero.clone() for name in parts.spec.metrics}
        parts.statistics.begin()

    def __iter__(self) -> Iterator[Batch]:
        """This rank's micro-batches. Autocast and the keyed random stream hold while the caller uses each one."""
        parts = self._parts
        for number, loaded in enumerate(parts.loader.take(self.index), start=1):
            self._num_samples = loaded.micro_batch.last - loaded.micro_batch.first
            seed_streams(parts.device, derive_seed(parts.job.run.seed, "step", self.index, loaded.micro_batch.index))
            parts.statistics.next()
            if number == self._num_due:
                parts.reducer.arm()  # gradients travel during the last backward only
            self._num_taken = number
            with parts.precision.context(parts.device):
                yield parts.precision.cast(loaded.batch)
            if self._num_done != number:
                raise self._out_of_turn("the next batch was taken")

    def backward(self, loss: Loss | Tensor) -> None:
        """Add one micro-batch's gradients. A plain tensor counts as the mean over the micro-batch's samples."""
        if self._num_done + 1 != self._num_taken:
            raise self._out_of_turn("step.backward(loss) was called again")
        part = as_loss(loss, self._num_samples, self._parts.spec.metrics)
        scaled = part.total * self._scale if self._parts.precision.scales_loss else part.total
        with torch.autocast(self._parts.device.type, enabled=False):
            scaled.backward()
        self._loss += part.total.detach()
        self._weight += part.weight
        for name, value in part.metrics.items():
            self._metrics[name] += value.detach() if isinstance(value, Tensor) else value
        self._num_done += 1

    def commit(self, *, drain: bool = False, save: bool = False) -> Verdict:
        """End the step on all ranks together. No host sync on an accelerator."""
        if self._num_done != self._num_due:
            what = f"step.backward(loss) was called {self._num_done} times for {self._num_due} micro-batches"
            raise UserError(what, "Call it once for every batch that the step yields.", step=self.index + 1)
        parts = self._parts
        parts.reducer.finish()
        gradients = parts.reducer.gradients()
        ballot = Ballot(self._loss, self._weight, norm_squared(gradients), self._metrics, drain, save)
        verdict = parts.vote.cast(ballot, self._scale)  # the ONE small all-reduce
        parts.optimizer.step(self.index, gradients, verdict.factor, verdict.taken)
        parts.loss_scale.update(verdict.taken)
        parts.statistics.finish(verdict.taken)
        parts.reducer.release()
        self._is_committed = True
        return verdict

    @property
    def is_underway(self) -> bool:
        """Whether batches have run whose gradients are not applied yet."""
        return self._num_taken > 0 and not self._is_committed

    def _out_of_turn(self, what: str) -> UserError:
        """Random streams, autocast and the reduction belong to one batch at a time."""
        fix = "Call step.backward(loss) exactly once for each batch, before the next one is taken."
        return UserError(f"{what} out of turn", fix, step=self.index + 1)


def seed_streams(device: torch.device, seed: int) -> None:
    """Key the streams this step can draw from. ``torch.manual_seed`` asks for every device, at 100x the cost."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
