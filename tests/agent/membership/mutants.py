"""Machines of the membership that were broken on purpose, each in one place: what the tests must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from closeranks.agent.membership.election import Candidate, EmbeddedRegister, LeaseRecord
from closeranks.agent.membership.follower import Follower, FollowerState
from closeranks.agent.membership.generation import Generation, GenerationPhase, MemberState
from closeranks.agent.membership.host_sessions import HostSession
from closeranks.agent.membership.leader import Leader
from closeranks.agent.membership.messages import Envelope, Fence, Heartbeat, HeartbeatAck

from .chaoses import flapping, seeded, unheard
from .cluster import Parts
from .trouble import Chaos


class TakesStaleTerms(Follower):
    def _is_stale(self, envelope: Envelope) -> bool:
        return envelope.session != self.session


class TakesStaleSessions(Follower):
    def _is_stale(self, envelope: Envelope) -> bool:
        return envelope.term < self.term


class ForgetsEarlyFences(Follower):
    def _on_fence(self, fence: Fence) -> Any:
        newest = self.generation
        effects = super()._on_fence(fence)
        if newest < fence.generation:
            self.generation = newest
        return effects


class LeasesFromReceipt(Follower):
    def _on_heartbeat_ack(self, ack: HeartbeatAck, now: float) -> Any:
        if ack.seq in self._sent:
            self._sent[ack.seq] = now
        return super()._on_heartbeat_ack(ack, now)


class JoinsWithLiveWorkers(Follower):
    def _lose_lease(self, why: str, now: float) -> Any:
        effects = super()._lose_lease(why, now)
        if self.state == FollowerState.KILLING:
            self.state = FollowerState.IDLE
        return effects


class BeginsEarly(Leader):
    """One confirmed fence is enough for it."""

    @staticmethod
    def _may_settle(generation: Generation) -> bool:
        return any(member.state >= MemberState.DONE for member in generation.members.values())


class CountsNoMargin(Leader):
    """Leases end on its clock when they end on the host's, or a little earlier."""

    def _extend_lease(self, session: HostSession, now: float) -> Any:
        timing = super()._extend_lease(session, now)
        session.expires_at = now + 0.75 * timing.lease_s
        return timing


class ForgetsJoinsWhileBreaking(Leader):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.forgotten: set[str] = set()

    def _is_available(self, session: HostSession) -> bool:
        return session.name not in self.forgotten and super()._is_available(session)

    def _on_heartbeat(self, session: HostSession, heartbeat: Heartbeat, now: float) -> Any:
        is_new = not session.is_confirmed and self.phase == GenerationPhase.BREAKING
        effects = super()._on_heartbeat(session, heartbeat, now)
        if is_new:
            self.forgotten.add(session.name)
        return effects


class AnswersTheLost(Leader):
    """Renews leases that it has counted as expired."""

    def handle(self, envelope: Envelope, now: float) -> Any:
        session = self._sender_of(envelope)
        if session is not None and session.is_lost and isinstance(envelope.body, Heartbeat):
            return self._on_heartbeat(session, envelope.body, now)
        return super().handle(envelope, now)


class LeadsForEver(Leader):
    """Its authority never runs out."""

    def _is_silent(self, now: float) -> bool:
        return False

    def tick(self, now: float) -> Any:
        self.until = max(self.until, now + 1)
        return super().tick(now)


class HoldsFromReceipt(Candidate):
    def on_answer(self, number: int, record: LeaseRecord, now: float) -> Any:
        if self._pending is not None and self._pending.number == number:
            self._asked_at = now
        return super().on_answer(number, record, now)


class TakesUpOldTerms(Candidate):
    """Leads again in a term that it has given up."""

    def _resign(self, now: float) -> Any:
        resigned = super()._resign(now)
        self._past = 0
        return resigned


class TakesWithoutLooking(EmbeddedRegister):
    """Sets without comparing."""

    def acquire(self, seen_term: int, holder: str, now: float) -> LeaseRecord:
        self._record, self._expires_at = LeaseRecord(seen_term + 1, holder), now + self.lease_s
        return self._record


@dataclass(frozen=True)
class Hunt:
    """Where a broken machine is looked for: in the kind of chaos in which it shows soonest."""

    chaos: Callable[[int, int], Chaos]
    num_contenders: int
    parts: Parts


IN_SCENES = {
    "accepts orders of a stale term": Parts(follower=TakesStaleTerms),
    "accepts orders of a stale session": Parts(follower=TakesStaleSessions),
    "forgets a fence that overtook its begin": Parts(follower=ForgetsEarlyFences),
    "counts the lease from receipt": Parts(follower=LeasesFromReceipt),
    "joins while its workers live": Parts(follower=JoinsWithLiveWorkers),
    "begins before all are fenced": Parts(lead=BeginsEarly),
    "forgets a join while breaking": Parts(lead=ForgetsJoinsWhileBreaking),
    "answers hosts that it has given up": Parts(lead=AnswersTheLost),
    "holds the register from receipt": Parts(candidate=HoldsFromReceipt),
    "takes up a term it has given up": Parts(candidate=TakesUpOldTerms),
    "sets without comparing": Parts(register=TakesWithoutLooking),
}

IN_CLUSTERS = {
    "counts the lease from receipt": Hunt(unheard, 1, Parts(follower=LeasesFromReceipt)),
    "begins before all are fenced": Hunt(seeded, 1, Parts(lead=BeginsEarly)),
    "counts no margin": Hunt(unheard, 1, Parts(lead=CountsNoMargin)),
    "forgets a join while breaking": Hunt(seeded, 1, Parts(lead=ForgetsJoinsWhileBreaking)),
    "leads for ever": Hunt(flapping, 2, Parts(lead=LeadsForEver)),
    "takes up a term it has given up": Hunt(seeded, 2, Parts(candidate=TakesUpOldTerms)),
    "sets without comparing": Hunt(flapping, 2, Parts(register=TakesWithoutLooking)),
}
