"""The session of a training run: builds the run, yields its steps, settles their results and closes everything.

Our own loop and a user's loop iterate the same steps. A session connects the parts of a run; it does no arithmetic.
Invariant: every way out (finished, drained, stopped, failed) passes through ``close``, which may be called twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from torch import nn

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.core.errors import UserError
from closeranks.core.events import Evaluated, RunStarted, StepDone, Warned
from closeranks.core.protocols import Batch, Loss
from closeranks.core.requests import SAVE
from closeranks.core.system.environment import detect_world
from closeranks.run.builder.build import build
from closeranks.run.builder.run_definition import RunDefinition, from_job, from_python, make_hooks
from closeranks.run.builder.shared_setup import SharedSetup
from closeranks.run.components.step_traces import StepTraces
from closeranks.run.hooks import Hook, Hooks
from closeranks.run.job.job import Job
from closeranks.run.job.run_folder import record_job
from closeranks.run.result import Result
from closeranks.run.session_end import FINISHED, SessionEnd
from closeranks.run.state.restore import restore_generation
from closeranks.run.state.state_capture import StateCapture
from closeranks.run.step.evaluate import evaluate
from closeranks.run.step.garbage_collection import GarbageCollection
from closeranks.run.step.pipeline_callbacks import compute_loss
from closeranks.run.step.step import Step, check_between_steps
from closeranks.run.step.step_results import StepResult, StepResults
from closeranks.run.worker.agent_client import take_snapshot_paths
from closeranks.run.worker.metric_sinks import connect_sinks
from closeranks.run.worker.process_setup import prepare_process, started_event
from closeranks.run.worker.progress_output import connect_agent_client
from closeranks.telemetry.run_log.recorder import EventRecorder


class Session:
    """One training run in this process; ``for step in session`` yields steps until the job is done.

    ``model`` is a module or a function that makes one, ``data`` any dataset with a length and an index; ``collate``
    makes a batch from a list of samples; ``metrics`` names the sums in a ``Loss`` beside the loss. Tables of the job
    are given by name: ``train={"steps": 200, "global_batch": 32}``, ``optim={"lr": 3e-4}``.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        loss: Any = None,
        *,
        eval_data: Any = None,
        hooks: Sequence[Hook] = (),
        metrics: Sequence[str] = (),
        collate: Any = None,
        **tables: Any,
    ) -> None:
        self._open(from_python(model, data, loss, eval_data, metrics, collate, tables), hooks, None)

    @classmethod
    def from_job(cls, job: Job, folder: Path | None = None, hooks: Sequence[Hook] = ()) -> Self:
        """A session for a job that names its model and data. ``folder``: the run folder that the launcher prepared."""
        session = cls.__new__(cls)
        session._open(from_job(job), hooks, folder)
        return session

    def _open(self, definition: RunDefinition, hooks: Sequence[Hook], folder: Path | None) -> None:
        self.job, self.world = definition.job, detect_world()
        prepare_process(self.job, self.world)
        with ExitStack() as stack:  # if opening fails half-way, everything is closed again
            setup = SharedSetup(self.job, self.world, stack, folder)
            self._built = build(self.job, self.world, definition.load_inputs(), setup.batch_history)
            self.engine, self.state, self.context = self._built.engine, self._built.state, self._built.engine.context
            stack.callback(self.context.world_group.close)
            self.job, self.folder = self.context.job, setup.folder(self.context.groups.world)
            self.recorder = EventRecorder(self.folder, self.world.rank, must_open=self.world.is_first_generation)
            self._emit = self.recorder.emit
            connect_sinks(self.recorder, self.folder, self.context, stack)
            self._set_up(hooks)
            self._stack = stack.pop_all()
        closers = (self.engine.batches.close, self._gc.enable, self._emit_end)
        for close in (*closers, self._capture.close, self._end_hooks):
            self._stack.callback(close)

    def _set_up(self, hooks: Sequence[Hook]) -> None:
        self._client = connect_agent_client(self.recorder, self.folder, self.job.telemetry, self.world)
        self._hooks = Hooks([*hooks, *make_hooks(self.job)])
        self._gc = GarbageCollection(self.job.train.gc_every)
        self._end = SessionEnd()
        self._is_begun = self._is_entered = False
        self._step: Step | None = None
        self._last: StepDone | None = None
        self._eval: Evaluated | None = None
        restored = restore_generation(self.engine, self.state, self.folder, take_snapshot_paths())
        self.num_done = restored.start_point.step
        """Steps finished so far, those before a resume included."""
        self._capture = StateCapture(self.context, self.state, restored, self._emit, self._client)
        self.engine.components.add(self._capture.checkpoints, self._capture.snapshots, self._capture)
        self.engine.components.add(StepTraces(self.context, self.folder, self._emit))
        self._results = StepResults(self.engine)

    @property
    def model(self) -> nn.Module:
        return self.engine.model.module

    @property
    def _can_evaluate(self) -> bool:
        return self._built.eval_source is not None and not self._end

    def loss(self, batch: Batch) -> Loss:
        """The job's own loss of one micro-batch."""
        return compute_loss(self.engine.model, batch)

    def started_event(self) -> RunStarted:
        """The event that describes the run when it starts."""
        return started_event(self.engine, self._built.started_fields, self.num_done, self.folder)

    def stop(self, reason: str) -> None:
        """Ask for an early end: all ranks stop together at the end of a following step, and the state is saved."""
        self._end.request_stop(reason)

    def evaluate(self) -> Evaluated:
        """Evaluate the model on held-out data; every rank must call it."""
        self._pause(WorkerPhase.EVALUATE)
        self._eval = evaluate(self.engine, self._built.eval_source, self.num_done)
        self._emit(self._eval)
        self._capture.checkpoints.on_eval(self._eval)
        self._hooks.on_eval(self, self._eval)
        self._results.restart_clock()
        return self._eval

    def save(self, place: Path | str | None = None) -> str:
        """Write a checkpoint to ``place``, or among the run's own, and wait for its commit; every rank must call it."""
        self._pause(WorkerPhase.SAVE)
        path = self._capture.checkpoints.save_now(self.num_done, place, is_hurried=self._end.reason == "drained")
        self._results.restart_clock()
        return path

    @property
    def result(self) -> Result:
        loss, reason = self._last.loss if self._last else float("nan"), self._end.reason or FINISHED
        return Result(self.num_done, loss, self._eval, self.folder, reason, self._end.detail)

    def __iter__(self) -> Iterator[Step]:
        if self._is_begun:
            raise UserError("this session has run already", "Open a new Session, with checkpoint.resume to continue.")
        try:
            self._begin()
            while self.num_done < self.context.schedule.num_steps and not self._end:
                step = self._step = Step(self.engine, self.num_done)
                yield step
                self._commit(step)
            self._conclude()
        except GeneratorExit:  # the user's loop left early or raised: only a surrounding `with` knows which
            self._end.mark_loop_exit()
            raise
        except BaseException as error:
            self._end.mark_failed(error)
            raise
        finally:
            if not self._is_entered:
                self.close()

    def _begin(self) -> None:
        self._is_begun = True
        if self.world.is_lead and (problem := record_job(self.job, self.folder, must=self.world.is_first_generation)):
            self._emit(Warned(problem))
        self._emit(self.started_event())
        self._capture.snapshots.emit_start_events(self._built.warnings)
        self.model.train()
        self._hooks.on_start(self)
        self.engine.batches.start(self.num_done, self.folder, self._emit, must_log=self.world.is_first_generation)
        self._gc.disable()
        self._capture.snapshots.start(self.num_done)
        self._results.restart_clock()

    def _commit(self, step: Step) -> None:
        verdict = step.commit(self._client.poll() | self._end.requests())
        self.num_done += 1
        self._note(self._results.push(step.index, verdict))
        self._gc.run(self.num_done)
        if self.context.sync_schedule.is_due(self.num_done, self.job.train.eval_every) and self._can_evaluate:
            self.evaluate()
        if self._capture.are_due(self.num_done):
            self._note(self._results.flush())  # the saved state must list every skipped sample
        self._capture.take(self.num_done)  # after the evaluation, so that a restored run need not repeat it

    def _pause(self, phase: WorkerPhase) -> None:
        """Called before anything but training: checks that no step is in progress, and reads every verdict."""
        check_between_steps(self.context.sync_schedule, self._step, self.num_done)
        self._note(self._results.flush())
        self.context.step_timer.enter_phase(phase)

    def _note(self, settled: Iterable[StepResult]) -> None:
        for entry in settled:
            self._last = entry.done
            self._emit(entry.done)
            for on_settled in self.engine.components.phases["settled"]:
                on_settled(entry, self._emit)
            self._hooks.on_step(self, entry.done)
            if entry.requests and self.num_done < self.context.schedule.num_steps:  # the end saves anyway
                self._end.apply_requests(entry.requests)
                if SAVE in entry.requests and not self._end:
                    self._capture.checkpoints.grant_save()

    def _conclude(self) -> None:
        """Saves before it evaluates, so that bad evaluation data does not cost the state; with ``keep_best`` evaluates
        first, as the checkpoint is saved with its loss."""
        self._note(self._results.flush())
        if self._end.is_regrouped:
            self._capture.snapshots.hand_over(self.num_done, self.save)
            return
        actions: list[Callable[[], object]] = [self.save] if self.job.checkpoint.save else []
        has_evaluated = self._eval is not None and self._eval.step == self.num_done
        if self._can_evaluate and not has_evaluated:
            actions.insert(0 if self.job.checkpoint.keep_best else len(actions), self.evaluate)
        for action in actions:
            action()

    def close(self) -> None:
        """Release threads, files and the group, all of them even if one raises. May be called again."""
        self._stack.close()

    def _end_hooks(self) -> None:
        with self._end.keep_first_error(self._emit):
            self._hooks.on_end(self)

    def _emit_end(self) -> None:
        for ended in self.engine.components.phases["ended"]:
            ended(self.num_done, self._emit)
        if not self._end.is_regrouped:
            self._emit(self._end.ended_event(self.num_done))

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._end.mark_failed(error)
        self.close()
