"""The leader's state machine: which hosts are present, which are members, and when the next generation may begin.

Messages of hosts and the passing of time in, effects out. Which hosts become members is decided elsewhere; the leader's
own host is a host like any other, whose messages come by a direct call.

Invariants:
- a generation begins only after every member of the one before is done, has confirmed its fence, has rejoined (a host
  joins only when none of its workers is alive), or is lost and its lease has expired; a closed connection counts as an
  expired lease after ``ORPHAN_S``, because an agent closes it only when its workers are dead, and the kernel kills the
  workers of a dead agent;
- a host that joins is available from its first heartbeat until it leaves or is lost, whatever else happens meanwhile;
- a message of another term, incarnation or session than the host's newest changes nothing;
- a leader whose own lease has expired gives no orders and renews no lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from closeranks.agent.membership.effects import (
    AvailableHost,
    EndCause,
    GenerationBroken,
    GenerationFormed,
    GenerationSettled,
    HostChange,
    HostStatusChanged,
    LeaderEffect,
    RelayedMessage,
    SendMessage,
    SteppedDown,
    Why,
)
from closeranks.agent.membership.generation import Generation, GenerationMember, GenerationPhase, MemberState
from closeranks.agent.membership.host_sessions import HostSession, HostSessions
from closeranks.agent.membership.lease_timing import ORPHAN_S, LeaseTiming, lease_timing_for
from closeranks.agent.membership.messages import (
    BeginGeneration,
    Dismiss,
    Envelope,
    Fence,
    Fenced,
    Heartbeat,
    HeartbeatAck,
    HostNote,
    Join,
    Leaving,
    MessageBody,
    StoreAddress,
    Welcome,
    WorkerEvent,
    WorkerFailed,
    WorkerOutput,
    WorkerRequest,
    WorkersDone,
)
from closeranks.core.errors import CloseranksError
from closeranks.core.requests import RunRequest

Effects = list[LeaderEffect]


class Leader:
    """The leader of one term. In every call, ``now`` is its host's monotonic clock."""

    def __init__(
        self,
        term: int,
        *,
        plan: Mapping[str, Any] | None = None,
        pace: Callable[[int], LeaseTiming] = lease_timing_for,
        until: float = math.inf,
        quiet_until: float = -math.inf,
        generation: int = -1,
    ) -> None:
        """``until`` is when its own lease expires unless ``renew`` is called; before ``quiet_until`` leases that an
        earlier leader granted may still hold, so no generation begins. ``generation`` is the newest one known to have
        existed."""
        self.term = term
        self.until = until
        self.quiet_until = quiet_until
        self.generation: Generation | None = None
        self._plan = dict(plan or {})
        self._pace = pace
        self._newest = generation
        self._peers = HostSessions()
        self._is_over = False
        self._farewell: Dismiss | None = None

    # --- state

    @property
    def phase(self) -> GenerationPhase:
        return self.generation.phase if self.generation else GenerationPhase.SETTLED

    @property
    def available(self) -> tuple[AvailableHost, ...]:
        """The hosts that could take workers, in the order in which they joined."""
        return tuple(
            AvailableHost(peer.name, peer.num_workers, peer.incarnation, peer.facts)
            for peer in self._peers.present()
            if self._is_available(peer)
        )

    def _is_available(self, peer: HostSession) -> bool:
        return peer.is_confirmed and not peer.is_leaving

    def session_of(self, name: str) -> HostSession | None:
        """The host's newest session, with the progress it last reported."""
        return self._peers.get(name)

    def may_begin(self, now: float) -> bool:
        return not self._is_silent(now) and self.phase == GenerationPhase.SETTLED and now >= self.quiet_until

    def deadline(self, now: float) -> float | None:
        """When ``tick`` must be called at the latest."""
        if self._is_over:
            return None
        alarm = self._peers.next_expiry()
        due = self.until if alarm is None else min(alarm, self.until)
        return None if math.isinf(due) else max(due, now)

    # --- inputs

    def handle(self, letter: Envelope, now: float) -> Effects:
        """A message from a host has arrived."""
        if self._is_silent(now) or letter.term > self.term:
            return []
        body = letter.body
        if isinstance(body, Join):
            return self._on_join(letter, body, now)
        peer = self._peer_of(letter)
        if peer is None or letter.term != self.term:
            return []
        if self._farewell is not None:
            return [self._send(peer, self._farewell)]
        match body:
            case Heartbeat():
                return [] if peer.is_lost else self._on_beat(peer, body, now)
            case WorkerFailed() | Fenced() | WorkersDone() | StoreAddress():
                seat = self._seat(peer)
                if seat is None or self.generation is None or body.generation != self.generation.number:
                    return []
                return self._on_news(self.generation, seat, body, now)
            case Leaving():
                return self._on_leaving(peer, body)
            case WorkerEvent() | WorkerOutput():
                is_current = self.generation is not None and body.generation == self.generation.number
                return [RelayedMessage(peer.name, body)] if is_current and not peer.is_lost else []
            case HostNote():
                return [RelayedMessage(peer.name, body)]
            case _:
                return []

    def on_disconnected(self, host: str, incarnation: int, now: float) -> Effects:
        """The host, or its kernel, has closed the connection. Not for a connection that went silent or that was closed
        by this side: those hosts are lost when their lease expires."""
        if self._is_silent(now):
            return []
        return [
            effect
            for peer in self._sessions(host)
            if peer.incarnation == incarnation
            for effect in self._lose(peer, "its connection was closed", now, dead_at=now + ORPHAN_S)
        ]

    def tick(self, now: float) -> Effects:
        """Time has passed."""
        if self._is_over:
            return []
        if now >= self.until:
            self._is_over = True
            return [SteppedDown(self.term)]
        effects: Effects = []
        for peer in self._peers.expired(now):
            effects += self._lose(peer, "no heartbeat arrived in time", now, dead_at=now)
        return effects + self._settle_if_empty(now)

    # --- orders of the caller

    def renew(self, until: float) -> None:
        """The leader's own lease was renewed."""
        self.until = max(self.until, until)

    def begin(self, members: Sequence[tuple[str, int]], payload: Mapping[str, Any], now: float) -> Effects:
        """Begin the next generation: hosts in rank order, each with its number of workers."""
        available = {host.name: host for host in self.available}
        bad = [name for name, count in members if name not in available or not count >= 1]
        if not self.may_begin(now) or bad or not members or len(dict(members)) < len(members):
            who = f": {', '.join(bad)}" if bad else ""
            raise CloseranksError(f"generation {self._newest + 1} cannot begin while it is {self.phase}{who}")
        self._newest += 1
        per_host = tuple(count for _, count in members)
        seats = []
        for number, (name, _) in enumerate(members):
            peer = self._peers.get(name)
            assert peer is not None
            seats.append(GenerationMember(peer, BeginGeneration(self._newest, number, per_host, dict(payload)), now))
        self.generation = Generation(self._newest, seats)
        return [self._send(seat.session, seat.begin) for seat in seats]

    def send_request(self, request: RunRequest, now: float) -> Effects:
        """Pass a request on to every worker of the generation."""
        generation = self.generation
        if self._is_silent(now) or generation is None or not generation.is_alive:
            return []
        ask = WorkerRequest(generation.number, len(generation.asks) + 1, request)
        generation.asks.append(ask)
        return [self._send(seat.session, ask) for seat in generation.live_members()]

    def fence(self, what: str, now: float) -> Effects:
        """Fence the generation: a hang was detected, or a deadline has passed."""
        return [] if self._is_silent(now) else self._break(EndCause("ordered", "", what), now)

    def dismiss(self, reason: str, now: float, *, rescues: bool = False) -> Effects:
        """The job is over: dismiss every host, and every host that sends a message from now on. ``rescues``: each one
        writes the snapshots in its memory to disk first."""
        if self._is_silent(now):
            return []
        self._farewell = Dismiss(reason, rescues)
        return [self._send(peer, self._farewell) for peer in self._peers.present()]

    # --- messages

    def _on_join(self, letter: Envelope, join: Join, now: float) -> Effects:
        known = self._peers.get(letter.host)
        identity = (letter.incarnation, letter.session)
        if known is not None and identity == known.identity:
            return [] if known.is_lost else [self._welcome(known, now)]
        if known is not None and identity < known.identity and not self._may_step_back(known, letter):
            return []
        peer = HostSession(letter.host, *identity, join.num_workers, now, join.facts)
        if self._farewell is not None:
            return [self._send(peer, self._farewell)]
        self._newest = max(self._newest, join.generation)
        effects = self._replace(known, letter, now) if known is not None else []
        welcome = self._welcome(peer, now)
        self._peers.add(peer)
        return [*effects, welcome]

    @staticmethod
    def _may_step_back(known: HostSession, letter: Envelope) -> bool:
        """A host whose clock was set back starts with a lower incarnation; it must wait until its earlier one is
        lost."""
        return known.is_lost and letter.incarnation != known.incarnation

    def _replace(self, known: HostSession, letter: Envelope, now: float) -> Effects:
        """The host has joined again. In the same incarnation it has no workers left; those of an earlier incarnation,
        or of another host of that name, are dead when their lease expires or their connection closes."""
        if known.incarnation == letter.incarnation:
            return self._lose(known, "it has joined again", now, dead_at=now, why="rejoined")
        effects = self._lose(known, "its agent was restarted", now, why="restarted")
        return [*effects, self._send(known, Dismiss(f"another agent has joined as {known.name}"))]

    def _welcome(self, peer: HostSession, now: float) -> SendMessage:
        pace = self._trust(peer, now)
        return self._send(peer, Welcome(pace.beat_s, pace.lease_s, self._plan))

    def _trust(self, peer: HostSession, now: float) -> LeaseTiming:
        """The host is about to be granted a lease of this length: do not count it as dead any earlier, whatever it was
        granted before."""
        pace = self._pace(self._peers.num_here)
        peer.expires_at = max(peer.expires_at, now + pace.dead_after_s)
        return pace

    def _on_beat(self, peer: HostSession, beat: Heartbeat, now: float) -> Effects:
        pace = self._trust(peer, now)
        peer.progress = beat.progress
        effects: Effects = [self._send(peer, HeartbeatAck(beat.seq, pace.beat_s, pace.lease_s))]
        if not peer.is_confirmed:
            peer.is_confirmed = True
            effects.append(self._changed(peer, "joined"))
        seat = self._seat(peer)
        if seat is not None and self.generation is not None:
            effects += self._reconcile(self.generation, seat, beat, now, pace)
        return effects

    def _reconcile(
        self, generation: Generation, seat: GenerationMember, beat: Heartbeat, now: float, pace: LeaseTiming
    ) -> Effects:
        """Accept what the heartbeat confirms, and send again what it does not, once that had time to arrive."""
        effects: Effects = []
        if beat.generation == generation.number and generation.is_alive:
            effects += self._start_seen(generation, seat)
        if seat.may_have_workers and now >= seat.told_at + pace.beat_s:
            missing = self._missing(generation, seat, beat)
            if missing:
                seat.told_at = now
            effects += [self._send(seat.session, body) for body in missing]
        return effects

    @staticmethod
    def _missing(generation: Generation, seat: GenerationMember, beat: Heartbeat) -> list[MessageBody]:
        if generation.phase == GenerationPhase.BREAKING:
            return [Fence(generation.number)]
        if beat.generation != generation.number:
            return [seat.begin]
        missing: list[MessageBody] = list(generation.asks[beat.num_asked :])
        if generation.store and not beat.has_store:
            missing.append(StoreAddress(generation.number, generation.store))
        return missing

    @staticmethod
    def _start_seen(generation: Generation, seat: GenerationMember) -> Effects:
        generation.move(seat, MemberState.WORKING)
        if generation.phase == GenerationPhase.FORMING and generation.has_started:
            generation.phase = GenerationPhase.RUNNING
            return [GenerationFormed(generation.number)]
        return []

    def _on_news(
        self,
        generation: Generation,
        seat: GenerationMember,
        body: WorkerFailed | Fenced | WorkersDone | StoreAddress,
        now: float,
    ) -> Effects:
        match body:
            case StoreAddress():
                return self._on_store(generation, seat, body)
            case WorkerFailed():
                seat.facts = seat.facts or body.facts
                return self._break(EndCause("fault", seat.session.name, "a worker failed", body.facts), now)
            case WorkersDone():
                return self._on_done(generation, seat, body, now)
            case Fenced():
                seat.facts = body.facts if seat.may_have_workers else seat.facts
                generation.move(seat, MemberState.OUT)
                effects = self._break(EndCause("fault", seat.session.name, "it was fenced", body.facts), now)
                return effects + self._settle_if_empty(now)

    def _on_store(self, generation: Generation, seat: GenerationMember, store: StoreAddress) -> Effects:
        """The first address counts; it is sent back to its sender too, as an acknowledgement."""
        if not generation.is_alive:
            return []
        effects = self._start_seen(generation, seat)
        if generation.store:
            return [*effects, self._send(seat.session, StoreAddress(generation.number, generation.store))]
        generation.store = store.address
        return [*effects, *(self._send(other.session, store) for other in generation.live_members())]

    def _on_done(self, generation: Generation, seat: GenerationMember, done: WorkersDone, now: float) -> Effects:
        if not seat.may_have_workers:
            return []
        seat.facts = done.facts
        effects = self._start_seen(generation, seat) if generation.is_alive else []
        generation.move(seat, MemberState.DONE)
        return effects + self._settle_if_empty(now)

    def _on_leaving(self, peer: HostSession, leaving: Leaving) -> Effects:
        """The host stays a member until the generation is over: the restart policy asks for a regroup, which loses no
        step."""
        if peer.is_lost or peer.is_leaving:
            return []
        peer.is_leaving = True
        effects: Effects = [self._changed(peer, "leaving", leaving.reason)]
        return effects if self._is_seated(peer) else effects + self._let_go(peer)

    def _let_go(self, peer: HostSession) -> Effects:
        self._peers.mark_lost(peer)
        return [self._send(peer, Dismiss("it left as requested")), self._changed(peer, "left")]

    # --- the end of a generation

    def _lose(
        self, peer: HostSession, what: str, now: float, *, dead_at: float = math.inf, why: Why = "lost"
    ) -> Effects:
        effects: Effects = [] if peer.is_lost else [self._changed(peer, "lost", what)]
        self._peers.mark_lost(peer, dead_at)
        seat = self._seat(peer)
        if seat is not None and seat.may_have_workers and self.generation is not None:
            if dead_at <= now:
                self.generation.move(seat, MemberState.OUT)
            effects += self._break(EndCause(why, peer.name, what), now)
        return effects

    def _break(self, cause: EndCause, now: float) -> Effects:
        """The first cause counts. Every member that may have workers is ordered to fence, and again after its
        heartbeats until it has confirmed."""
        generation = self.generation
        if generation is None or not generation.is_alive:
            return []
        generation.phase, generation.cause = GenerationPhase.BREAKING, cause
        effects: Effects = [GenerationBroken(generation.number, cause)]
        for seat in generation.live_members():
            seat.told_at = now
            effects.append(self._send(seat.session, Fence(generation.number)))
        return effects + self._settle_if_empty(now)

    def _settle_if_empty(self, now: float) -> Effects:
        generation = self.generation
        if generation is None or generation.phase == GenerationPhase.SETTLED or not self._may_settle(generation):
            return []
        generation.phase = GenerationPhase.SETTLED
        effects: Effects = []
        for peer in [seat.session for seat in generation.members.values()]:
            if peer.is_leaving and not peer.is_lost:
                effects += self._let_go(peer)
        facts = {name: seat.facts for name, seat in generation.members.items() if seat.facts}
        return [*effects, GenerationSettled(generation.number, generation.cause, facts, self.available)]

    @staticmethod
    def _may_settle(generation: Generation) -> bool:
        return generation.is_empty

    # --- lookups

    def _is_silent(self, now: float) -> bool:
        return self._is_over or now >= self.until

    def _peer_of(self, letter: Envelope) -> HostSession | None:
        identity = (letter.incarnation, letter.session)
        return next((peer for peer in self._sessions(letter.host) if peer.identity == identity), None)

    def _sessions(self, name: str) -> list[HostSession]:
        """The host's newest session, and an older one that is a member of this generation and may still have
        workers."""
        newest = self._peers.get(name)
        seat = self.generation.members.get(name) if self.generation else None
        sessions = [newest] if newest is not None else []
        return sessions if seat is None or seat.session is newest else [*sessions, seat.session]

    def _seat(self, peer: HostSession) -> GenerationMember | None:
        return self.generation.member_of(peer) if self.generation else None

    def _is_seated(self, peer: HostSession) -> bool:
        return self.phase != GenerationPhase.SETTLED and self._seat(peer) is not None

    def _send(self, peer: HostSession, body: MessageBody) -> SendMessage:
        return SendMessage(peer.envelope(self.term, body))

    @staticmethod
    def _changed(peer: HostSession, change: HostChange, what: str = "") -> HostStatusChanged:
        return HostStatusChanged(peer.name, change, what, peer.num_workers)
