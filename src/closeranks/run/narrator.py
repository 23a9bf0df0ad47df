"""Who tells the person what happens in a script that no command of ours started? The session itself, on rank 0.

Invariant: under plain ``python``, torchrun or srun a script shows the same lines and leaves the same page as the
command line does; tests' worlds stay silent.
"""

from __future__ import annotations

from pathlib import Path

from closeranks.core.events import Event, RunEnded, encode
from closeranks.core.world import World
from closeranks.run.overseer import Alone, Overseer, current_overseer
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.pages import write_pages
from closeranks.telemetry.progress import Progress
from closeranks.telemetry.recorder import Recorder


def overseen(recorder: Recorder, folder: Path, telemetry: TelemetryConfig, world: World) -> Overseer:
    """Whoever oversees this session: an agent, a launcher, or itself. It hears what rank 0 records."""
    overseer = current_overseer() or narrate(folder, telemetry, world)
    if world.is_lead:
        recorder.add_sink(lambda event: overseer.send_event(encode(event)))
    return overseer


def narrate(folder: Path, telemetry: TelemetryConfig, world: World) -> Overseer:
    """The overseer of a session that nobody oversees."""
    if world.launcher == "testing" or not world.is_lead:
        return Alone()
    return Alone(_Narrator(folder, telemetry).handle)


class _Narrator:
    def __init__(self, folder: Path, telemetry: TelemetryConfig) -> None:
        self._folder, self._telemetry = folder, telemetry
        self._progress = Progress(log_every=telemetry.log_every)

    def handle(self, event: Event) -> None:
        self._progress.handle(event)
        if not isinstance(event, RunEnded):
            return
        self._progress.close()
        if self._telemetry.report:
            write_pages(self._folder, self._progress.note, is_script=True, draws_beside=True)
