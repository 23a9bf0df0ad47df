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
    Broke,
    Cause,
    Change,
    Changed,
    Deposed,
    Formed,
    Host,
    LeadEffect,
    Send,
    Settled,
    Told,
    Why,
)
from closeranks.agent.membership.generation import Generation, Phase, Seat, Standing
from closeranks.agent.membership.messages import (
    Ask,
    Beat,
    BeatBack,
    Begin,
    Body,
    Broken,
    Dismiss,
    Done,
    Event,
    Fence,
    Fenced,
    Join,
    Leaving,
    Letter,
    Note,
    Output,
    Store,
    Welcome,
)
from closeranks.agent.membership.pace import ORPHAN_S, Pace, pace_for
from closeranks.agent.membership.peers import Peer, Peers
from closeranks.core.errors import CloseranksError
from closeranks.core.requests import Request

Effects = list[LeadEffect]


class Lead:
    """The leader of one term. In every call, ``now`` is its host's monotonic clock."""

    def __init__(
        self,
        term: int,
        *,
        plan: Mapping[str, Any] | None = None,
        pace: Callable[[int], Pace] = pace_for,
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
        self._peers = Peers()
        self._is_over = False
        self._farewell: Dismiss | None = None

    # --- state

    @property
    def phase(self) -> Phase:
        return self.generation.phase if self.generation else Phase.SETTLED

    @property
    def available(self) -> tuple[Host, ...]:
        """The hosts that could take workers, in the order in which they joined."""
        return tuple(
            Host(peer.name, peer.num_workers, peer.incarnation, peer.facts)
            for peer in self._peers.here()
            if self._is_available(peer)
        )

    def _is_available(self, peer: Peer) -> bool:
        return peer.is_heard and not peer.is_leaving

    def peer(self, name: str) -> Peer | None:
        """The host's newest session, with the progress it last reported."""
        return self._peers.get(name)

    def may_begin(self, now: float) -> bool:
        return not self._is_silent(now) and self.phase == Phase.SETTLED and now >= self.quiet_until

    def deadline(self, now: float) -> float | None:
        """When ``tick`` must be called at the latest."""
        if self._is_over:
            return None
        alarm = self._peers.next_alarm()
        due = self.until if alarm is None else min(alarm, self.until)
        return None if math.isinf(due) else max(due, now)

    # --- inputs

    def handle(self, letter: Letter, now: float) -> Effects:
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
            case Beat():
                return [] if peer.is_lost else self._on_beat(peer, body, now)
            case Broken() | Fenced() | Done() | Store():
                seat = self._seat(peer)
                if seat is None or self.generation is None or body.generation != self.generation.number:
                    return []
                return self._on_news(self.generation, seat, body, now)
            case Leaving():
                return self._on_leaving(peer, body)
            case Event() | Output():
                is_current = self.generation is not None and body.generation == self.generation.number
                return [Told(peer.name, body)] if is_current and not peer.is_lost else []
            case Note():
                return [Told(peer.name, body)]
            case _:
                return []

    def closed(self, host: str, incarnation: int, now: float) -> Effects:
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
            return [Deposed(self.term)]
        effects: Effects = []
        for peer in self._peers.due(now):
            effects += self._lose(peer, "it was not heard in time", now, dead_at=now)
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
            seats.append(Seat(peer, Begin(self._newest, number, per_host, dict(payload)), now))
        self.generation = Generation(self._newest, seats)
        return [self._send(seat.peer, seat.begin) for seat in seats]

    def ask(self, request: Request, now: float) -> Effects:
        """Pass a request on to every worker of the generation."""
        generation = self.generation
        if self._is_silent(now) or generation is None or not generation.is_alive:
            return []
        ask = Ask(generation.number, len(generation.asks) + 1, request)
        generation.asks.append(ask)
        return [self._send(seat.peer, ask) for seat in generation.open_seats()]

    def break_up(self, what: str, now: float) -> Effects:
        """Fence the generation: a hang was detected, or a deadline has passed."""
        return [] if self._is_silent(now) else self._break(Cause("ordered", "", what), now)

    def dismiss(self, reason: str, now: float, *, rescues: bool = False) -> Effects:
        """The job is over: dismiss every host, and every host that sends a message from now on. ``rescues``: each one
        writes the snapshots in its memory to disk first."""
        if self._is_silent(now):
            return []
        self._farewell = Dismiss(reason, rescues)
        return [self._send(peer, self._farewell) for peer in self._peers.here()]

    # --- messages

    def _on_join(self, letter: Letter, join: Join, now: float) -> Effects:
        known = self._peers.get(letter.host)
        identity = (letter.incarnation, letter.session)
        if known is not None and identity == known.identity:
            return [] if known.is_lost else [self._welcome(known, now)]
        if known is not None and identity < known.identity and not self._may_step_back(known, letter):
            return []
        peer = Peer(letter.host, *identity, join.num_workers, now, join.facts)
        if self._farewell is not None:
            return [self._send(peer, self._farewell)]
        self._newest = max(self._newest, join.generation)
        effects = self._replace(known, letter, now) if known is not None else []
        welcome = self._welcome(peer, now)
        self._peers.add(peer)
        return [*effects, welcome]

    @staticmethod
    def _may_step_back(known: Peer, letter: Letter) -> bool:
        """A host whose clock was set back starts with a lower incarnation; it must wait until its earlier one is
        lost."""
        return known.is_lost and letter.incarnation != known.incarnation

    def _replace(self, known: Peer, letter: Letter, now: float) -> Effects:
        """The host has joined again. In the same incarnation it has no workers left; those of an earlier incarnation,
        or of another host of that name, are dead when their lease expires or their connection closes."""
        if known.incarnation == letter.incarnation:
            return self._lose(known, "it has joined again", now, dead_at=now, why="rejoined")
        effects = self._lose(known, "its agent has started anew", now, why="restarted")
        return [*effects, self._send(known, Dismiss(f"another agent has joined as {known.name}"))]

    def _welcome(self, peer: Peer, now: float) -> Send:
        pace = self._trust(peer, now)
        return self._send(peer, Welcome(pace.beat_s, pace.lease_s, self._plan))

    def _trust(self, peer: Peer, now: float) -> Pace:
        """The host is about to be granted a lease of this length: do not count it as dead any earlier, whatever it was
        granted before."""
        pace = self._pace(self._peers.num_here)
        peer.expires_at = max(peer.expires_at, now + pace.patience_s)
        return pace

    def _on_beat(self, peer: Peer, beat: Beat, now: float) -> Effects:
        pace = self._trust(peer, now)
        peer.progress = beat.progress
        effects: Effects = [self._send(peer, BeatBack(beat.seq, pace.beat_s, pace.lease_s))]
        if not peer.is_heard:
            peer.is_heard = True
            effects.append(self._changed(peer, "joined"))
        seat = self._seat(peer)
        if seat is not None and self.generation is not None:
            effects += self._reconcile(self.generation, seat, beat, now, pace)
        return effects

    def _reconcile(self, generation: Generation, seat: Seat, beat: Beat, now: float, pace: Pace) -> Effects:
        """Accept what the heartbeat confirms, and send again what it does not, once that had time to arrive."""
        effects: Effects = []
        if beat.generation == generation.number and generation.is_alive:
            effects += self._start_seen(generation, seat)
        if seat.is_open and now >= seat.told_at + pace.beat_s:
            missing = self._missing(generation, seat, beat)
            if missing:
                seat.told_at = now
            effects += [self._send(seat.peer, body) for body in missing]
        return effects

    @staticmethod
    def _missing(generation: Generation, seat: Seat, beat: Beat) -> list[Body]:
        if generation.phase == Phase.BREAKING:
            return [Fence(generation.number)]
        if beat.generation != generation.number:
            return [seat.begin]
        missing: list[Body] = list(generation.asks[beat.num_asked :])
        if generation.store and not beat.has_store:
            missing.append(Store(generation.number, generation.store))
        return missing

    @staticmethod
    def _start_seen(generation: Generation, seat: Seat) -> Effects:
        generation.move(seat, Standing.WORKING)
        if generation.phase == Phase.FORMING and generation.has_started:
            generation.phase = Phase.RUNNING
            return [Formed(generation.number)]
        return []

    def _on_news(self, generation: Generation, seat: Seat, body: Broken | Fenced | Done | Store, now: float) -> Effects:
        match body:
            case Store():
                return self._on_store(generation, seat, body)
            case Broken():
                seat.facts = seat.facts or body.facts
                return self._break(Cause("fault", seat.peer.name, "a worker failed", body.facts), now)
            case Done():
                return self._on_done(generation, seat, body, now)
            case Fenced():
                seat.facts = body.facts if seat.is_open else seat.facts
                generation.move(seat, Standing.OUT)
                effects = self._break(Cause("fault", seat.peer.name, "it was fenced", body.facts), now)
                return effects + self._settle_if_empty(now)

    def _on_store(self, generation: Generation, seat: Seat, store: Store) -> Effects:
        """The first address counts; it is sent back to its sender too, as an acknowledgement."""
        if not generation.is_alive:
            return []
        effects = self._start_seen(generation, seat)
        if generation.store:
            return [*effects, self._send(seat.peer, Store(generation.number, generation.store))]
        generation.store = store.address
        return [*effects, *(self._send(other.peer, store) for other in generation.open_seats())]

    def _on_done(self, generation: Generation, seat: Seat, done: Done, now: float) -> Effects:
        if not seat.is_open:
            return []
        seat.facts = done.facts
        effects = self._start_seen(generation, seat) if generation.is_alive else []
        generation.move(seat, Standing.DONE)
        return effects + self._settle_if_empty(now)

    def _on_leaving(self, peer: Peer, leaving: Leaving) -> Effects:
        """The host stays a member until the generation is over: the restart policy asks for a regroup, which loses no
        step."""
        if peer.is_lost or peer.is_leaving:
            return []
        peer.is_leaving = True
        effects: Effects = [self._changed(peer, "leaving", leaving.reason)]
        return effects if self._is_seated(peer) else effects + self._let_go(peer)

    def _let_go(self, peer: Peer) -> Effects:
        self._peers.lose(peer)
        return [self._send(peer, Dismiss("it has left as it was asked to")), self._changed(peer, "left")]

    # --- the end of a generation

    def _lose(self, peer: Peer, what: str, now: float, *, dead_at: float = math.inf, why: Why = "lost") -> Effects:
        effects: Effects = [] if peer.is_lost else [self._changed(peer, "lost", what)]
        self._peers.lose(peer, dead_at)
        seat = self._seat(peer)
        if seat is not None and seat.is_open and self.generation is not None:
            if dead_at <= now:
                self.generation.move(seat, Standing.OUT)
            effects += self._break(Cause(why, peer.name, what), now)
        return effects

    def _break(self, cause: Cause, now: float) -> Effects:
        """The first cause counts. Every member that may have workers is ordered to fence, and again after its
        heartbeats until it has confirmed."""
        generation = self.generation
        if generation is None or not generation.is_alive:
            return []
        generation.phase, generation.cause = Phase.BREAKING, cause
        effects: Effects = [Broke(generation.number, cause)]
        for seat in generation.open_seats():
            seat.told_at = now
            effects.append(self._send(seat.peer, Fence(generation.number)))
        return effects + self._settle_if_empty(now)

    def _settle_if_empty(self, now: float) -> Effects:
        generation = self.generation
        if generation is None or generation.phase == Phase.SETTLED or not self._may_settle(generation):
            return []
        generation.phase = Phase.SETTLED
        effects: Effects = []
        for peer in [seat.peer for seat in generation.seats.values()]:
            if peer.is_leaving and not peer.is_lost:
                effects += self._let_go(peer)
        facts = {name: seat.facts for name, seat in generation.seats.items() if seat.facts}
        return [*effects, Settled(generation.number, generation.cause, facts, self.available)]

    @staticmethod
    def _may_settle(generation: Generation) -> bool:
        return generation.is_empty

    # --- lookups

    def _is_silent(self, now: float) -> bool:
        return self._is_over or now >= self.until

    def _peer_of(self, letter: Letter) -> Peer | None:
        identity = (letter.incarnation, letter.session)
        return next((peer for peer in self._sessions(letter.host) if peer.identity == identity), None)

    def _sessions(self, name: str) -> list[Peer]:
        """The host's newest session, and an older one that is a member of this generation and may still have
        workers."""
        newest = self._peers.get(name)
        seat = self.generation.seats.get(name) if self.generation else None
        sessions = [newest] if newest is not None else []
        return sessions if seat is None or seat.peer is newest else [*sessions, seat.peer]

    def _seat(self, peer: Peer) -> Seat | None:
        return self.generation.seat_of(peer) if self.generation else None

    def _is_seated(self, peer: Peer) -> bool:
        return self.phase != Phase.SETTLED and self._seat(peer) is not None

    def _send(self, peer: Peer, body: Body) -> Send:
        return Send(peer.letter(self.term, body))

    @staticmethod
    def _changed(peer: Peer, change: Change, what: str = "") -> Changed:
        return Changed(peer.name, change, what, peer.num_workers)
