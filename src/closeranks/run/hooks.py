"""Hooks: callbacks with which a user observes and controls a run without changing its loop.

Call sequence, by the session on every rank: ``on_start`` once; ``on_step`` after each step is settled (on an
accelerator one step late, so that nothing waits for it); ``on_eval`` after each evaluation; ``on_end`` once, also after
a failure, if ``on_start`` returned. A hook may call ``session.stop(reason)``: all ranks then stop together at
the end of a following step.

Invariant: what a hook raises ends the run with the hook's name in the error; it is never swallowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from closeranks.agent.detection.failure import is_consequence
from closeranks.agent.detection.progress import WorkerPhase
from closeranks.core.errors import CloseranksError, UserError
from closeranks.core.events import Evaluated, StepDone
from closeranks.core.registry import did_you_mean
from closeranks.core.tracebacks import describe_error

if TYPE_CHECKING:
    from pathlib import Path

    from closeranks.run.session import Session


class Hook:
    """Subclass it and override what you need; every method does nothing by default."""

    def on_start(self, session: Session) -> None: ...

    def on_step(self, session: Session, step: StepDone) -> None: ...

    def on_eval(self, session: Session, result: Evaluated) -> None: ...

    def on_end(self, session: Session) -> None: ...


class Hooks:
    """All hooks of a run, called in order. ``on_end`` is called in reverse, on each of them even if another raises."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = tuple(hooks)
        self._ends = ExitStack()

    def on_start(self, session: Session) -> None:
        for hook in self._hooks:
            _call(hook, "on_start", session)
            self._ends.callback(_call, hook, "on_end", session)

    def on_step(self, session: Session, step: StepDone) -> None:
        for hook in self._hooks:
            _call(hook, "on_step", session, step)

    def on_eval(self, session: Session, result: Evaluated) -> None:
        for hook in self._hooks:
            _call(hook, "on_eval", session, result)

    def on_end(self, session: Session) -> None:
        self._ends.close()


def _call(hook: Hook, method: str, session: Session, *arguments: Any) -> None:
    """Errors that the hook did not cause (a lost peer, an error of ours with its own advice) are raised unchanged."""
    try:
        with session.context.step_timer.in_phase(WorkerPhase.HOOK):
            getattr(hook, method)(session, *arguments)
    except Exception as error:
        if isinstance(error, CloseranksError) or is_consequence(error):
            raise
        what = f"the hook {type(hook).__qualname__} raised in {method}: {describe_error(error)}"
        raise UserError(what, "Fix the hook.") from error


class EarlyStop(Hook):
    """Stop when an evaluation figure has not improved for ``patience`` evaluations in a row."""

    def __init__(
        self, metric: str = "loss", patience: int = 3, *, maximise: bool = False, min_delta: float = 0.0
    ) -> None:
        self._metric, self._patience, self._min_delta = metric, patience, min_delta
        self._sign = -1.0 if maximise else 1.0
        self._best = math.inf
        self._num_bad = 0

    def on_eval(self, session: Session, result: Evaluated) -> None:
        figures = {**result.metrics, "loss": result.loss}
        if self._metric not in figures:
            what = f"EarlyStop watches '{self._metric}', which the evaluation does not report"
            raise UserError(what, did_you_mean(self._metric, figures))
        value = figures[self._metric]
        if self._sign * value < self._best - self._min_delta:
            self._best, self._num_bad = self._sign * value, 0
            return
        self._num_bad += 1
        if self._num_bad >= self._patience:
            session.stop(f"{self._metric} has not improved for {self._patience} evaluations")


class TensorBoard(Hook):
    """Write scalars that TensorBoard reads, from rank 0, into ``tensorboard/`` of the run folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def on_start(self, session: Session) -> None:
        if not session.world.is_lead:
            return
        from closeranks.telemetry.sinks.sink_thread import SinkThread
        from closeranks.telemetry.sinks.tensorboard import TensorBoardSink

        emit = session.recorder.emit
        self._thread = SinkThread(TensorBoardSink(self._folder or session.folder, emit), emit)
        self._thread.handle(session.started_event())  # it was emitted before the sink existed
        session.recorder.add_sink(self._thread.handle)

    def on_end(self, session: Session) -> None:
        if session.world.is_lead:
            self._thread.close()
