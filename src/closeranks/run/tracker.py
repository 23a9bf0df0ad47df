"""A hook that sends figures to an experiment tracker, from rank 0.

Invariant: a tracker that blocks does not hold up training, and one that fails does not end the run: one warning names
it, and it is not called again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from closeranks.core.events import Evaluated, Event, StepDone
from closeranks.run.hooks import Hook
from closeranks.telemetry.sinks.sink_thread import SinkThread

if TYPE_CHECKING:
    from closeranks.run.session import Session


class Tracker(Hook):
    """Override ``start``, ``log`` and ``end``; every ``every``-th step and all evaluations are logged, from rank 0.

    All three are called on one thread of the tracker's own, in this order, while training continues.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every

    def start(self, session: Session) -> None: ...

    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def end(self, session: Session) -> None: ...

    def on_start(self, session: Session) -> None:
        self._thread = None
        if session.world.is_lead:
            self._thread = SinkThread(_TrackerSink(self, session), session.recorder.emit, is_retried=False)

    def on_step(self, session: Session, step: StepDone) -> None:
        if self._thread is not None and step.step % self._every == 0:
            self._thread.handle(step)

    def on_eval(self, session: Session, result: Evaluated) -> None:
        if self._thread is not None:
            self._thread.handle(result)

    def on_end(self, session: Session) -> None:
        if self._thread is not None:
            self._thread.close()


class _TrackerSink:
    fix = ""

    def __init__(self, tracker: Tracker, session: Session) -> None:
        self._tracker, self._session = tracker, session
        self.name = f"the tracker {type(tracker).__qualname__}"

    def open(self) -> None:
        self._tracker.start(self._session)

    def handle(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case StepDone():
                    rate = event.items / event.seconds if event.seconds else 0.0
                    figures = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, "items_per_s": rate}
                    self._tracker.log({**figures, **event.metrics}, event.step)
                case Evaluated():
                    figures = {"loss": event.loss, **event.metrics}
                    self._tracker.log({f"eval/{name}": value for name, value in figures.items()}, event.step)

    def close(self) -> None:
        self._tracker.end(self._session)
