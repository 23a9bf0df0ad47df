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

    def note_compute_time(self, seconds: float, pipeline_rank: int = 0) -> None:
        """Report this worker's own compute time per micro-batch, of a step that is over."""
        ...

    def note_snapshot(self, step: int) -> None:
        """A copy of this step's state is sealed in memory."""
        ...

    def send_event(self, event: dict[str, Any]) -> None: ...


class StandaloneClient:
    """Used without an agent, when a shell or a scheduler started the process: requests are signals, once
    ``install_signal_handlers`` was called."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self._pending = PendingRequests()
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
        for number in _SIGNALS:
            if not is_sighup_ignored(number):
                signal.signal(number, self._on_signal)
        os.register_at_fork(after_in_child=_restore_default_handlers)

    def poll(self) -> frozenset[RunRequest]:
        return self._pending.take()

    def progress(self, step: int, phase: int) -> None:
        return None

    def micro_batch_done(self, *, counts: bool = True) -> None:
        return None

    def note_compute_time(self, seconds: float, pipeline_rank: int = 0) -> None:
        return None

    def note_snapshot(self, step: int) -> None:
        return None

    def send_event(self, event: dict[str, Any]) -> None:
        known = decode(event)
        if self._on_event is not None and known is not None:
            self._on_event(known)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._pending.add(SAVE)
            return
        self._pending.add(DRAIN)
        if number == signal.SIGHUP:
            self.end_reason = "disconnected"
        if number == signal.SIGINT:  # a second Ctrl-C interrupts at once
            self.end_reason = "interrupted"
            signal.signal(number, signal.default_int_handler)


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def _restore_default_handlers() -> None:
    """In a process forked by a worker: restore the default signal handlers, so that a signal ends it as usual."""
    for number in _SIGNALS:
        if not is_sighup_ignored(number):
            signal.signal(number, signal.SIG_DFL)


class _WorkerSetup:
    """What the worker's entry point knows before any session is opened."""

    link: WorkerLink | None = None
    agent_client: AgentClient | None = None
    snapshot_paths: SnapshotPaths = SnapshotPaths()
    folder: Path | None = None
    """The launcher's folder, with its logs; the first session that names no folder writes there too."""


def configure_worker(
    *,
    link: WorkerLink | None = None,
    agent_client: AgentClient | None = None,
    folder: Path | None = None,
    snapshot_paths: SnapshotPaths | None = None,
) -> None:
    """Called once by the worker's entry point. ``snapshot_paths``: of the snapshot memory, if no link provides them."""
    _WorkerSetup.link, _WorkerSetup.folder = link, folder
    _WorkerSetup.agent_client = agent_client or link
    if snapshot_paths is None and link is not None:
        snapshot_paths = SnapshotPaths(tuple(tuple(slots) for slots in link.snapshot_paths), link.world.local_rank)
    _WorkerSetup.snapshot_paths = snapshot_paths or SnapshotPaths()


def take_snapshot_paths() -> SnapshotPaths:
    """The snapshot memory for the next session of this process; empty if there is none."""
    paths = _WorkerSetup.snapshot_paths
    _WorkerSetup.snapshot_paths = replace(paths, run=paths.run + 1)
    return paths


def current_link() -> WorkerLink | None:
    return _WorkerSetup.link


def current_agent_client() -> AgentClient | None:
    """None in a script that none of our commands started."""
    return _WorkerSetup.agent_client


def take_folder() -> Path | None:
    """The launcher's folder, returned once: a script's second session gets a folder of its own."""
    folder, _WorkerSetup.folder = _WorkerSetup.folder, None
    return folder
