"""Begins the captures of a session's state: snapshots in memory for recovery, checkpoints in storage, and one pass for
both when they are due at the same step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from closeranks.capture.capture import Capture, CaptureTarget
from closeranks.capture.capture_plan import num_digest_threads
from closeranks.core.events import Event
from closeranks.run.builder.context import RunContext
from closeranks.run.components.component import Component
from closeranks.run.state.restore import RestoredGeneration
from closeranks.run.state.session_checkpoints import SessionCheckpoints
from closeranks.run.state.session_snapshots import SessionSnapshots
from closeranks.run.state.state import RunState
from closeranks.run.worker.agent_client import AgentClient


class StateCapture(Component):
    def __init__(
        self,
        context: RunContext,
        state: RunState,
        restored: RestoredGeneration,
        emit: Callable[[Event], None],
        agent_client: AgentClient,
    ) -> None:
        self._state = state
        self._capture = Capture(num_digest_threads(context.world.local_size))
        self.checkpoints = SessionCheckpoints(
            context, state, self._capture, restored.folder, emit, restored.start_point
        )
        self.snapshots = SessionSnapshots(
            context, state, self._capture, restored, emit, agent_client, self.checkpoints.schedule_state
        )

    def are_due(self, step: int) -> bool:
        """Whether ``take`` will copy the state of this step."""
        return self.checkpoints.is_save_granted or self.snapshots.is_due(step)

    def take(self, step: int) -> None:
        """Called after a commit, once nothing else changes the state before the next step."""
        targets: list[CaptureTarget] = [*self.checkpoints.begin_save(step), *self.snapshots.after_step(step)]
        if targets:
            self._capture.begin(self._state.tensors(), targets)

    def before_evaluation(self) -> None:
        self._capture.wait_until_copied()

    def close(self) -> None:
        """Closes all of them, even if one raises."""
        with ExitStack() as closing:
            closing.callback(self.snapshots.close)
            closing.callback(self.checkpoints.close)
            closing.callback(self._capture.close)
