"""The job controller: takes a job from generation to generation until it ends.

The membership state machine knows which hosts are present and when a generation has no workers left; the restart policy
decides which hosts are members of the next; this file carries messages between the state machine and the hosts, and
reports what happened. Invariants: every wait has a deadline; every report of a fault names one culprit; this host takes
the same path as any other, without a network.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from closeranks.agent.detection.hang_monitor import HangMonitor
from closeranks.agent.detection.hang_reports import HANG_EVENT, HangReports
from closeranks.agent.detection.host_report import HostReport, merge_reports
from closeranks.agent.detection.progress import WorkerProgress
from closeranks.agent.detection.root_cause import RootCause, external_cause
from closeranks.agent.detection.standstill.hang_report import decode_report
from closeranks.agent.detection.standstill.standstill_reports import StandstillReports, explain_failure
from closeranks.agent.detection.stragglers import Straggler, StragglerDetector
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.host.host_controller import SIGTERM_EVENT, HostController, LeaderLink, progress_from_row
from closeranks.agent.host.local_host import LocalHost
from closeranks.agent.job.generation_end import conclude, killed_early
from closeranks.agent.job.host_table import HostTable, HostWaitNotice
from closeranks.agent.job.placement import HostPlacement, hosts_by_rank
from closeranks.agent.job.recovery import Recovery
from closeranks.agent.job.restart_policy import NextGeneration
from closeranks.agent.job.shutdown import ShutdownRequest
from closeranks.agent.job_view import JobView, WorkerView
from closeranks.agent.launch_plan import AgentCallbacks, JobOutcome, LaunchPlan, ResizedLaunch, encode_plan
from closeranks.agent.membership.effects import (
    GenerationBroken,
    GenerationFormed,
    GenerationSettled,
    HostStatusChanged,
    LeaderEffect,
    RelayedMessage,
    SendMessage,
    SteppedDown,
)
from closeranks.agent.membership.field_codecs import ProtocolError
from closeranks.agent.membership.follower import Follower
from closeranks.agent.membership.leader import Leader
from closeranks.agent.membership.lease_timing import lease_timing_for
from closeranks.agent.membership.messages import Envelope, HostNote, WorkerEvent, WorkerOutput
from closeranks.agent.transport.host_connections import HostConnections, HostDisconnected
from closeranks.core.errors import RunFailed
from closeranks.core.events import Event, HostChanged, SlowRank, encode
from closeranks.core.requests import DRAIN, REGROUP, RunRequest

OnTick = Callable[[JobView], float | None]
"""Called with a view of the job; returns when (``time.monotonic()``) it wants to be called again at the latest."""

_SIGTERM_WAIT_S = 0.2
"""After a worker got SIGTERM, how long to wait for a SIGTERM to the whole run."""
_DISMISS_S = 5.0
"""How long other hosts have to receive the end of the job, and to disconnect."""
_MAX_TICK_S = 0.25
"""The longest interval between two calls of ``OnTick``: it may have work that it did not foresee in its last answer."""
_SURE_BEATS = 4
"""For how many heartbeats a rank must have been furthest behind before it is declared hung: the progress that two hosts
report differs in age."""
_TERM = 1
"""This leader is the only one: it runs in the process that started the job, and the job ends with it."""


class JobController:
    """Runs the generations of a job. All callbacks come from ``run``, in its thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        loop: EventLoop,
        callbacks: AgentCallbacks,
        on_tick: OnTick | None = None,
        has_unsaved: Callable[[LocalHost], bool] = lambda host: False,
    ) -> None:
        """``has_unsaved``: whether this host's memory holds a newer state than any checkpoint."""
        self._plan = plan
        self._has_unsaved = has_unsaved
        self._loop = loop
        self._agent_callbacks = callbacks
        self._on_tick = on_tick
        self._leader = Leader(_TERM)
        self._host: LocalHost | None = None
        self._name = ""
        self._host_table = HostTable("")
        self._host_controller: HostController | None = None
        self._messages: deque[tuple[bool, Envelope | HostDisconnected]] = deque()
        """Messages in transit within this process, to the leader (True) or to this host's controller. What a host sent
        before it disconnected is read first."""
        self._connections: HostConnections | None = None
        self._wait_notice: HostWaitNotice | None = None
        self.stop: ShutdownRequest | None = None
        self._outcome: JobOutcome | None = None
        self._recovery = Recovery(plan, self._emit)
        self._sigterm_report: tuple[float, int] | None = None
        """When a worker reported a SIGTERM, and its rank."""
        self._waiting: tuple[RootCause, float] | None = None
        """The root cause to recover from, as soon as enough hosts have joined or at this time."""
        self.killed: list[int] = []
        """Ranks that did not end by themselves; set when the run is over."""
        limits = self._recovery.limits
        self._stragglers = StragglerDetector(limits.slow_ratio, limits.slow_steps)
        self._hang_reports, self._standstills = HangReports(), StandstillReports()
        self._tick_at, self._ticked = 0.0, (-1, "")

    # --- public interface

    @property
    def has_generation(self) -> bool:
        """Whether the first generation has begun."""
        return self._leader.generation is not None

    @property
    def generation(self) -> int:
        return self._leader.generation.number if self._leader.generation else 0

    def request(self, request: RunRequest) -> None:
        """Send a request to every worker, which brings it to the vote of its next step."""
        self._act(self._leader.send_request(request, time.monotonic()))

    def announce_store(self, address: str) -> None:
        """Rank 0 is on this host and has opened its store."""
        if self._host_controller is not None:
            self._host_controller.announce_store(address)

    @property
    def callbacks(self) -> AgentCallbacks:
        """Callbacks for this host: events and output of its workers are relayed as for any host; notes, which need no
        generation, are passed on directly."""

        def event(rank: int, fields: dict[str, Any]) -> None:
            if self._host_controller is not None:
                self._host_controller.callbacks.on_event(rank, fields)

        def output(rank: int, line: str) -> None:
            if self._host_controller is not None:
                self._host_controller.callbacks.on_output(rank, line)

        return AgentCallbacks(event, output, self._agent_callbacks.on_note)

    # --- the event loop

    def run(self, host: LocalHost) -> JobOutcome:
        """Run the job. Other hosts may join while this one's zygote still imports, as theirs have to import too."""
        self._host, self._name, self._host_table = host, host.name, HostTable(host.name)
        try:
            self._connections = self._open_connections()
            while self._outcome is None:
                if self._host_controller is None and host.is_ready:
                    self._start_host_controller(host, time.monotonic())
                elif self._host_controller is None and host.error is not None:
                    raise host.error
                until = self._tick()
                if self._outcome is None:
                    self._loop.run_once(until)
            return self._outcome
        finally:
            self._dismiss()

    def _open_connections(self) -> HostConnections | None:
        endpoint = self._plan.join_endpoint
        if endpoint is None:
            return None
        connections = HostConnections(
            self._loop,
            endpoint,
            encode_plan(self._plan),
            own_name=self._name,
            on_envelope=lambda envelope: self._messages.append((True, envelope)),
            on_disconnected=lambda name, incarnation: self._messages.append(
                (True, HostDisconnected(name, incarnation))
            ),
            on_note=self._agent_callbacks.on_note,
        )
        self._wait_notice = HostWaitNotice(
            self._plan.num_hosts, endpoint.join_command(connections.address.port, self._plan.num_workers)
        )
        return connections

    def _dismiss(self) -> None:
        """Tell the other hosts that the job is over, whatever ended it, and wait ``_DISMISS_S`` for them at most."""
        if self._connections is None:
            return
        leader, now = self._leader, time.monotonic()
        if self._outcome is not None:
            effects = leader.dismiss(self._outcome.reason, now)
        else:
            rescues = self._host is not None and self._has_unsaved(self._host)
            effects = leader.dismiss("the job has failed", now, rescues=rescues)
        self._connections.close_gracefully(
            _envelopes(effects), lambda envelope: _envelopes(leader.handle(envelope, now)), now + _DISMISS_S
        )

    def _start_host_controller(self, host: LocalHost, now: float) -> None:
        hang_monitor = HangMonitor(self._recovery.limits, self._loop) if self._recovery.can_recover else None
        follower = Follower(host.name, time.time_ns(), host.capacity, now=now)
        leader_link = LeaderLink(lambda envelope: self._messages.append((True, envelope)), lambda end: None)
        self._host_controller = HostController(host, follower, hang_monitor, leader_link, is_leader=True)

    def _tick(self) -> float | None:
        """Do everything that can be done now; returns when it must be called again, unless something happens before."""
        until: list[float | None] = []
        while self._outcome is None:
            now = time.monotonic()
            if self._connections is not None:
                self._connections.wake()
            until = [self._host_controller.tick(now)] if self._host_controller is not None else []
            # Deliver before the tick: these messages arrived in time, and after a pause of this process no host must be
            # counted as lost because they were not read yet.
            had_messages = bool(self._messages)
            self._deliver()
            self._act(self._leader.tick(now))
            until += [
                self._leader.deadline(now),
                self._check(now),
                self._connections.deadline if self._connections else None,
            ]
            if not had_messages and not self._messages:
                break
        until.append(self._call_on_tick(time.monotonic()))
        return min((at for at in until if at is not None), default=None)

    def _deliver(self) -> None:
        while self._messages and self._outcome is None:
            is_to_leader, message = self._messages.popleft()
            if isinstance(message, HostDisconnected):
                self._act(self._leader.on_disconnected(message.name, message.incarnation, time.monotonic()))
            elif is_to_leader:
                self._act(self._leader.handle(message, time.monotonic()))
            elif self._host_controller is not None:
                self._host_controller.receive(message)

    def _check(self, now: float) -> float | None:
        """Handle what is due by now."""
        until = [self._check_stop(now), self._check_hosts(now)]
        if self._sigterm_report is not None and self._recovery.leaving is None and self.stop is None:
            due, rank = self._sigterm_report[0] + _SIGTERM_WAIT_S, self._sigterm_report[1]
            if now >= due:
                cause = "asked to leave by SIGTERM"
                self._request_regroup(external_cause("preempted", cause, rank=rank, step=self._recovery.step), now)
            else:
                until.append(due)
        if self._waiting is not None:
            root_cause, due = self._waiting
            if now >= due:
                self._try(root_cause, now)
            else:
                until.append(due)
        self._check_hangs(now)
        self._check_stragglers(now)
        return min((at for at in until if at is not None), default=None)

    def _check_stop(self, now: float) -> float | None:
        if self.stop is None:
            return None
        if self._leader.generation is None or (self._waiting is not None and self.stop.reason == "interrupted"):
            self._outcome = JobOutcome(self.stop.reason)
        elif self._waiting is not None:
            self._try(self._waiting[0], now)
        elif now >= self.stop.deadline:
            self._act(self._leader.fence("the grace period is over", now))
        else:
            return self.stop.deadline
        return None

    def _check_hosts(self, now: float) -> float | None:
        if self._wait_notice is None or self._leader.generation is not None:
            return None
        ready = [host.name for host in self._host_table.hosts if host.state == "ready"]
        text, until = self._wait_notice.check(list(dict.fromkeys([self._name, *ready])), now)
        if text:
            self._agent_callbacks.on_note(text)
        return until

    # --- effects of the membership state machine

    def _act(self, effects: list[LeaderEffect]) -> None:
        for effect in effects:  # update the host table first: the state machine decided with all changes known
            if isinstance(effect, HostStatusChanged):
                self._host_table.update(effect, time.monotonic())
        for effect in effects:
            now = time.monotonic()
            match effect:
                case SendMessage(envelope) if envelope.host == self._name:
                    self._messages.append((False, envelope))
                case SendMessage(envelope):
                    if self._connections is not None:
                        self._connections.send(envelope)
                case HostStatusChanged():
                    self._on_changed(effect, now)
                case RelayedMessage(host=host, body=body):
                    self._on_relayed(host, body, now)
                case GenerationFormed():
                    self._recovery.on_formed(now)
                case GenerationBroken():
                    self._recovery.noticed_at = self._recovery.noticed_at or now
                case GenerationSettled():
                    self._on_settled(effect, now)
                case SteppedDown():
                    raise RunFailed("another leader has taken over this job")

    def _on_changed(self, changed: HostStatusChanged, now: float) -> None:
        if changed.host != self._name:
            self._emit(HostChanged(changed.host, changed.change, changed.what, changed.num_workers))
        if self._leader.generation is None:
            self._begin_first(now)
        elif self._waiting is not None:
            self._try(self._waiting[0], now)
        elif changed.change in ("joined", "leaving"):
            self._check_boundary(changed, now)

    def _check_boundary(self, changed: HostStatusChanged, now: float) -> None:
        """A healthy generation grows, or releases a host, after its current step."""
        if self.stop is not None:
            return
        match self._recovery.at_boundary(changed.host, changed.change, self._host_table, now):
            case RootCause() as why:
                self._request_regroup(why, now)
            case RunRequest() as request:
                self.request(request)

    def _on_relayed(self, host: str, body: WorkerEvent | WorkerOutput | HostNote, now: float) -> None:
        match body:
            case HostNote(text=text):
                self._agent_callbacks.on_note(text if host == self._name else f"{host}: {text}")
            case WorkerOutput(rank=rank, line=line):
                self._agent_callbacks.on_output(rank, line)
            case WorkerEvent(rank=rank, event=fields) if fields.get("event") == SIGTERM_EVENT:
                self._sigterm_report = self._sigterm_report or (now, rank)
            case WorkerEvent(event=fields) if fields.get("event") == HANG_EVENT:
                self._on_hang_report(host, fields, now)
            case WorkerEvent(rank=rank, event=fields):
                self._agent_callbacks.on_event(rank, fields)
                self._recovery.on_event(rank, fields, self.generation, now)

    def _on_hang_report(self, host: str, fields: Mapping[str, Any], now: float) -> None:
        try:
            report = decode_report(fields, now)
        except ProtocolError as error:
            self._agent_callbacks.on_note(f"{host}: {error}")
            return
        self._standstills.add(report, now)
        if not report.is_stall:
            self._hang_reports.add(host, report.hang)

    # --- workers that hang or are slow, and other reasons to regroup

    def _check_hangs(self, now: float) -> None:
        host_of = hosts_by_rank(self._recovery.placements)
        self._emit(self._standstills.stall_to_tell(host_of, self.generation, now))
        if not self._hang_reports.is_undecided:
            return
        sure_s = _SURE_BEATS * lease_timing_for(len(self._recovery.placements)).beat_s
        if hang := self._hang_reports.confirmed_hang(host_of, self._progress(now), now, sure_s):
            hang, told = self._standstills.explain_hang(hang, host_of, self.generation, now)
            self._hang_reports.blame(hang, now)
            self._emit(told)
            self._act(self._leader.fence(hang.cause(now), now))

    def _check_stragglers(self, now: float) -> None:
        if self._recovery.limits.stragglers == "off":
            return
        progress_of = self._progress(now)
        for straggler in self._stragglers.check(progress_of, now) if progress_of else ():
            self._report_straggler(straggler, now)

    def _progress(self, now: float) -> dict[int, WorkerProgress]:
        """The progress of all ranks, from the last heartbeat of each host."""
        sessions = [self._leader.session_of(placement.host) for placement in self._recovery.placements]
        rows = [row for session in sessions if session is not None for row in session.progress]
        return {row.rank: progress_from_row(row, now) for row in rows}

    def _report_straggler(self, straggler: Straggler, now: float) -> None:
        host = self._recovery.host_of(straggler.rank)
        self._emit(
            SlowRank(straggler.rank, host, straggler.step, straggler.score, straggler.compute_s, straggler.median_s)
        )
        if self._recovery.limits.stragglers == "evict" and self._recovery.leaving is None and self.stop is None:
            cause = f"{straggler.score:.1f} times slower than the others"
            self._request_regroup(external_cause("slow", cause, rank=straggler.rank, step=straggler.step), now)

    def _request_regroup(self, why: RootCause, now: float) -> None:
        """Ask this generation to end at a step boundary, so that no step is lost."""
        self._recovery.leaving = why
        self.request(REGROUP)

    # --- from one generation to the next

    def _begin_first(self, now: float) -> None:
        host_table = self._host_table
        if host_table.num_ready >= self._plan.num_hosts and host_table.is_leader_ready and self.stop is None:
            self._begin(*self._recovery.first_placement(host_table), now)

    def _begin(self, placements: tuple[HostPlacement, ...], fitted: ResizedLaunch, now: float) -> None:
        payload = self._recovery.begin_generation(placements, fitted)
        self._waiting = self._sigterm_report = None
        self._stragglers.begin()
        self._hang_reports.begin()
        self._standstills.begin()
        if fitted.summary:
            self._agent_callbacks.on_note(fitted.summary)
        members = [(placement.host, placement.num_workers) for placement in placements]
        self._act(self._leader.begin(members, payload, now))
        if self.stop is not None:
            self.request(DRAIN)

    def _on_settled(self, settled: GenerationSettled, now: float) -> None:
        """All workers of a generation are gone."""
        report = merge_reports([self._host_report(host, facts, now) for host, facts in settled.facts.items()])
        report = replace(report, workers=self._hang_reports.mark_hung(report.workers))
        self._emit(explain_failure(report.evidence, hosts_by_rank(self._recovery.placements), self.generation))
        is_hurried = self.stop is not None and (self.stop.reason == "interrupted" or now >= self.stop.deadline)
        may_go_on = self._recovery.can_recover and not is_hurried
        root_cause = self._recovery.on_generation_end(settled, report, now) if may_go_on else None
        if root_cause is not None:
            self._try(root_cause, now)
            return
        self._outcome = conclude(settled, report, self.stop, self._agent_callbacks.on_note)
        self.killed = killed_early(report)

    def _host_report(self, host: str, facts: Mapping[str, Any], now: float) -> HostReport:
        try:
            return HostReport.from_fields(facts, now)
        except ProtocolError as error:
            self._agent_callbacks.on_note(f"{host}: {error}")
            return HostReport()

    def _try(self, root_cause: RootCause, now: float) -> None:
        """Begin the next generation, or wait, as the restart policy decides; raises if it gives up."""
        decision = self._recovery.next_decision(
            root_cause, self._host_table.hosts, now, is_stopping=self.stop is not None
        )
        if isinstance(decision, NextGeneration):
            self._begin(decision.placements, decision.fitted, now)
            return
        if self._waiting is None:
            self._agent_callbacks.on_note(decision.why)
        self._waiting = (root_cause, decision.until)

    # --- events and views

    def _emit(self, event: Event | None) -> None:
        if event is not None:
            self._agent_callbacks.on_event(-1, encode(event))

    def _call_on_tick(self, now: float) -> float | None:
        """Call ``OnTick`` when it asked to be called, at least every ``_MAX_TICK_S``, and when the generation or the
        state has changed; at every iteration if it named no time."""
        if self._on_tick is None:
            return None
        status = (self.generation, self._state)
        if now >= self._tick_at or status != self._ticked:
            self._ticked = status
            asked = self._on_tick(self.view(now))
            self._tick_at = min(now + _MAX_TICK_S, now if asked is None else asked)
            return asked
        return self._tick_at

    def view(self, now: float) -> JobView:
        host = self._host
        members = frozenset(placement.host for placement in self._recovery.placements)
        return JobView(
            now=now,
            state=self._state,
            generation=self.generation,
            world_size=sum(placement.num_workers for placement in self._recovery.placements),
            local_workers=tuple(host.worker_views()) if host else (),
            hosts=self._host_table.host_views(members, self._recovery.quarantined),
            snapshot_paths=tuple(tuple(paths) for paths in host.snapshot_memory.paths) if host else (),
            snapshot_bytes=host.snapshot_memory.num_bytes if host else 0,
            zygote=host.zygote if host else None,
            remote_workers=tuple(self._remote_views(now)),
        )

    def _remote_views(self, now: float) -> Iterator[WorkerView]:
        for placement in self._recovery.placements:
            session = self._leader.session_of(placement.host) if placement.host != self._name else None
            if session is not None:
                yield from (
                    WorkerView(row.rank, placement.host, None, progress_from_row(row, now)) for row in session.progress
                )

    @property
    def _state(self) -> str:
        if self._leader.generation is None:
            return "starting"
        if self.stop is not None:
            return "stopping"
        return "closing ranks" if self._recovery.is_recovering else "running"


def _envelopes(effects: list[LeaderEffect]) -> list[Envelope]:
    return [effect.envelope for effect in effects if isinstance(effect, SendMessage)]
