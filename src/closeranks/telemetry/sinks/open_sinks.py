"""Opens the sinks that a job asks for, and closes them.

Invariant: what the user must fix (a token that is missing) ends the run before its first step, as long as nothing has
been trained; in a later generation it costs one sink.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.core.errors import UserError
from closeranks.core.events import Event, RunEnded, Warned
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.run_log.recorder import EventRecorder
from closeranks.telemetry.sinks import mlflow, otlp, prometheus, tensorboard, wandb
from closeranks.telemetry.sinks.sink import SINKS, Sink, SinkContext
from closeranks.telemetry.sinks.sink_thread import SinkThread, close_all

__all__ = ["SinkThreads", "mlflow", "open_sinks", "otlp", "prometheus", "tensorboard", "wandb"]

_CLOSE_S = 60.0
_HURRIED_CLOSE_S = 2.0
"""Where somebody waits: another generation that continues, or a scheduler that asked the run to stop."""


class SinkThreads:
    """The sinks of a run, each on a thread of its own."""

    def __init__(self, recorder: EventRecorder, sinks: list[Sink]) -> None:
        self._threads = [SinkThread(sink, recorder.emit) for sink in sinks]
        self._close_s = _HURRIED_CLOSE_S
        for thread in self._threads:
            recorder.add_sink(thread.handle)
        if self._threads:
            recorder.add_sink(self._watch)

    def close(self) -> None:
        close_all(self._threads, self._close_s)

    def _watch(self, event: Event) -> None:
        if isinstance(event, RunEnded) and event.reason in ("finished", "stopped"):
            self._close_s = _CLOSE_S


def open_sinks(recorder: EventRecorder, context: SinkContext, *, must_open: bool) -> SinkThreads:
    """``must_open``: raise what the user must fix, as before anything is trained."""
    return SinkThreads(recorder, list(_made(context, must_open=must_open)))


def _made(context: SinkContext, *, must_open: bool) -> Iterator[Sink]:
    for name in SINKS:
        if not is_on(context.config, name):
            continue
        try:
            yield SINKS[name](context)
        except UserError as error:
            if must_open:
                raise
            context.emit(Warned(f"telemetry.{name} is disabled until the run is started again: {error}"))


def is_on(config: TelemetryConfig, name: str) -> bool:
    table = getattr(config, name)
    return table if isinstance(table, bool) else table.is_on
