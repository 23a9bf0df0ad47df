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

from closeranks.agent.allotment import Place, hosts_by_rank
from closeranks.agent.attention import Attention
from closeranks.agent.claims import CLAIM, Claims, claim_of
from closeranks.agent.closing import conclude, killed_early
from closeranks.agent.course import Course
from closeranks.agent.ending import Stop
from closeranks.agent.gate import Gate, Gone
from closeranks.agent.host import Host
from closeranks.agent.launch import Fitted, LaunchPlan, Listener, Outcome, plan_fields
from closeranks.agent.loop import Loop
from closeranks.agent.membership.checks import ProtocolError
from closeranks.agent.membership.effects import (
    Broke,
    Changed,
    Deposed,
    Formed,
    LeadEffect,
    Send,
    Settled,
    Told,
)
from closeranks.agent.membership.follower import Follower
from closeranks.agent.membership.lead import Lead as Membership
from closeranks.agent.membership.messages import Event as Told_
from closeranks.agent.membership.messages import Letter, Note, Output
from closeranks.agent.membership.pace import pace_for
from closeranks.agent.muster import Muster
from closeranks.agent.policy import Go
from closeranks.agent.progress import Progress
from closeranks.agent.roster import Roster
from closeranks.agent.statement import Statement, together
from closeranks.agent.station import TOLD, Mail, Station, word_of
from closeranks.agent.stragglers import Slow, Stragglers
from closeranks.agent.verdict import Verdict, without_facts
from closeranks.agent.view import Seen, View
from closeranks.core.errors import RunFailed
from closeranks.core.events import Event, HostChanged, SlowRank, encode
from closeranks.core.requests import DRAIN, REGROUP, Request

OnTurn = Callable[[View], float | None]
"""Called with a view of the job; returns when (``time.monotonic()``) it wants to be called again at the latest."""

_TOLD_S = 0.2
"""After a worker got SIGTERM, how long to wait for a SIGTERM to the whole run."""
_FAREWELL_S = 5.0
"""How long other hosts have to receive the end of the job, and to disconnect."""
_SHOW_S = 0.25
"""The longest interval between two calls of ``OnTurn``: it may have work that it did not foresee in its last answer."""
_SURE_BEATS = 4
"""For how many heartbeats a rank must have been furthest behind before it is declared hung: the progress that two hosts
report differs in age."""
_TERM = 1
"""This leader is the only one: it runs in the process that started the job, and the job ends with it."""


