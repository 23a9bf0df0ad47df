"""Tells whether a run may still be training, for those who wait for something from it.

The agent's status says so where there is an agent; without one only the events of rank 0 do, and a run that was killed
looks like one that is slow. Reads a status file and the end of one metrics file, however long the run is.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from closeranks.core.events import RunEnded, RunStarted
from closeranks.core.system.regular_file import open_binary
from closeranks.telemetry.live.status import RunStatus, StatusFreshness, is_alive, read_status, status_freshness
from closeranks.telemetry.run_log.recorder import parse_line
from closeranks.telemetry.run_log.run_folder import RunFolder

_TAIL_BYTES = 1 << 16
_LATER_S = 10.0
"""Events so much later than the last status are not of the same run."""


@dataclass(frozen=True, slots=True)
class LastEvents:
    """The end of a metrics file."""

    ended: str = ""
    """The reason of the last run in it, if that has ended."""
    at: float = 0.0
    """When the last event was written."""


class RunWatch:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def generation(self) -> int:
        """0 without an agent."""
        status = read_status(self._folder)
        return 0 if status is None else status.generation

    @property
    def step(self) -> str:
        """In words; empty where it is not known."""
        status = read_status(self._folder)
        return "" if status is None else f"step {status.step} of {status.num_steps}"

    def ending(self) -> str:
        """How the run ended, in words; empty if it may be training."""
        status = read_status(self._folder)
        heard = None if status is None else status_freshness(status, time.time(), is_alive(status.writer))
        return ending(status, heard, last_events(RunFolder(self._folder).metrics(0)))


def ending(status: RunStatus | None, heard: StatusFreshness | None, last: LastEvents) -> str:
    """A run without an agent may have continued one with an agent: the later record counts."""
    ended = f"has ended ({last.ended})" if last.ended else ""
    if status is None or last.at > status.at + _LATER_S:
        return ended
    if heard is StatusFreshness.ENDED:
        return f"has ended ({status.state})"
    if heard is StatusFreshness.GONE:
        return "is not training: its agent is gone, and did not record how the run ended"
    return ""


def last_events(path: Path) -> LastEvents:
    ended, at = "", 0.0
    for line in _last_lines(path):
        values = parse_line(line) or {}
        at = max(at, float(values.get("at", 0.0)))
        if values.get("event") == RunStarted.name:
            ended = ""
        elif values.get("event") == RunEnded.name:
            ended = str(values.get("reason"))
    return LastEvents(ended, at)


def _last_lines(path: Path) -> list[bytes]:
    try:
        with open_binary(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
