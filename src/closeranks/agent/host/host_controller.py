"""The host controller: carries out the leader's orders on a host, and reports to the leader what happens there.

The membership's ``Follower`` decides, ``LocalHost`` acts; this connects the two, for the leader's own host and for any
other. Invariants: a fault is reported once per generation, as soon as its root cause on this host is clear; a hang is
reported, not decided, because the workers may wait for one of another host; a generation is reported as fenced only
when its workers are gone, or after the kernel has had ``REAP_S`` to end them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from closeranks.agent.detection.hang import Hang
from closeranks.agent.detection.hang_monitor import HangMonitor
from closeranks.agent.detection.host_report import HostReport
from closeranks.agent.detection.progress import WorkerPhase, WorkerProgress
from closeranks.agent.detection.standstill.hang_report import encode_report
from closeranks.agent.host.local_host import LocalHost
from closeranks.agent.job.shutdown import CLEAR_S, REAP_S, REPORT_S
from closeranks.agent.launch_plan import AgentCallbacks
from closeranks.agent.membership.effects import (
    FollowerEffect,
    ForwardRequest,
    ForwardStore,
    JoinAccepted,
    KillWorkers,
    ParticipationEnded,
    SendMessage,
    StartWorkers,
)
from closeranks.agent.membership.follower import Follower, FollowerState
from closeranks.agent.membership.messages import (
    BeginGeneration,
    Envelope,
    HostNote,
    RankProgress,
    WorkerEvent,
    WorkerOutput,
)
from closeranks.core.world import World

_CHECK_SNAPSHOTS_S = 0.2
SIGTERM_EVENT = "told"
"""The event that a worker got a SIGTERM of its own."""


@dataclass(frozen=True, slots=True)
class LeaderLink:
    """Where messages to the leader go, and the callback for the end of the job."""

    send: Callable[[Envelope], None]
    on_end: Callable[[ParticipationEnded], None]


class HostController:
    """The controller of one host. Call ``tick`` after every iteration of the event loop; it returns when it must be
    called again."""

    def __init__(
        self,
        host: LocalHost,
        follower: Follower,
        hang_monitor: HangMonitor | None,
        leader_link: LeaderLink,
        *,
        is_leader: bool = False,
    ) -> None:
        """``hang_monitor`` None: the first fault ends the run. ``is_leader``: the leader is in this process."""
        self.host = host
        self._is_leader = is_leader
        self._follower = follower
        self._hang_monitor = hang_monitor
        self._leader_link = leader_link
        self._pending: BeginGeneration | None = None
        """The generation to start as soon as the zygote is ready."""
        self._has_reported_fault = self._has_reported_sigterm = False
        self._fenced_at = 0.0
        self._first_snapshot_step: int | None = None
        self._check_snapshots_at = 0.0
        """When to check next whether older snapshots can be freed."""
        self._is_alone = True
        """Whether all workers of the generation are on this host."""
        self._reported_hang: object = None
        """The suspects, step and phase of the hang that was last reported, and whether it was only a stall."""

    @property
    def callbacks(self) -> AgentCallbacks:
        """Callbacks that pass events, output and notes on to the leader."""
        follower = self._follower

        def relay(body: WorkerEvent | WorkerOutput | HostNote) -> None:
            self._do(follower.relay(body))

        return AgentCallbacks(
            on_event=lambda rank, event: relay(WorkerEvent(follower.generation, rank, event)),
            on_output=lambda rank, line: relay(WorkerOutput(follower.generation, rank, line)),
            on_note=lambda text: relay(HostNote(text)),
        )

    # --- the leader, and the connection to it

    def receive(self, envelope: Envelope) -> None:
        self._do(self._follower.handle(envelope, time.monotonic()))

    def on_connected(self) -> None:
        """There is a connection to the leader."""
        self._follower.on_connected(time.monotonic())

    def on_disconnected(self) -> None:
        """The connection to the leader has ended."""
        self._do(self._follower.on_disconnected(time.monotonic()))

    def abandon(self, reason: str) -> None:
        """The job has no leader any more."""
        self._do(self._follower.abandon(reason))

    def leave(self, reason: str) -> None:
        """This host was asked to leave the job."""
        self._do(self._follower.leave(reason))

    # --- what happens on this host

    def announce_store(self, address: str) -> None:
        """Rank 0 is on this host and has opened its store. A script opens one for each of its sessions: if all workers
        are on this host, as a script's are, the leader need not know."""
        if self._is_alone:
            self.host.announce_store(address)
        else:
            self._do(self._follower.on_store_opened(address))

    def tick(self, now: float) -> float | None:
        if self._is_leader and self._follower.is_joined:
            self._follower.lease_until = math.inf  # the leader is in this process, so it cannot be unreachable
        until = [self.host.tick(now), self._check(now)]
        due = self._follower.deadline(now)
        if due is not None and due <= now:  # progress is read only when a heartbeat is due
            self._do(self._follower.tick(now, self._progress(now)))
            due = self._follower.deadline(now)
        until.append(due)
        return min((at for at in until if at is not None), default=None)

    def _check(self, now: float) -> float | None:
        host, state = self.host, self._follower.state
        if self._pending is not None:
            if host.is_ready:
                self._start(self._pending)
            elif host.error is not None:
                self._report_fault(now)
            return None
        if state == FollowerState.KILLING:
            return self._check_fenced(now)
        if state != FollowerState.WORKING:
            return None
        status = host.group_status
        if host.error is not None:
            self._report_fault(now)
        elif status.failed_at is not None:
            wait_s = CLEAR_S if status.has_silent_death and self._hang_monitor is not None else REPORT_S
            if status.all_reported or now >= status.failed_at + wait_s:
                self._report_fault(now)
                return None
            return status.failed_at + wait_s
        elif status.num_left == 0:
            self._end_output()
            self._do(self._follower.on_workers_done(self._host_report().to_fields(now)))
        else:
            return self._check_workers(now)
        return None

    def _check_workers(self, now: float) -> float | None:
        signalled = next((worker for worker in self.host.workers if worker.got_sigterm), None)
        if signalled is not None and not self._has_reported_sigterm:
            self._has_reported_sigterm = True
            self._do(
                self._follower.relay(
                    WorkerEvent(self._follower.generation, signalled.world.rank, {"event": SIGTERM_EVENT})
                )
            )
        if self._hang_monitor is None or self._has_reported_fault:
            return None
        if now >= self._check_snapshots_at:
            self._check_snapshots_at = now + _CHECK_SNAPSHOTS_S
            self._check_snapshots()
        check = self._hang_monitor.check(self.host.workers, now)
        if check.hang is not None:
            self._report_hang(self._hang_monitor, check.hang, is_stall=check.is_stall)
        return check.next_at

    def _report_hang(self, hang_monitor: HangMonitor, hang: Hang, *, is_stall: bool) -> None:
        """Report a hang, once for each (suspects, step, phase): the leader knows the other hosts' workers, and
        decides."""
        key = (hang.suspects, hang.step, hang.phase, is_stall)
        if key != self._reported_hang:
            self._reported_hang = key
            report = replace(hang_monitor.examine(hang, self.host.workers), is_stall=is_stall)
            fields = encode_report(report, time.monotonic())
            self._do(self._follower.relay(WorkerEvent(self._follower.generation, hang.suspects[0], fields)))

    def _check_snapshots(self) -> None:
        """Free the snapshots of earlier generations once all ranks have voted since their first snapshot."""
        progress = [worker.progress for worker in self.host.workers]
        if self._first_snapshot_step is None:
            steps = [one.snapshot_step for one in progress if one.snapshot_step is not None]
            self._first_snapshot_step = max(steps) if len(steps) == len(progress) else None
        elif all(one.step is not None and one.step >= self._first_snapshot_step + 2 for one in progress):
            self.host.drop_old_snapshots()
            self._check_snapshots_at = math.inf

    def _check_fenced(self, now: float) -> float | None:
        if self.host.group_status.num_left and now < self._fenced_at + REAP_S:
            return self._fenced_at + REAP_S
        self._end_output()
        report = self._host_report().to_fields(now)
        self._note_survivors()
        if self.host.error is not None and self.host.was_ready:
            self.host.restart_zygote()
        self._do(self._follower.on_fenced(report, now))
        return None

    def _end_output(self) -> None:
        for worker in self.host.workers:
            worker.finish_output()

    def _note_survivors(self) -> None:
        for worker in self.host.workers:
            if not worker.is_over:
                who = f"Rank {worker.world.rank} (process {worker.pid})"
                why = "it hangs in the kernel, perhaps in a device driver or a network file system"
                text = f"{who} was killed but has not ended within {REAP_S:g} s: {why}."
                self._do(self._follower.relay(HostNote(text)))

    def _report_fault(self, now: float) -> None:
        if not self._has_reported_fault:
            self._has_reported_fault = True
            self._do(self._follower.on_worker_failed(self._host_report().to_fields(now)))

    def _host_report(self) -> HostReport:
        host, group, now = self.host, self.host.worker_group, time.monotonic()
        has_failed = any(worker.failed_at is not None for worker in host.workers)
        return HostReport(
            workers=tuple(host.worker_reports()),
            num_oom_kills=group.num_oom_kills if group else 0,
            zygote=str(host.error) if host.error else "",
            evidence=tuple(worker.evidence(now) for worker in host.workers) if has_failed else (),
        )

    def _progress(self, now: float) -> list[RankProgress]:
        return [_row(worker.world.rank, worker.progress, now) for worker in self.host.workers]

    # --- effects of the follower

    def _do(self, effects: list[FollowerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(envelope):
                    self._leader_link.send(envelope)
                case StartWorkers(begin):
                    self._pending = begin
                    self._has_reported_fault = self._has_reported_sigterm = False
                case ForwardStore(address):
                    self.host.announce_store(address)
                case ForwardRequest(worker_request):
                    for worker in self.host.workers:  # each reads it at its next step
                        worker.send({"type": "request", "request": worker_request.request.kind})
                case KillWorkers():
                    self._kill()
                case ParticipationEnded():
                    self._leader_link.on_end(effect)
                case JoinAccepted():
                    pass

    def _start(self, begin: BeginGeneration) -> None:
        self._pending = self._first_snapshot_step = self._reported_hang = None
        self._check_snapshots_at = 0.0
        self._is_alone = len(begin.per_host) == 1
        if self._hang_monitor is not None:
            self._hang_monitor.begin()
        self.host.start_workers(worlds_of(begin), begin.payload)

    def _kill(self) -> None:
        self._fenced_at = time.monotonic()
        if self._pending is not None:
            self._pending = None
            self.host.close_workers()
        self.host.fence()


def worlds_of(begin: BeginGeneration) -> list[World]:
    """The worlds of one host's workers, in rank order."""
    hosts = begin.hosts if len(begin.per_host) > 1 else ()
    return [
        World(
            rank,
            begin.world_size,
            local_rank=number,
            local_size=begin.num_workers,
            launcher="agent",
            generation=begin.generation,
            hosts=hosts,
        )
        for number, rank in enumerate(begin.ranks)
    ]


def progress_from_row(row: RankProgress, now: float) -> WorkerProgress:
    """A worker's progress, decoded from its host's last heartbeat."""
    return WorkerProgress(
        step=None if row.step < 0 else row.step,
        phase=WorkerPhase(row.phase),
        at=now - row.age_s,
        micro_batches_done=row.micro_batches_done,
        compute_sum_s=row.compute_sum_s,
        num_timed=row.num_timed,
        pipeline_rank=row.pipeline_rank,
    )


def _row(rank: int, progress: WorkerProgress, now: float) -> RankProgress:
    return RankProgress(
        rank=rank,
        step=-1 if progress.step is None else progress.step,
        phase=int(progress.phase),
        age_s=max(0.0, now - progress.at),
        micro_batches_done=progress.micro_batches_done,
        snapshot_step=-1 if progress.snapshot_step is None else progress.snapshot_step,
        compute_sum_s=progress.compute_sum_s,
        num_timed=progress.num_timed,
        pipeline_rank=progress.pipeline_rank,
    )
