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
    def _is_stale(self, letter: Envelope) -> bool:
        return letter.session != self.session


class TakesStaleSessions(Follower):
    def _is_stale(self, letter: Envelope) -> bool:
        return letter.term < self.term


class ForgetsEarlyFences(Follower):
    def _on_fence(self, fence: Fence) -> Any:
        newest = self.generation
        effects = super()._on_fence(fence)
        if newest < fence.generation:
            self.generation = newest
        return effects


class LeasesFromReceipt(Follower):
    def _on_beat_back(self, back: HeartbeatAck, now: float) -> Any:
        if back.seq in self._sent:
            self._sent[back.seq] = now
        return super()._on_beat_back(back, now)


class JoinsWithLiveWorkers(Follower):
    def _cut(self, why: str, now: float) -> Any:
        effects = super()._cut(why, now)
        if self.state == FollowerState.KILLING:
            self.state = FollowerState.IDLE
        return effects


class BeginsEarly(Leader):
    """One confirmed fence is enough for it."""

    @staticmethod
    def _may_settle(generation: Generation) -> bool:
        return any(seat.state >= MemberState.DONE for seat in generation.members.values())


class CountsNoMargin(Leader):
    """Leases end on its clock when they end on the host's, or a little earlier."""

    def _trust(self, peer: HostSession, now: float) -> Any:
        pace = super()._trust(peer, now)
        peer.expires_at = now + 0.75 * pace.lease_s
        return pace


class ForgetsJoinsWhileBreaking(Leader):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.forgotten: set[str] = set()

    def _is_available(self, peer: HostSession) -> bool:
        return peer.name not in self.forgotten and super()._is_available(peer)

    def _on_beat(self, peer: HostSession, beat: Heartbeat, now: float) -> Any:
        is_new = not peer.is_confirmed and self.phase == GenerationPhase.BREAKING
        effects = super()._on_beat(peer, beat, now)
        if is_new:
            self.forgotten.add(peer.name)
        return effects


class AnswersTheLost(Leader):
    """Renews leases that it has counted as expired."""

    def handle(self, letter: Envelope, now: float) -> Any:
        peer = self._peer_of(letter)
        if peer is not None and peer.is_lost and isinstance(letter.body, Heartbeat):
            return self._on_beat(peer, letter.body, now)
        return super().handle(letter, now)


class LeadsForEver(Leader):
    """Its authority never runs out."""

    def _is_silent(self, now: float) -> bool:
        return False

    def tick(self, now: float) -> Any:
        self.until = max(self.until, now + 1)
        return super().tick(now)


class HoldsFromReceipt(Candidate):
    def on_answer(self, number: int, holding: LeaseRecord, now: float) -> Any:
        if self._pending is not None and self._pending.number == number:
            self._asked_at = now
        return super().on_answer(number, holding, now)


class TakesUpOldTerms(Candidate):
    """Leads again in a term that it has given up."""

    def _resign(self, now: float) -> Any:
        resigned = super()._resign(now)
        self._past = 0
        return resigned


class TakesWithoutLooking(EmbeddedRegister):
    """Sets without comparing."""

    def acquire(self, seen_term: int, holder: str, now: float) -> LeaseRecord:
        self._held, self._expires_at = LeaseRecord(seen_term + 1, holder), now + self.lease_s
        return self._held


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
