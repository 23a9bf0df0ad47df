"""Prints progress and writes the report, on rank 0, in a script that none of our commands started.

Invariant: under plain ``python``, torchrun or srun a script prints the same lines and writes the same pages as the
command line does; the worlds of tests print nothing.
"""

from __future__ import annotations

from pathlib import Path

from closeranks.core.events import Event, RunEnded, encode
from closeranks.core.world import World
from closeranks.facts.prices import load_prices
from closeranks.run.diagnosis import findings_section
from closeranks.run.worker.agent_client import AgentClient, StandaloneClient, current_agent_client
from closeranks.telemetry.config import TelemetryConfig
from closeranks.telemetry.goodput.loss_target import tell_target
from closeranks.telemetry.live.progress import ProgressDisplay
from closeranks.telemetry.reports.pages import write_pages
from closeranks.telemetry.run_log.recorder import EventRecorder


def connect_agent_client(
    recorder: EventRecorder, folder: Path, telemetry: TelemetryConfig, world: World
) -> AgentClient:
    """The agent client of this session: that of an agent or a launcher, or a standalone one. It receives the events
    that rank 0 records."""
    client = current_agent_client() or standalone_client(folder, telemetry, world)
    if world.is_lead:
        recorder.add_sink(lambda event: client.send_event(encode(event)))
    return client


def standalone_client(folder: Path, telemetry: TelemetryConfig, world: World) -> AgentClient:
    """The client of a session without an agent."""
    if world.launcher == "testing" or not world.is_lead:
        return StandaloneClient()
    return StandaloneClient(_ProgressOutput(folder, telemetry).handle)


class _ProgressOutput:
    def __init__(self, folder: Path, telemetry: TelemetryConfig) -> None:
        self._folder, self._telemetry = folder, telemetry
        self._progress = ProgressDisplay(log_every=telemetry.log_every, prices=load_prices(telemetry.prices))

    def handle(self, event: Event) -> None:
        self._progress.handle(event)
        if not isinstance(event, RunEnded):
            return
        self._progress.close()
        tell_target(self._folder, self._progress.print_line)
        if self._telemetry.report:
            write_pages(
                self._folder, self._progress.print_line, is_script=True, findings=findings_section, in_thread=True
            )
