"""Connects the sinks that a job asks for to the events of rank 0.

Invariant: sinks are closed after the last event, and before the file that their warnings go to.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from closeranks.agent.detection.progress import WorkerPhase
from closeranks.run.builder.context import RunContext
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.sinks.open_sinks import open_sinks
from closeranks.telemetry.sinks.sink import SinkContext


def connect_sinks(recorder: EventRecorder, folder: Path, context: RunContext, stack: ExitStack) -> None:
    """``stack`` closes them, and the recorder."""
    stack.callback(recorder.close)
    if not context.world.is_lead:
        return
    settings = context.job.model_dump(mode="json")
    sinks = SinkContext(folder, context.job.telemetry, recorder.emit, settings)
    stack.callback(open_sinks(recorder, sinks, must_open=context.world.is_first_generation).close)
    # A sink may take a while to finish, which nobody should take for a hang.
    stack.callback(context.step_timer.enter_phase, WorkerPhase.END)
