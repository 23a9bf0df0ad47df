"""Begins the captures of a session's state: snapshots in memory for recovery, checkpoints in storage, and one pass for
both when they are due at the same step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from closeranks.capture.capture import Capture, CaptureTarget
from closeranks.capture.plan import num_digest_threads
from closeranks.core.events import Event
from closeranks.run.component import Component
from closeranks.run.context import Context
from closeranks.run.keeping import Keeping
from closeranks.run.overseer import Overseer
from closeranks.run.restoring import TakenOver
from closeranks.run.saving import Saving
from closeranks.run.state import State


class Copies(Component):
    def __init__(
        self, context: Context, state: State, taken: TakenOver, emit: Callable[[Event], None], overseer: Overseer
    ) -> None:
        self._state = state
        self._capture = Capture(num_digest_threads(context.world.local_size))
        self.saving = Saving(context, state, self._capture, taken.folder, emit, taken.origin)
        self.keeping = Keeping(context, state, self._capture, taken, emit, overseer, self.saving.rhythm_state)

    def are_due(self, step: int) -> bool:
        """Whether ``take`` will copy the state of this step."""
        return self.saving.is_granted or self.keeping.is_due(step)

    def take(self, step: int) -> None:
        """Called after a commit, once nothing else changes the state before the next step."""
        targets: list[CaptureTarget] = [*self.saving.proceed(step), *self.keeping.after(step)]
        if targets:
            self._capture.begin(self._state.tensors(), targets)

    def before_evaluation(self) -> None:
        self._capture.wait_until_copied()

    def close(self) -> None:
        """Closes all of them, even if one raises."""
        with ExitStack() as closing:
            closing.callback(self.keeping.close)
            closing.callback(self.saving.close)
            closing.callback(self._capture.close)
