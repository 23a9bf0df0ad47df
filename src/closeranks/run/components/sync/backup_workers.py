"""Backup workers, as a component: whose gradients a step takes, what becomes of the others' samples, and the bias.

``sync.server.backup`` decides whose push a step takes; ``data.sampling.returned`` says who computes the dropped
samples again. This component tells each of the two what the other knows, adds what was dropped and taken to the ballot,
and reports it.

Invariants: all ranks settle the same steps with the same decisions, in order; a sample is counted as taken only if the
sum of gradients has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from closeranks.core.errors import ConfigError, Problem
from closeranks.core.events import Event, PushesDropped
from closeranks.core.protocols import Reducer
from closeranks.elastic.local_sgd_vote import BackupVote
from closeranks.elastic.vote import Ballot, Verdict
from closeranks.optim.optimizer import Optimizer
from closeranks.parallel.process_group import RankGroup
from closeranks.run.builder.context import RunContext
from closeranks.run.components.batches import Batches
from closeranks.run.components.model import Model
from closeranks.run.components.sync.parameter_servers import ParameterServers
from closeranks.run.state.saved_state import SavedState
from closeranks.sync.server.backup import BackupBallots, BackupReducer
from closeranks.sync.server.decisions import Expected

if TYPE_CHECKING:
    from closeranks.run.step.step_results import StepResult

_NAME = "backup"


class BackupWorkers(ParameterServers):
    """[Note: what a step took] On the ballot, with n workers: n flags of who was dropped and n counts of samples taken,
    then the weight and the number of samples that an earlier step had returned."""

    def __init__(
        self,
        context: RunContext,
        model: Model,
        reducer: Reducer,
        optimizer: Optimizer,
        owners: RankGroup,
        batches: Batches,
    ) -> None:
        assert batches.returned is not None
        self._batches, self._returned = batches, batches.returned
        self._backup = cast(BackupReducer, reducer)
        self._backup.expected = self._expected
        super().__init__(context, model, reducer, optimizer, owners)
        self._num_workers = self._roles.num_workers
        self._num_returned = self._num_returned_samples = 0
        self._returned_weight: Tensor | None = None
        self._totals = [0.0] * (2 * self._num_workers + 3)
        """Of [Note: what a step took] over the run, then the weight of all samples taken."""
        steps = range(context.schedule.num_steps)
        if len(steps) > 1 and all(map(self._returned.must_take_all, steps)):
            what = "every step ends an epoch, and a step that does so waits for all workers: no sample may be missing"
            raise ConfigError([Problem("sync.server.backup", what, "Set it to 0, or lower train.global_batch.")])

    def begin(self, index: int) -> None:
        worker = self._batches.worker
        own = () if worker is None else self._returned.assigned(index, worker)
        self._num_returned, self._returned_weight = len(own), None
        self._num_returned_samples = sum(one.num_samples for one in own)

    def cancels(self, index: int) -> bool:
        return self._backup.is_decided

    def after_backward(self, weight: Tensor, scale: Tensor) -> None:
        """Returned micro-batches come first: ``weight`` is theirs after the last of them."""
        if self._num_returned:
            self._num_returned -= 1
            self._returned_weight = weight.clone()

    def before_vote(self, index: int, ballot: Ballot) -> None:
        num, worker = self._num_workers, self._batches.worker
        row = torch.zeros(2 * num + 2, dtype=torch.float64)
        if self._server == 0:
            busy, taken = self._returned.busy(index), self._backup.decision.taken
            row[[one for one in busy if one not in taken]] = 1.0
        elif worker is not None:
            row[num + worker] = self._returned.num_samples(index, worker)
            if self._returned_weight is not None:
                row[2 * num], row[2 * num + 1] = self._returned_weight, self._num_returned_samples
        ballot.extra[_NAME] = row

    def after_vote(self, index: int, verdict: Verdict) -> None:
        self._batches.settle(index, self._backup.decision.taken)

    def voted_figures(self, extra: Mapping[str, Sequence[float]]) -> Mapping[str, Any]:
        flags = extra[_NAME][: self._num_workers]
        return {"dropped": [worker for worker, flag in enumerate(flags) if flag]}

    def settled(self, entry: StepResult, emit: Callable[[Event], None]) -> None:
        numbers = (*entry.extra[_NAME], entry.done.weight)
        self._totals = [total + number for total, number in zip(self._totals, numbers, strict=True)]

    def ended(self, num_done: int, emit: Callable[[Event], None]) -> None:
        if self._context.world.is_lead and num_done:
            emit(self.report(num_done))

    def report(self, step: int) -> PushesDropped:
        num = self._num_workers
        dropped, samples, (returned_weight, returned, weight) = (
            self._totals[:num],
            self._totals[num : 2 * num],
            self._totals[2 * num :],
        )
        mean = weight / (sum(samples) or 1.0)
        return PushesDropped(
            step=step,
            dropped=[round(count) for count in dropped],
            samples=[round(count) for count in samples],
            returned=round(returned),
            returned_weight=round(returned_weight / returned / mean, 6) if returned and mean else 1.0,
            waiting=sum(one.num_samples for one in self._returned.waiting),
        )

    def tree(self) -> Mapping[str, Any]:
        return {_NAME: {"totals": self._totals}}

    def restore(self, saved: SavedState) -> None:
        """Counts by worker start anew with another number of workers."""
        state = saved.tree.get(_NAME)
        totals = state.get("totals", ()) if isinstance(state, dict) else ()
        if len(totals) == len(self._totals):
            self._totals = [float(total) for total in totals]

    def _expected(self, step: int) -> Expected:
        workers = self._returned.busy(step)
        num_late = 0 if self._returned.must_take_all(step) else self._config.backup
        return Expected(workers, min(len(workers), max(1, len(workers) - num_late)))

    def _make_vote(self, metrics: Sequence[str], owners: RankGroup) -> BackupVote:
        backup = self._backup
        backup.ballots = BackupBallots(backup, owners)
        vote = BackupVote(backup.ballots, self._context.groups.world, metrics, **self._vote_options)
        worker = self._batches.worker
        vote.is_dropped = lambda: worker is not None and worker not in backup.decision.taken
        return vote
