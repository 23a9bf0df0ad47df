"""One optimizer step, from its first micro-batch to its commit. New readers start here; docs/tour.md walks through it.

A step is open while its micro-batches run, in our loop or in the user's, and is then committed. Invariants: all
ranks take the step or none does; gradients are sums, scaled once by the weight of all ranks, so uneven batches and
accumulation are exact; randomness is keyed by (seed, step, micro-batch), never by what a process drew before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.core import phases
from closeranks.core.errors import UserError
from closeranks.core.protocols import Batch, Loss
from closeranks.core.requests import RunRequest
from closeranks.core.seeds import derive_seed
from closeranks.data.loading.batch_reader import LoadedBatch
from closeranks.data.sampling.order import MicroBatch
from closeranks.elastic.vote import Ballot, Verdict
from closeranks.models.losses import as_loss
from closeranks.optim.norms import norm_squared
from closeranks.run.step.engine import Engine
from closeranks.run.step.loss_sums import LossSums
from closeranks.run.step.pipeline_callbacks import MicroBatchCallbacks, explain_shape_errors
from closeranks.sync.local_sgd.sync_schedule import SyncSchedule


class Step:
    """One optimizer step in progress: ``run`` it, or iterate its batches and call ``backward`` on each loss."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine, self._model, context = engine, engine.model, engine.context
        self._timer, self._phases = context.step_timer, engine.components.phases
        self.index = index
        """Number of steps finished before this one."""
        self._assigned = engine.batches.assigned(index)
        self._loaded: Sequence[LoadedBatch] = ()
        self._num_taken = self._num_done = 0
        self._is_taken = self._is_committed = False
        self._scale = engine.loss_scale.scale / self._model.loss_divisor
        self._sums = LossSums(self._model.spec.metrics, context.device, reports_loss=context.reports_loss)
        for begin in self._phases["begin"]:
            begin(index)
        self._timer.begin(index + 1)

    def run(self) -> None:
        """Run all micro-batches with the job's own loss: one after the other, or by the pipeline's schedule."""
        model = self._model
        with explain_shape_errors(model):
            if model.pipeline is None:
                for batch in self:
                    self.backward(model.spec.loss(model.module, batch))
                return
            loaded = self._load()
            self._num_taken = len(loaded)
            if loaded:  # a short last step may leave a replica without work
                callbacks = MicroBatchCallbacks(
                    model, self._engine.reducer, self._timer, loaded, self._before_forward, self._scale_loss
                )
                model.pipeline.run(callbacks)
                self._timer.stop(len(loaded))
            self._num_done = self._num_taken

    def __iter__(self) -> Iterator[Batch]:
        """This rank's micro-batches. Autocast and the keyed RNG are in effect while the caller uses each one."""
        model = self._model
        if model.pipeline is not None:
            what = "a pipeline runs its micro-batches in the order of its schedule, not one by one"
            raise UserError(what, "Call step.run() instead of iterating over the step.", step=self.index + 1)
        for number, loaded in enumerate(self._load(), start=1):
            if self._is_cancelled():
                return
            self._before_forward(loaded.micro_batch)
            self._num_taken = number
            with model.precision.context(model.device):
                yield model.precision.cast(loaded.batch)
            if self._num_done != number:
                raise self._order_error("the next batch was taken before step.backward(loss)")

    def backward(self, loss: Loss | Tensor) -> None:
        """Add one micro-batch's gradients. A plain tensor counts as the mean over the micro-batch's samples."""
        if self._num_done + 1 != self._num_taken:
            raise self._order_error("step.backward(loss) was called without a batch")
        reducer = self._engine.reducer
        micro_batch = self._loaded[self._num_done].micro_batch
        scaled = self._scale_loss(micro_batch, loss)
        for before in self._phases["before_backward"]:
            before(micro_batch)
        with phases.phase(phases.BACKWARD), torch.autocast(self._model.device.type, enabled=False):
            reducer.begin_backward(is_last=self._num_taken == len(self._assigned))
            scaled.backward()
            reducer.end_backward()
        for after in self._phases["after_backward"]:
            after(self._sums.weight, self._scale)
        self._num_done += 1
        self._timer.micro_batch_done()
        if self._num_done == len(self._assigned):
            self._timer.stop(self._num_done)

    def commit(self, requests: Iterable[RunRequest] = ()) -> Verdict:
        """Collective. End the step, and pass this rank's ``requests`` to the vote. No host sync on an accelerator."""
        if self._num_done != len(self._assigned):
            what = f"step.backward(loss) was called {self._num_done} times for {len(self._assigned)} micro-batches"
            raise UserError(what, "Call it once for every batch that the step yields.", step=self.index + 1)
        engine, sums, timer = self._engine, self._sums, self._timer
        timer.enter_phase(WorkerPhase.REDUCE)
        engine.reducer.finish()
        norm = norm_squared(engine.reducer.primary_gradients(), engine.context.device)
        ballot = Ballot(sums.loss, sums.weight, norm, sums.metrics, frozenset(requests))
        timer.enter_phase(WorkerPhase.SNAPSHOT)
        for before in self._phases["before_vote"]:
            before(self.index, ballot)
        timer.enter_phase(WorkerPhase.VOTE)
        is_sync_step = engine.context.sync_schedule.is_sync_step(self.index + 1)
        verdict = engine.vote.cast(ballot, self._scale, is_sync_step=is_sync_step)  # the ONE small all-reduce
        timer.enter_phase(WorkerPhase.SNAPSHOT)
        for after in self._phases["after_vote"]:
            after(self.index, verdict)
        timer.enter_phase(WorkerPhase.UPDATE)
        for update in self._phases["update"]:
            update(self.index, verdict)
        for after in self._phases["after_update"]:
            after(self.index, verdict)
        for end in self._phases["end"]:
            end(self.index)
        timer.report_times()
        self._is_committed = True
        return verdict

    @property
    def is_underway(self) -> bool:
        """Whether batches have run whose gradients are not applied yet."""
        return self._num_taken > 0 and not self._is_committed

    def _load(self) -> Sequence[LoadedBatch]:
        """This rank's micro-batches, once."""
        if self._is_taken:
            what = "the micro-batches of this step are taken already: it was run or iterated before"
            raise UserError(what, "Call step.run() once, or iterate over the step once.", step=self.index + 1)
        self._is_taken = True
        self._timer.enter_phase(WorkerPhase.DATA)
        if self._is_cancelled():
            self._engine.batches.skip_step(self.index)
            return ()
        self._loaded = self._engine.batches.load_step(self.index, self._assigned)
        for loaded in self._phases["loaded"]:
            loaded(self.index, self._loaded)
        self._timer.start()
        return self._loaded

    def _is_cancelled(self) -> bool:
        """Whether the rest of this rank's micro-batches is left out, since nobody would count them."""
        if not any(cancels(self.index) for cancels in self._phases["cancels"]):
            return False
        self._assigned = self._assigned[: self._num_done]
        return True

    def _before_forward(self, micro_batch: MicroBatch, stage: int = 0) -> None:
        """Called before a micro-batch's forward in one of this rank's stages."""
        context = self._engine.context
        seed_generators(context.device, derive_seed(context.job.run.seed, "step", micro_batch.step, micro_batch.index))
        for before in self._phases["before_forward"]:
            before(micro_batch, stage)

    def _scale_loss(self, micro_batch: MicroBatch, loss: Loss | Tensor) -> Tensor:
        """Count a micro-batch's loss, and scale it for its backward; a padding micro-batch has no weight."""
        part = as_loss(loss, micro_batch.num_samples, self._model.spec.metrics)
        if micro_batch.is_padding:
            return part.total * 0.0
        self._sums.add(part)
        return part.total * self._scale if self._model.precision.scales_loss else part.total

    def _order_error(self, what: str) -> UserError:
        """The keyed RNG, autocast and the reduction belong to one batch at a time."""
        fix = "Call step.backward(loss) exactly once for each batch, before the next one is taken."
        return UserError(what, fix, step=self.index + 1)


def check_between_steps(sync_schedule: SyncSchedule, step: Step | None, num_done: int) -> None:
    """Refuse a collective action while a step is in progress or replicas differ. ``step``: the newest one."""
    if step is not None and step.is_underway:
        raise UserError("evaluate() or save() was called within a step", "Call it before the step's first batch.")
    why, fix = sync_schedule.refusal(num_done)
    if step is not None and why:
        raise UserError(f"evaluate() or save() was called {why}", fix, step=num_done)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators that this step can use. ``torch.manual_seed`` seeds every device, at 100x the cost."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
