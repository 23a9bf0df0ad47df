"""A hook that sends figures to an experiment tracker, from rank 0.

Invariant: a tracker that fails does not end the run: one warning names it, and it is not called again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from closeranks.core.events import Evaluated, StepDone, Warned
from closeranks.core.tracebacks import describe_error
from closeranks.run.hooks import Hook

if TYPE_CHECKING:
    from closeranks.run.session import Session


class Tracker(Hook):
    """Override ``start``, ``log`` and ``end``; every ``every``-th step and all evaluations are logged, from rank 0."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._has_failed = False

    def start(self, session: Session) -> None: ...

    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def end(self, session: Session) -> None: ...

    def on_start(self, session: Session) -> None:
        self._try(session, lambda: self.start(session))

    def on_step(self, session: Session, step: StepDone) -> None:
        if step.step % self._every == 0:
            rate = step.items / step.seconds if step.seconds else 0.0
            figures = {"loss": step.loss, "lr": step.lr, "grad_norm": step.grad_norm, "items_per_s": rate}
            self._try(session, lambda: self.log({**figures, **step.metrics}, step.step))

    def on_eval(self, session: Session, result: Evaluated) -> None:
        figures = {"loss": result.loss, **result.metrics}
        self._try(session, lambda: self.log({f"eval/{name}": value for name, value in figures.items()}, result.step))

    def on_end(self, session: Session) -> None:
        self._try(session, lambda: self.end(session))

    def _try(self, session: Session, act: Callable[[], None]) -> None:
        if self._has_failed or not session.world.is_lead:
            return
        try:
            act()
        except Exception as error:
            self._has_failed = True
            what = f"the tracker {type(self).__qualname__} is disabled for the rest of the run: {describe_error(error)}"
            session.recorder.emit(Warned(what, session.num_done or None))
