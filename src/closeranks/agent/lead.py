"""How does a job go from generation to generation until it ends?

The membership's machine says who is here and when nobody of a generation is left; the policy says who takes part in the
next; this carries letters between the machine and the hosts, and tells what happened. Invariants: every wait has an
end; whatever is said of a fault names one culprit; this host takes the same path as any other, without a network.
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
"""Looks on in every turn of the loop; answers when (``time.monotonic()``) it wants to look again at the latest."""

_TOLD_S = 0.2
"""After a worker was asked to leave, how long to wait whether the whole run is."""
_FAREWELL_S = 5.0
"""How long other hosts have to hear that it is over, and to hang up."""
_SHOW_S = 0.25
"""Who looks on may be busy with something of its own that it did not know of when it last said when to look."""
_SURE_BEATS = 4
"""Over how many beats a rank must have been the last of all before it is given up: words of two hosts differ in age."""
_TERM = 1
"""This lead is the only one: it stands in the process that started the job, and its loss ends it."""


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
        """``has_unsaved``: whether the memory of this host holds what no checkpoint does."""
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
        """On their way within this process: to the lead or to this host's station. What a host wrote before it hung up
        is read first."""
        self._gate: Gate | None = None
        self._muster: Muster | None = None
        self.stop: Stop | None = None
        self._outcome: Outcome | None = None
        self._course = Course(plan, self._emit)
        self._told: tuple[float, int] | None = None
        """When a worker said that it was asked to leave, and which."""
        self._waiting: tuple[Verdict, float] | None = None
        """What is to be survived as soon as enough hosts are here, or then."""
        self.killed: list[int] = []
        """Ranks that did not end by themselves, when it is over."""
        limits = self._course.limits
        self._stragglers = Stragglers(limits.slow_ratio, limits.slow_steps)
        self._claims = Claims()
        self._show_at, self._shown = 0.0, (-1, "")

    # --- from outside

    @property
    def is_underway(self) -> bool:
        """Whether there are workers, or soon will be again."""
        return self._machine.generation is not None

    @property
    def generation(self) -> int:
        return self._machine.generation.number if self._machine.generation else 0

    def request(self, request: Request) -> None:
        """Every worker is asked, and brings it to the vote of its next step."""
        self._act(self._machine.ask(request, time.monotonic()))

    def announce(self, address: str) -> None:
        """Rank 0 is on this host and has opened its store."""
        if self._station is not None:
            self._station.announce(address)

    @property
    def ears(self) -> Listener:
        """Of this host: what its workers say takes the way of all hosts' workers; notes need no generation."""

        def event(rank: int, fields: dict[str, Any]) -> None:
            if self._station is not None:
                self._station.relay.on_event(rank, fields)

        def output(rank: int, line: str) -> None:
            if self._station is not None:
                self._station.relay.on_output(rank, line)

        return Listener(event, output, self._listener.on_note)

    # --- the loop

    def run(self, host: Host) -> Outcome:
        """Other hosts may come while this one's zygote still imports: they have the same to do."""
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
        """Whatever ended it: other hosts hear that it is over, as far as a moment lets them."""
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
        """Everything that can be done now; when there is more, unless something happens before."""
        until: list[float | None] = []
        while self._outcome is None:
            now = time.monotonic()
            if self._gate is not None:
                self._gate.wake()
            until = [self._station.turn(now)] if self._station is not None else []
            # What lies here was written in time: after a standstill of this process nobody is called late for it.
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
        """What only time brings about."""
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

    # --- what the machine wants done

    def _act(self, effects: list[LeadEffect]) -> None:
        for effect in effects:  # who is here first: the machine decided with all of it known
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
        """A healthy generation grows, or lets a host go, after its step."""
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

    # --- workers that stand still or are slow, and other reasons to regroup

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
        """What all ranks have told with their hosts' last beats."""
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
        """Ask this generation to end by agreement: no step is lost."""
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
        """Everybody of a generation is gone."""
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
        """Begin the next generation if the policy lets it; raises what cannot be survived."""
        decision = self._course.next(verdict, self._roster.hosts, now, is_stopping=self.stop is not None)
        if isinstance(decision, Go):
            self._begin(decision.places, decision.fitted, now)
            return
        if self._waiting is None:
            self._listener.on_note(decision.why)
        self._waiting = (verdict, decision.until)

    # --- what is said

    def _emit(self, event: Event) -> None:
        self._listener.on_event(-1, encode(event))

    def _show(self, now: float) -> float | None:
        """Whoever looks on is asked to when it wants to be, and whenever something has changed: taking a view reads
        every worker's word."""
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
