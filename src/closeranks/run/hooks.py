"""How does a user take part in a run without touching its loop?

Call sequence, by the session on every rank alike: ``on_start`` once; ``on_step`` after each step is settled (on an
accelerator one step late, so that nothing waits for it); ``on_eval`` after each evaluation; ``on_end`` once, also after
a failure. A hook may call ``session.stop(reason)``: all ranks then stop together at the end of a following step.

Invariant: what a hook raises ends the run with the hook's name in the error; it is never swallowed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from closeranks.core.events import Evaluated, StepDone

if TYPE_CHECKING:
    from pathlib import Path

    from closeranks.run.session import Session


class Hook:
    """Subclass it and override what you need; every method does nothing by default."""

    def on_start(self, session: Session) -> None: ...

    def on_step(self, session: Session, step: StepDone) -> None: ...

    def on_eval(self, session: Session, result: Evaluated) -> None: ...

    def on_end(self, session: Session) -> None: ...


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
        value = result.loss if self._metric == "loss" else result.metrics[self._metric]
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
        from closeranks.telemetry.tensorboard import TensorBoardSink  # an extra: imported where it is asked for

        sink = TensorBoardSink(self._folder or session.folder / "tensorboard")
        session.recorder.add_sink(sink.handle)
        self._sink = sink

    def on_end(self, session: Session) -> None:
        if session.world.is_lead:
            self._sink.close()