class Lead:
    """Runs the generations of a job. All callbacks come from ``run``, in its thread."""

    def __init__(
        self,
        plan: LaunchPlan,
        loop: Loop,
        listener: Listener,
        on_turn: OnTurn | None = None,
        has_unsaved: Callable[[Host], bool] = lambda host: False,
    ) -> None:
        """``has_unsaved``: whether this host's memory holds a newer state than any checkpoint."""
        self._plan = plan
        self._has_unsaved = has_unsaved
        self._loop = loop
        self._listener = listener
        self._on_turn = on_turn
        self._machine = Membership(_TERM)
        self._host: Host | None = None
        self._name = ""
        self._roster = Roster("")
        self._station: Station | None = None
        self._letters: deque[tuple[bool, Letter | Gone]] = deque()
        """Messages in transit within this process, to the leader (True) or to this host's controller. What a host sent
        before it disconnected is read first."""
        self._gate: Gate | None = None
        self._muster: Muster | None = None
        self.stop: Stop | None = None
        self._outcome: Outcome | None = None
        self._course = Course(plan, self._emit)
        self._told: tuple[float, int] | None = None
        """When a worker reported a SIGTERM, and its rank."""
        self._waiting: tuple[Verdict, float] | None = None
        """The root cause to recover from, as soon as enough hosts have joined or at this time."""
        self.killed: list[int] = []
        """Ranks that did not end by themselves; set when the run is over."""
        limits = self._course.limits
        self._stragglers = Stragglers(limits.slow_ratio, limits.slow_steps)
        self._claims = Claims()
        self._show_at, self._shown = 0.0, (-1, "")

    # --- public interface

    @property
    def is_underway(self) -> bool:
        """Whether the first generation has begun."""
        return self._machine.generation is not None

    @property
    def generation(self) -> int:
        return self._machine.generation.number if self._machine.generation else 0

    def request(self, request: Request) -> None:
        """Send a request to every worker, which brings it to the vote of its next step."""
        self._act(self._machine.ask(request, time.monotonic()))

    def announce(self, address: str) -> None:
        """Rank 0 is on this host and has opened its store."""
        if self._station is not None:
            self._station.announce(address)

    @property
    def ears(self) -> Listener:
        """Callbacks for this host: events and output of its workers are relayed as for any host; notes, which need no
        generation, are passed on directly."""

        def event(rank: int, fields: dict[str, Any]) -> None:
            if self._station is not None:
                self._station.relay.on_event(rank, fields)

        def output(rank: int, line: str) -> None:
            if self._station is not None:
                self._station.relay.on_output(rank, line)

        return Listener(event, output, self._listener.on_note)

    # --- the event loop

    def run(self, host: Host) -> Outcome:
        """Run the job. Other hosts may join while this one's zygote still imports, as theirs have to import too."""
        self._host, self._name, self._roster = host, host.name, Roster(host.name)
        try:
            self._gate = self._open_gate()
            while self._outcome is None:
                if self._station is None and host.is_ready:
                    self._open_station(host, time.monotonic())
                elif self._station is None and host.error is not None:
                    raise host.error
                until = self._turn()
                if self._outcome is None:
                    self._loop.turn(until)
            return self._outcome
        finally:
            self._dismiss()

    def _open_gate(self) -> Gate | None:
        door = self._plan.door
        if door is None:
            return None
        gate = Gate(
            self._loop,
            door,
            plan_fields(self._plan),
            own_name=self._name,
            on_letter=lambda letter: self._letters.append((True, letter)),
            on_gone=lambda name, incarnation: self._letters.append((True, Gone(name, incarnation))),
            on_note=self._listener.on_note,
        )
        self._muster = Muster(self._plan.num_hosts, door.how_to_join(gate.address.port, self._plan.num_workers))
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
        self._gate.see_off(_letters(farewell), lambda letter: _letters(machine.handle(letter, now)), now + _FAREWELL_S)

    def _open_station(self, host: Host, now: float) -> None:
        attention = Attention(self._course.limits, self._loop) if self._course.can_survive else None
        follower = Follower(host.name, time.time_ns(), host.capacity, now=now)
        mail = Mail(lambda letter: self._letters.append((True, letter)), lambda end: None)
        self._station = Station(host, follower, attention, mail, is_lead=True)

    def _turn(self) -> float | None:
        """Do everything that can be done now; returns when it must be called again, unless something happens before."""
        until: list[float | None] = []
        while self._outcome is None:
            now = time.monotonic()
            if self._gate is not None:
                self._gate.wake()
            until = [self._station.turn(now)] if self._station is not None else []
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
            if isinstance(letter, Gone):
                self._act(self._machine.closed(letter.name, letter.incarnation, time.monotonic()))
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
                self._leave(without_facts("preempted", cause, rank=rank, step=self._course.step), now)
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
            self._outcome = Outcome(self.stop.reason)
        elif self._waiting is not None:
            self._try(self._waiting[0], now)
        elif now >= self.stop.deadline:
            self._act(self._machine.break_up("patience is over", now))
        else:
            return self.stop.deadline
        return None

    def _mind_muster(self, now: float) -> float | None:
        if self._muster is None or self._machine.generation is not None:
            return None
        ready = [host.name for host in self._roster.hosts if host.state == "ready"]
        text, until = self._muster.look(list(dict.fromkeys([self._name, *ready])), now)
        if text:
            self._listener.on_note(text)
        return until

    # --- effects of the membership state machine

    def _act(self, effects: list[LeadEffect]) -> None:
        for effect in effects:  # update the host table first: the state machine decided with all changes known
            if isinstance(effect, Changed):
                self._roster.note(effect, time.monotonic())
        for effect in effects:
            now = time.monotonic()
            match effect:
                case Send(letter) if letter.host == self._name:
                    self._letters.append((False, letter))
                case Send(letter):
                    if self._gate is not None:
                        self._gate.send(letter)
                case Changed():
                    self._on_changed(effect, now)
                case Told(host=host, body=body):
                    self._on_told(host, body, now)
                case Formed():
                    self._course.formed(now)
                case Broke():
                    self._course.noticed_at = self._course.noticed_at or now
                case Settled():
                    self._on_settled(effect, now)
                case Deposed():
                    raise RunFailed("another lead has taken over this job")

    def _on_changed(self, changed: Changed, now: float) -> None:
        if changed.host != self._name:
            self._emit(HostChanged(changed.host, changed.change, changed.what, changed.num_workers))
        if self._machine.generation is None:
            self._begin_first(now)
        elif self._waiting is not None:
            self._try(self._waiting[0], now)
        elif changed.change in ("joined", "leaving"):
            self._mind_boundary(changed, now)

    def _mind_boundary(self, changed: Changed, now: float) -> None:
        """A healthy generation grows, or releases a host, after its current step."""
        if self.stop is not None:
            return
        match self._course.at_boundary(changed.host, changed.change, self._roster, now):
            case Verdict() as why:
                self._leave(why, now)
            case Request() as request:
                self.request(request)

    def _on_told(self, host: str, body: Told_ | Output | Note, now: float) -> None:
        match body:
            case Note(text=text):
                self._listener.on_note(text if host == self._name else f"{host}: {text}")
            case Output(rank=rank, line=line):
                self._listener.on_output(rank, line)
            case Told_(rank=rank, event=fields) if fields.get("event") == TOLD:
                self._told = self._told or (now, rank)
            case Told_(event=fields) if fields.get("event") == CLAIM:
                self._hear_claim(host, fields, now)
            case Told_(rank=rank, event=fields):
                self._listener.on_event(rank, fields)
                self._course.hear(rank, fields, self.generation, now)

    def _hear_claim(self, host: str, fields: Mapping[str, Any], now: float) -> None:
        try:
            self._claims.hear(host, claim_of(fields, now))
        except ProtocolError as error:
            self._listener.on_note(f"{host}: {error}")

    # --- workers that hang or are slow, and other reasons to regroup

    def _mind_still(self, now: float) -> None:
        if not self._claims.is_open:
            return
        sure_s = _SURE_BEATS * pace_for(len(self._course.places)).beat_s
        if still := self._claims.verdict(hosts_by_rank(self._course.places), self._words(now), now, sure_s):
            self._act(self._machine.break_up(still.cause(now), now))

    def _mind_slow(self, now: float) -> None:
        if self._course.limits.stragglers == "off":
            return
        words = self._words(now)
        for slow in self._stragglers.look(words, now) if words else ():
            self._tell_slow(slow, now)

    def _words(self, now: float) -> dict[int, Progress]:
        """The progress of all ranks, from the last heartbeat of each host."""
        peers = [self._machine.peer(place.host) for place in self._course.places]
        rows = [row for peer in peers if peer is not None for row in peer.progress]
        return {row.rank: word_of(row, now) for row in rows}

    def _tell_slow(self, slow: Slow, now: float) -> None:
        host = self._course.host_of(slow.rank)
        self._emit(SlowRank(slow.rank, host, slow.step, slow.score, slow.own_s, slow.median_s))
        if self._course.limits.stragglers == "evict" and self._course.leaving is None and self.stop is None:
            cause = f"{slow.score:.1f} times slower than the others"
            self._leave(without_facts("slow", cause, rank=slow.rank, step=slow.step), now)

    def _leave(self, why: Verdict, now: float) -> None:
        """Ask this generation to end at a step boundary, so that no step is lost."""
        self._course.leaving = why
        self.request(REGROUP)

    # --- from one generation to the next

    def _begin_first(self, now: float) -> None:
        roster = self._roster
        if roster.num_ready >= self._plan.num_hosts and roster.is_led and self.stop is None:
            self._begin(*self._course.first(roster), now)

    def _begin(self, places: tuple[Place, ...], fitted: Fitted, now: float) -> None:
        payload = self._course.begin(places, fitted)
        self._waiting = self._told = None
        self._stragglers.begin()
        self._claims.begin()
        if fitted.words:
            self._listener.on_note(fitted.words)
        members = [(place.host, place.num_workers) for place in places]
        self._act(self._machine.begin(members, payload, now))
        if self.stop is not None:
            self.request(DRAIN)

    def _on_settled(self, settled: Settled, now: float) -> None:
        """All workers of a generation are gone."""
        whole = together([self._statement(host, facts, now) for host, facts in settled.facts.items()])
        whole = replace(whole, workers=self._claims.mark(whole.workers))
        is_hurried = self.stop is not None and (self.stop.reason == "interrupted" or now >= self.stop.deadline)
        may_go_on = self._course.can_survive and not is_hurried
        verdict = self._course.over(settled, whole, now) if may_go_on else None
        if verdict is not None:
            self._try(verdict, now)
            return
        self._outcome = conclude(settled, whole, self.stop, self._listener.on_note)
        self.killed = killed_early(whole)

    def _statement(self, host: str, facts: Mapping[str, Any], now: float) -> Statement:
        try:
            return Statement.from_fields(facts, now)
        except ProtocolError as error:
            self._listener.on_note(f"{host}: {error}")
            return Statement()

    def _try(self, verdict: Verdict, now: float) -> None:
        """Begin the next generation, or wait, as the restart policy decides; raises if it gives up."""
        decision = self._course.next(verdict, self._roster.hosts, now, is_stopping=self.stop is not None)
        if isinstance(decision, Go):
            self._begin(decision.places, decision.fitted, now)
            return
        if self._waiting is None:
            self._listener.on_note(decision.why)
        self._waiting = (verdict, decision.until)

    # --- events and views

    def _emit(self, event: Event) -> None:
        self._listener.on_event(-1, encode(event))

    def _show(self, now: float) -> float | None:
        """Call ``OnTurn`` when it asked to be called, and whenever the generation or the state has changed. Not more
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

    def view(self, now: float) -> View:
        host = self._host
        members = frozenset(place.host for place in self._course.places)
        return View(
            now=now,
            state=self._state,
            generation=self.generation,
            world_size=sum(place.num_workers for place in self._course.places),
            seen=tuple(host.seen()) if host else (),
            hosts=self._roster.seen(members, self._course.quarantined),
            boxes=tuple(tuple(box) for box in host.boxes.paths) if host else (),
            boxes_bytes=host.boxes.num_bytes if host else 0,
            zygote=host.zygote if host else None,
            elsewhere=tuple(self._seen_elsewhere(now)),
        )

    def _seen_elsewhere(self, now: float) -> Iterator[Seen]:
        for place in self._course.places:
            peer = self._machine.peer(place.host) if place.host != self._name else None
            if peer is not None:
                yield from (Seen(row.rank, place.host, None, word_of(row, now)) for row in peer.progress)

    @property
    def _state(self) -> str:
        if self._machine.generation is None:
            return "starting"
        if self.stop is not None:
            return "stopping"
        return "closing ranks" if self._course.is_closing else "running"


def _letters(effects: list[LeadEffect]) -> list[Letter]:
    return [effect.letter for effect in effects if isinstance(effect, Send)]
