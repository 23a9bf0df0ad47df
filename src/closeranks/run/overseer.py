"""How does a worker talk to whoever started it?

Under our agent there is a link; under torchrun, srun or plain Python there is nobody, and signals are all we hear.
Invariant: training code asks one object, and asking costs microseconds.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from closeranks.agent.link import Requests, WorkerLink


class Overseer(Protocol):
    def poll(self) -> Requests:
        """What is being asked of this run now; never waits."""
        ...

    def progress(self, step: int, phase: int) -> None:
        """Where this worker stands, readable from outside even after it died."""
        ...

    def send_event(self, event: dict[str, Any]) -> None: ...


class Alone:
    """Nobody started us but a shell or a scheduler: SIGTERM and SIGUSR1 ask for a drain."""

    def __init__(self, *, listen: bool = False) -> None:
        self._drain = False
        if listen:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGUSR1, self._on_signal)

    def poll(self) -> Requests:
        return Requests(drain=self._drain, save=self._drain)

    def progress(self, step: int, phase: int) -> None:
        return None

    def send_event(self, event: dict[str, Any]) -> None:
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._drain = True


class _Place:
    """What the worker's entry knows before any session is opened."""

    link: WorkerLink | None = None
    overseer: Overseer = Alone()
    folder: Path | None = None
    """Where whoever started us keeps its logs; the first session that names no folder writes there too."""


def settle_in(*, link: WorkerLink | None = None, overseer: Overseer | None = None, folder: Path | None = None) -> None:
    """Called once by the worker's entry."""
    _Place.link, _Place.folder = link, folder
    _Place.overseer = overseer or link or Alone()


def current_link() -> WorkerLink | None:
    return _Place.link


def current_overseer() -> Overseer:
    return _Place.overseer


def take_folder() -> Path | None:
    """The folder we were given, once: a script's second session gets one of its own."""
    folder, _Place.folder = _Place.folder, None
    return folder
