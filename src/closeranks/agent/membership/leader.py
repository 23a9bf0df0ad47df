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
        timing: Callable[[int], LeaseTiming] = lease_timing_for,
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
        self._timing = timing
        self._newest = generation
        self._sessions = HostSessions()
        self._is_over = False
        self._dismissal: Dismiss | None = None

    # --- state

    @property
    def phase(self) -> GenerationPhase:
        return self.generation.phase if self.generation else GenerationPhase.SETTLED

    @property
    def available(self) -> tuple[AvailableHost, ...]:
        """The hosts that could take workers, in the order in which they joined."""
        return tuple(
            AvailableHost(session.name, session.num_workers, session.incarnation, session.facts)
            for session in self._sessions.present()
            if self._is_available(session)
        )

    def _is_available(self, session: HostSession) -> bool:
        return session.is_confirmed and not session.is_leaving

    def session_of(self, name: str) -> HostSession | None:
        """The host's newest session, with the progress it last reported."""
        return self._sessions.get(name)

    def may_begin(self, now: float) -> bool:
        return not self._is_silent(now) and self.phase == GenerationPhase.SETTLED and now >= self.quiet_until

    def deadline(self, now: float) -> float | None:
        """When ``tick`` must be called at the latest."""
        if self._is_over:
            return None
        expiry = self._sessions.next_expiry()
        due = self.until if expiry is None else min(expiry, self.until)
        return None if math.isinf(due) else max(due, now)

    # --- inputs

    def handle(self, envelope: Envelope, now: float) -> Effects:
        """A message from a host has arrived."""
        if self._is_silent(now) or envelope.term > self.term:
            return []
        body = envelope.body
        if isinstance(body, Join):
            return self._on_join(envelope, body, now)
        session = self._sender_of(envelope)
        if session is None or envelope.term != self.term:
            return []
        if self._dismissal is not None:
            return [self._send(session, self._dismissal)]
        match body:
            case Heartbeat():
                return [] if session.is_lost else self._on_heartbeat(session, body, now)
            case WorkerFailed() | Fenced() | WorkersDone() | StoreAddress():
                member = self._member_of(session)
                if member is None or self.generation is None or body.generation != self.generation.number:
                    return []
                return self._on_report(self.generation, member, body, now)
            case Leaving():
                return self._on_leaving(session, body)
            case WorkerEvent() | WorkerOutput():
                is_current = self.generation is not None and body.generation == self.generation.number
                return [RelayedMessage(session.name, body)] if is_current and not session.is_lost else []
            case HostNote():
                return [RelayedMessage(session.name, body)]
            case _:
                return []

    def on_disconnected(self, host: str, incarnation: int, now: float) -> Effects:
        """The host, or its kernel, has closed the connection. Not for a connection that went silent or that was closed
        by this side: those hosts are lost when their lease expires."""
        if self._is_silent(now):
            return []
        return [
            effect
            for session in self._sessions_of(host)
            if session.incarnation == incarnation
            for effect in self._lose(session, "its connection was closed", now, dead_at=now + ORPHAN_S)
        ]

    def tick(self, now: float) -> Effects:
        """Time has passed."""
        if self._is_over:
            return []
        if now >= self.until:
            self._is_over = True
            return [SteppedDown(self.term)]
        effects: Effects = []
        for session in self._sessions.expired(now):
            effects += self._lose(session, "no heartbeat arrived in time", now, dead_at=now)
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
            why = f"not available: {', '.join(bad)}" if bad else f"the one before is {self.phase}"
            raise CloseranksError(f"generation {self._newest + 1} cannot begin: {why}")
        self._newest += 1
        per_host = tuple(count for _, count in members)
        new_members = []
        for number, (name, _) in enumerate(members):
            session = self._sessions.get(name)
            assert session is not None
            new_members.append(
                GenerationMember(session, BeginGeneration(self._newest, number, per_host, dict(payload)), now)
            )
        self.generation = Generation(self._newest, new_members)
        return [self._send(member.session, member.begin) for member in new_members]

    def send_request(self, request: RunRequest, now: float) -> Effects:
        """Pass a request on to every worker of the generation."""
        generation = self.generation
        if self._is_silent(now) or generation is None or not generation.is_alive:
            return []
        message = WorkerRequest(generation.number, len(generation.requests) + 1, request)
        generation.requests.append(message)
        return [self._send(member.session, message) for member in generation.live_members()]

    def fence(self, what: str, now: float) -> Effects:
        """Fence the generation: a hang was detected, or a deadline has passed."""
        return [] if self._is_silent(now) else self._break(EndCause("ordered", "", what), now)

    def dismiss(self, reason: str, now: float, *, rescues: bool = False) -> Effects:
        """The job is over: dismiss every host, and every host that sends a message from now on. ``rescues``: each one
        writes the snapshots in its memory to disk first."""
        if self._is_silent(now):
            return []
        self._dismissal = Dismiss(reason, rescues)
        return [self._send(session, self._dismissal) for session in self._sessions.present()]

    # --- messages

    def _on_join(self, envelope: Envelope, join: Join, now: float) -> Effects:
        known = self._sessions.get(envelope.host)
        identity = (envelope.incarnation, envelope.session)
        if known is not None and identity == known.identity:
            return [] if known.is_lost else [self._welcome(known, now)]
        if known is not None and identity < known.identity and not self._may_step_back(known, envelope):
            return []
        session = HostSession(envelope.host, *identity, join.num_workers, now, join.facts)
        if self._dismissal is not None:
            return [self._send(session, self._dismissal)]
        self._newest = max(self._newest, join.generation)
        effects = self._replace(known, envelope, now) if known is not None else []
        welcome = self._welcome(session, now)
        self._sessions.add(session)
        return [*effects, welcome]

    @staticmethod
    def _may_step_back(known: HostSession, envelope: Envelope) -> bool:
        """A host whose clock was set back starts with a lower incarnation; it must wait until its earlier one is
        lost."""
        return known.is_lost and envelope.incarnation != known.incarnation

    def _replace(self, known: HostSession, envelope: Envelope, now: float) -> Effects:
        """The host has joined again. In the same incarnation it has no workers left; those of an earlier incarnation,
        or of another host of that name, are dead when their lease expires or their connection closes."""
        if known.incarnation == envelope.incarnation:
            return self._lose(known, "it has joined again", now, dead_at=now, why="rejoined")
        effects = self._lose(known, "its agent was restarted", now, why="restarted")
        return [*effects, self._send(known, Dismiss(f"another agent has joined as {known.name}"))]

    def _welcome(self, session: HostSession, now: float) -> SendMessage:
        timing = self._extend_lease(session, now)
        return self._send(session, Welcome(timing.beat_s, timing.lease_s, self._plan))

    def _extend_lease(self, session: HostSession, now: float) -> LeaseTiming:
        """The host is about to be granted a lease of this length: do not count it as dead any earlier, whatever it was
        granted before."""
        timing = self._timing(self._sessions.num_present)
        session.expires_at = max(session.expires_at, now + timing.dead_after_s)
        return timing

    def _on_heartbeat(self, session: HostSession, heartbeat: Heartbeat, now: float) -> Effects:
        timing = self._extend_lease(session, now)
        session.progress = heartbeat.progress
        effects: Effects = [self._send(session, HeartbeatAck(heartbeat.seq, timing.beat_s, timing.lease_s))]
        if not session.is_confirmed:
            session.is_confirmed = True
            effects.append(self._changed(session, "joined"))
        member = self._member_of(session)
        if member is not None and self.generation is not None:
            effects += self._reconcile(self.generation, member, heartbeat, now, timing)
        return effects

    def _reconcile(
        self, generation: Generation, member: GenerationMember, heartbeat: Heartbeat, now: float, timing: LeaseTiming
    ) -> Effects:
        """Accept what the heartbeat confirms, and send again what it does not, once that had time to arrive."""
        effects: Effects = []
        if heartbeat.generation == generation.number and generation.is_alive:
            effects += self._confirm_start(generation, member)
        if member.may_have_workers and now >= member.ordered_at + timing.beat_s:
            missing = self._missing(generation, member, heartbeat)
            if missing:
                member.ordered_at = now
            effects += [self._send(member.session, body) for body in missing]
        return effects

    @staticmethod
    def _missing(generation: Generation, member: GenerationMember, heartbeat: Heartbeat) -> list[MessageBody]:
        if generation.phase == GenerationPhase.BREAKING:
            return [Fence(generation.number)]
        if heartbeat.generation != generation.number:
            return [member.begin]
        missing: list[MessageBody] = list(generation.requests[heartbeat.num_asked :])
        if generation.store and not heartbeat.has_store:
            missing.append(StoreAddress(generation.number, generation.store))
        return missing

    @staticmethod
    def _confirm_start(generation: Generation, member: GenerationMember) -> Effects:
        generation.move(member, MemberState.WORKING)
        if generation.phase == GenerationPhase.FORMING and generation.has_started:
            generation.phase = GenerationPhase.RUNNING
            return [GenerationFormed(generation.number)]
        return []

    def _on_report(
        self,
        generation: Generation,
        member: GenerationMember,
        body: WorkerFailed | Fenced | WorkersDone | StoreAddress,
        now: float,
    ) -> Effects:
        match body:
            case StoreAddress():
                return self._on_store(generation, member, body)
            case WorkerFailed():
                member.facts = member.facts or body.facts
                return self._break(EndCause("fault", member.session.name, "a worker failed", body.facts), now)
            case WorkersDone():
                return self._on_done(generation, member, body, now)
            case Fenced():
                member.facts = body.facts if member.may_have_workers else member.facts
                generation.move(member, MemberState.OUT)
                effects = self._break(EndCause("fault", member.session.name, "it was fenced", body.facts), now)
                return effects + self._settle_if_empty(now)

    def _on_store(self, generation: Generation, member: GenerationMember, store: StoreAddress) -> Effects:
        """The first address counts; it is sent back to its sender too, as an acknowledgement."""
        if not generation.is_alive:
            return []
        effects = self._confirm_start(generation, member)
        if generation.store:
            return [*effects, self._send(member.session, StoreAddress(generation.number, generation.store))]
        generation.store = store.address
        return [*effects, *(self._send(other.session, store) for other in generation.live_members())]

    def _on_done(self, generation: Generation, member: GenerationMember, done: WorkersDone, now: float) -> Effects:
        if not member.may_have_workers:
            return []
        member.facts = done.facts
        effects = self._confirm_start(generation, member) if generation.is_alive else []
        generation.move(member, MemberState.DONE)
        return effects + self._settle_if_empty(now)

    def _on_leaving(self, session: HostSession, leaving: Leaving) -> Effects:
        """The host stays a member until the generation is over: the restart policy asks for a regroup, which loses no
        step."""
        if session.is_lost or session.is_leaving:
            return []
        session.is_leaving = True
        effects: Effects = [self._changed(session, "leaving", leaving.reason)]
        return effects if self._is_member(session) else effects + self._release(session)

    def _release(self, session: HostSession) -> Effects:
        self._sessions.mark_lost(session)
        return [self._send(session, Dismiss("it left as requested")), self._changed(session, "left")]

    # --- the end of a generation

    def _lose(
        self, session: HostSession, what: str, now: float, *, dead_at: float = math.inf, why: Why = "lost"
    ) -> Effects:
        effects: Effects = [] if session.is_lost else [self._changed(session, "lost", what)]
        self._sessions.mark_lost(session, dead_at)
        member = self._member_of(session)
        if member is not None and member.may_have_workers and self.generation is not None:
            if dead_at <= now:
                self.generation.move(member, MemberState.OUT)
            effects += self._break(EndCause(why, session.name, what), now)
        return effects

    def _break(self, cause: EndCause, now: float) -> Effects:
        """The first cause counts. Every member that may have workers is ordered to fence, and again after its
        heartbeats until it has confirmed."""
        generation = self.generation
        if generation is None or not generation.is_alive:
            return []
        generation.phase, generation.cause = GenerationPhase.BREAKING, cause
        effects: Effects = [GenerationBroken(generation.number, cause)]
        for member in generation.live_members():
            member.ordered_at = now
            effects.append(self._send(member.session, Fence(generation.number)))
        return effects + self._settle_if_empty(now)

    def _settle_if_empty(self, now: float) -> Effects:
        generation = self.generation
        if generation is None or generation.phase == GenerationPhase.SETTLED or not self._may_settle(generation):
            return []
        generation.phase = GenerationPhase.SETTLED
        effects: Effects = []
        for session in [member.session for member in generation.members.values()]:
            if session.is_leaving and not session.is_lost:
                effects += self._release(session)
        facts = {name: member.facts for name, member in generation.members.items() if member.facts}
        return [*effects, GenerationSettled(generation.number, generation.cause, facts, self.available)]

    @staticmethod
    def _may_settle(generation: Generation) -> bool:
        return generation.is_empty

    # --- lookups

    def _is_silent(self, now: float) -> bool:
        return self._is_over or now >= self.until

    def _sender_of(self, envelope: Envelope) -> HostSession | None:
        identity = (envelope.incarnation, envelope.session)
        return next((session for session in self._sessions_of(envelope.host) if session.identity == identity), None)

    def _sessions_of(self, name: str) -> list[HostSession]:
        """The host's newest session, and an older one that is a member of this generation and may still have
        workers."""
        newest = self._sessions.get(name)
        member = self.generation.members.get(name) if self.generation else None
        sessions = [newest] if newest is not None else []
        return sessions if member is None or member.session is newest else [*sessions, member.session]

    def _member_of(self, session: HostSession) -> GenerationMember | None:
        return self.generation.member_of(session) if self.generation else None

    def _is_member(self, session: HostSession) -> bool:
        return self.phase != GenerationPhase.SETTLED and self._member_of(session) is not None

    def _send(self, session: HostSession, body: MessageBody) -> SendMessage:
        return SendMessage(session.envelope(self.term, body))

    @staticmethod
    def _changed(session: HostSession, change: HostChange, what: str = "") -> HostStatusChanged:
        return HostStatusChanged(session.name, change, what, session.num_workers)
