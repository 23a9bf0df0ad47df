"""State machine of a host that takes part in a job: joining, holding a lease, running and fencing its workers.

    joining --welcome--> joined --lease over, connection closed, a newer term--> (workers killed) --> joining again
    joined:  idle --BeginGeneration--> working --Fence--> killing --dead--> idle    working --workers exited--> done

Invariants:
- no worker is alive when a ``Join`` is sent, so that the leader may count a host that joins again as fenced;
- the lease runs from when the heartbeat that the leader acknowledged was SENT: a host knows that it has lost its lease
  before the leader may count it as lost, and orders its workers killed at that moment. ``lease_until`` is for the
  workers too: one that checks it before it commits is safe even while its agent is stopped;
- orders are obeyed only from the highest term seen, for this session, and for a newer generation than any known; a
  fence that overtakes its begin is remembered;
- what the leader must know is sent again with every heartbeat until the leader has acknowledged it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

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
    RankProgress,
    StoreAddress,
    Welcome,
    WorkerEvent,
    WorkerFailed,
    WorkerOutput,
    WorkerRequest,
    WorkersDone,
)

Effects = list[FollowerEffect]

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 8.0


class FollowerState(enum.StrEnum):
    IDLE = "idle"
    WORKING = "working"
    KILLING = "killing"
    DONE = "done"


class Follower:
    """One incarnation of a host's agent. In every call, ``now`` is the host's monotonic clock."""

    def __init__(
        self,
        host: str,
        incarnation: int,
        num_workers: int,
        *,
        now: float,
        give_up_s: float = 60.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """``incarnation`` grows with every start of the agent on that host; ``give_up_s`` is how long it looks for a
        leader before it ends."""
        self.host = host
        self.incarnation = incarnation
        self.num_workers = num_workers
        self.term = 0
        self.session = 0
        self.is_joined = False
        self.is_over = False
        self.state = FollowerState.IDLE
        self.generation = -1
        """The newest generation known here, whether it was started or not."""
        self.lease_until = -math.inf
        self._give_up_s = give_up_s
        self._facts = dict(facts or {})
        self._answered_at = now
        self._next_join = now
        self._retry_s = _FIRST_RETRY_S
        self._next_beat = math.inf
        self._beat_s = 0.0
        self._seq = 0
        self._sent: dict[int, float] = {}
        self._joined_at = now
        self._unacknowledged: dict[str, MessageBody] = {}
        self._fenced_facts: Mapping[str, Any] = {}
        self._store = ""
        self._num_asked = 0
        self._leaving: Leaving | None = None
        self._end: ParticipationEnded | None = None

    # --- messages from the leader

    def handle(self, envelope: Envelope, now: float) -> Effects:
        """A message from a leader has arrived."""
        if self.is_over or (envelope.host, envelope.incarnation) != (self.host, self.incarnation):
            return []
        if self._is_stale(envelope):
            return []
        if envelope.term > self.term and self.is_joined:
            self.term = envelope.term
            return self._lose_lease("another leader has taken over", now)
        match envelope.body:
            case Welcome() as welcome:
                return self._on_welcome(envelope.term, welcome, now)
            case Dismiss() as dismiss:
                return self._finish(ParticipationEnded(dismiss.reason, rescues=dismiss.rescues))
            case body:
                return self._on_order(body, now) if self.is_joined and now < self.lease_until else []

    def _on_order(self, body: MessageBody, now: float) -> Effects:
        is_working = self.state == FollowerState.WORKING
        match body:
            case HeartbeatAck():
                return self._on_heartbeat_ack(body, now)
            case BeginGeneration():
                return self._on_begin(body, now)
            case Fence():
                return self._on_fence(body)
            case StoreAddress(generation=number) if is_working and number == self.generation:
                return self._on_store(body)
            case WorkerRequest(generation=number) if is_working and number == self.generation:
                return self._on_request(body)
            case _:
                return []

    def _is_stale(self, envelope: Envelope) -> bool:
        return envelope.term < self.term or envelope.session != self.session

    def _on_welcome(self, term: int, welcome: Welcome, now: float) -> Effects:
        if self.is_joined or now >= self._joined_at + welcome.lease_s:
            return []
        self.term, self.is_joined = term, True
        self.lease_until = self._joined_at + welcome.lease_s
        self._answered_at, self._beat_s, self._retry_s = now, welcome.beat_s, _FIRST_RETRY_S
        self._sent.clear()
        return [JoinAccepted(self.term, welcome.plan), self._heartbeat(now, ())]

    def _on_heartbeat_ack(self, ack: HeartbeatAck, now: float) -> Effects:
        """Heartbeats up to this one need no acknowledgement any more: one for an earlier heartbeat, arriving later,
        would renew the lease for less."""
        sent_at = self._sent.get(ack.seq)
        if sent_at is None:
            return []
        for seq in [seq for seq in self._sent if seq <= ack.seq]:
            del self._sent[seq]
        self.lease_until = max(self.lease_until, sent_at + ack.lease_s)
        self._answered_at, self._beat_s = now, ack.beat_s
        return []

    def _on_begin(self, begin: BeginGeneration, now: float) -> Effects:
        """Confirmed with an immediate heartbeat, so that a large fleet with slow heartbeats forms a generation as fast
        as a small one."""
        if begin.generation <= self.generation or self.state in (FollowerState.WORKING, FollowerState.KILLING):
            return []
        self.generation, self.state = begin.generation, FollowerState.WORKING
        self._store, self._num_asked, self._fenced_facts = "", 0, {}
        self._unacknowledged.clear()
        return [StartWorkers(begin), self._heartbeat(now, ())]

    def _on_fence(self, fence: Fence) -> Effects:
        if fence.generation < self.generation or self.state == FollowerState.KILLING:
            return []
        if fence.generation == self.generation and self.state == FollowerState.WORKING:
            return [self._kill("the generation is over")]
        if fence.generation > self.generation:
            self.generation, self._fenced_facts, self.state = fence.generation, {}, FollowerState.IDLE
            self._unacknowledged.clear()
        return [self._send(Fenced(self.generation, dict(self._fenced_facts)))]

    def _on_store(self, store: StoreAddress) -> Effects:
        self._unacknowledged.pop(StoreAddress.kind, None)
        if self._store:
            return []
        self._store = store.address
        return [ForwardStore(store.address)]

    def _on_request(self, request: WorkerRequest) -> Effects:
        """Requests are taken in order; one that overtook another is dropped, and the leader sends it again."""
        if request.number != self._num_asked + 1:
            return []
        self._num_asked = request.number
        return [ForwardRequest(request)]

    # --- what happens on this host

    def on_store_opened(self, address: str) -> Effects:
        """Rank 0 is on this host and has opened its store."""
        if self.state != FollowerState.WORKING or self._store:
            return []
        return self._send_reliably(StoreAddress(self.generation, address))

    def on_worker_failed(self, facts: Mapping[str, Any]) -> Effects:
        """A worker failed; the leader will have the whole generation fenced."""
        return (
            self._send_reliably(WorkerFailed(self.generation, dict(facts)))
            if self.state == FollowerState.WORKING
            else []
        )

    def on_workers_done(self, facts: Mapping[str, Any]) -> Effects:
        """All workers have exited by themselves."""
        if self.state != FollowerState.WORKING:
            return []
        self.state, self._fenced_facts = FollowerState.DONE, dict(facts)
        self._unacknowledged.clear()
        return self._send_reliably(WorkersDone(self.generation, dict(facts)))

    def on_fenced(self, facts: Mapping[str, Any], now: float) -> Effects:
        """All workers are dead, as ``KillWorkers`` ordered."""
        if self.state != FollowerState.KILLING:
            return []
        self.state, self._fenced_facts = FollowerState.IDLE, dict(facts)
        self._unacknowledged.clear()
        if self._end is not None:
            return self._finish(self._end)
        if self.is_joined:
            return [self._send(Fenced(self.generation, dict(facts)))]
        self._next_join = now
        return []

    def leave(self, reason: str) -> Effects:
        """This host was asked to leave the job: it stays until its workers have left the generation."""
        self._leaving = Leaving(reason)
        return [self._send(self._leaving)] if self.is_joined else self._finish(ParticipationEnded(reason))

    def abandon(self, reason: str) -> Effects:
        """The caller has concluded that this job has no leader any more."""
        return [] if self.is_over or self._end is not None else self._finish(ParticipationEnded(reason, is_lost=True))

    def relay(self, body: WorkerEvent | WorkerOutput | HostNote) -> Effects:
        return [self._send(body)] if self.is_joined else []

    def on_connected(self, now: float) -> None:
        """There is a connection to a leader: a host that has not joined need not wait for its next attempt."""
        if not self.is_joined:
            self._next_join, self._retry_s = now, _FIRST_RETRY_S

    def on_disconnected(self, now: float) -> Effects:
        """The connection to the leader has ended."""
        return self._lose_lease("the connection to the leader was closed", now) if self.is_joined else []

    # --- timers

    def tick(self, now: float, progress: Sequence[RankProgress] = ()) -> Effects:
        if self.is_over:
            return []
        if self.is_joined and now >= self.lease_until:
            return self._lose_lease("the leader has not answered in time", now)
        if self.is_joined:
            if now < self._next_beat:
                return []
            again = [*self._unacknowledged.values(), *([self._leaving] if self._leaving else [])]
            return [self._heartbeat(now, progress), *(self._send(body) for body in again)]
        if self.state == FollowerState.KILLING:
            return []
        if now >= self._answered_at + self._give_up_s:
            return self._finish(ParticipationEnded(f"no leader was found within {self._give_up_s:g} s", is_lost=True))
        return self._join(now) if now >= self._next_join else []

    def deadline(self, now: float) -> float | None:
        """When ``tick`` must be called at the latest; None: not before something else happens."""
        if self.is_over or (self.state == FollowerState.KILLING and not self.is_joined):
            return None
        if self.is_joined:
            return max(now, min(self._next_beat, self.lease_until))
        return max(now, min(self._next_join, self._answered_at + self._give_up_s))

    def _join(self, now: float) -> Effects:
        """Each attempt is a new session, and waits longer for its answer than the one before."""
        self.session += 1
        self._joined_at, self._next_join = now, now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
        return [self._send(Join(self.num_workers, self.generation, self._facts))]

    def _heartbeat(self, now: float, progress: Sequence[RankProgress]) -> SendMessage:
        self._seq += 1
        self._sent[self._seq] = now
        self._next_beat = now + self._beat_s
        return self._send(Heartbeat(self._seq, self.generation, bool(self._store), self._num_asked, tuple(progress)))

    # --- the end of a lease, of a generation, of the job

    def _lose_lease(self, why: str, now: float) -> Effects:
        """The lease or the connection is lost. The host keeps its snapshot memory and its incarnation."""
        self.is_joined, self._next_beat, self._next_join = False, math.inf, now
        self._unacknowledged.clear()
        if self._leaving is not None:
            return self._finish(ParticipationEnded(self._leaving.reason))
        return [self._kill(why)] if self.state == FollowerState.WORKING else []

    def _finish(self, end: ParticipationEnded) -> Effects:
        """End once the workers are dead."""
        self._end = end
        if self.state == FollowerState.WORKING:
            return [self._kill(end.reason)]
        if self.state == FollowerState.KILLING:
            return []
        self.is_over = True
        return [end]

    def _kill(self, why: str) -> KillWorkers:
        self.state = FollowerState.KILLING
        return KillWorkers(self.generation, why)

    def _send_reliably(self, body: MessageBody) -> Effects:
        self._unacknowledged[body.kind] = body
        return [self._send(body)]

    def _send(self, body: MessageBody) -> SendMessage:
        return SendMessage(Envelope(self.term, self.host, self.incarnation, self.session, body))
