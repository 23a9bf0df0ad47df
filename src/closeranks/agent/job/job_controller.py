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
from closeranks.agent.detection.hang_reports import HANG_EVENT, HangReports, decode_hang
from closeranks.agent.detection.host_report import HostReport, merge_reports
from closeranks.agent.detection.progress import WorkerProgress
from closeranks.agent.detection.root_cause import RootCause, external_cause
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
from closeranks.agent.membership.leader import Leader as Membership
from closeranks.agent.membership.lease_timing import lease_timing_for
from closeranks.agent.membership.messages import Envelope, HostNote, WorkerOutput
from closeranks.agent.membership.messages import WorkerEvent as Told_
from closeranks.agent.transport.host_connections import HostConnections, HostDisconnected
from closeranks.core.errors import RunFailed
from closeranks.core.events import Event, HostChanged, SlowRank, encode
from closeranks.core.requests import DRAIN, REGROUP, RunRequest

OnTick = Callable[[JobView], float | None]
"""Called with a view of the job; returns when (``time.monotonic()``) it wants to be called again at the latest."""

_TOLD_S = 0.2
"""After a worker got SIGTERM, how long to wait for a SIGTERM to the whole run."""
_FAREWELL_S = 5.0
"""How long other hosts have to receive the end of the job, and to disconnect."""
_SHOW_S = 0.25
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
        listener: AgentCallbacks,
        on_turn: OnTick | None = None,
        has_unsaved: Callable[[LocalHost], bool] = lambda host: False,
    ) -> None:
        """``has_unsaved``: whether this host's memory holds a newer state than any checkpoint."""
        self._plan = plan
        self._has_unsaved = has_unsaved
        self._loop = loop
        self._listener = listener
        self._on_turn = on_turn
        self._machine = Membership(_TERM)
        self._host: LocalHost | None = None
        self._name = ""
        self._roster = HostTable("")
        self._station: HostController | None = None
        self._letters: deque[tuple[bool, Envelope | HostDisconnected]] = deque()
        """Messages in transit within this process, to the leader (True) or to this host's controller. What a host sent
        before it disconnected is read first."""
        self._gate: HostConnections | None = None
        self._muster: HostWaitNotice | None = None
        self.stop: ShutdownRequest | None = None
        self._outcome: JobOutcome | None = None
        self._course = Recovery(plan, self._emit)
        self._told: tuple[float, int] | None = None
        """When a worker reported a SIGTERM, and its rank."""
        self._waiting: tuple[RootCause, float] | None = None
        """The root cause to recover from, as soon as enough hosts have joined or at this time."""
        self.killed: list[int] = []
        """Ranks that did not end by themselves; set when the run is over."""
        limits = self._course.limits
        self._stragglers = StragglerDetector(limits.slow_ratio, limits.slow_steps)
        self._claims = HangReports()
        self._show_at, self._shown = 0.0, (-1, "")

    # --- public interface

    @property
    def has_generation(self) -> bool:
        """Whether the first generation has begun."""
        return self._machine.generation is not None

    @property
    def generation(self) -> int:
        return self._machine.generation.number if self._machine.generation else 0

    def request(self, request: RunRequest) -> None:
        """Send a request to every worker, which brings it to the vote of its next step."""
        self._act(self._machine.send_request(request, time.monotonic()))

    def announce_store(self, address: str) -> None:
        """Rank 0 is on this host and has opened its store."""
        if self._station is not None:
            self._station.announce_store(address)

    @property
    def callbacks(self) -> AgentCallbacks:
        """Callbacks for this host: events and output of its workers are relayed as for any host; notes, which need no
        generation, are passed on directly."""

        def event(rank: int, fields: dict[str, Any]) -> None:
            if self._station is not None:
                self._station.callbacks.on_event(rank, fields)

        def output(rank: int, line: str) -> None:
            if self._station is not None:
                self._station.callbacks.on_output(rank, line)

        return AgentCallbacks(event, output, self._listener.on_note)

    # --- the event loop

    def run(self, host: LocalHost) -> JobOutcome:
        """Run the job. Other hosts may join while this one's zygote still imports, as theirs have to import too."""
        self._host, self._name, self._roster = host, host.name, HostTable(host.name)
        try:
            self._gate = self._open_gate()
            while self._outcome is None:
                if self._station is None and host.is_ready:
                    self._open_station(host, time.monotonic())
                elif self._station is None and host.error is not None:
                    raise host.error
                until = self._turn()
                if self._outcome is None:
                    self._loop.run_once(until)
            return self._outcome
        finally:
            self._dismiss()

    def _open_gate(self) -> HostConnections | None:
        door = self._plan.join_endpoint
        if door is None:
            return None
        gate = HostConnections(
            self._loop,
            door,
            encode_plan(self._plan),
            own_name=self._name,
            on_letter=lambda letter: self._letters.append((True, letter)),
            on_gone=lambda name, incarnation: self._letters.append((True, HostDisconnected(name, incarnation))),
            on_note=self._listener.on_note,
        )
        self._muster = HostWaitNotice(
            self._plan.num_hosts, door.join_command(gate.address.port, self._plan.num_workers)
        )
        return gate

    def _dismiss(self) -> None:
        """Tell the other hosts that the job is over, whatever ended it, and wait ``_FAREWELL_S`` for them at most."""
        if self._gate is None:
            return
        machine, now = self._machine, time.monotonic()
        if self._outcome is not None:
            farewell = machine.dismiss(self._outcome.reason, now)
        else:
            rescues = self._host is not None and self._has_unsaved(self._host)
            farewell = machine.dismiss("the job has failed", now, rescues=rescues)
        self._gate.close_gracefully(
            _letters(farewell), lambda letter: _letters(machine.handle(letter, now)), now + _FAREWELL_S
        )

    def _open_station(self, host: LocalHost, now: float) -> None:
        attention = HangMonitor(self._course.limits, self._loop) if self._course.can_recover else None
        follower = Follower(host.name, time.time_ns(), host.capacity, now=now)
        mail = LeaderLink(lambda letter: self._letters.append((True, letter)), lambda end: None)
        self._station = HostController(host, follower, attention, mail, is_lead=True)

    def _turn(self) -> float | None:
        """Do everything that can be done now; returns when it must be called again, unless something happens before."""
        until: list[float | None] = []
        while self._outcome is None:
            now = time.monotonic()
            if self._gate is not None:
                self._gate.wake()
            until = [self._station.tick(now)] if self._station is not None else []
            # Deliver before the tick: these messages arrived in time, and after a pause of this process no host must be
            # counted as lost because they were not read yet.
            has_mail = bool(self._letters)
            self._deliver()
            self._act(self._machine.tick(now))
            until += [self._machine.deadline(now), self._mind(now), self._gate.deadline if self._gate else None]
            if not has_mail and not self._letters:
                break
        until.append(self._show(time.monotonic()))
        return min((at for at in until if at is not None), default=None)

    def _deliver(self) -> None:
        while self._letters and self._outcome is None:
            is_to_lead, letter = self._letters.popleft()
            if isinstance(letter, HostDisconnected):
                self._act(self._machine.on_disconnected(letter.name, letter.incarnation, time.monotonic()))
            elif is_to_lead:
                self._act(self._machine.handle(letter, time.monotonic()))
            elif self._station is not None:
                self._station.receive(letter)

    def _mind(self, now: float) -> float | None:
        """Handle what is due by now."""
        until = [self._mind_stop(now), self._mind_muster(now)]
        if self._told is not None and self._course.leaving is None and self.stop is None:
            due, rank = self._told[0] + _TOLD_S, self._told[1]
            if now >= due:
                cause = "asked to leave by SIGTERM"
                self._leave(external_cause("preempted", cause, rank=rank, step=self._course.step), now)
            else:
                until.append(due)
        if self._waiting is not None:
            verdict, due = self._waiting
            if now >= due:
                self._try(verdict, now)
            else:
                until.append(due)
        self._mind_still(now)
        self._mind_slow(now)
        return min((at for at in until if at is not None), default=None)

    def _mind_stop(self, now: float) -> float | None:
        if self.stop is None:
            return None
        if self._machine.generation is None or (self._waiting is not None and self.stop.reason == "interrupted"):
            self._outcome = JobOutcome(self.stop.reason)
        elif self._waiting is not None:
            self._try(self._waiting[0], now)
        elif now >= self.stop.deadline:
            self._act(self._machine.fence("the grace period is over", now))
        else:
            return self.stop.deadline
        return None

    def _mind_muster(self, now: float) -> float | None:
        if self._muster is None or self._machine.generation is not None:
            return None
        ready = [host.name for host in self._roster.hosts if host.state == "ready"]
        text, until = self._muster.check(list(dict.fromkeys([self._name, *ready])), now)
        if text:
            self._listener.on_note(text)
        return until

    # --- effects of the membership state machine

    def _act(self, effects: list[LeaderEffect]) -> None:
        for effect in effects:  # update the host table first: the state machine decided with all changes known
            if isinstance(effect, HostStatusChanged):
                self._roster.update(effect, time.monotonic())
        for effect in effects:
            now = time.monotonic()
            match effect:
                case SendMessage(letter) if letter.host == self._name:
                    self._letters.append((False, letter))
                case SendMessage(letter):
                    if self._gate is not None:
                        self._gate.send(letter)
                case HostStatusChanged():
                    self._on_changed(effect, now)
                case RelayedMessage(host=host, body=body):
                    self._on_told(host, body, now)
                case GenerationFormed():
                    self._course.on_formed(now)
                case GenerationBroken():
                    self._course.noticed_at = self._course.noticed_at or now
                case GenerationSettled():
                    self._on_settled(effect, now)
                case SteppedDown():
                    raise RunFailed("another leader has taken over this job")

    def _on_changed(self, changed: HostStatusChanged, now: float) -> None:
        if changed.host != self._name:
            self._emit(HostChanged(changed.host, changed.change, changed.what, changed.num_workers))
        if self._machine.generation is None:
            self._begin_first(now)
        elif self._waiting is not None:
            self._try(self._waiting[0], now)
        elif changed.change in ("joined", "leaving"):
            self._mind_boundary(changed, now)

    def _mind_boundary(self, changed: HostStatusChanged, now: float) -> None:
        """A healthy generation grows, or releases a host, after its current step."""
        if self.stop is not None:
            return
        match self._course.at_boundary(changed.host, changed.change, self._roster, now):
            case RootCause() as why:
                self._leave(why, now)
            case RunRequest() as request:
                self.request(request)

    def _on_told(self, host: str, body: Told_ | WorkerOutput | HostNote, now: float) -> None:
        match body:
            case HostNote(text=text):
                self._listener.on_note(text if host == self._name else f"{host}: {text}")
            case WorkerOutput(rank=rank, line=line):
                self._listener.on_output(rank, line)
            case Told_(rank=rank, event=fields) if fields.get("event") == SIGTERM_EVENT:
                self._told = self._told or (now, rank)
            case Told_(event=fields) if fields.get("event") == HANG_EVENT:
                self._hear_claim(host, fields, now)
            case Told_(rank=rank, event=fields):
                self._listener.on_event(rank, fields)
                self._course.on_event(rank, fields, self.generation, now)

    def _hear_claim(self, host: str, fields: Mapping[str, Any], now: float) -> None:
        try:
            self._claims.add(host, decode_hang(fields, now))
        except ProtocolError as error:
            self._listener.on_note(f"{host}: {error}")

    # --- workers that hang or are slow, and other reasons to regroup

    def _mind_still(self, now: float) -> None:
        if not self._claims.is_undecided:
            return
        sure_s = _SURE_BEATS * lease_timing_for(len(self._course.placements)).beat_s
        if still := self._claims.confirmed_hang(hosts_by_rank(self._course.placements), self._words(now), now, sure_s):
            self._act(self._machine.fence(still.cause(now), now))

    def _mind_slow(self, now: float) -> None:
        if self._course.limits.stragglers == "off":
            return
        words = self._words(now)
        for slow in self._stragglers.check(words, now) if words else ():
            self._tell_slow(slow, now)

    def _words(self, now: float) -> dict[int, WorkerProgress]:
        """The progress of all ranks, from the last heartbeat of each host."""
        peers = [self._machine.session_of(place.host) for place in self._course.placements]
        rows = [row for peer in peers if peer is not None for row in peer.progress]
        return {row.rank: progress_from_row(row, now) for row in rows}

    def _tell_slow(self, slow: Straggler, now: float) -> None:
        host = self._course.host_of(slow.rank)
        self._emit(SlowRank(slow.rank, host, slow.step, slow.score, slow.own_s, slow.median_s))
        if self._course.limits.stragglers == "evict" and self._course.leaving is None and self.stop is None:
            cause = f"{slow.score:.1f} times slower than the others"
            self._leave(external_cause("slow", cause, rank=slow.rank, step=slow.step), now)

    def _leave(self, why: RootCause, now: float) -> None:
        """Ask this generation to end at a step boundary, so that no step is lost."""
        self._course.leaving = why
        self.request(REGROUP)

    # --- from one generation to the next

    def _begin_first(self, now: float) -> None:
        roster = self._roster
        if roster.num_ready >= self._plan.num_hosts and roster.is_leader_ready and self.stop is None:
            self._begin(*self._course.first_placement(roster), now)

    def _begin(self, places: tuple[HostPlacement, ...], fitted: ResizedLaunch, now: float) -> None:
        payload = self._course.begin_generation(places, fitted)
        self._waiting = self._told = None
        self._stragglers.begin()
        self._claims.begin()
        if fitted.summary:
            self._listener.on_note(fitted.summary)
        members = [(place.host, place.num_workers) for place in places]
        self._act(self._machine.begin(members, payload, now))
        if self.stop is not None:
            self.request(DRAIN)

    def _on_settled(self, settled: GenerationSettled, now: float) -> None:
        """All workers of a generation are gone."""
        whole = merge_reports([self._statement(host, facts, now) for host, facts in settled.facts.items()])
        whole = replace(whole, workers=self._claims.mark_hung(whole.workers))
        is_hurried = self.stop is not None and (self.stop.reason == "interrupted" or now >= self.stop.deadline)
        may_go_on = self._course.can_recover and not is_hurried
        verdict = self._course.on_generation_end(settled, whole, now) if may_go_on else None
        if verdict is not None:
            self._try(verdict, now)
            return
        self._outcome = conclude(settled, whole, self.stop, self._listener.on_note)
        self.killed = killed_early(whole)

    def _statement(self, host: str, facts: Mapping[str, Any], now: float) -> HostReport:
        try:
            return HostReport.from_fields(facts, now)
        except ProtocolError as error:
            self._listener.on_note(f"{host}: {error}")
            return HostReport()

    def _try(self, verdict: RootCause, now: float) -> None:
        """Begin the next generation, or wait, as the restart policy decides; raises if it gives up."""
        decision = self._course.next_decision(verdict, self._roster.hosts, now, is_stopping=self.stop is not None)
        if isinstance(decision, NextGeneration):
            self._begin(decision.placements, decision.fitted, now)
            return
        if self._waiting is None:
            self._listener.on_note(decision.why)
        self._waiting = (verdict, decision.until)

    # --- events and views

    def _emit(self, event: Event) -> None:
        self._listener.on_event(-1, encode(event))

    def _show(self, now: float) -> float | None:
        """Call ``OnTick`` when it asked to be called, and whenever the generation or the state has changed. Not more
        often, because a view reads every worker's shared progress."""
        if self._on_turn is None:
            return None
        standing = (self.generation, self._state)
        if now >= self._show_at or standing != self._shown:
            self._shown = standing
            asked = self._on_turn(self.view(now))
            self._show_at = min(now + _SHOW_S, now if asked is None else asked)
            return asked
        return self._show_at

    def view(self, now: float) -> JobView:
        host = self._host
        members = frozenset(place.host for place in self._course.placements)
        return JobView(
            now=now,
            state=self._state,
            generation=self.generation,
            world_size=sum(place.num_workers for place in self._course.placements),
            local_workers=tuple(host.worker_views()) if host else (),
            hosts=self._roster.host_views(members, self._course.quarantined),
            snapshot_paths=tuple(tuple(box) for box in host.snapshot_memory.paths) if host else (),
            snapshot_bytes=host.snapshot_memory.num_bytes if host else 0,
            zygote=host.zygote if host else None,
            remote_workers=tuple(self._seen_elsewhere(now)),
        )

    def _seen_elsewhere(self, now: float) -> Iterator[WorkerView]:
        for place in self._course.placements:
            peer = self._machine.session_of(place.host) if place.host != self._name else None
            if peer is not None:
                yield from (
                    WorkerView(row.rank, place.host, None, progress_from_row(row, now)) for row in peer.progress
                )

    @property
    def _state(self) -> str:
        if self._machine.generation is None:
            return "starting"
        if self.stop is not None:
            return "stopping"
        return "closing ranks" if self._course.is_recovering else "running"


def _letters(effects: list[LeaderEffect]) -> list[Envelope]:
    return [effect.envelope for effect in effects if isinstance(effect, SendMessage)]
