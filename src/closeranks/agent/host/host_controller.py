"""The host controller: carries out the leader's orders on a host, and reports to the leader what happens there.

The membership's ``Follower`` decides, ``Host`` acts; this connects the two, for the leader's own host and for any
other. Invariants: a fault is reported once per generation, as soon as its root cause on this host is clear; a hang is
reported, not decided, because the workers may wait for one of another host; a generation is reported as fenced only
when its workers are gone, or after the kernel has had ``REAP_S`` to end them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from closeranks.agent.detection.hang import Hang
from closeranks.agent.detection.hang_monitor import HangMonitor
from closeranks.agent.detection.hang_reports import encode_hang
from closeranks.agent.detection.host_report import HostReport
from closeranks.agent.detection.progress import WorkerPhase, WorkerProgress
from closeranks.agent.host.local_host import LocalHost
from closeranks.agent.job.shutdown import CLEAR_S, REAP_S, TELL_S
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

_BOXES_S = 0.2
SIGTERM_EVENT = "told"
"""The event that a worker got a SIGTERM of its own."""


@dataclass(frozen=True, slots=True)
class LeaderLink:
    """Where messages to the leader go, and the callback for the end of the job."""

    send: Callable[[Envelope], None]
    on_end: Callable[[ParticipationEnded], None]


class HostController:
    """The controller of one host. Call ``turn`` after every iteration of the event loop; it returns when it must be
    called again."""

    def __init__(
        self,
        host: LocalHost,
        follower: Follower,
        attention: HangMonitor | None,
        mail: LeaderLink,
        *,
        is_lead: bool = False,
    ) -> None:
        """``attention`` None: the first fault ends the run. ``is_lead``: the leader is in this process."""
        self.host = host
        self._is_lead = is_lead
        self._follower = follower
        self._attention = attention
        self._mail = mail
        self._pending: BeginGeneration | None = None
        """The generation to start as soon as the zygote is ready."""
        self._has_told_fault = self._has_told_leaving = False
        self._fenced_at = 0.0
        self._first_kept: int | None = None
        self._boxes_at = 0.0
        """When to check next whether older snapshots can be freed."""
        self._is_alone = True
        """Whether all workers of the generation are on this host."""
        self._claimed: object = None
        """The suspects, step and phase of the hang that was last reported."""

    @property
    def callbacks(self) -> AgentCallbacks:
        """Callbacks that pass events, output and notes on to the leader."""
        follower = self._follower

        def tell(body: WorkerEvent | WorkerOutput | HostNote) -> None:
            self._do(follower.relay(body))

        return AgentCallbacks(
            on_event=lambda rank, event: tell(WorkerEvent(follower.generation, rank, event)),
            on_output=lambda rank, line: tell(WorkerOutput(follower.generation, rank, line)),
            on_note=lambda text: tell(HostNote(text)),
        )

    # --- the leader, and the connection to it

    def receive(self, letter: Envelope) -> None:
        self._do(self._follower.handle(letter, time.monotonic()))

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
        if self._is_lead and self._follower.is_joined:
            self._follower.lease_until = math.inf  # the leader is in this process, so it cannot be unreachable
        until = [self.host.tick(now), self._look(now)]
        due = self._follower.deadline(now)
        if due is not None and due <= now:  # progress is read only when a heartbeat is due
            self._do(self._follower.tick(now, self._progress(now)))
            due = self._follower.deadline(now)
        until.append(due)
        return min((at for at in until if at is not None), default=None)

    def _look(self, now: float) -> float | None:
        host, work = self.host, self._follower.state
        if self._pending is not None:
            if host.is_ready:
                self._start(self._pending)
            elif host.error is not None:
                self._tell_fault(now)
            return None
        if work == FollowerState.KILLING:
            return self._mind_end(now)
        if work != FollowerState.WORKING:
            return None
        condition = host.group_status
        if host.error is not None:
            self._tell_fault(now)
        elif condition.failed_at is not None:
            tell_s = CLEAR_S if condition.has_silent_death and self._attention is not None else TELL_S
            if condition.all_reported or now >= condition.failed_at + tell_s:
                self._tell_fault(now)
                return None
            return condition.failed_at + tell_s
        elif condition.num_left == 0:
            self._end_output()
            self._do(self._follower.on_workers_done(self._statement().to_fields(now)))
        else:
            return self._mind_living(now)
        return None

    def _mind_living(self, now: float) -> float | None:
        told = next((member for member in self.host.workers if member.got_sigterm), None)
        if told is not None and not self._has_told_leaving:
            self._has_told_leaving = True
            self._do(
                self._follower.relay(WorkerEvent(self._follower.generation, told.world.rank, {"event": SIGTERM_EVENT}))
            )
        if self._attention is None or self._has_told_fault:
            return None
        if now >= self._boxes_at:
            self._boxes_at = now + _BOXES_S
            self._mind_boxes()
        noticed = self._attention.check(self.host.workers, now)
        if noticed.hang is not None:
            self._claim(self._attention, noticed.hang)
        return noticed.next_at

    def _claim(self, attention: HangMonitor, still: Hang) -> None:
        """Report a hang, once for each (suspects, step, phase): the leader knows the other hosts' workers, and
        decides."""
        place = (still.suspects, still.step, still.phase)
        if place != self._claimed:
            self._claimed = place
            fields = encode_hang(attention.narrow_suspects(still, self.host.workers), time.monotonic())
            self._do(self._follower.relay(WorkerEvent(self._follower.generation, still.suspects[0], fields)))

    def _mind_boxes(self) -> None:
        """Free the snapshots of earlier generations once all ranks have voted since their first snapshot."""
        words = [member.progress for member in self.host.workers]
        if self._first_kept is None:
            kept = [word.snapshot_step for word in words if word.snapshot_step is not None]
            self._first_kept = max(kept) if len(kept) == len(words) else None
        elif all(word.step is not None and word.step >= self._first_kept + 2 for word in words):
            self.host.drop_old_snapshots()
            self._boxes_at = math.inf

    def _mind_end(self, now: float) -> float | None:
        if self.host.group_status.num_left and now < self._fenced_at + REAP_S:
            return self._fenced_at + REAP_S
        self._end_output()
        statement = self._statement().to_fields(now)
        self._tell_of_survivors()
        if self.host.error is not None and self.host.was_ready:
            self.host.restart_zygote()
        self._do(self._follower.on_fenced(statement, now))
        return None

    def _end_output(self) -> None:
        for member in self.host.workers:
            member.finish_output()

    def _tell_of_survivors(self) -> None:
        for member in self.host.workers:
            if not member.is_over:
                who = f"Rank {member.world.rank} (process {member.pid})"
                why = "it hangs in the kernel, perhaps in a device driver or a network file system"
                text = f"{who} was killed but has not ended within {REAP_S:g} s: {why}."
                self._do(self._follower.relay(HostNote(text)))

    def _tell_fault(self, now: float) -> None:
        if not self._has_told_fault:
            self._has_told_fault = True
            self._do(self._follower.on_worker_failed(self._statement().to_fields(now)))

    def _statement(self) -> HostReport:
        host, crew = self.host, self.host.worker_group
        return HostReport(
            workers=tuple(host.worker_reports()),
            num_oom_kills=crew.num_oom_kills if crew else 0,
            zygote=str(host.error) if host.error else "",
        )

    def _progress(self, now: float) -> list[RankProgress]:
        return [_row(member.world.rank, member.progress, now) for member in self.host.workers]

    # --- effects of the follower

    def _do(self, effects: list[FollowerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendMessage(letter):
                    self._mail.send(letter)
                case StartWorkers(begin):
                    self._pending = begin
                    self._has_told_fault = self._has_told_leaving = False
                case ForwardStore(address):
                    self.host.announce_store(address)
                case ForwardRequest(ask):
                    for member in self.host.workers:  # each reads it at its next step
                        member.send({"type": "request", "request": ask.request.kind})
                case KillWorkers():
                    self._kill()
                case ParticipationEnded():
                    self._mail.on_end(effect)
                case JoinAccepted():
                    pass

    def _start(self, begin: BeginGeneration) -> None:
        self._pending = self._first_kept = self._claimed = None
        self._boxes_at = 0.0
        self._is_alone = len(begin.per_host) == 1
        if self._attention is not None:
            self._attention.begin()
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
