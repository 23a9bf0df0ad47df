"""Keeps the status file of a run up to date, for others to read.

Receives every event, and the agent's view of the job at each of its ticks. Invariant: cheap enough for every tick (the
file is composed only when it is due), and no error here can end the run. Imports no torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.agent.detection.progress import PHASE_WORDS
from closeranks.agent.job_view import JobView, WorkerView
from closeranks.core.events import (
    Evaluated,
    Event,
    HostChanged,
    PushesDropped,
    RankLost,
    RanksClosed,
    RunStarted,
    Saved,
    SaveFailed,
    SharesChanged,
    SlowRank,
    Snapshotting,
    Standstill,
    StepDone,
    Warned,
)
from closeranks.telemetry.goodput.live_account import LiveAccount
from closeranks.telemetry.goodput.loss_target import continued_watch
from closeranks.telemetry.live import event_lines
from closeranks.telemetry.live.status import (
    HostStatus,
    RunStatus,
    StatusEvent,
    StatusWriter,
    WorkerStatus,
    read_status,
    resident_bytes,
    this_process,
)
from closeranks.telemetry.live.throughput import MeterReading, ThroughputMeter
from closeranks.telemetry.run_log.run_folder import RunFolder

if TYPE_CHECKING:
    from closeranks.agent.job.job_controller import OnTick

_EVENTS_KEPT = 8
_HELD_S = 60.0


class StatusUpdater:
    """Call sequence: ``handle`` for each event of rank 0 and of the agent, ``update`` at every tick, ``finish`` once.

    If the folder holds the status of an earlier part of the run, it is kept until this part has started: a run that is
    refused leaves it unchanged.
    """

    def __init__(self, folder: Path, on_problem: Callable[[str], None] | None = None) -> None:
        self._on_problem = on_problem
        self._writer = StatusWriter(folder, on_problem=on_problem)
        self._folder = folder
        self._began_at = time.time()
        self._self = this_process()
        self._num_steps = self._step = self._snapshot_every = self._num_before = 0
        self._lost: RankLost | None = None
        self._happened: deque[StatusEvent] = deque(maxlen=_EVENTS_KEPT)
        self._view = JobView(0.0, "starting", 0, 0, (), (), (), 0)
        self._is_held = RunFolder(folder).status.exists()
        self._started = RunStarted()
        self._meter = ThroughputMeter(self._started)
        self._reading: MeterReading | None = None
        self._continue(folder)

    def _continue(self, folder: Path) -> None:
        """Continue the account and the target of earlier commands in this folder."""
        before = read_status(folder)
        self._account = LiveAccount(before.account, before.step) if before is not None else LiveAccount()
        self._target = continued_watch(folder, before.target if before is not None else None)

    def set_folder(self, folder: Path) -> None:
        """A script's session writes to another folder than the one that was prepared."""
        if folder != self._folder:
            if not self._is_held:
                with suppress(OSError):
                    RunFolder(self._folder).status.unlink(missing_ok=True)
            self._folder, self._writer = folder, StatusWriter(folder, on_problem=self._on_problem)
            self._continue(folder)

    def handle(self, event: Event) -> None:
        self._account.add(time.time(), event)
        if self._target.add(event, self._account.account) and (reached := self._target.target) is not None:
            self._note(f"loss {reached.loss:.5g} in {reached.of} at step {reached.step}: the target is reached")
        match event:
            case RunStarted():
                self._begin(event)
            case StepDone():
                self._step, self._reading = event.step, self._meter.observe(event)
            case Evaluated():
                self._meter.pause(event.seconds)
            case Saved():
                self._meter.pause(event.stall_s)
            case Snapshotting():
                self._snapshot_every = event.every
            case RankLost():
                self._note_lost_rank()
                self._lost, self._num_before = event, self._view.world_size
            case RanksClosed():
                lost, self._lost = self._lost, None
                if lost is not None:
                    self._meter.lose(lost.detected_s + event.seconds)
                    self._note(event_lines.closed_line(lost, event, self._num_before or event.world_size))
            case PushesDropped() if any(event.dropped):
                self._note(event_lines.dropped_line(event))
            case SharesChanged():
                self._note(event_lines.shares_line(event))
            case SlowRank():
                self._note(event_lines.slow_line(event))
            case Standstill():
                self._note(event_lines.standstill_lines(event)[0])
            case HostChanged():
                self._note(event_lines.host_line(event))
            case SaveFailed():
                self._note(event_lines.save_failed_line(event))
            case Warned():
                self._note(event_lines.warned_line(event))

    def _begin(self, started: RunStarted) -> None:
        self._is_held = False
        self._num_steps, self._step = started.last_step, started.first_step
        if started.generation:
            self._meter.start_generation(started)
        else:
            self._meter = ThroughputMeter(started)
        self._started = started

    def update(self, view: JobView) -> float:
        """One tick of the agent; returns when, on the monotonic clock, the next one is needed at the latest."""
        self._view = view
        if not self._is_held and self._writer.is_due(view.generation, view.state):
            self._writer.write(self.status(view.state))
        return self._writer.next_at if not self._is_held else view.now + _HELD_S

    def chained_with(self, other: OnTick | None) -> OnTick:
        """Calls both at every tick, ``other`` first; the earlier of the two times counts."""

        def tick(view: JobView) -> float:
            wanted = other(view) if other is not None else None
            own = self.update(view)
            return own if wanted is None else min(own, wanted)

        return tick

    def finish(self, state: str) -> None:
        """Write the last status. ``state``: how the run ended."""
        self._note_lost_rank()
        if not self._is_held:
            self._writer.write(self.status(state))

    def status(self, state: str) -> RunStatus:
        view, now = self._view, time.time()
        happened = tuple(self._happened)
        if self._lost is not None:
            happened = (*happened, StatusEvent(now, event_lines.closing_line(self._lost)))
        return RunStatus(
            run=str(self._folder),
            state=state,
            writer=self._self,
            began_at=self._began_at,
            at=now,
            generation=view.generation,
            world_size=view.world_size,
            step=self._step,
            num_steps=self._num_steps,
            workers=tuple(
                _worker(one) for one in sorted((*view.local_workers, *view.remote_workers), key=lambda one: one.rank)
            ),
            hosts=tuple(HostStatus(host.name, host.num_workers, host.state) for host in view.hosts),
            happened=happened,
            snapshot_every=self._snapshot_every,
            snapshot_bytes=view.snapshot_bytes,
            device=self._started.device if self._started.last_step else "",
            item=self._started.item,
            eta_s=self._reading.eta_s if self._reading else None,
            eta_error_s=self._reading.eta_error_s if self._reading else None,
            account=self._account.account(),
            target=self._target.target,
        )

    def _note(self, text: str) -> None:
        self._happened.append(StatusEvent(time.time(), text))

    def _note_lost_rank(self) -> None:
        """Note a lost rank from which the run has not recovered."""
        lost, self._lost = self._lost, None
        if lost is not None:
            self._note(event_lines.lost_words(lost))


def _worker(worker: WorkerView) -> WorkerStatus:
    progress = worker.progress
    return WorkerStatus(
        rank=worker.rank,
        host=worker.host,
        pid=worker.pid,
        step=progress.step,
        phase=PHASE_WORDS[progress.phase],
        own_s=progress.compute_s,
        memory_bytes=resident_bytes(worker.pid),
    )
