"""The client with which a worker talks to its agent, and the standalone one that replaces it.

Under our agent there is a link to it; under torchrun, srun or plain Python there is no agent, and requests arrive as
signals only. Invariant: training code calls one object, and a call costs microseconds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from closeranks.agent.host.signals import is_sighup_ignored
from closeranks.agent.workers.worker_link import WorkerLink
from closeranks.core.events import Event, decode
from closeranks.core.requests import DRAIN, SAVE, PendingRequests, RunRequest
from closeranks.elastic.snapshot_paths import SnapshotPaths


class AgentClient(Protocol):
    has_regrouped: bool
    """Set when this generation ended by agreement, for another to continue."""

    def poll(self) -> frozenset[RunRequest]:
        """The requests to this run that are pending now; never blocks."""
        ...

    def progress(self, step: int, phase: int) -> None:
        """Publish the worker's step and phase, which stay readable from outside even after it died."""
        ...

    def micro_batch_done(self, *, counts: bool = True) -> None:
        """A heartbeat: one more micro-batch of the step is done."""
        ...

    def note_compute_time(self, seconds: float, lane: int = 0) -> None:
        """Report this worker's own compute time per micro-batch, of a step that is over."""
        ...

    def note_snapshot(self, step: int) -> None:
        """A copy of this step's state is sealed in memory."""
        ...

    def send_event(self, event: dict[str, Any]) -> None: ...


class StandaloneClient:
    """Used without an agent, when a shell or a scheduler started the process: requests are signals, once ``listen`` was
    called."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._asked = PendingRequests()
        self.end_reason = "drained"
        """Why a drain was requested: ``drained`` by a scheduler, ``interrupted`` by Ctrl-C, ``disconnected`` by the
        loss of the terminal."""
        self._on_event = on_event
        self.has_regrouped = False

    def install_signal_handlers(self) -> None:
        """Install signal handlers: SIGTERM, SIGHUP and a first SIGINT request a drain, SIGUSR1 a save.

        Called when training is about to start: before that there is nothing to save and a signal should end the process
        at once, even while torch waits for other ranks, which no Python handler can interrupt.
        """
        for number in _HEARD:
            if not is_sighup_ignored(number):
                signal.signal(number, self._on_signal)
        os.register_at_fork(after_in_child=_be_ordinary)

    def poll(self) -> frozenset[RunRequest]:
        return self._asked.take()

    def progress(self, step: int, phase: int) -> None:
        return None

    def micro_batch_done(self, *, counts: bool = True) -> None:
        return None

    def note_compute_time(self, seconds: float, lane: int = 0) -> None:
        return None

    def note_snapshot(self, step: int) -> None:
        return None

    def send_event(self, event: dict[str, Any]) -> None:
        known = decode(event)
        if self._on_event is not None and known is not None:
            self._on_event(known)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._asked.add(SAVE)
            return
        self._asked.add(DRAIN)
        if number == signal.SIGHUP:
            self.end_reason = "disconnected"
        if number == signal.SIGINT:  # a second Ctrl-C interrupts at once
            self.end_reason = "interrupted"
            signal.signal(number, signal.default_int_handler)


_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def _be_ordinary() -> None:
    """In a process forked by a worker: restore the default signal handlers, so that a signal ends it as usual."""
    for number in _HEARD:
        if not is_sighup_ignored(number):
            signal.signal(number, signal.SIG_DFL)


class _Place:
    """What the worker's entry point knows before any session is opened."""

    link: WorkerLink | None = None
    overseer: AgentClient | None = None
    shelf: SnapshotPaths = SnapshotPaths()
    folder: Path | None = None
    """The launcher's folder, with its logs; the first session that names no folder writes there too."""


def configure_worker(
    *,
    link: WorkerLink | None = None,
    overseer: AgentClient | None = None,
    folder: Path | None = None,
    shelf: SnapshotPaths | None = None,
) -> None:
    """Called once by the worker's entry point. ``shelf``: paths of the snapshot memory, if no link provides them."""
    _Place.link, _Place.folder = link, folder
    _Place.overseer = overseer or link
    if shelf is None and link is not None:
        shelf = SnapshotPaths(tuple(tuple(box) for box in link.snapshot_paths), link.world.local_rank)
    _Place.shelf = shelf or SnapshotPaths()


def take_snapshot_paths() -> SnapshotPaths:
    """The snapshot memory for the next session of this process; empty if there is none."""
    shelf, _Place.shelf = _Place.shelf, replace(_Place.shelf, run=_Place.shelf.run + 1)
    return shelf


def current_link() -> WorkerLink | None:
    return _Place.link


def current_agent_client() -> AgentClient | None:
    """None in a script that none of our commands started."""
    return _Place.overseer


def take_folder() -> Path | None:
    """The launcher's folder, returned once: a script's second session gets a folder of its own."""
    folder, _Place.folder = _Place.folder, None
    return folder
